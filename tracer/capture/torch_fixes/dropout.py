"""Capture a dropout that drops nothing as no op, as eager runs it; torch's decomposition copies its input.

It is in `torch/_decomp/decompositions.py` of torch 2.11 to 2.15; `_dropout_impl` in ATen/native/Dropout.cpp gives the
input back. The copies took time and memory, and hid an activation's output behind themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tracer.capture.torch_fixes.whole_kernels import KEYS

OP = torch.ops.aten.dropout.default


@contextlib.contextmanager
def idle_dropout() -> Iterator[None]:
    """In the body, a dropout with a probability of 0, or outside of training, is its input."""
    before = {key: OP.py_kernels[key] for key in KEYS}

    def dropout(x: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
        return before[KEYS[0]](x, p, train) if train and p else x

    for key in KEYS:
        OP.py_kernels[key] = dropout
    OP._dispatch_cache.clear()
    try:
        yield
    finally:
        OP.py_kernels.update(before)
        OP._dispatch_cache.clear()
