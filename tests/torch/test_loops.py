"""Loops that differ from the ordinary one: their peaks on the CPU are the predicted ones, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor.verifying import verify
from simulator.core.problem import Problem
from simulator.prediction.ask import simulate
from tests.torch.steps import peaks, plan_of, recompute_all, step_of
from tracer.recording import record_fake, record_real
from tracer.step.loop_options import parse_around
from tracer.step.step import BuildStep, load_spec
from traces.devices import device
from traces.errors import SpecError
from traces.records.trace import GRADIENT, Trace

CPU = device("cpu")
LOOPS: dict[str, dict[str, Any]] = {
    "before": {},
    "after": {"zero_grad": "after"},
    "keep": {"zero_grad": "keep"},
    "none": {"zero_grad": "none"},
    "clip": {"clip_grad_norm": 1.0},
    "accumulate": {"accumulate": 3},
    "all at once": {"accumulate": 2, "clip_grad_norm": 0.5, "zero_grad": "keep"},
}


class Wide(nn.Module):
    """Its weights outweigh what forward saves, so that gradients decide the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.c(self.b(self.a(x).relu()).relu())
        return y


class Tall(nn.Module):
    """What forward saves outweighs its weights; one of them is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.a(self.norm(self.a(x).relu())).square()
        return y


def wide() -> tuple[Any, ...]:
    model = Wide()
    batch = (torch.randn(8, 64), torch.randn(8, 64))
    return model, batch, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def tall() -> tuple[Any, ...]:
    model = Tall()
    batch = (torch.randn(512, 32), torch.randn(512, 32))
    return model, batch, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def looped(make: Callable[[], tuple[Any, ...]], options: dict[str, Any]) -> BuildStep:
    around = parse_around(options)
    return BuildStep(
        model="test", options=around, seed=0, make=lambda _device: step_of(*make()), policy=around
    )


def recorded(build: BuildStep) -> Trace:
    return record_fake(build, CPU)


@pytest.mark.parametrize(
    ("loop", "make"),
    [
        *((loop, wide) for loop in LOOPS),
        ("all at once", tall),
        *(pytest.param(loop, tall, marks=pytest.mark.slow) for loop in LOOPS if loop != "all at once"),
    ],
)
def test_peaks_are_those_that_were_predicted(make: Any, loop: str) -> None:
    build = looped(make, LOOPS[loop])
    found = recorded(build)
    problem = Problem(found)
    plan = plan_of(found, *recompute_all(problem))
    assert simulate(found, plan).planned.timeline.peak_allocated_bytes == peaks(build, plan, 4)[-1]


def test_gradients_of_earlier_parts_are_there_in_forward() -> None:
    build = looped(wide, {"accumulate": 2})
    found = recorded(build)
    weights = sum(4 * p.numel() for p in Wide().parameters())
    resident = found.summary()["resident_bytes"]
    assert resident[GRADIENT] == weights
    assert resident.keys() - recorded(looped(wide, {})).summary()["resident_bytes"].keys() == {GRADIENT}
    forward = Problem(found).saved.timeline.peak_bytes[0]
    assert forward >= found.resident_bytes


def test_the_loop_is_in_the_header() -> None:
    assert recorded(looped(tall, {})).meta.loop == ""
    said = recorded(looped(tall, {"accumulate": 2, "clip_grad_norm": 1.0}))
    assert said.meta.loop == "clip_grad_norm 1.0, accumulate 2"
    assert said.meta.options == {"accumulate": 2, "clip_grad_norm": 1.0}


def test_a_plan_trains_in_the_loop_that_it_was_made_for() -> None:
    """The loop comes with the plan's options, and both sides run it: bit for bit."""
    build = looped(wide, LOOPS["all at once"])
    found = recorded(build)
    plan = plan_of(found, *recompute_all(Problem(found)))
    outcome = verify(build, plan, "cpu", 3)
    assert outcome.bit_equal
    assert outcome.losses != verify(looped(wide, {}), plan, "cpu", 3).losses


@pytest.mark.parametrize(
    "loop", [{"clip_grad_norm": 1.0, "zero_grad": "keep"}, {"accumulate": 3, "zero_grad": "after"}]
)
def test_a_loop_is_measured_op_by_op(loop: dict[str, Any]) -> None:
    """Of several parts the last one, and the optimizer's step."""
    build = looped(wide, loop)
    found = record_real(build, CPU, "cpu", rounds=1, warmup=1)
    assert found.meta.mode == "real"
    assert found.ops.target == recorded(build).ops.target
    assert found.meta.untouched_peak_bytes == peaks(build, iterations=4)[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero_grad": "later"}, "--zero-grad 'later' is unknown"),
        ({"clip_grad_norm": 0.0}, "--clip-grad-norm 0.0 must be"),
        ({"accumulate": 0}, "--accumulate 0 must be"),
    ],
)
def test_what_is_no_loop_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        load_spec("resnet18", options)


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_what_clips_gradients_takes_lists_of_them(target: str) -> None:
    found = record_fake(looped(wide, {"clip_grad_norm": 1.0}), device(target))
    assert "aten._foreach_norm.Scalar" in found.ops.target


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_phases_are_told_apart_outside_of_compiled_code() -> None:
    """Else dynamo would guard the phase in each compiled module, compile anew for each, and give up at its limit."""
    from torch._dynamo.testing import CompileCounter
    from torch.utils.checkpoint import checkpoint

    from tracer.step.loop import Phases

    counter, told = CompileCounter(), list[str]()
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    block = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(2, 4, requires_grad=True)
    with Phases(told.append).telling():
        for _ in range(2):
            checkpoint(block, x, use_reentrant=False).sum().backward()  # runs in forward, and in backward
            optimizer.step()
    assert counter.frame_count == 1
    step = ["backward", "optimizer", "optimizer"]
    assert told == [*step, "forward", *step]
