"""What eager runs as one kernel is captured as one op, and trains to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor.verifying import verify
from simulator.core.problem import Problem
from tests.torch.steps import build_of, plan_of, program, recompute_all, recorded
from tracer.capture.torch_fixes.whole_kernels import KEYS, OPS


class Resized(nn.Module):
    """A convolution, its result resized, and one more convolution."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(functional.interpolate(self.a(x), size=(7, 9), **self.how).tanh())


@pytest.mark.parametrize(
    ("mode", "op"),
    [
        ("bilinear", "upsample_bilinear2d"),
        ("nearest", "upsample_nearest2d"),
        ("bicubic", "upsample_bicubic2d"),
        ("nearest-exact", "_upsample_nearest_exact2d"),
    ],
)
def test_an_interpolation_is_one_op_forward_and_one_backward(mode: str, op: str) -> None:
    def make() -> tuple[Any, ...]:
        return Resized(mode=mode), torch.randn(2, 2, 4, 5), lambda y: y.square().mean(), None

    trace = recorded(build_of(make)).trace
    assert trace.ops.target.count(f"aten.{op}.default") == 1
    assert trace.ops.target.count(f"aten.{op}_backward.default") == 1
    assert not any("index" in t for t in trace.ops.target)
    outcome = verify(build_of(make), plan_of(trace, *recompute_all(Problem(trace))), steps=2)
    assert outcome.bit_equal, outcome.first_difference


def test_torch_s_own_decompositions_are_there_again_afterwards() -> None:
    def registered() -> set[tuple[str, Any]]:
        packets = [getattr(torch.ops.aten, name) for name in OPS]
        ops = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
        return {(str(op), key) for op in ops for key in KEYS if key in op.py_kernels}

    before = registered()
    assert ("aten.upsample_bilinear2d.vec", KEYS[0]) in before
    program(nn.Linear(2, 2), torch.randn(3, 2))
    assert registered() == before
