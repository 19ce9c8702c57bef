"""Build functions of small nets, for tests that need a training step which a fresh process can build again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Built = tuple[nn.Module, Any, Callable[..., Any] | None, torch.optim.Optimizer | None]
HERE = Path(__file__).resolve()


def spec(function: str) -> str:
    """What to give to `load_spec` or `trace` for one of these functions."""
    return f"{HERE}:{function}"


def mlp(optimizer: str = "sgd") -> Built:
    """Linear 8 -> 16, ReLU, Linear 16 -> 4, mean squared error, batch of 32."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = torch.randn(32, 8), torch.randn(32, 4)
    if optimizer == "none":
        return model, batch, functional.mse_loss, None
    return model, batch, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Tied(nn.Module):
    """One weight used twice, a layer norm between; wide enough that bfloat16 rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24) / 5)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.norm(functional.linear(x, self.weight)), self.weight)


def tied() -> Built:
    model = Tied()
    batch = torch.randn(16, 24), torch.randn(16, 24)
    return model, batch, functional.mse_loss, torch.optim.AdamW(model.parameters(), lr=1e-2)


def overflowing() -> dict[str, Any]:
    """Asks for float16, with a loss whose gradients overflow at the first scale."""
    model, batch, _, _ = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 1e5 * functional.mse_loss(y, target)

    return {"model": model, "batch": batch, "loss": loss, "optimizer": optimizer, "amp": "float16"}


class Residual(nn.Module):
    """conv -> batch norm -> in-place ReLU -> dropout, added in place to its input, then a head."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.drop(functional.relu(self.norm(self.conv(x)), inplace=True))
        y += x
        return self.head(functional.relu(y).mean((2, 3)))


def residual(batch_size: int = 4) -> Built:
    model = Residual()
    batch = torch.randn(batch_size, 3, 16, 16), torch.randint(5, (batch_size,))
    return model, batch, functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-2)


class Table(nn.Module):
    """Adds the first rows of a table of twelve, as models do with the numbers of their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 1)
        self.register_buffer("places", torch.randn(1, 12, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x) + self.places[:, : x.shape[1]])).mean()


def table(batch_size: int = 2, seq_len: int = 12) -> Built:
    model = Table()
    return (
        model,
        {"x": torch.randn(batch_size, seq_len, 6)},
        None,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"a": self.a(x), "b": self.b(x), "kind": "two", "ids": torch.arange(3)}


class Branches(nn.Module):
    """Three blocks whose branches end side by side, as in an Inception net, and a second head on the way."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()

        def conv(channels: int, kernel: int) -> nn.Module:
            layer = nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False)
            return nn.Sequential(layer, nn.BatchNorm2d(width), nn.ReLU(inplace=True))

        def block(channels: int) -> nn.Module:
            deep = nn.Sequential(conv(channels, 1), conv(width, 3))
            pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), conv(channels, 1))
            return nn.ModuleList((conv(channels, 1), deep, pooled))

        self.blocks = nn.ModuleList(block(channels) for channels in (3, 3 * width, 3 * width))
        self.heads = nn.ModuleList(nn.Linear(3 * width, 5) for _ in range(2))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for block in self.blocks:
            x = torch.cat([branch(x) for branch in block], 1)
            seen.append(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return self.heads[0](self.drop(seen[-1])) + 0.3 * self.heads[1](self.drop(seen[1]))


def branches() -> Built:
    model = Branches()
    batch = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
    return model, batch, functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-2)


class Branching(nn.Linear):
    """Looks at its data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.sum() > 0:  # the line that errors must name
            y = y * 2
        return y


def branching() -> Built:
    return Branching(4, 4), torch.randn(2, 4), lambda y: y.sum(), None


class Nonzero(nn.Linear):
    """Has an op whose output's shape depends on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.sum(1).nonzero()  # the line that errors must name
        return super().forward(x)[rows]


def nonzero() -> Built:
    return Nonzero(4, 4), torch.randn(2, 4), lambda y: y.sum(), None


class Unused(nn.Linear):
    """Does nothing with its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def unused() -> Built:
    return Unused(4, 4), torch.randn(2, 4), lambda y: y.sum(), None


def wrong_targets() -> Built:
    return nn.Linear(4, 4), (torch.randn(2, 4), torch.randn(3, 5)), lambda y, t: (y - t).sum(), None


def loss_reads_data() -> Built:
    def loss(y: torch.Tensor) -> torch.Tensor:
        total = y.sum()
        return total * 2 if total.item() > 0 else total

    return nn.Linear(4, 4), torch.randn(2, 4), loss, None


def loss_raises() -> Built:
    def loss(y: torch.Tensor) -> torch.Tensor:
        raise KeyError("labels")

    return nn.Linear(4, 4), torch.randn(2, 4), loss, None


def detached_loss() -> Built:
    return nn.Linear(4, 4), torch.randn(2, 4), lambda y: y.detach().sum(), None


class Words(torch.nn.Module):
    """Words to logits, or to the loss of their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(600, 99), torch.nn.Linear(99, 600)

    def forward(self, ids: Any, targets: Any = None) -> Any:
        logits = self.head(torch.tanh(self.words(ids)))
        return logits if targets is None else of_words(logits, targets)


def of_words(logits: Any, targets: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
