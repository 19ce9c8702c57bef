"""Keep ops whole in a capture that eager runs as one kernel, but torch takes apart whenever it captures autograd.

torch registers Python decompositions of these at the dispatch keys that a capture goes through first. An interpolation
would become some thirty ops with several results of its output's size each, in place of one with nothing to save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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


def whole_kernels() -> contextlib.AbstractContextManager[None]:
    """In the body, these ops are captured as the kernels that eager runs."""
    packets = [getattr(torch.ops.aten, name) for name in OPS]
    return python_kernels(
        [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    )


@contextlib.contextmanager
def python_kernels(ops: Sequence[Any], kernel: Any = None) -> Iterator[None]:
    """In the body, ops have this kernel in place of those that torch registered at the keys; None: no such kernel."""
    before = [(op, {key: op.py_kernels[key] for key in KEYS if key in op.py_kernels}) for op in ops]
    for op, kernels in before:
        for key in kernels:
            if kernel is None:
                del op.py_kernels[key]
            else:
                op.py_kernels[key] = kernel
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in before:
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
