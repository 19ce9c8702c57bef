"""The buffer that the CUDA kernel of a reduction takes for partial results, by the shape of what is reduced.

A sum over many rows with few results is shared by several blocks of threads, which leave their partial results in a
buffer from the caching allocator: for a bias's gradient it often is larger than what is summed, and a maximum with its
place takes 16 bytes each. The rules are those of
torch's `aten/src/ATen/native/cuda/Reduce.cuh` (`setReduceConfig`, `global_memory_size`) and of the order in which
`TensorIterator` puts dimensions. For random shapes they have been compared with what the wheels of 2.11 to 2.13 ask
their allocator for when they are told of a GPU; no GPU has confirmed them here.

Counts: strides, the width of the accumulator, multiprocessors and their threads. Ignores: inputs of more than 2 GiB,
which torch cuts into pieces; addresses that are not aligned to four elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from tracer.costs.signature import TensorSpec
from tracer.costs.table import ceil_div

THREADS: Final = 512  # of a block
WARP: Final = 32
VECTOR: Final = 4  # elements that a thread loads at once
FEWEST: Final = 16  # values that a thread should have
MOST: Final = 256
LARGEST_BYTES: Final = 2**31 - 1  # offsets that fit 32 bits
# Threads that a multiprocessor holds, by compute capability; 2048 on all others.
RESIDENT: Final = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """One dimension as the kernel sees it: neighbours that lie behind each other are one."""

    size: int
    stride: int  # of the input, in elements
    result: int  # of the output; 0: summed


def partial_results(
    x: TensorSpec, summed: tuple[int, ...], sm: tuple[int, int], processors: int, each_bytes: int
) -> tuple[int, ...]:
    """Bytes of the buffer of partial results and of the blocks' counters; empty if one block makes each result.

    Args:
        summed: the dimensions; none: all of them.
        each_bytes: of a partial result.

    Raises:
        LookupError: the input is so large that torch cuts it into pieces.
    """
    if x.span_bytes > LARGEST_BYTES:
        raise LookupError("an input of more than 2 GiB is summed in pieces")
    if not x.elements:
        return ()
    axes = _axes(x, summed)
    inner = sum(1 for a in axes if not a.result)
    outputs = math.prod(a.size for a in axes if a.result)
    inputs = x.elements // outputs
    vector, along_input = 1, True
    width, height = 1, 1
    if axes:
        along_input = inner == len(axes) or axes[0].stride < axes[inner].stride if inner else False
        width, height = (inputs, outputs) if along_input else (outputs, inputs)
        fastest = axes[0] if along_input else axes[inner]
        if fastest.stride == 1 and not along_input:
            vector = _vector(axes, inner)
            width //= vector
        elif fastest.stride == 1 and width > 128 and inner == 1:
            width //= VECTOR
    width, height = _block(width, height, THREADS // vector)
    threads = width * height
    step_input, step_output = (width, 1) if along_input else (1, width)
    each = ceil_div(inputs, step_input)
    if each < height * FEWEST and each < MOST:
        return ()
    step_input *= height
    each = ceil_div(inputs, step_input)
    slots = processors * (RESIDENT.get(sm, 2048) // threads)
    grid = ceil_div(outputs // vector, step_output)
    if each < MOST or grid > slots:
        return ()
    blocks = max(min(ceil_div(slots, grid), ceil_div(each, FEWEST)), ceil_div(each, MOST))
    if blocks <= 1:
        return ()
    size = each_bytes * outputs * blocks
    return (size if along_input else size * width * vector), 4 * grid


def _axes(x: TensorSpec, summed: tuple[int, ...]) -> list[_Axis]:
    """The dimensions in the kernel's order: the summed ones first, each group from the fastest to the slowest."""
    rank = len(x.shape)
    # A scalar has dimension 0 to sum.
    gone = {d % rank for d in summed} if summed and rank else set(range(rank))
    results = [0] * rank
    step = 1
    for d in reversed(range(rank)):
        if d not in gone:
            results[d] = step
            step *= x.shape[d]
    found = [
        _Axis(size=x.shape[d], stride=x.stride[d], result=results[d])
        for d in reversed(range(rank))
        if x.shape[d] != 1
    ]
    found.sort(key=lambda a: (a.result != 0, a.result or a.stride))
    axes: list[_Axis] = []
    for a in found:
        b = axes[-1] if axes else None
        if b is not None and (b.size * b.stride, b.size * b.result) == (a.stride, a.result):
            axes[-1] = _Axis(size=b.size * a.size, stride=b.stride, result=b.result)
        else:
            axes.append(a)
    return axes


def _vector(axes: list[_Axis], inner: int) -> int:
    """How many results a thread computes at once."""
    vector = VECTOR
    for n in (axes[inner].size, *(a.stride for k, a in enumerate(axes) if k != inner)):
        while n % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    # The largest power of two that is at most n, and 1 for 0.
    across, down = (1 << max(n.bit_length() - 1, 0) if n < threads else threads for n in (width, height))
    first = min(across, WARP)
    rows = min(down, threads // first)
    return min(across, threads // rows), rows
