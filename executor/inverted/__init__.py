"""Activations and norms that save their output, which the next layer saves anyway, in place of their input.

After Inverted Activations (Novikov and Oseledets, arXiv:2407.15545): the derivative is computed from the output and one
bit an element, which says on what side of the function's minimum the input lay. Forward is torch's own; gradients are
rounded otherwise than torch's (see `executor.inverted.fits` for by how much).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.inverted.modules import GELU, Hardswish, Mish, SiLU
    from executor.inverted.norms import BatchNorm1d, BatchNorm2d, BatchNorm3d, LayerNorm
    from executor.inverted.replace import Converted, convert

_PLACES = {
    "norms": ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm"),
    "replace": ("convert", "Converted"),
    "modules": ("GELU", "Hardswish", "Mish", "SiLU"),
}

__all__ = [
    "GELU",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Converted",
    "Hardswish",
    "LayerNorm",
    "Mish",
    "SiLU",
    "convert",
]


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"executor.inverted.{module}"), name)
    raise AttributeError(f"module 'executor.inverted' has no attribute {name!r}")
