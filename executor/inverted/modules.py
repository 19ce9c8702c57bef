"""Drop-in activations that save their output and one bit an element."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from executor.inverted.formulas import DIGITS, FORWARD
from executor.inverted.ops import activate, backward_from_output, side


class _FromOutput(torch.autograd.Function):
    """An activation whose backward reads its output; in place, it writes over its input as torch's own does."""

    @staticmethod
    def forward(x: torch.Tensor, kind: str, inplace: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if inplace:
            bits = side(x, kind)
            getattr(functional, kind)(x, inplace=True)
            return x, bits
        return activate(x, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, ctx.kind, inplace = inputs
        if inplace:
            ctx.mark_dirty(x)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None]:
        y, bits = ctx.saved_tensors
        return backward_from_output(grad, y, bits, ctx.kind), None, None


def from_output(x: torch.Tensor, kind: str, inplace: bool = False) -> torch.Tensor:
    """The activation `kind` (one of `formulas.FORWARD`) of x, which saves its output in place of x.

    Forward is torch's own (on CUDA, one kernel of ours by the same formula). Types other than float32, float16 and
    bfloat16 take torch's backward, too. Memory is saved where the next layer saves the output anyway and nothing else
    saves the input. What follows must not write into
    the output (`nn.Dropout(inplace=True)` does): torch then refuses to go backward, as it does to differentiate twice.
    """
    if x.dtype in DIGITS and torch.is_grad_enabled() and x.requires_grad:
        return _FromOutput.apply(x, kind, inplace)[0]
    return getattr(functional, kind)(x, inplace=True) if inplace else FORWARD[kind](x)


class GELU(nn.GELU):
    """`torch.nn.GELU`, from its output; `approximate` is none or tanh."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return from_output(input, "gelu" if self.approximate == "none" else "gelu_tanh")


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), as in CLIP, from its output."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return from_output(input, "quick_gelu")


class SiLU(nn.SiLU):
    """`torch.nn.SiLU`, from its output."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return from_output(input, "silu", self.inplace)


class Mish(nn.Mish):
    """`torch.nn.Mish`, from its output."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return from_output(input, "mish", self.inplace)


class Hardswish(nn.Hardswish):
    """`torch.nn.Hardswish`, from its output."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return from_output(input, "hardswish", self.inplace)
