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
    def forward(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        return FORWARD[kind](x), side(x, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.kind = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor, None]:
        y, bits = ctx.saved_tensors
        return backward_from_output(grad, y, bits, ctx.kind), None


def from_output(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The activation `kind` (one of `formulas.FORWARD`) of x, which saves its output in place of x.

    Forward is torch's own. Types other than float32, float16 and bfloat16 take torch's backward, too. Memory is saved
    where the next layer saves the output anyway and nothing else saves the input. What follows must not write into the
    output (`nn.Dropout(inplace=True)` does): torch then refuses to go backward, as it does to differentiate twice.
    """
    if x.dtype in DIGITS and torch.is_grad_enabled() and x.requires_grad:
        return _FromOutput.apply(x, kind)[0]
    return FORWARD[kind](x)


class GELU(nn.GELU):
    """`torch.nn.GELU`, from its output; `approximate` is none or tanh."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return from_output(input, "gelu" if self.approximate == "none" else "gelu_tanh")


class SiLU(nn.SiLU):
    """`torch.nn.SiLU`, from its output, and never in place."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return from_output(input, "silu")


_TORCH: dict[type[nn.Module], type[nn.Module]] = {nn.GELU: GELU, nn.SiLU: SiLU}
# By name, since transformers may not be installed: our class, and the attributes that it needs.
_TRANSFORMERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "GELUActivation": (GELU, {"approximate": "none"}),
    "SiLUActivation": (SiLU, {"inplace": False}),
    **dict.fromkeys(
        ("GELUTanh", "NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation"),
        (GELU, {"approximate": "tanh"}),
    ),
}


def convert(model: nn.Module) -> dict[str, str]:
    """Let the model's GELU and SiLU modules, those of transformers among them, save their output.

    A module changes its class in place: parameters, hooks, modes and the keys of `state_dict` stay. Forward of torch's
    own modules stays to the bit; formulas that transformers writes out become fused ops, which round otherwise.
    Subclasses, modules that write over their input or whose forward was replaced, and activations that a model calls as
    functions (`torch.nn.functional.gelu`) stay as they are. Where a module's input is saved by something else, too,
    nothing is gained: whether it is, autograd decides.

    Returns:
        what was replaced: the module's name, and that of the class which it had.
    """
    replaced = {}
    for name, module in model.named_modules():
        kind = type(module)
        ours, attributes = _TORCH.get(kind), dict[str, Any]()
        if kind.__module__ == "transformers.activations" and kind.__name__ in _TRANSFORMERS:
            ours, attributes = _TRANSFORMERS[kind.__name__]
        if ours is not None and "forward" not in vars(module) and not getattr(module, "inplace", False):
            module.__class__ = ours
            vars(module).update(attributes)
            replaced[name] = kind.__name__
    return replaced
