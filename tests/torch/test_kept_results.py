"""Ops whose kernels resize what they have allocated: how much of it the result keeps, and a step with such losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from simulator import simulate
from tests.torch.steps import build_of, measured, peaks
from tracer.costs.roofline import result_bytes

aten = torch.ops.aten
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.binary_cross_entropy.default, ((8, 16), (8, 16))),
    (aten.binary_cross_entropy.default, ((8, 16), (8, 16), None, 2)),
    (aten.binary_cross_entropy.default, ((8, 16), (8, 16), None, 0)),
    (aten.soft_margin_loss.default, ((8, 16), (8, 16))),
    (aten.soft_margin_loss.default, ((8, 16), (8, 16), 0)),
    (aten.huber_loss.default, ((8, 16), (8, 16))),
    (aten.binary_cross_entropy_with_logits.default, ((8, 16), (8, 16))),
    (
        aten.col2im.default,
        ((2, 36, 100), [12, 12], [3, 3], [1, 1], [0, 0], [1, 1]),
    ),  # 28,800 bytes into 4,608
    (aten.col2im.default, ((2, 4, 9), [8, 8], [2, 2], [1, 1], [0, 0], [3, 3])),  # less into more
    (aten.im2col.default, ((2, 4, 12, 12), [3, 3], [1, 1], [0, 0], [1, 1])),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_result_keeps_what_the_kernel_allocated(number: int) -> None:
    op, given = CALLS[number]
    args = [torch.rand(a) if isinstance(a, tuple) else a for a in given]
    real = op(*args).untyped_storage().nbytes()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        told = result_bytes(op, fakes, op(*fakes))
    assert told == real


class Coder(nn.Module):
    """An autoencoder of probabilities with both losses inside, and a sum of overlapping patches."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.back = nn.Linear(144, 8), nn.Linear(8, 144)
        self.patch = nn.Conv2d(1, 9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.back(self.code(x.flatten(1)).relu())
        patches = functional.fold(self.patch(x).flatten(2), (14, 14), 3)
        return (
            functional.binary_cross_entropy(rows.sigmoid(), x.flatten(1))
            + functional.soft_margin_loss(rows, (x.flatten(1) - 0.5).sign())
            + patches.square().mean()
        )


def test_the_memory_of_such_a_step_is_predicted_to_the_byte() -> None:
    def make() -> tuple[Any, ...]:
        model = Coder()
        return model, torch.rand(16, 1, 12, 12), None, torch.optim.SGD(model.parameters(), lr=0.01)

    build = build_of(make)
    kept = simulate(measured(build))
    assert max(peaks(build, kept.plan, 4)[2:]) == kept.saved.timeline.peak_allocated_bytes
