"""Training steps that others measured on real GPUs and published, written anew op for op, as build functions.

`cs336` is the transformer of Stanford's course CS336, assignment 1 (pre-norm RMSNorm, RoPE, SwiGLU, linear layers by
einsum without bias, an untied head, naive attention), with the course's cross entropy and an AdamW that replaces its
moments.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

SIZES = {
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "2.7B": (2560, 10240, 32, 32),
}
VOCABULARY = 10_000


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(outputs, inputs), std=0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(rows, width)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids, :]


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(given)


class Rotary(nn.Module):
    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(context), 10_000.0 ** -(torch.arange(0, width, 2) / width))
        self.register_buffer("table", torch.stack((torch.cos(angles), torch.sin(angles))), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.table[:, : x.shape[-2]]
        return torch.stack((cos * a - sin * b, sin * a + cos * b), dim=-1).flatten(-2).contiguous()


def softmax(x: torch.Tensor) -> torch.Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.q, self.k, self.v = Linear(width, width), Linear(width, width), Linear(width, width)
        self.out = Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for y in (q, k, v))
        positions = torch.arange(length, device=x.device)
        q, k = self.rotary(q), self.rotary(k)
        mask = positions[:, None] >= positions[None, :]
        y = naive_attention(q, k, v, mask)
        return self.out(y.transpose(-2, -3).flatten(-2).contiguous())


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(width, inner), Linear(inner, width), Linear(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(gate) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.attention, self.ffn = SelfAttention(width, heads, rotary), SwiGLU(width, inner)
        self.ln1, self.ln2 = RMSNorm(width), RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention(self.ln1(x))
        x = x + y
        z = self.ffn(self.ln2(x))
        return x + z


class Transformer(nn.Module):
    def __init__(self, context: int, width: int, inner: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = Embedding(VOCABULARY, width)
        rotary = Rotary(context, width // heads)
        self.layers = nn.ModuleList(Block(width, inner, heads, rotary) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def cross_entropy(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    shifted = inputs - torch.max(inputs, dim=-1, keepdim=True)[0]
    logs = shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))
    return torch.mean(-torch.gather(logs, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """As the course's assignment has it written: new moments take the place of the old ones in the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, gradient = self.state[p], p.grad.data
                t = state.get("t", 1)
                m, v = state.get("m", torch.zeros_like(p)), state.get("v", torch.zeros_like(p))
                m = first * m + (1 - first) * gradient
                v = second * v + (1 - second) * gradient**2
                rate = group["lr"] * math.sqrt(1 - second**t) / (1 - first**t)
                p.data -= rate * m / (torch.sqrt(v) + group["eps"])
                p.data -= group["lr"] * group["weight_decay"] * p.data
                state["t"], state["m"], state["v"] = t + 1, m, v


def cs336(size: str, context: int, batch_size: int, amp: str = "") -> dict[str, Any]:
    model = Transformer(context, *SIZES[size])
    ids = torch.randint(VOCABULARY, (batch_size, context + 1))
    return {
        "model": model,
        "batch": (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()),
        "loss": cross_entropy,
        "optimizer": AdamW(model.parameters()),
        **({"amp": amp} if amp else {}),
    }


def wed128() -> dict[str, Any]:
    return cs336("medium", 128, 4)


def wed256() -> dict[str, Any]:
    return cs336("medium", 256, 4)


def wed512() -> dict[str, Any]:
    return cs336("medium", 512, 4, "bfloat16")


def wed1024() -> dict[str, Any]:
    return cs336("medium", 1024, 4, "bfloat16")


def _trained(name: str, config: str, batch: dict[str, torch.Tensor], **settings: Any) -> tuple[Any, ...]:
    """A model of transformers by its classes' names, in the loop of its Trainer: AdamW as torch chooses it."""
    import transformers

    model = getattr(transformers, name)(getattr(transformers, config)(**settings))
    model.train()
    return model, batch, torch.optim.AdamW(model.parameters())


def _tokens(vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocabulary, (2, 16))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def opt_bert() -> tuple[Any, ...]:
    tokens = _tokens(30_522)
    return _trained(
        "BertForMaskedLM", "BertConfig", {**tokens, "token_type_ids": torch.zeros_like(tokens["labels"])}
    )


def opt_gpt2() -> tuple[Any, ...]:
    made = _trained("GPT2LMHeadModel", "GPT2Config", _tokens(50_257))
    for block in made[0].transformer.h:  # as in transformers 4
        block.attn.register_buffer("causal", torch.ones(1, 1, 1024, 1024, dtype=torch.bool).tril())
    return made


def opt_vit() -> tuple[Any, ...]:
    images = {"pixel_values": torch.randn(2, 3, 224, 224), "labels": torch.randint(1000, (2,))}
    return _trained("ViTForImageClassification", "ViTConfig", images, num_labels=1000)
