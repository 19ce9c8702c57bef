"""More steps that others measured and published, written anew op for op: a transformer of CS336 as another student has
it, GPT-2 as `gollem` trains it, one naive attention, and the llama of `ackaudit`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tests.published import models


class Linear(nn.Module):
    """The weight is the first operand. `transposed`: as torch 2.6 lays the result out, which torch 2.11 does not."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(outputs, inputs)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.transposed:
            return torch.bmm(self.weight[None], x.flatten(0, -2).T[None])[0].T.unflatten(0, x.shape[:-1])
        return torch.einsum("oi,...i->...o", self.weight, x)

    transposed = False


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.weight = width, nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        x = x / torch.sqrt(length**2 / self.width + 1e-5)
        return torch.einsum("d,bsd->bsd", self.weight, x).to(given)


class Rotary(nn.Module):
    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        angles = torch.outer(
            torch.arange(context), 1.0 / 10_000.0 ** (torch.arange(0, width, 2).float() / width)
        )
        table = torch.zeros(context, width // 2, 2)
        table[:, :, 0], table[:, :, 1] = torch.cos(angles), torch.sin(angles)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        pairs = x.unflatten(-1, (-1, 2))
        cos = self.table[positions, :, 0].unsqueeze(1)
        sin = self.table[positions, :, 1].unsqueeze(1)
        out = torch.zeros_like(pairs)
        out[..., 0] = cos * pairs[..., 0] - sin * pairs[..., 1]
        out[..., 1] = sin * pairs[..., 0] + cos * pairs[..., 1]
        return out.reshape(x.shape)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = Linear(width, width), Linear(width, width), Linear(width, width)
        self.out = Linear(width, width)
        self.rotary = Rotary(context, width // heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).permute(0, 2, 1, 3) for y in (q, k, v))
        positions = torch.arange(length, device=x.device).unsqueeze(0).expand(batch, -1)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        mask = ~torch.triu(torch.ones(length, length, device=x.device), diagonal=1).to(torch.bool)
        mask = mask.unsqueeze(0).unsqueeze(0).expand(batch, self.heads, -1, -1)
        scores = torch.einsum("...qd,...kd->...qk", q, k)
        scores = scores / math.sqrt(k.shape[-1])
        scores = scores.masked_fill(mask == False, -1e9)  # noqa: E712
        y = torch.einsum("...qk,...kd->...qd", models.softmax(scores), v)
        return self.out(y.permute(0, 2, 1, 3).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(width, inner), Linear(inner, width), Linear(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.w1(x)
        b = self.w3(x)
        a = torch.sigmoid(a) * a
        return self.w2(a * b)


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, context: int) -> None:
        super().__init__()
        self.ln1, self.attention = RMSNorm(width), SelfAttention(width, heads, context)
        self.ln2, self.ffn = RMSNorm(width), SwiGLU(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.ln1(x)
        h = self.attention(h)
        x = x + h
        h = self.ln2(x)
        h = self.ffn(h)
        return x + h


class Transformer(models.Transformer):
    def __init__(self, context: int, width: int, inner: int, layers: int, heads: int) -> None:
        nn.Module.__init__(self)
        self.embedding = models.Embedding(models.VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, inner, heads, context) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = Linear(width, models.VOCABULARY)


def cross_entropy(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    inputs, targets = inputs.reshape(-1, inputs.shape[-1]), targets.reshape(-1)
    inputs = inputs - torch.max(inputs, dim=-1, keepdim=True).values
    total = torch.exp(inputs).sum(dim=-1)
    chosen = inputs[torch.arange(inputs.shape[0], device=inputs.device), targets]
    return (torch.log(total) - chosen).mean()


class AdamW(torch.optim.Optimizer):
    """In place, a parameter at a time, its state made when its first step comes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                gradient, state = p.grad.data, self.state[p]
                if not state:
                    state["t"], state["m"], state["v"] = 0, torch.zeros_like(p.data), torch.zeros_like(p.data)
                state["t"] += 1
                state["m"].mul_(first).add_(gradient, alpha=1 - first)
                state["v"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                below = (state["v"].sqrt() / math.sqrt(1 - second ** state["t"])).add_(group["eps"])
                p.data.addcdiv_(state["m"], below, value=-group["lr"] / (1 - first ** state["t"]))
                p.data.add_(p.data, alpha=-group["lr"] * group["weight_decay"])


def kk512() -> dict[str, Any]:
    model = Transformer(512, *models.SIZES["2.7B"])
    ids = torch.randint(models.VOCABULARY, (4, 512))
    return {
        "model": model,
        "batch": (ids, ids),
        "loss": cross_entropy,
        "optimizer": AdamW(model.parameters()),
    }


def kk512_transposed() -> dict[str, Any]:
    made = kk512()
    for layer in made["model"].modules():
        if isinstance(layer, Linear):
            layer.transposed = True
    return made


def kk512_forward() -> dict[str, Any]:
    return {**kk512(), "loss": _sum, "optimizer": None}


def _sum(out: torch.Tensor, _: Any = None) -> torch.Tensor:
    return out.sum()


class GPTAttention(nn.Module):
    def __init__(self, width: int, heads: int, context: int, flash: bool) -> None:
        super().__init__()
        self.heads, self.flash = heads, flash
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(context, context)).view(1, 1, context, context))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (y.view(batch, length, self.heads, -1).transpose(1, 2) for y in (q, k, v))
        if self.flash:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1)
            scores = scores / math.sqrt(k.shape[-1])
            scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
            y = scores.softmax(dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, context: int, flash: bool) -> None:
        super().__init__()
        self.ln1, self.attention = nn.LayerNorm(width), GPTAttention(width, heads, context, flash)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """GPT-2 124M with an output head that shares the embedding's weight; it returns its loss."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50_257, 768), nn.Embedding(1024, 768)
        self.blocks = nn.ModuleList(GPTBlock(768, 12, 1024, flash) for _ in range(12))
        self.norm = nn.LayerNorm(768)
        self.head = nn.Linear(768, 50_257, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1
        )


def gollem(
    batch_size: int, length: int, *, amp: str = "", flash: bool = False, fused: bool = False
) -> dict[str, Any]:
    model = GPT(flash).train()
    wide = [p for p in model.parameters() if p.dim() >= 2]
    narrow = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    ids = torch.randint(50_257, (2, batch_size, length))
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=fused)
    return {
        "model": model,
        "batch": (ids[0].clone(), ids[1].clone()),
        "optimizer": optimizer,
        **({"amp": amp} if amp else {}),
    }


GOLLEM: dict[str, dict[str, Any]] = {
    "gol_h100_bf16": {"batch_size": 1, "length": 1024, "amp": "bfloat16"},
    "gol_h100_bf16_flash": {"batch_size": 1, "length": 1024, "amp": "bfloat16", "flash": True},
    **{
        "_".join(("gol_s64", kind, *(n for n, on in (("flash", flash), ("fused", fused)) if on))): {
            "batch_size": 4, "length": 64, "amp": amp, "flash": flash, "fused": fused
        }
        for kind, amp in (("fp32", ""), ("bf16", "bfloat16"))
        for flash in (False, True)
        for fused in (False, True)
    },
}  # fmt: skip


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bqd,bkd->bqk", q, k)
        scores = scores / k.shape[-1] ** 0.5
        powers = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
        weights = powers / torch.sum(powers, dim=-1, keepdim=True)
        return torch.einsum("bqk,bkd->bqd", weights, v)


def silmont_attention() -> dict[str, Any]:
    q, k, v = (torch.randn(8, 4096, 16, requires_grad=True) for _ in range(3))
    return {"model": Attention(), "batch": {"q": q, "k": k, "v": v}, "loss": _sum, "optimizer": None}


def ack_llama8() -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=32, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=1000, use_cache=False,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(1000, (2, 1024))}
    return {"model": LlamaModel(config), "batch": batch, "loss": _hidden_sum, "optimizer": None}


def _hidden_sum(out: Any) -> torch.Tensor:
    return out.last_hidden_state.sum()


def __getattr__(name: str) -> Any:
    if name in GOLLEM:
        return lambda: gollem(**GOLLEM[name])
    raise AttributeError(name)
