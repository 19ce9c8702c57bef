"""Keep ops whole in a capture that eager runs as one kernel, but torch takes apart whenever it captures autograd.

torch registers Python decompositions of these at the dispatch keys that a capture goes through first. An interpolation
would become some thirty ops with several results of its output's size each, in place of one with nothing to save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from tracer.torch_api import DispatchKey

OPS: Final = (
    *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d")),
    *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    *(f"upsample_{kind}" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"_upsample_{kind}_aa" for kind in ("bilinear2d", "bicubic2d")),
    "softshrink", "hardshrink", "multi_margin_loss", "multilabel_margin_loss_forward",
)  # fmt: skip
KEYS: Final = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def whole_kernels() -> Iterator[None]:
    """In the body, these ops are captured as the kernels that eager runs."""
    taken: list[tuple[Any, Any, Any]] = []
    for name in OPS:
        packet = getattr(torch.ops.aten, name)
        for op in (getattr(packet, overload) for overload in packet.overloads()):
            taken += [(op, key, op.py_kernels.pop(key)) for key in KEYS if key in op.py_kernels]
            op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
