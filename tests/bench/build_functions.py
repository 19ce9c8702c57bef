"""Build functions of the models that only the benchmarks need: decoders of many layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Built = tuple[nn.Module, Any, Callable[..., Any] | None, torch.optim.Optimizer | None]


class Block(nn.Module):
    """A decoder's block before normalisation: causal attention written out, and a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        y = self.norm1(x)
        q, k, v = (
            p(y).view(b, t, self.heads, w // self.heads).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(2, 3) * (w // self.heads) ** -0.5 + mask).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, w))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, layers: int, width: int = 512, heads: int = 8, vocabulary: int = 8192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        t = tokens.shape[1]
        mask = torch.full((t, t), float("-inf"), device=tokens.device).triu(1)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x)).flatten(0, 1)


def _decoder(layers: int, batch_size: int, seq_len: int) -> Built:
    model = Decoder(layers)
    tokens = torch.randint(8192, (batch_size, seq_len))
    batch = tokens, torch.randint(8192, (batch_size * seq_len,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, batch, functional.cross_entropy, optimizer


def decoder96(batch_size: int = 4, seq_len: int = 512) -> Built:
    return _decoder(96, batch_size, seq_len)


def decoder256(batch_size: int = 4, seq_len: int = 512) -> Built:
    return _decoder(256, batch_size, seq_len)
