"""Put cuDNN's kernel in the place of a batch norm in training where torch would take it on a GPU.

torch's capture cannot hold cuDNN's batch norm: the op updates the running statistics in place without saying so, and
therefore AOTAutograd captures torch's own kernel. The eager step does not run that. So the finished graph gets
`aten.cudnn_batch_norm` for it, which writes the statistics itself. `again` says how to run it a second time without a
second update.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, Final

import torch
from torch import fx

aten = torch.ops.aten

FORWARD: Final = (aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats)
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
    """Return whether torch takes cuDNN for a batch norm in training on a CUDA GPU, of a tensor with channels second.

    The rules are those of `use_cudnn` in torch's `aten/src/ATen/native/Normalization.cpp` (`_batch_norm_impl_index`),
    releases 2.11 to 2.13. They have been read, and no GPU has confirmed them here.
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


def meta(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what `aten.cudnn_batch_norm` returns in training, on fake tensors."""
    return (
        torch.empty_like(x),
        torch.empty_like(weight),
        torch.empty_like(weight),
        x.new_empty(reserve_bytes(x), dtype=torch.uint8),
    )


def results(target: Any, args: Any, out: Any) -> Any:
    """The results of an op as cuDNN leaves them, where torch's fake kernels say something else."""
    if target is aten.cudnn_batch_norm.default and args[5] is True:
        return meta(args[0], args[1])
    if target is aten.cudnn_batch_norm_backward.default:  # torch's fake kernel follows the gradient's layout
        return torch.empty_like(args[0]), *out[1:]
    return out


def lies_dense(x: torch.Tensor) -> bool:
    """True if a tensor lies as cuDNN takes it: contiguous, or an image in channels last."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    return x.is_contiguous() or bool(x.is_contiguous(memory_format=layout))


def put_cudnn(graph: fx.Graph, mutations: list[tuple[fx.Node, fx.Node]]) -> list[tuple[fx.Node, fx.Node]]:
    """Replace torch's own batch norms by `aten.cudnn_batch_norm` where a GPU takes it; it writes its buffers itself.

    Args:
        graph: is changed.
        mutations: pairs of an overwritten input and its new value; those that cuDNN now writes are left out of what
            is returned.
    """
    reserves: dict[fx.Node, fx.Node] = {}
    dense: dict[fx.Node, fx.Node] = {}  # inputs that were copied, and their copies
    for n in list(graph.nodes):
        if n.target in FORWARD:
            x, weight, bias, *statistics, training, momentum, eps = n.args
            mean, var = statistics or (None, None)
            v, w, b, m, d = (a and a.meta["val"] for a in (x, weight, bias, mean, var))
            if not training or not takes_cudnn(v, w, b, m, d, eps, enabled=torch.backends.cudnn.enabled):
                continue
            with graph.inserting_before(n):
                if not lies_dense(v):  # eager's own code makes it so
                    dense[x] = _clone(x)
                    x = dense[x]
                # Statistics that are no inputs of the graph may have other readers: what is written is a copy.
                written = [a if a.op == "placeholder" else _clone(a) for a in statistics]
                args = (x, weight, bias, *(written or (None, None)), True, momentum, eps)
                cudnn = graph.create_node(
                    "call_function", aten.cudnn_batch_norm.default, args, name="cudnn_batch_norm"
                )
                reserve = graph.call_function(operator.getitem, (cudnn, 3))
            cudnn.meta = {**n.meta, "val": meta(x.meta["val"], weight.meta["val"])}
            reserve.meta = {**n.meta, "val": cudnn.meta["val"][3]}
            for part in list(n.users):
                k = part.args[1]
                if k < 3:
                    part.args = (cudnn, k)
                    part.meta["val"] = cudnn.meta["val"][k]
                    if k:
                        reserves[part] = reserve
                    continue
                part.replace_all_uses_with(written[k - 3])
                mutations = [(t, written[k - 3] if v is part else v) for t, v in mutations]
                graph.erase_node(part)
            graph.erase_node(n)
        elif n.target is aten.native_batch_norm_backward.default and n.args[5] in reserves:
            grad, x, weight, _, _, saved_mean, saved_var, _, eps, _ = n.args
            reserve = reserves[saved_mean]
            args = (dense.get(x, x), grad, weight, None, None, saved_mean, saved_var, eps, reserve)
            with graph.inserting_before(n):
                cudnn = graph.create_node(
                    "call_function",
                    aten.cudnn_batch_norm_backward.default,
                    args,
                    name="cudnn_batch_norm_backward",
                )
            cudnn.meta = dict(n.meta)
            n.replace_all_uses_with(cudnn)
            graph.erase_node(n)
    return [(t, v) for t, v in mutations if t is not v]


def _clone(n: fx.Node) -> fx.Node:
    copy: fx.Node = n.graph.call_function(
        aten.clone.default, (n,), {"memory_format": torch.contiguous_format}
    )
    copy.meta = {**n.meta, "val": torch.empty_like(n.meta["val"], memory_format=torch.contiguous_format)}
    return copy


def writes(n: fx.Node) -> tuple[Any, ...]:
    """The inputs that a batch norm by cuDNN overwrites; its schema says none."""
    if n.target is not aten.cudnn_batch_norm.default or n.args[5] is not True:
        return ()
    return tuple(n.args[k] for k in STATISTICS if n.args[k] is not None)


def only_writes_statistics(n: fx.Node) -> bool:
    """True of a batch norm in training whose new statistics are written or updated by another, and not read."""
    if n.target is not FORWARD[0] or n.args[5] is not True:
        return False
    readers = (u for part in n.users if part.args[1] in STATISTICS for u in part.users)
    return all(u.op == "output" or u.target in (aten.copy_.default, n.target) for u in readers)


def again(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """An op and its arguments for a second run: a batch norm in training gets no statistics to update.

    The kernel reads them only to update them, so its other results are the same.
    """
    functional = target is aten._native_batch_norm_legit_functional.default
    if (not functional and target is not aten.cudnn_batch_norm.default) or args[5] is not True:
        return target, args
    return aten.native_batch_norm.default if functional else target, (*args[:3], None, None, *args[5:])


def without_statistics(graph: fx.Graph) -> None:
    """Let no backward of a batch norm in training read the running statistics, which the next forward changes: their
    gradient does not depend on them."""
    for n in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if n.args[7] is True:
            n.args = (*n.args[:3], None, None, *n.args[5:])
