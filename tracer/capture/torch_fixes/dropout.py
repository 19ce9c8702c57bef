"""Capture a dropout that drops nothing as no op, as eager runs it; torch's decomposition copies its input.

It is in `torch/_decomp/decompositions.py` of torch 2.11 to 2.13; `_dropout_impl` in ATen/native/Dropout.cpp gives the
input back, as torch does from 2.14 on. The copies took time and memory, and hid an activation's output behind
themselves.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from tracer.capture.torch_fixes.whole_kernels import KEYS, python_kernels

OP = torch.ops.aten.dropout.default


def idle_dropout() -> AbstractContextManager[None]:
    """In the body, a dropout with a probability of 0, or outside of training, is its input."""
    copying = OP.py_kernels[KEYS[0]]

    def dropout(x: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
        return copying(x, p, train) if train and p else x

    return python_kernels([OP], dropout)
