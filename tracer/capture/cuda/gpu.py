"""Capture the ops that a GPU would run in place of those that torch takes on the CPU.

Counts: attention (`tracer.capture.cuda.attention`), recurrent layers (`tracer.capture.cuda.recurrent`), RMS norm, batch
norm (`tracer.capture.passes.batch_norm`), and ops whose results have another data type on CUDA (`results`). Ignores:
what torch decides below its ops (which convolution algorithm, which memory format a convolution returns).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from tracer.capture.cuda.attention import attend
from tracer.capture.cuda.recurrent import recurrent_kernels
from tracer.capture.passes.batch_norm import dense, meta, takes_cudnn
from tracer.capture.torch_fixes.grouped import whole_histograms
from tracer.precision.autocast_lists import lowered
from tracer.precision.cast_cache import kernels
from tracer.precision.policy import without_autocast
from tracer.torch_api import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    FakeTensor,
    pytree,
    replaced,
    scaled_dot_product_attention,
)
from traces.devices import Device

aten = torch.ops.aten

# Ops whose results on CUDA have another data type than on the CPU: in half precision, the statistics of a norm are
# float32 on CUDA and the input's own type on the CPU (torch/_refs and torch/_decomp).
DIFFERENT_RESULTS: Final = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_no_training.default,
        aten._fused_rms_norm.default,
    }
)


# Of float16 to float32 these are one kernel on CUDA, without a float32 copy of the input (aten's SoftMax.cpp).
HALF_TO_FLOAT: Final = {
    **dict.fromkeys((torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax), aten._softmax),
    **dict.fromkeys(
        (torch.log_softmax, torch.nn.functional.log_softmax, torch.Tensor.log_softmax), aten._log_softmax
    ),
}


def _widens(args: Any, kwargs: Any) -> bool:
    """Whether a call of softmax is one of float16 that asks for float32, along a dimension that it names."""
    dtype = kwargs.get("dtype", args[-1] if len(args) > 2 else None)
    named = isinstance(kwargs.get("dim", args[1] if len(args) > 1 else None), int)
    given = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float16
    return given and named and dtype is torch.float32


@contextlib.contextmanager
def gpu_kernels(target: Device | None, *, eager: bool = False) -> Iterator[None]:
    """While it is active, attention is captured as the ops that a GPU runs, and batch norms with inputs as it has them.

    torch's functions are replaced where its own Python code looks them up, and a mode catches the calls of whoever
    holds a reference to the originals (under which torch's Python functions would run without the mode).

    Args:
        target: the GPU that a laptop's capture is for; None on a GPU, where torch itself chooses the attention.
        eager: whether this is no capture, but what eager runs.
    """
    attention, norm = scaled_dot_product_attention, torch.batch_norm

    def run_attention(*args: Any, **kwargs: Any) -> Any:
        if target is None:
            return attention(*args, **kwargs)
        # The choice depends on what autocast would make of query, key and value; below it nothing is cast again.
        args, kwargs = lowered(args, kwargs)
        with without_autocast():
            return attend(target, *args, **kwargs)

    def run_norm(  # type: ignore[no-untyped-def]
        input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
    ):
        given = (input, weight, bias, running_mean, running_var)
        if training and takes_cudnn(*given, eps, enabled=cudnn_enabled):
            given = (*map(dense, given[:3]), *given[3:])
        return norm(*given, training, momentum, eps, cudnn_enabled)

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if target is not None and func in HALF_TO_FLOAT and _widens(args, kwargs or {}):
                dim = (kwargs or {}).get("dim", args[1] if len(args) > 1 else None)
                return HALF_TO_FLOAT[func](args[0], dim, True)
            if func == attention:
                func = run_attention
            elif func == norm:
                func = run_norm
            return func(*args, **(kwargs or {}))

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch.nn.functional, scaled_dot_product_attention=run_attention))
        stack.enter_context(replaced(torch, batch_norm=run_norm))
        for kernel in (fused_rms_norm, whole_histograms) if target is not None else ():
            stack.enter_context(kernel())
        stack.enter_context(recurrent_kernels(target, eager=eager))
        stack.enter_context(Mode())
        yield


def results(target: Any, args: Any, kwargs: Any, out: Any, *, laptop: bool) -> Any:
    """The results of an op as a GPU leaves them, where torch's fake kernels say something else.

    Args:
        target: the op; args, kwargs: its arguments, fake tensors.
        out: its results by the fake kernel.
        laptop: whether these are fake tensors on the CPU that stand for a GPU's.

    Fake tensors on CUDA can be made without CUDA as long as autograd does not see them, so torch's own rules are asked.
    """
    if target is aten.cudnn_batch_norm.default and args[5] is True:
        return meta(args[0], args[1])
    if target is aten.cudnn_batch_norm_backward.default:  # torch's fake kernel follows the gradient's layout
        return torch.empty_like(args[0]), *out[1:]
    if not laptop or target not in DIFFERENT_RESULTS:
        return out

    def there(x: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    with torch.no_grad(), DisableTorchFunction():  # "cuda" is meant
        wanted = target(*pytree.tree_map(there, args), **pytree.tree_map(there, kwargs))
    return pytree.tree_map(
        lambda here, w: (
            here
            if not isinstance(here, torch.Tensor) or here.dtype == w.dtype
            else torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=here.device)
        ),
        out,
        wanted,
    )


@contextlib.contextmanager
def fused_rms_norm() -> Iterator[None]:
    """In the body, `torch.rms_norm` of CPU tensors is captured as a GPU's kernel, `aten._fused_rms_norm`, with
    its backward; taken apart, as torch does on a CPU, it saves a value of the input's size more.

    Which calls come to that op is decided by torch above it (aten's layer_norm.cpp, rms_norm_symint).
    """
    op, key = aten._fused_rms_norm.default, DispatchKey.CompositeImplicitAutograd
    # Below autograd nobody takes it apart either.
    op.py_kernels[key] = lambda *_args, **_kwargs: NotImplemented
    try:
        with kernels("AutogradCPU", {"_fused_rms_norm": lambda *args: _Fused.apply(*args)}):
            yield
    finally:
        del op.py_kernels[key]
        op._dispatch_cache.clear()


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
        with ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutogradCPU)):
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
