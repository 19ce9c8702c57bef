"""Tell by a few rules what ops allocate inside themselves, where neither torch's CUDA code nor the device can be asked.

Approximate: told of attention, norms, softmax and cross entropy, embeddings, and of cuBLAS's buffer; each at the size
that torch's kernels (aten/src/ATen/native, 2.11 to 2.15) mostly ask for. Ignores: convolutions and all other ops, which
count by what they return; copies of matrices that lie otherwise, casts, partial sums, a kernel's tiles.
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
A_CALL_FROM: Final = (
    2,
    15,
)  # from here on cuBLAS gets its buffer for a call; up to then each thread keeps one
CUBLAS: Final = frozenset(
    {"mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot"}
)


def approximate_events(call: Signature, device: Device, release: tuple[int, int]) -> tuple[int, ...] | None:
    """Return what an op allocates (+bytes) and frees (-bytes), in order; None: no rule says.

    Args:
        call: of the op. device: on which it runs. release: of torch, as (2, 13).
    """
    name, on_cuda = short_name(call.target), device.kind == "cuda"
    rule = (ON_CUDA.get(name) if on_cuda else None) or RULES.get(name)
    if rule is None and name not in CUBLAS:
        return None
    taken = rule(call) if rule is not None else ()
    if on_cuda and name in CUBLAS and release >= A_CALL_FROM:
        taken = (*taken, cublas_bytes(device))
    taken = tuple(n for n in taken if n)
    made = tuple(x.span_bytes for x in call.results if x.span_bytes)
    return (*made, *taken, *(-n for n in reversed(taken)))


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


# Rules: a call -> what it takes beside its results


def _copies(*places: int) -> Callable[[Signature], Temporaries]:
    """Contiguous copies of the arguments there."""
    return lambda call: tuple(copied(call.argument(k)) for k in places)


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


def _softmax_backward(call: Signature) -> Temporaries:
    gradient, output = call.args[:2]
    return max(gradient.item_bytes, output.item_bytes) * gradient.elements, copied(output)


def _embedding_backward(call: Signature) -> Temporaries:
    """On CUDA more than 3,072 indices are sorted, and sums of parts made in float32."""
    gradient, indices, rows = call.args[:3]
    n, copies = indices.elements, (copied(gradient), copied(indices))
    if n <= 3072:
        return copies
    segments = min(n, rows)
    partial = 4 * (n // 10 + segments) * gradient.shape[-1]
    return *copies, *(indices.nbytes,) * 3, 2 * indices.item_bytes * segments, partial


RULES: Final[Mapping[str, Callable[[Signature], Temporaries]]] = {
    **dict.fromkeys(("_softmax", "_log_softmax", "_log_softmax_backward_data"), _copies(0)),
    **dict.fromkeys(
        ("native_layer_norm", "_fused_rms_norm", "nll_loss_forward", "nll_loss_backward"), _copies(0)
    ),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _copies(0, 1)),
    **dict.fromkeys(("_softmax_backward_data", "embedding_dense_backward"), _copies(0, 1)),
    "embedding": _copies(1),
    **dict.fromkeys(("nll_loss_forward", "_scaled_dot_product_efficient_attention"), _copies()),
    **dict.fromkeys((f"_scaled_dot_product_flash_attention{on}" for on in ("", "_for_cpu")), _copies()),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda call: (copied(call.args[0], 0, 2, 1, 3),),
}
ON_CUDA: Final[Mapping[str, Callable[[Signature], Temporaries]]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_softmax_backward_data": _softmax_backward,
    "embedding_dense_backward": _embedding_backward,
}


# Libraries


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


@cache
def short_name(target: str) -> str:
    """An op's name without its overload, one of aten's without "aten": "mm", "lowtide.dropout_mask"."""
    return target.removeprefix("aten.").rpartition(".")[0]
