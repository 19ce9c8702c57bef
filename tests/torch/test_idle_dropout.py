"""A dropout that drops nothing is captured as eager runs it: as its input, and not as a copy of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor.verifying import verify
from simulator.core.problem import Problem
from simulator.levers import invert
from tests.torch.steps import build_of, plan_of, program, recompute_all, recorded
from tracer.capture.torch_fixes.dropout import OP


class Mlp(nn.Module):
    """As of a vision transformer: what the second layer saves is the activation's output itself, if nothing drops."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(32, 256), nn.Linear(256, 32), nn.Dropout(probability)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(functional.gelu(self.a(x))))


class InPlace(nn.Linear):
    """The idle dropout's result is its input, so that what is done to one of them is done to the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        y = functional.dropout(h, 0.0, training=True)
        y.add_(1.0)
        return h * y


@pytest.mark.parametrize(("probability", "training"), [(0.0, True), (0.1, False), (0.1, True)])
def test_only_a_dropout_that_drops_is_an_op(probability: float, training: bool) -> None:
    def make() -> tuple[Any, ...]:
        model = Mlp(probability)
        model.drop.train(training)
        return model, torch.randn(256, 32), lambda y: y.square().mean(), None

    trace = recorded(build_of(make)).trace
    idle = not (training and probability)
    assert ("lowtide.dropout_mask.default" not in trace.ops.target) is idle
    assert "aten.clone.default" not in trace.ops.target
    # 256 * 256 floats are enough for it; with a mask, backward does not read the activation's output.
    assert any(True for _ in invert.offer(Problem(trace))) is idle


def test_what_is_written_into_an_idle_dropout_is_written_into_its_input() -> None:
    def make() -> tuple[Any, ...]:
        return InPlace(8, 8), torch.randn(4, 8), lambda y: y.square().mean(), None

    trace = recorded(build_of(make)).trace
    outcome = verify(build_of(make), plan_of(trace, *recompute_all(Problem(trace))), steps=2)
    assert outcome.bit_equal, outcome.first_difference


def test_torch_s_own_decomposition_is_there_again_afterwards() -> None:
    before = dict(OP.py_kernels)
    program(Mlp(0.0), torch.randn(3, 32))
    assert OP.py_kernels == before
