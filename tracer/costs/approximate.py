"""Tell by a few rules what ops allocate inside themselves, where neither torch's CUDA code nor the device can be asked.

Approximate: told of attention, norms, softmax and cross entropy, embeddings, products, and of ops that torch tags as
pointwise; each at the size that torch's kernels (aten/src/ATen/native, 2.11 to 2.15) mostly ask for. Ignores:
convolutions and all other ops, which count by what they return; partial sums, masks' padding, scratch of some KB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from tracer.costs.rows import LibraryWorkspace, OpRow, StorageRow
from tracer.costs.signature import Signature, TensorSpec
from traces.devices import Device
from traces.records.trace import BACKWARD, FORWARD, WORKSPACE

KIB: Final = 2**10
Temporaries = tuple[int, ...]  # bytes that are freed as the op returns


def approximate_events(call: Signature, device: Device, release: tuple[int, int]) -> tuple[int, ...] | None:
    """Return what an op allocates (+bytes) and frees (-bytes), in order; None: no rule says.

    Args:
        call: of the op. device: on which it runs. release: of torch, as (2, 13).
    """
    name = short_name(call.target)
    rule = {**OPS, **(ON_CUDA if device.kind == "cuda" else ON_CPU)}.get(name)
    if rule is None and not is_pointwise(call.target) and name not in PLAIN:
        return None
    taken = rule(call) if rule is not None else () if device.kind == "cuda" else _casts(call)
    if device.kind == "cuda" and name in CUBLAS and release >= A_CALL_FROM:
        taken = (*taken, cublas_bytes(device))
    taken = tuple(n for n in taken if n)
    in_place = call.target.split(".")[-2].endswith("_")
    made = () if in_place else tuple(x.span_bytes for x in call.results if x.span_bytes)
    return (*made, *taken, *(-n for n in reversed(taken)))


# Layouts


def copied(x: Any, *permutation: int) -> int:
    """Bytes of `x.permute(permutation).contiguous()`; 0 if that is no copy, or no tensor."""
    if not isinstance(x, TensorSpec):
        return 0
    expected = 1
    for k in reversed(permutation or range(len(x.shape))):
        if x.shape[k] != 1 and x.stride[k] != expected and x.elements:
            return x.nbytes
        expected *= x.shape[k]
    return 0


def _blas(x: TensorSpec) -> int:
    """Bytes of the copy of one matrix of a batch that lies neither in rows nor in columns."""
    (rows, columns), (down, across) = x.shape[-2:], x.stride[-2:]
    fits = (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))
    return 0 if fits or x.elements <= 1 else rows * columns * x.item_bytes


# Rules: a call -> what it takes beside its results


def _copies(*places: int) -> Callable[[Signature], Temporaries]:
    """Contiguous copies of the arguments there."""
    return lambda call: tuple(copied(call.argument(k)) for k in places)


def _product(call: Signature) -> Temporaries:
    return tuple(_blas(x) for x in call.inputs[-2:] if len(x.shape) > 1)


def _casts(call: Signature) -> Temporaries:
    """On a CPU, of a pointwise op, arguments that are first converted to the type of its result."""
    if not call.results or not call.results[0].dtype.startswith(("float", "bfloat")):
        return ()
    y = call.results[0]
    others = (x for x in call.inputs if x.shape and x.dtype != y.dtype)
    return tuple(x.elements * y.item_bytes for x in others)


def _sum(call: Signature) -> Temporaries:
    """An input of another type than the result is converted first, but for halves that are summed to float32."""
    x, y = call.inputs[0], call.results[0]
    halves = x.item_bytes == 2 and y.dtype == "float32"
    return () if x.dtype == y.dtype or halves else (x.elements * y.item_bytes,)


def _flash_backward(call: Signature) -> Temporaries:
    """The gradient of the queries in float32, and the row sums."""
    gradient, q, k = call.args[:3]
    batch, heads, length, head = q.shape
    long, wide = -(-length // 128) * 128, -(-head // 32) * 32
    expanded = batch * k.shape[2] * heads * head * k.item_bytes if heads != k.shape[1] else 0
    return (
        copied(gradient, 0, 2, 1, 3),
        4 * batch * heads * long,
        4 * batch * long * heads * wide,
        *(expanded,) * 2,
    )


def _efficient_backward(call: Signature) -> Temporaries:
    """The products of gradient and output in float32, and their sums."""
    gradient, q, _, v = call.args[:4]
    batch, heads, length, _ = q.shape
    products = 0 if q.item_bytes == 2 else 4 * batch * heads * length * v.shape[3]
    return copied(gradient, 0, 2, 1, 3), products, 4 * batch * heads * length


def _cudnn_backward(call: Signature) -> Temporaries:
    gradient, q = call.args[:2]
    batch, heads, length, head = q.shape
    return copied(gradient, 0, 2, 1, 3) and copied(gradient), 4 * batch * heads * length * (head + 1)


def _cpu_tiles(call: Signature, q: TensorSpec, k: TensorSpec, floats: int, more: int) -> Temporaries:
    """A tile of scores a thread, of so many floats each, and further columns."""
    length = q.shape[2]
    rows = min(256 if length >= 768 else 64 if length >= 192 else 32, length)
    columns = min(512, k.shape[2])
    half = 2 * _threads() * rows * columns if q.item_bytes == 2 else 0
    return 4 * _threads() * rows * (floats * columns + more), half


def _cpu_flash(call: Signature) -> Temporaries:
    q, k = call.args[:2]
    return _cpu_tiles(call, q, k, 1, 2 + q.shape[3])


def _cpu_flash_backward(call: Signature) -> Temporaries:
    gradient, q, k = call.args[:3]
    return copied(gradient, 0, 2, 1, 3), *_cpu_tiles(call, q, k, 2, 0)


def _softmax_backward(call: Signature) -> Temporaries:
    gradient, output = call.args[:2]
    return max(gradient.item_bytes, output.item_bytes) * gradient.elements, copied(output)


def _safe_softmax(call: Signature) -> Temporaries:
    y = call.results[0]
    return y.elements, y.elements // max(1, y.shape[-1])


def _cpu_layer_norm_backward(call: Signature) -> Temporaries:
    columns = call.argument(4)
    return copied(call.args[0]), copied(call.args[1]), 8 * _threads() * (columns.elements if columns else 0)


def _embedding_backward(call: Signature) -> Temporaries:
    """On CUDA more than 3,072 indices are sorted, and sums of parts made in float32."""
    gradient, indices, rows = call.args[:3]
    n, copies = indices.elements, (copied(gradient), copied(indices))
    if n <= 3072:
        return copies
    segments = min(n, rows)
    partial = 4 * (n // 10 + segments) * gradient.shape[-1]
    return *copies, *(indices.nbytes,) * 3, 2 * indices.item_bytes * segments, partial


OPS: Final[Mapping[str, Callable[[Signature], Temporaries]]] = {
    **dict.fromkeys(("_softmax", "_log_softmax", "_log_softmax_backward_data"), _copies(0)),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "nll_loss_backward"), _copies(0)),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _copies(0, 1)),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    **dict.fromkeys(("sum", "mean"), _sum),
    "embedding": _copies(1),
    "_safe_softmax": _safe_softmax,
}
ON_CUDA: Final[Mapping[str, Callable[[Signature], Temporaries]]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_softmax_backward_data": _softmax_backward,
    "embedding_dense_backward": _embedding_backward,
}
ON_CPU: Final[Mapping[str, Callable[[Signature], Temporaries]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_flash,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_flash_backward,
    "_softmax_backward_data": _copies(0, 1),
    "embedding_dense_backward": _copies(0, 1),
    "native_layer_norm_backward": _cpu_layer_norm_backward,
}
# What takes nothing, or next to nothing, beside its results, and is not pointwise by torch's tags.
PLAIN: Final = frozenset({
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "nll_loss_forward", "_to_copy", "clone", "copy", "copy_", "cat",
    "stack", "index", "select_backward", "slice_backward", "arange", "full", "full_like", "empty", "empty_like",
    "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_empty_strided", "fill", "fill_", "zero_",
    "lowtide.dropout_mask", "where", "constant_pad_nd", "gather", "amax", "argmax", "tril", "triu",
})  # fmt: skip


# Libraries

A_CALL_FROM: Final = (
    2,
    15,
)  # from here on cuBLAS gets its buffer for a call; up to then it keeps one in each thread
CUBLAS: Final = frozenset(
    {"mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot"}
)


def cublas_bytes(device: Device) -> int:
    """cuBLAS's buffer (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    return (4096 * 8 if device.sm[0] in (9, 10, 12) else 4096 * 2 + 16 * 8) * KIB


def library_storages(
    ops: Iterable[OpRow], device: Device, release: tuple[int, int]
) -> tuple[StorageRow, ...]:
    """The buffers that cuBLAS keeps, forward's and backward's thread one each, as storages of the whole step."""
    if device.kind != "cuda" or release >= A_CALL_FROM:
        return ()
    calls = [(i, r.phase == BACKWARD) for i, r in enumerate(ops) if short_name(r.target) in CUBLAS]
    firsts = (next((i for i, b in calls if b is backward), -1) for backward in (False, True))
    found = zip(("forward", "backward"), firsts, strict=True)
    return tuple(
        _kept(f"cuBLAS workspace ({thread})", cublas_bytes(device), i) for thread, i in found if i >= 0
    )


def workspace_rows(ops: Sequence[OpRow], seen: Iterable[LibraryWorkspace]) -> tuple[StorageRow, ...]:
    """Workspaces that were seen, as storages that exist throughout the step, each first used by the op that asked.

    A library asks for one in the first op of its kind. Each thread has its own, so one of a size that has been there
    before is backward's.
    """
    rows: list[StorageRow] = []
    for w in seen:
        backward = any(w.nbytes == row.nbytes for row in rows)
        asking = (i for i, r in enumerate(ops) if r.target == w.op and (not backward or r.phase == BACKWARD))
        rows.append(_kept(f"workspace of a library, made by {w.op}", w.nbytes, next(asking, -1)))
    return tuple(rows)


def rerun_workspaces(ops: Iterable[OpRow], device: Device) -> dict[str, int]:
    """The ops of forward for which a library asks for its buffer in backward's thread too, once they run again there:
    target -> bytes beyond the buffer that backward has anyway."""
    if device.kind != "cuda":
        return {}
    return dict.fromkeys(
        sorted({r.target for r in ops if r.phase == FORWARD and short_name(r.target) in CUBLAS}), 0
    )


def _kept(name: str, nbytes: int, first: int) -> StorageRow:
    return StorageRow(
        name=name, nbytes=nbytes, category=WORKSPACE, used_from=first, dtype="uint8", shape=(nbytes,)
    )


# Names of ops


@cache
def short_name(target: str) -> str:
    """An op's name without its overload, one of aten's without "aten": "mm", "lowtide.dropout_mask"."""
    return target.removeprefix("aten.").rpartition(".")[0]


@cache
def is_pointwise(target: str) -> bool:
    """True if torch tags an op ("aten.mul.Tensor") as pointwise: elements of its result need one of each argument."""
    import torch

    try:
        return torch.Tag.pointwise in resolve(target).tags
    except LookupError:
        return False


def resolve(target: str) -> Any:
    """The operator of that name ("aten.mul.Tensor"). Raises LookupError if torch has none."""
    import torch

    namespace, _, rest = target.partition(".")
    name, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        raise LookupError(f"torch has no operator {target}") from None


def _threads() -> int:
    import torch

    return torch.get_num_threads()
