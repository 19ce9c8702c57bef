"""Put cuDNN's kernel in the place of a batch norm in training where torch would take it on a GPU.

torch's capture cannot hold cuDNN's batch norm: the op updates the running statistics in place without saying so, and
therefore AOTAutograd replaces it by torch's own kernel. The eager step does not. So a batch norm is captured as an op
of ours that says what it does, and the finished graph gets `aten.cudnn_batch_norm` for it, which writes the statistics
itself, as the eager step does. `again` says how to run it a second time without a second update.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
from torch import fx

aten = torch.ops.aten

LARGEST_BATCH: Final = 880_801  # cuDNN's limit of a spatial batch norm in training
LARGEST: Final = 2**31 - 1  # elements; some of cuDNN's kernels index with 32 bits
SMALLEST_EPS: Final = 0.0  # cuDNN's CUDNN_BN_MIN_EPSILON
STATISTICS: Final = (3, 4)  # positions of the running mean and variance among the arguments


def takes_cudnn(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    eps: float,
    *,
    enabled: bool = True,
) -> bool:
    """Whether torch takes cuDNN for a batch norm in training on a CUDA GPU.

    The rules are those of `use_cudnn` in torch's `aten/src/ATen/native/Normalization.cpp` (`_batch_norm_impl_index`),
    releases 2.11 to 2.13. They have been read, and no GPU has confirmed them here.

    Args:
        x: at least three-dimensional, channels second.
        weight, bias, mean, var: the parameters and the running statistics.
        enabled: `torch.backends.cudnn.enabled`.
    """
    if weight is None or bias is None or (mean is None) != (var is None):
        return False
    half = x.dtype is torch.float16
    return (
        enabled
        and x.dtype in (torch.float16, torch.float32, torch.float64)
        and weight.dtype is not torch.bfloat16
        and (not half or weight.dtype is torch.float32)
        and x.dim() >= 3
        and x.shape[0] <= LARGEST_BATCH
        and 0 < x.numel() <= LARGEST
        and eps >= SMALLEST_EPS
    )


def reserve_bytes(x: torch.Tensor) -> int:
    """Bytes that cuDNN keeps from a batch norm's forward for its backward, beside mean and inverse deviation.

    On a GPU, cuDNN is asked. Elsewhere 0 is assumed: torch's own decomposition of the op returns an empty reserve, and
    without a fused activation cuDNN has nothing to keep. For channels-last inputs, where cuDNN may take a persistent
    kernel, this is not known.
    """
    if x.device.type == "cuda" and torch.cuda.is_available():
        from tracer.torch_api import cudnn_batch_norm_reserve_bytes

        with contextlib.suppress(RuntimeError):
            return int(cudnn_batch_norm_reserve_bytes(x, True))
    return 0


@torch.library.custom_op("lowtide::cudnn_batch_norm", mutates_args=())
def cudnn_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`aten.cudnn_batch_norm` in training, with the new running statistics as its last two results."""
    new_mean = mean.clone() if mean is not None else x.new_empty(0)
    new_var = var.clone() if var is not None else x.new_empty(0)
    given = (new_mean, new_var) if mean is not None else (None, None)
    out, saved_mean, saved_var, reserve = aten.cudnn_batch_norm(x, weight, bias, *given, True, momentum, eps)
    return out, saved_mean, saved_var, reserve, new_mean, new_var


@cudnn_batch_norm.register_fake
def _(x, weight, bias, mean, var, momentum, eps):  # type: ignore[no-untyped-def]
    out, saved_mean, saved_var, reserve = meta(x, weight)
    new_mean, new_var = (x.new_empty(0) if s is None else torch.empty_like(s) for s in (mean, var))
    return out, saved_mean, saved_var, reserve, new_mean, new_var


def meta(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `aten.cudnn_batch_norm` returns in training, on fake tensors."""
    return (
        torch.empty_like(x),
        torch.empty_like(weight),
        torch.empty_like(weight),
        x.new_empty(reserve_bytes(x), dtype=torch.uint8),
    )


@torch.library.custom_op("lowtide::cudnn_batch_norm_backward", mutates_args=())
def cudnn_batch_norm_backward(
    x: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    saved_mean: torch.Tensor,
    saved_var: torch.Tensor,
    eps: float,
    reserve: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`aten.cudnn_batch_norm_backward`, which takes the running statistics and does not look at them."""
    return tuple(
        aten.cudnn_batch_norm_backward(x, grad, weight, None, None, saved_mean, saved_var, eps, reserve)
    )


@cudnn_batch_norm_backward.register_fake
def _(x, grad, weight, saved_mean, saved_var, eps, reserve):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _bias, _mean, _var, _momentum, eps = inputs
    _out, saved_mean, saved_var, reserve, new_mean, new_var = output
    ctx.save_for_backward(x, weight, saved_mean, saved_var, reserve)
    ctx.eps = eps
    ctx.mark_non_differentiable(saved_mean, saved_var, reserve, new_mean, new_var)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> Any:
    if grad is None:
        return (None,) * 7
    x, weight, saved_mean, saved_var, reserve = ctx.saved_tensors
    grads = torch.ops.lowtide.cudnn_batch_norm_backward(
        x, grad, weight, saved_mean, saved_var, ctx.eps, reserve
    )
    return (*grads, None, None, None, None)


cudnn_batch_norm.register_autograd(_backward, setup_context=_save)


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """The batch norm by cuDNN's kernel, the running statistics updated."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    given = x if x.is_contiguous(memory_format=layout) else x.contiguous()
    out, _, _, _, new_mean, new_var = torch.ops.lowtide.cudnn_batch_norm(
        given, weight.contiguous(), bias.contiguous(), mean, var, momentum, eps
    )
    if mean is not None and var is not None:
        mean.copy_(new_mean)
        var.copy_(new_var)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The finished graph


def put_cudnn(graph: fx.Graph, mutations: list[tuple[fx.Node, fx.Node]]) -> list[tuple[fx.Node, fx.Node]]:
    """Replace the ops of ours by `aten.cudnn_batch_norm`, which writes its buffers itself.

    Args:
        graph: is changed.
        mutations: pairs of an overwritten input and its new value; those that cuDNN now writes are left out of what
            is returned.

    A batch norm whose statistics are no buffers of the model keeps the op of ours, which updates copies.
    """
    for n in list(graph.nodes):
        if n.op != "call_function":
            continue
        if n.target is torch.ops.lowtide.cudnn_batch_norm_backward.default:
            x, grad, weight, saved_mean, saved_var, eps, reserve = n.args
            n.target = aten.cudnn_batch_norm_backward.default
            n.args = (x, grad, weight, None, None, saved_mean, saved_var, eps, reserve)
        elif n.target is torch.ops.lowtide.cudnn_batch_norm.default:
            x, weight, bias, mean, var, momentum, eps = n.args
            parts = {p.args[1]: p for p in n.users}
            written = [(mean, parts.get(4)), (var, parts.get(5))] if mean is not None else []
            if any(s.op != "placeholder" for s, _ in written):
                continue
            n.target = aten.cudnn_batch_norm.default
            n.args = (x, weight, bias, mean, var, True, momentum, eps)
            n.meta["val"] = n.meta["val"][:4]
            for buffer, part in written:
                # The new value, and what `copy_` made of it: from here on both are the buffer itself.
                copies = [u for u in part.users if u.target is aten.copy.default] if part is not None else []
                for value in (*copies, part):
                    if value is not None:
                        value.replace_all_uses_with(buffer)
                        mutations = [(t, buffer if v is value else v) for t, v in mutations]
                        graph.erase_node(value)
            for k in (4, 5):
                if mean is None and k in parts:
                    graph.erase_node(parts[k])
    return [(t, v) for t, v in mutations if t is not v]


def writes(n: fx.Node) -> tuple[Any, ...]:
    """The inputs that a batch norm by cuDNN overwrites; its schema says none."""
    if n.target is not aten.cudnn_batch_norm.default or n.args[5] is not True:
        return ()
    return tuple(n.args[k] for k in STATISTICS if n.args[k] is not None)


def again(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an op for a second run: a batch norm by cuDNN gets no statistics to update.

    The kernel reads them in training only to update them, so its results are the same.
    """
    if target is not aten.cudnn_batch_norm.default or args[5] is not True:
        return args
    return (*args[:3], None, None, *args[5:])
