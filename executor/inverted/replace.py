"""Replace a model's activations and norms by those that save their output."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from executor.inverted.modules import GELU, Hardswish, Mish, QuickGELU, SiLU
from executor.inverted.norms import BatchNorm1d, BatchNorm2d, BatchNorm3d, LayerNorm, RMSNorm, obstacle

# By name, since transformers may not be installed: its class, ours, and the attributes that ours needs.
_TRANSFORMERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "GELUActivation": (GELU, {"approximate": "none"}),
    "GELUTanh": (GELU, {"approximate": "tanh"}),
    "NewGELUActivation": (GELU, {"approximate": "tanh"}),
    "FastGELUActivation": (GELU, {"approximate": "tanh"}),
    "AccurateGELUActivation": (GELU, {"approximate": "tanh"}),
    "SiLUActivation": (SiLU, {"inplace": False}),
    "MishActivation": (Mish, {"inplace": False}),
    "QuickGELUActivation": (QuickGELU, {}),
}
_TORCH: dict[type[nn.Module], type[nn.Module]] = {
    nn.GELU: GELU, nn.SiLU: SiLU, nn.Mish: Mish, nn.Hardswish: Hardswish,
}  # fmt: skip
_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: BatchNorm1d, nn.BatchNorm2d: BatchNorm2d, nn.BatchNorm3d: BatchNorm3d,
}  # fmt: skip
# torch's backward of these reads their output already, or reads nothing.
_AS_THEY_ARE = ("Identity", "LinearActivation", "ReLU", "Sigmoid", "Softmax", "Tanh")


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert` replaced, and what not and why: by the module's name in the model."""

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name}: {what}" for name, what in self.replaced.items()]
        return "\n".join([*lines, *(f"{name} stays as it is: {why}" for name, why in self.left.items())])


def convert(model: nn.Module, *, norms: bool = True) -> Converted:
    """Let the model's GELU, SiLU, Mish, Hardswish and QuickGELU modules, transformers' among them, save their output.

    With `norms` its layer norms and RMS norms, too, and each batch norm that a leaky ReLU follows in an
    `nn.Sequential`, as one, if their weights allow it. A module changes its class in place: parameters, hooks, modes
    and the keys of `state_dict` stay. Forward of torch's own modules stays to the bit on the CPU; formulas that
    transformers writes out become fused ops, which round otherwise. Activations that a model calls as functions
    (`torch.nn.functional.gelu`)
    are not seen, and where a module's input is saved by something else, too, nothing is gained: whether it is, autograd
    decides.
    """
    said = Converted()
    used = Counter(id(child) for module in model.modules() for child in module._modules.values())
    for name, module in model.named_modules():
        kind = type(module)
        ours = _TORCH.get(kind)
        attributes: dict[str, Any] = {}
        if kind.__module__ == "transformers.activations" and kind.__name__ in _TRANSFORMERS:
            ours, attributes = _TRANSFORMERS[kind.__name__]
        if ours is not None and "forward" not in vars(module):
            module.__class__ = ours
            vars(module).update(attributes)
            said.replaced[name] = f"{kind.__name__} from its output"
        elif norms and kind in (nn.LayerNorm, nn.RMSNorm):
            _convert_norm(said, name, module, LayerNorm if kind is nn.LayerNorm else RMSNorm)
        elif norms and _is_rms_norm(module):
            if _convert_norm(said, name, module, RMSNorm):
                more = {"normalized_shape": module.weight.shape, "eps": module.variance_epsilon}
                vars(module).update(more, elementwise_affine=True)
        elif norms and kind is nn.Sequential:
            _convert_pairs(said, name, module, used)
        elif reason := _reason(module, ours):
            said.left[name] = reason
    return said


def _is_rms_norm(module: nn.Module) -> bool:
    """Whether it is one of transformers' RMS norms (over a hundred classes) and computes what torch's does."""
    weight, eps = (getattr(module, name, None) for name in ("weight", "variance_epsilon"))
    ours = type(module).__module__.startswith("transformers.") and isinstance(eps, float)
    if not (ours and isinstance(weight, nn.Parameter) and weight.dim() == 1) or weight.is_meta:
        return False
    x = torch.linspace(-2, 3, 2 * len(weight), dtype=weight.dtype, device=weight.device).view(2, -1)
    with torch.no_grad():
        wanted = nn.functional.rms_norm(x, weight.shape, weight, eps)
        return torch.allclose(type(module).forward(module, x), wanted, rtol=0.02, atol=1e-4)


def _convert_norm(said: Converted, name: str, norm: nn.Module, ours: type[nn.Module]) -> bool:
    weight: Any = norm.weight
    why = obstacle(weight, getattr(norm, "bias", None), torch.float32 if weight is None else weight.dtype)
    if why or "forward" in vars(norm):
        said.left[name] = why or "its forward was replaced"
        return False
    said.replaced[name] = f"{type(norm).__name__} from its output"
    norm.__class__ = ours
    return True


def _convert_pairs(said: Converted, name: str, sequence: nn.Module, used: Counter[int]) -> None:
    """Make one of each batch norm and the leaky ReLU behind it, which becomes an identity."""
    for (key, norm), (_, activation) in pairwise(sequence.named_children()):
        if type(norm) not in _NORMS or type(activation) is not nn.LeakyReLU or activation.negative_slope <= 0:
            continue
        where = f"{name}.{key}" if name else key
        if used[id(activation)] > 1 or used[id(norm)] > 1 or norm._forward_hooks or activation._forward_hooks:
            said.left[where] = "it or its leaky ReLU is used twice or has hooks"
        elif _convert_norm(said, where, norm, _NORMS[type(norm)]):
            vars(norm)["slope"] = activation.negative_slope
            activation.__class__ = nn.Identity


def _reason(module: nn.Module, ours: type[nn.Module] | None) -> str:
    """Why an activation was not replaced; nothing of modules that are none or have nothing to gain."""
    kind = type(module)
    if ours is not None:
        return "its forward was replaced"
    if base := next((c for c in _TORCH if isinstance(module, c) and kind not in _TORCH.values()), None):
        return f"{kind.__name__} is a subclass of {base.__name__} and may compute something else"
    # Without parameters: attention, which has some, is more than a function of one tensor.
    activation = kind.__module__ in ("torch.nn.modules.activation", "transformers.activations")
    activation = activation and next(module.parameters(), None) is None
    if activation and kind not in _TORCH.values() and kind.__name__ not in _AS_THEY_ARE:
        return f"there is no drop-in for {kind.__name__}"
    return ""
