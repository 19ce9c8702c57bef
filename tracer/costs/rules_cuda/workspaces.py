"""What an op allocates while it runs on a GPU, by rules instead of measurements.

The rules are rows of `workspaces.toml`, each with the source that it was read from. Beyond the table, an op that torch
tags as pointwise allocates its outputs and nothing else.

No rule has been confirmed on a GPU by this project; a measurement goes first wherever there is one.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tracer.costs import table
from tracer.costs.libraries import bytes_a_call
from tracer.costs.rules_cuda.cub import radix_sort, scan, unique_by_key
from tracer.costs.rules_cuda.reductions import partial_results
from tracer.costs.signature import Signature, TensorSpec
from tracer.costs.table import Events, Table, ceil_div, is_pointwise, made
from tracer.cudnn import recurrent_workspace
from traces.devices import Device


def rule_events(signature: Signature, device: Device, release: tuple[int, int]) -> Events | None:
    """What the op allocates (+bytes) and frees (-bytes) on a device, in order; None: no rule says.

    The events sum to the bytes of the outputs that the op leaves, as `traces.records.trace.Ops.events` demands.

    Args:
        release: of torch, as (2, 13).

    Counts: the allocations that torch's own code makes, each at the size that it asks for. Ignores: what the table
    names as not known.
    """
    torch = sys.modules.get("torch")
    if TABLE.rule_for(signature.target) is not None:
        return TABLE.events(
            signature,
            sm=10 * device.sm[0] + device.sm[1],
            sms=device.multiprocessors,
            deterministic=torch is not None and torch.are_deterministic_algorithms_enabled(),
            release=release,
            **bytes_a_call(device, release),
        )
    # A kernel converts types in registers.
    return made(signature) if is_pointwise(signature.target) else None


# What formulas may call


def converted(x: TensorSpec, y: TensorSpec) -> TensorSpec:
    """What the kernel of a sum of `x` into `y` reads: `x`, or `x` converted to the type of `y`.

    The copy has the strides of `x` if they leave no gaps. Halves are summed to float32 as they are.
    """
    if x.dtype == y.dtype or (x.dtype in ("float16", "bfloat16") and y.dtype == "float32"):
        return x
    return replace(dense(x), dtype=y.dtype)


def largest(specs: Any) -> int:
    """The most elements that a tensor of a list has."""
    return max((x.elements for x in specs if isinstance(x, TensorSpec)), default=0)


def chunks(specs: Any) -> tuple[int, ...]:
    """Into how many pieces the kernels for lists of tensors cut each of them (MultiTensorApply.cuh: kChunkSize)."""
    return tuple(ceil_div(x.elements, 65536) for x in specs)


def flash_splits(blocks: int, slots: int, key_blocks: int) -> int:
    """Into how many parts flash attention's forward splits the keys (`num_splits_heuristic` of flash_api.cpp).

    Args:
        blocks: batch * heads * blocks of queries. slots: twice the multiprocessors. key_blocks: blocks of keys.
    """
    if blocks >= 0.8 * slots:
        return 1
    most = min(128, slots, key_blocks)
    fits = [k for k in range(1, most + 1) if k == 1 or ceil_div(key_blocks, k) != ceil_div(key_blocks, k - 1)]
    waves = {k: blocks * k / slots for k in fits}
    share = {k: w / math.ceil(w) for k, w in waves.items()}
    best = max(share.values(), default=0.0)
    return next((k for k in fits if share[k] >= 0.85 * best), 1)


def efficient_tile(sm: int, half: bool, widest: int, dropout: bool) -> tuple[int, int]:
    """Queries and keys of a tile of efficient attention's backward (mem_eff_attention/kernels/cutlassB.h).

    Args:
        sm: as 90. half: whether the type has 16 bits. widest: head size. dropout: whether there is some.
    """
    if widest > 64 and sm in (80, 90, 100, 103):
        return (128, 128) if half and widest <= 128 else (128, 64)
    wide = widest > 64 and half and (sm < 80 or widest > 128 or (widest <= 96 and not dropout))
    return (128, 64) if wide else (64, 64)


def blas(x: TensorSpec) -> int:
    """Bytes of the copy of a matrix, a batch of them or a vector that lies otherwise than cuBLAS takes it."""
    fits = bool(x.stride[0]) if len(x.shape) == 1 else x.elements <= 1 or table.fits_blas(x)
    return 0 if fits or x.elements <= 1 else x.nbytes


def copied_like(x: TensorSpec, like: TensorSpec) -> int:
    """Bytes of `x` made contiguous in the memory format of `like`, 0 if that is no copy."""
    return in_format(x, len(like.shape) == 4 and like.stride[1] == 1 and table.copied(like) > 0)


def channels_last(*of: TensorSpec) -> bool:
    """Whether cuDNN takes images in channels last, since one of these lies so (cudnn_conv_suggest_memory_format)."""
    return all(len(x.shape) == 4 and x.dtype != "float64" for x in of) and any(map(lies_last, of))


def lies_last(x: TensorSpec) -> bool:
    """c10/core/MemoryFormat.h: is_channels_last_strides_2d_s4."""
    least = 0
    for k in (1, 3, 2, 0):
        if x.stride[k] < least or (k == 1 and not x.stride[1]) or (k == 0 and least == x.stride[1]):
            return False
        least = x.stride[k] * max(1, x.shape[k])
    return True


def in_format(x: TensorSpec, last: bool) -> int:
    """Bytes of `x` made contiguous, in channels last or not; 0 if that is no copy."""
    return table.copied(x, 0, 2, 3, 1) if last else table.copied(x)


def half_depthwise(x: TensorSpec, weight: TensorSpec, stride: Any, dilation: Any) -> bool:
    """Whether cuDNN takes a depthwise convolution that is not in channels last, as it does some of float16
    (Convolution.cpp: use_cudnn_depthwise, check_cudnn_depthwise_workload_with_filter)."""
    batch, channels, *high, wide = x.shape
    row = high in ([], [1])
    known = x.dtype == weight.dtype == "float16" and channels >= 32 and max(dilation) == 1
    if not known or (len({*stride}) > 1 and not row):
        return False
    step, side = stride[-1], weight.shape[-1]
    if row and step == 1:
        return True
    if weight.shape[2:] not in ((side,) * 2, (1,)) or side not in (1, 3, 5) or wide < 7 or step > 2:
        return False
    if step == 1 or batch == 1:
        return step == 1 or side > 1 or wide <= 28
    small = batch <= 16 and channels >= 128 and wide == 7
    return small if side == 1 else channels >= (256 if wide >= 28 else 512)


def dense(x: TensorSpec) -> TensorSpec:
    """A result of the same shape: with the same strides if they leave no gaps, else contiguous."""
    contiguous = tuple(math.prod(x.shape[k + 1 :]) for k in range(len(x.shape)))
    return x if x.span_bytes == x.nbytes else replace(x, stride=contiguous)


def rows_of(rows: int, columns: int, x: TensorSpec) -> TensorSpec:
    """A matrix of the type of `x`."""
    return TensorSpec(shape=(rows, columns), stride=(columns, 1), dtype=x.dtype)


def padded(x: TensorSpec | None) -> int:
    """Bytes of the memory whose first columns are `x`, 0 for none."""
    return math.prod(x.shape[:-1]) * x.stride[-2] * x.item_bytes if x is not None else 0


def indexed(x: TensorSpec, indices: Any) -> int:
    """The largest place that index tensors for the leading dimensions may name, counted in slices."""
    return (x.elements - 1) // max(1, math.prod(x.shape[len(indices) :]))


def several_blocks(rows: int, length: int) -> bool:
    """Whether topk gives a row to several blocks (TensorTopK.cu: should_use_multiblock)."""
    least = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    return length >= next((n for most, n in least if rows <= most), 400)


def sizes(of: Any) -> tuple[int, ...]:
    """Bytes of each tensor of a list."""
    return tuple(x.nbytes for x in of)


def steps_first(x: TensorSpec, batch_first: bool) -> int:
    """Bytes of a batch of sequences made contiguous with the steps first, 0 if that is no copy."""
    return table.copied(x, 1, 0, 2) if batch_first else table.copied(x)


def staging(x: TensorSpec, gone: Any, each_bytes: int, sm: int, processors: int) -> tuple[int, ...]:
    """Bytes of a reduction's partial results and of the counters that belong to them; see `rules_cuda.reductions`.

    gone: a dimension or several, none for all of them. each_bytes: of a partial result.
    """
    dims = (gone,) if isinstance(gone, int) else tuple(gone or ())
    return partial_results(x, dims, divmod(sm, 10), processors, each_bytes)


TABLE: Final = Table(
    path=Path(__file__).with_name("workspaces.toml"),
    functions=table.by_name(
        converted, largest, chunks, flash_splits, efficient_tile, blas, copied_like, channels_last, in_format,
        half_depthwise, dense, lies_last, padded, rows_of, indexed, several_blocks, radix_sort, scan, unique_by_key,
        staging, recurrent_workspace, steps_first, sizes,
    ),
)  # fmt: skip
