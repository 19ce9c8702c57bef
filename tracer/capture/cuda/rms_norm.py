"""Capture torch's own RMS norm as the one kernel that a GPU runs; of CPU tensors torch takes it apart.

Taken apart it saves a value of the input's size more for backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tracer.precision.cast_cache import kernels
from tracer.torch_api import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard

NAME = "_fused_rms_norm"
aten = torch.ops.aten


@contextlib.contextmanager
def fused_rms_norm() -> Iterator[None]:
    """In the body, `torch.rms_norm` of CPU tensors is captured as `aten._fused_rms_norm` and its backward.

    Which calls come to that op is decided by torch above it (aten's layer_norm.cpp, rms_norm_symint).
    """
    if not hasattr(aten, NAME):
        yield
        return
    op, key = aten._fused_rms_norm.default, DispatchKey.CompositeImplicitAutograd
    # Below autograd nobody takes it apart either.
    op.py_kernels[key] = lambda *_args, **_kwargs: NotImplemented
    try:
        with kernels("AutogradCPU", {NAME: lambda *args: _Fused.apply(*args)}):
            yield
    finally:
        del op.py_kernels[key]
        op._dispatch_cache.clear()


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
        with _below():
            out, rstd = aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape = shape
        ctx.mark_non_differentiable(rstd)
        return out, rstd

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        x, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        gradients = aten._fused_rms_norm_backward.default(gradient, x, ctx.shape, rstd, weight, wanted)
        return gradients[0], None, gradients[1], None


def _below() -> Any:
    return ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutogradCPU))
