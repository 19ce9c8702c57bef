"""Inverted activations in a plan: the executor runs the simulated step, to rounding, in the predicted bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor.inverted import ops
from executor.verifying import verify
from simulator.core.problem import Problem
from simulator.levers import exactness_of, rewritten_problem
from simulator.levers.invert import offer
from simulator.levers.pack import offer as packable
from simulator.planners import plan_with
from tests.torch import small_nets
from tests.torch.conftest import Measurer
from tracer.step.step import load_spec
from traces.records.plan import Plan, Rewrite
from traces.records.trace import Trace

# What torch.compile imports says of torch itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


class Net(nn.Module):
    """Every activation, with outputs that backward reads; what is added to a silu's it does not. One works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.wide = nn.ModuleList(nn.Linear(64, 256) for _ in range(5))
        self.narrow = nn.ModuleList(nn.Linear(256, 64) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, gate, up, b, d = self.wide
        x = x + self.narrow[0](functional.gelu(a(self.norm(x))))
        x = x + self.narrow[1](functional.silu(gate(x)) * up(x))
        x = x + self.narrow[2](functional.gelu(b(x), approximate="tanh"))
        x = x + self.narrow[4](functional.silu(d(x), inplace=True))
        return self.narrow[3](functional.silu(b(x)) + a(x)).mean(1)


def net() -> small_nets.Built:
    torch.manual_seed(0)
    model = Net()
    batch = torch.randn(8, 64, 64), torch.randint(8, (8,))
    return model, batch, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)


SPEC = f"{Path(__file__).resolve()}:net"


@pytest.fixture(scope="module")
def rewrites(trace: Trace) -> tuple[Rewrite, ...]:
    return tuple(offer(Problem(trace)))


def test_it_is_offered_where_backward_reads_the_output_too(
    trace: Trace, rewrites: tuple[Rewrite, ...]
) -> None:
    readers = [
        trace.ops.target[i]
        for r in rewrites
        for i in range(len(trace.ops))
        if r.storage in trace.ops.reads[i]
    ]
    found = {t.split(".")[1] for t in readers if "backward" in t}
    assert found == {"gelu_backward", "silu_backward"}
    assert len(rewrites) == 4
    assert sum("clone" in r.op for r in rewrites) == 1


@pytest.mark.slow
def test_it_trains_to_rounding_in_the_predicted_bytes(
    trace: Trace, rewrites: tuple[Rewrite, ...], measurer: Measurer, tmp_path: Path
) -> None:
    plan = Plan(meta=trace.meta, rewrites=rewrites, exactness=exactness_of(rewrites))
    found = verify(load_spec(SPEC, {}), plan, steps=2)
    assert found.equal
    assert not found.bit_equal
    assert found.gradient_error < 1e-5
    problem = rewritten_problem(Problem(trace), rewrites)
    predicted = problem.saved.timeline.peak_allocated_bytes
    assert predicted < Problem(trace).saved.timeline.peak_allocated_bytes
    # Each saves its input but for a bit an element.
    before, after = (sum(t.storages.nbytes[s] for s in t.saved) for t in (trace, problem.trace))
    whole = 8 * 64 * 256 * 4
    assert {trace.storages.nbytes[r.storage] for r in rewrites} == {whole}
    assert before - after == 4 * whole * 31 // 32
    assert measurer.steady_peak(plan, tmp_path) == predicted


def test_with_other_rewrites_and_recomputation(
    trace: Trace, rewrites: tuple[Rewrite, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "COMPILED_FROM", 1 << 40)  # compiled they run above, and in test_inverted.py
    packed = tuple(packable(Problem(trace), "int8"))
    # What is inverted is not packed.
    for both in ((*packed[::2], *rewrites), (*rewrites, *packed)):
        plan = Plan(meta=trace.meta, rewrites=both, exactness=exactness_of(both))
        assert plan.exactness == "approximate"
        assert verify(load_spec(SPEC, {}), plan, steps=1).equal
    problem = rewritten_problem(Problem(trace), rewrites)
    made = plan_with("search", problem, problem.saved.timeline.peak_allocated_bytes * 75 // 100)
    assert made.actions
    plan = Plan(meta=trace.meta, rewrites=rewrites, actions=made.actions, exactness="fp")
    assert verify(load_spec(SPEC, {}), plan, steps=1).gradient_error < 1e-5
