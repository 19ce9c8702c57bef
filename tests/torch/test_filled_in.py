"""A forward that notes a word in its configuration, or counts there, is captured; the user's own stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tracer import trace


class Config:
    def __init__(self) -> None:
        self.kind: str | None = None
        self.calls: int | None = None


class Noted(nn.Module):
    """As transformers' losses note the kind of problem."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.layer, self.counts = nn.Linear(4, 4), counts
        self.config = Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "classes"
        if self.counts:
            self.config.calls = (self.config.calls or 0) + 1
        return self.layer(x).sum()


@pytest.mark.parametrize("counts", [False, True])
def test_what_forward_notes_is_not_noted_by_a_trace(counts: bool) -> None:
    model = Noted(counts=counts)
    assert len(trace(model, torch.randn(2, 4)).ops)
    assert vars(model.config) == {"kind": None, "calls": None}
