"""Drop-in GELU and SiLU that save their output and one bit an element, and `convert`, which puts them into a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from executor.inverted.formulas import DIGITS, FORWARD
from executor.inverted.ops import backward_from_output, side


class _FromOutput(torch.autograd.Function):
    """An activation whose backward reads its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind, y = kind, FORWARD[kind](x)
        ctx.save_for_backward(y, side(x, kind))
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        y, bits = ctx.saved_tensors
        return backward_from_output(grad, y, bits, ctx.kind), None


def from_output(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The activation `kind` (one of `formulas.FORWARD`) of x, which saves its output in place of x.

    Types other than float32, float16 and bfloat16 take torch's backward, too. Memory is saved where the next layer
    saves the output anyway and nothing else saves the input. What follows must not write into the output
    (`nn.Dropout(inplace=True)` does): torch then refuses to go backward, as it does to differentiate twice.
    """
    if x.dtype in DIGITS and torch.is_grad_enabled() and x.requires_grad:
        return _FromOutput.apply(x, kind)
    return FORWARD[kind](x)


class GELU(nn.GELU):
    """`torch.nn.GELU`, from its output; `approximate` is none or tanh."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return from_output(input, "gelu" if self.approximate == "none" else "gelu_tanh")


class SiLU(nn.SiLU):
    """`torch.nn.SiLU`, from its output, and never in place."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return from_output(input, "silu")


_TANH = ("GELUTanh", "NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation")
# By name, since transformers may not be installed: our class, and the attributes that it needs.
_OURS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "torch.nn.modules.activation.GELU": (GELU, {}),
    "torch.nn.modules.activation.SiLU": (SiLU, {}),
    "transformers.activations.GELUActivation": (GELU, {"approximate": "none"}),
    "transformers.activations.SiLUActivation": (SiLU, {"inplace": False}),
    **{f"transformers.activations.{name}": (GELU, {"approximate": "tanh"}) for name in _TANH},
}


def convert(model: nn.Module) -> dict[str, str]:
    """Let the model's GELU and SiLU modules, those of transformers among them, save their output.

    A module changes its class in place: hooks, modes and the keys of `state_dict` stay. Forward of torch's own modules
    stays to the bit; formulas that transformers writes out become fused ops, which round otherwise. Subclasses, modules
    that write over their input or whose forward was replaced, and activations that a model calls as functions stay as
    they are. Returns what was replaced: the module's name, and that of the class which it had.
    """
    replaced = {}
    for name, module in model.named_modules():
        kind = type(module)
        found = _OURS.get(f"{kind.__module__}.{kind.__name__}")
        if found and "forward" not in vars(module) and not getattr(module, "inplace", False):
            module.__class__, attributes = found
            vars(module).update(attributes)
            replaced[name] = kind.__name__
    return replaced
