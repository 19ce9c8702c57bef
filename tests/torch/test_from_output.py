"""torch's own kernels say that a backward from the output is bit-equal, and so does a net that trains by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from executor.verifying import verify
from simulator import plan
from simulator.core.problem import Problem
from simulator.levers import rewritten_problem
from simulator.levers.invert import FROM_OUTPUT, offer
from tests.torch import small_nets
from tests.torch.conftest import Measurer
from tests.torch.steps import measured
from tracer.step.step import load_spec
from traces.records.plan import Plan

aten = torch.ops.aten
Pair = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]


def leaky(slope: float) -> Pair:
    return lambda x: aten.leaky_relu(x, slope), lambda g, v: aten.leaky_relu_backward(g, v, slope, False)


def hardtanh(low: float, high: float) -> Pair:
    return lambda x: aten.hardtanh(x, low, high), lambda g, v: aten.hardtanh_backward(g, v, low, high)


PAIRS = {
    "leaky": leaky(0.01),
    "leaky, slope 0": leaky(0.0),
    "leaky, slope 3": leaky(3.0),
    "hardtanh": hardtanh(-1.0, 1.0),
    "relu6": hardtanh(0.0, 6.0),
}


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a type of 16 bits, NaNs among them; of wider ones those as well, and their neighbours."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    if dtype in (torch.bfloat16, torch.float16):
        return every.view(dtype)
    wide = torch.cat([every.view(torch.bfloat16), every.view(torch.float16)]).to(dtype)
    up, down = (torch.full_like(wide, v) for v in (float("inf"), float("-inf")))
    return torch.cat([wide, torch.nextafter(wide, up), torch.nextafter(wide, down)])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_the_output_gives_every_bit_of_the_gradient(name: str, dtype: torch.dtype) -> None:
    forward, backward = PAIRS[name]
    x = all_numbers(dtype)
    for gradient in (1.7, -0.0, float("nan"), float("inf")):
        g = torch.full_like(x, gradient)
        assert torch.equal(bits(backward(g, x)), bits(backward(g, forward(x))))


class Activations(nn.Module):
    """Convolutions with one activation of each kind between, one of them in place."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (nn.LeakyReLU(0.1), nn.ReLU6(), nn.Hardtanh(), nn.ReLU6(inplace=True))
        layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
        for kind in kinds:
            layers += [nn.BatchNorm2d(8), kind, nn.Conv2d(8, 8, 3, padding=1)]
        self.net = nn.Sequential(*layers)
        self.head = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x).mean(3).flatten(1))


def activations() -> small_nets.Built:
    model = Activations()
    batch = torch.randn(128, 3, 8, 8), torch.randint(5, (128,))
    return model, batch, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)


SPEC = f"{Path(__file__).resolve()}:activations"


def test_a_net_trains_by_it_and_by_recomputing_bit_for_bit_in_the_predicted_bytes(
    measurer: Measurer, tmp_path: Path
) -> None:
    spec = load_spec(SPEC, {})
    trace = measured(spec)
    problem = Problem(trace)
    found = tuple(offer(problem, FROM_OUTPUT))
    assert len(found) == 4
    step = rewritten_problem(problem, found)
    assert step.trace.time_ns == trace.time_ns
    alone = Plan(meta=trace.meta, rewrites=found)
    both = plan(trace, "60%")
    assert both.rewrites
    assert both.recomputed
    for made in (alone, both):
        assert verify(spec, made, steps=3).bit_equal
        predicted = step.replay(made.actions).timeline.peak_allocated_bytes
        assert predicted < 0.8 * problem.saved.timeline.peak_allocated_bytes
        assert measurer.steady_peak(made, tmp_path) == predicted
