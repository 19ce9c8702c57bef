"""Which of a model's outputs take part in backward, whatever memory they share with one another or with its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from executor.verifying import verify
from tests.torch.steps import build_of, measured, plan_of, recorded
from tracer.measure.step import measure
from tracer.step.step import BuildStep
from traces.errors import CaptureError

Outputs = tuple[torch.Tensor, ...]


class Pair(nn.Module):
    """A linear layer that returns its result and something that is made of it, of its weight or of its input."""

    def __init__(self, second: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.second = second

    def forward(self, x: torch.Tensor) -> Outputs:
        y = self.a(x)
        return y, self.second(self, x, y)


SECOND = {
    "the same": lambda m, x, y: y,
    "a view": lambda m, x, y: y.t(),
    "a parameter": lambda m, x, y: m.a.weight,
    "a view of a parameter": lambda m, x, y: m.a.weight.t(),
    "made from the first": lambda m, x, y: y.tanh(),
}
LOSSES = {
    "both": lambda o: o[0].pow(2).mean() + o[1].abs().mean(),
    "the first": lambda o: o[0].pow(2).mean(),
    "the second": lambda o: o[1].abs().mean(),
}
REFUSED = {
    ("a parameter", "the second"): "no output of the model that the loss differentiates",
    ("a parameter", "both"): "returns a parameter or an argument, or a view of one",
    ("a view of a parameter", "both"): "returns a parameter or an argument, or a view of one",
    ("a view of a parameter", "the second"): "no output of the model that the loss differentiates",
}


def build_pair(second: str, loss: Callable[[Outputs], torch.Tensor]) -> BuildStep:
    return build_of(lambda: (Pair(SECOND[second]), torch.randn(4, 8), loss, None))


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("which", LOSSES)
def test_the_loss_decides_which_outputs_have_gradients(second: str, which: str) -> None:
    build = build_pair(second, LOSSES[which])
    if (second, which) in REFUSED:
        with pytest.raises(CaptureError, match=REFUSED[second, which]):
            recorded(build)
        return
    made = recorded(build)
    assert "aten.clone.default" not in made.trace.ops.target
    plan = plan_of(made.trace)
    outcome = verify(build, plan, steps=2)
    assert outcome.bit_equal, outcome.first_difference
    assert len(measure(made, build, "cpu", rounds=1, warmup=1)[0]) == len(made.rows)


def test_an_output_that_needs_no_gradient_may_be_used_by_any_loss() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Outputs:
            with torch.no_grad():
                goal = self.teacher(x)
            return self.student(x), goal, x

    def loss(o: Outputs) -> torch.Tensor:
        return (o[0] - o[1]).pow(2).mean() + (o[0] * o[2]).mean()

    build = build_of(lambda: (Teacher(), torch.randn(4, 8), loss, None))
    trace = recorded(build).trace
    assert verify(build, plan_of(trace), steps=2).bit_equal


def test_no_gradient_is_kept_for_an_output_from_which_another_is_made() -> None:
    """The loss takes the second output; the first, of 4 x 8 floats, has no zeros as its gradient."""
    build = build_pair("made from the first", LOSSES["the second"])
    made = recorded(build)
    placeholders = [n for n in made.program.captured.placeholders if "tangent_of" in n.meta]
    assert [n.meta["tangent_of"] for n in placeholders] == [1]


def test_gradients_of_the_batch_are_those_of_a_fresh_batch() -> None:
    build = build_of(
        lambda: (nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True), lambda y: y.pow(2).mean(), None)
    )
    made = recorded(build)
    real = measured(build, made)
    assert real.ops.target == made.trace.ops.target
    assert not any("add_" in t for t in real.ops.target)
    assert verify(build, plan_of(made.trace), steps=2).bit_equal


def test_a_copy_with_gaps_has_the_bytes_of_what_it_is_cut_from() -> None:
    """Writing 7 of 16 columns copies all 4 x 16 of them, as the kernel does: 256 bytes, not 220 up to the last one."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k in range(2):  # the second time, torch remembers the first
                h = self.a(x).clone()
                h[:, :7] = x[:, :7] + k
                x = self.b(h)
            return x

    build = build_of(lambda: (Part(), torch.randn(4, 8), lambda y: y.sum(), None))
    made = recorded(build)
    trace = made.trace
    copies = [i for i, t in enumerate(trace.ops.target) if t == "aten.copy.default"]
    assert copies
    assert {trace.storages.nbytes[s] for i in copies for s in trace.ops.writes[i]} == {256}
    real = measured(build, made)
    assert [real.ops.events[i] for i in copies] == [(256,)] * len(copies)


def test_outputs_that_share_memory_are_one_storage_until_the_last_of_them_is_gone() -> None:
    def make() -> tuple[Any, ...]:
        return Pair(lambda m, x, y: y.detach()), torch.randn(4, 8), lambda out: out[0].pow(2).mean(), None

    trace = recorded(build_of(make)).trace
    # The second goes when the loss is made; the first is what `pow` keeps for its backward.
    (power,) = (i for i, n in enumerate(trace.ops.target) if n == "aten.pow.Tensor_Scalar" and i < 4)
    (output,) = trace.ops.reads[power]
    assert any(output in reads for reads in trace.ops.reads[power + 1 :])
    assert "constant" not in trace.storages.name
