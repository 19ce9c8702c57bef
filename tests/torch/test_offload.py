"""Values in host memory: the executor runs the simulated step, equal in every bit, in the predicted bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor.graphs.edited import rewritten
from executor.verifying import verify
from simulator.bounds import bounder_of
from simulator.core.problem import Problem
from simulator.levers import LEVERS, exactness_of, offload, rewritten_problem
from simulator.planners import plan_with
from tests.torch import small_nets
from tests.torch.conftest import Measurer
from tests.torch.steps import program
from tracer.step.step import load_spec
from traces.records.plan import EXACT, Plan, Rewrite
from traces.records.trace import Trace


class Block(nn.Module):
    """Layer norms, which make three values each, heads taken apart by views, dropout, and a sum that waits long."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(128), nn.LayerNorm(128)
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)
        self.up, self.down, self.drop = nn.Linear(128, 512), nn.Linear(512, 128), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 32)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        mixed = self.drop((q @ k.transpose(-1, -2) / 6).softmax(-1)) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.drop(self.down(functional.gelu(self.up(self.second(x)))))


def net() -> small_nets.Built:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)), nn.Linear(128, 8))
    batch = torch.randn(8, 256, 128), torch.randint(8, (8, 256))

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(y.flatten(0, 1), target.flatten())

    return model, batch, loss, torch.optim.AdamW(model.parameters(), lr=1e-3)


SPEC = f"{Path(__file__).resolve()}:net"


@pytest.fixture(scope="module")
def rewrites(trace: Trace) -> tuple[Rewrite, ...]:
    return tuple(offload.offer(Problem(trace)))


def test_it_is_equal_in_every_bit_over_some_steps(trace: Trace, rewrites: tuple[Rewrite, ...]) -> None:
    assert len(rewrites) > 20
    assert exactness_of(rewrites) == EXACT
    assert verify(load_spec(SPEC, {}), Plan(meta=trace.meta, rewrites=rewrites), steps=3).bit_equal


def test_what_is_recomputed_from_copies_is_equal_in_every_bit(
    trace: Trace, rewrites: tuple[Rewrite, ...]
) -> None:
    """Each second value waits in host memory; the others are recomputed, from those."""
    problem = rewritten_problem(Problem(trace), rewrites[::2])
    made = plan_with("search", problem, int(1.05 * bounder_of(problem).floor.peak_bytes))
    schedule = problem.replay(made.actions).schedule
    again = [problem.trace.ops.target[i] for i in schedule.recomputed_ops]
    assert len(made.recomputed) > 5
    plan = Plan(meta=trace.meta, rewrites=rewrites[::2], actions=made.actions)
    assert again.count("lowtide.reload.default") >= len(rewrites[::2])
    assert verify(load_spec(SPEC, {}), plan, steps=2).bit_equal


def test_beside_other_rewrites_both_make_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op of several values after which others are packed, and values that are packed and copied away."""
    monkeypatch.setattr(offload, "LEAST", 1)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 8, 3)
    )
    p = program(model, torch.randn(4, 3, 34, 34))
    facts = Problem(p.trace())
    copied = tuple(offload.offer(facts))
    packed = [tuple(LEVERS[kind].offer(facts)) for kind in ("int8", "narrow16")]
    assert len(copied) == 5
    assert all(packed)
    for others in packed:
        assert rewritten(p, (*others, *copied)) is not p  # which compares the two


@pytest.mark.slow
def test_the_measured_peak_is_the_predicted_one(
    trace: Trace, rewrites: tuple[Rewrite, ...], measurer: Measurer, tmp_path: Path
) -> None:
    """Host memory is none of torch's, so what is measured is what a device would need."""
    plan = Plan(meta=trace.meta, rewrites=rewrites)
    predicted = rewritten_problem(Problem(trace), rewrites).saved.timeline.peak_allocated_bytes
    assert predicted < 0.6 * Problem(trace).saved.timeline.peak_allocated_bytes
    assert measurer.steady_peak(plan, tmp_path) == predicted
