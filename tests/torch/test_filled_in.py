"""A forward that notes a word in its configuration, once, is captured; one that counts there is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tracer import trace  # noqa: E402
from traces.errors import CaptureError  # noqa: E402


class Noted(nn.Module):
    """As transformers' losses note the kind of problem."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.layer, self.counts = nn.Linear(4, 4), counts
        self.config = SimpleNamespace(kind=None, calls=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "classes"
        if self.counts:
            self.config.calls = (self.config.calls or 0) + 1
        return self.layer(x).sum()


def test_a_word_that_is_noted_once() -> None:
    model = Noted(counts=False)
    assert len(trace(model, torch.randn(2, 4)).ops)
    assert model.config.kind is None


def test_a_number_is_refused() -> None:
    with pytest.raises(CaptureError, match="config"):
        trace(Noted(counts=True), torch.randn(2, 4))
