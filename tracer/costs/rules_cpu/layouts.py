"""Turn calls whose tensors lie in memory, or are typed, as a CPU kernel does not take them into the copies it makes.

A gradient of a sum is one number, expanded; a transposed tensor has no contiguous rows. Many kernels copy such an
argument first. Each rule restates what torch 2.13's profiler showed for the layouts named there, beside the source that
says why.

Counts: one copy of each such argument, of the result where it lies in another memory format than the gradient, and of
what is converted to a common type. Ignores: the tile through which a matrix is transposed, but for copies that are ops
of their own (14,400 bytes in float32); scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Final

from tracer.costs.rules_cpu.onednn import channels_last, contiguous, threads
from tracer.costs.signature import ITEM_BYTES, Signature, TensorSpec

FLOATS: Final = ("float32", "float64")
HALVES: Final = ("float16", "bfloat16")
TILE: Final = 60 * 60  # elements
SMALL_PRODUCT: Final = 400  # multiplications; below, a product of a batch of matrices is torch's own loop
Events = tuple[int, ...]


def with_copies(signature: Signature, copies: Iterable[int], *, first: bool = False) -> Events:
    """The outputs, and copies that are there together while the op runs.

    Args:
        first: whether the copies are made before the outputs.
    """
    took = tuple(n for n in copies if n)
    made = tuple(s.nbytes for s in signature.results)
    freed = tuple(-n for n in reversed(took))
    return (*took, *made, *freed) if first else (*made, *took, *freed)


def contiguous_arguments(signature: Signature) -> Events:
    """A copy of each argument that is not contiguous (`.contiguous()` in SoftMax.cpp, Embedding.cpp, LossNLL.cpp)."""
    return with_copies(signature, (s.nbytes for s in signature.inputs if not contiguous(s)))


def tile(x: TensorSpec, *, to_rows: bool = False) -> int:
    """Bytes of the tile through which a matrix is copied into the other order (`copy_transpose_valid` in Copy.cpp).

    Args:
        x: the matrix, which lies in rows; to_rows: which lies in columns.
    """
    if len(x.shape) != 2 or x.elements < TILE:
        return 0
    wanted = (1, x.shape[0]) if to_rows else (x.shape[1], 1)
    return TILE * x.item_bytes if x.stride == wanted else 0


def copied(signature: Signature) -> Events:
    """A copy, in place or not; into rows from columns, through a tile."""
    in_place = signature.target.startswith("aten.copy_.")
    x = signature.inputs[-1]
    y = signature.inputs[0] if in_place else signature.results[0]
    made = () if in_place else (y.nbytes,)
    through = tile(x, to_rows=True) if (x.shape, x.dtype) == (y.shape, y.dtype) and contiguous(y) else 0
    return (*made, through, -through) if through else made


def contiguous_first(signature: Signature) -> Events:
    """A copy of the first tensor, mostly an incoming gradient, if it is not contiguous."""
    return with_copies(signature, () if contiguous(signature.inputs[0]) else (signature.inputs[0].nbytes,))


def repeated(signature: Signature) -> Events:
    """Sizes and strides as lists of tensors, 32 bytes a dimension (`repeat` in TensorShape.cpp)."""
    return with_copies(signature, (32 * len(signature.results[0].shape),))


def with_gaps(signature: Signature) -> Events:
    """From the first element to the last, whatever lies between them."""
    return tuple(s.span_bytes for s in signature.results)


def triangle(signature: Signature) -> Events:
    """A copy of a batch of matrices that do not lie behind each other (`checkTrilTriuBatchContiguous`)."""
    x = signature.inputs[0]
    expected, behind = x.shape[-1] * x.shape[-2], True
    for size, stride in zip(reversed(x.shape[:-2]), reversed(x.stride[:-2]), strict=True):
        behind = behind and stride == expected
        expected *= size
    return with_copies(signature, () if behind or contiguous(x) else (x.nbytes,))


def embedding(signature: Signature) -> Events:
    """A copy of the indices if they are not contiguous (Embedding.cpp)."""
    return with_copies(signature, (s.nbytes for s in signature.inputs[1:] if not contiguous(s)), first=True)


def by_index(signature: Signature) -> Events:
    """Indices of 32 bits are converted, and halves are gathered and scattered in float32 (`gather`, `scatter` and their
    kind in TensorAdvancedIndexing.cpp)."""
    (y,) = signature.results
    narrow = (s for s in signature.inputs if s.dtype == "int32" and s.shape)
    wide = y.elements * ITEM_BYTES["float32"] if y.dtype in HALVES else 0
    return with_copies(signature, (wide, *(s.elements * ITEM_BYTES["int64"] for s in narrow)))


def sort(signature: Signature) -> Events:
    """The indices of one row (Sorting.cpp's kernel)."""
    x = signature.inputs[0]
    place = 2 if signature.target == "aten.sort.stable" else 1
    dimension = signature.argument(place, "dim", -1)
    return with_copies(signature, (x.shape[dimension] * ITEM_BYTES["int64"],) if x.shape else ())


def product(signature: Signature) -> Events:
    """A copy of each factor whose strides BLAS does not take (`addmm_impl_cpu_` in LinearAlgebra.cpp); of a batch of
    matrices one matrix at a time (`bmm_out_or_baddbmm_`)."""
    if any(s.dtype not in FLOATS for s in signature.inputs[-2:]):
        return with_copies(signature, ())
    return own_product(signature)


def own_product(signature: Signature) -> Events:
    """The same, of any type."""
    factors = signature.inputs[-2:]
    small = (
        len(factors[0].shape) == 3 and math.prod((*factors[0].shape[1:], factors[1].shape[2])) < SMALL_PRODUCT
    )
    if small or not signature.results[0].elements:
        return with_copies(signature, ())
    return with_copies(
        signature,
        (s.shape[-2] * s.shape[-1] * s.item_bytes for s in factors if not fits_blas(s)),
    )


def fits_blas(spec: TensorSpec) -> bool:
    """Whether a matrix lies in rows or in columns, which may have gaps between them."""
    rows, columns = spec.shape[-2:]
    down, across = spec.stride[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def times_vector(signature: Signature) -> Events:
    """A copy of a matrix that BLAS does not take (`addmv_impl_cpu` in Blas.cpp)."""
    x = signature.inputs[0]
    return with_copies(signature, () if fits_blas(x) else (x.nbytes,))


def in_rows_or_columns(spec: TensorSpec) -> bool:
    """Whether the matrices of a batch lie behind each other without gaps, each in rows or each in columns."""
    turned = replace(
        spec,
        shape=(*spec.shape[:-2], spec.shape[-1], spec.shape[-2]),
        stride=(*spec.stride[:-2], spec.stride[-1], spec.stride[-2]),
    )
    return contiguous(spec) or contiguous(turned)


def reduction(signature: Signature) -> Events:
    """A sum reads its input in the type of its result (`make_reduction_from_ty` in ReduceOpsUtils.h); halves are summed
    up in float32 where what is summed does not lie side by side (SumKernel.cpp)."""
    (y,) = signature.results
    x = signature.inputs[0]
    if x.dtype == y.dtype and y.dtype in HALVES and _apart(x, signature.argument(1, "dim")):
        single = ITEM_BYTES["float32"]
        return with_copies(signature, (y.elements * single, x.elements * single))
    return with_copies(signature, (x.elements * y.item_bytes,) if x.dtype != y.dtype else ())


def _apart(x: TensorSpec, summed: object) -> bool:
    """Whether the dimensions that are summed make up more than one run of elements that lie behind each other."""
    if not isinstance(summed, tuple):
        return False
    gone = {d % len(x.shape) for d in summed if x.shape}
    order = sorted(range(len(x.shape)), key=lambda d: -x.stride[d])
    dims = [d for d in order if x.shape[d] != 1 and x.stride[d]]
    joined = sum(
        1 for a, b in pairwise(dims) if a in gone and b in gone and x.stride[a] == x.shape[b] * x.stride[b]
    )
    return sum(1 for d in dims if d in gone) - joined > 1


def comparison(signature: Signature) -> Events | None:
    """What is compared is converted to one type first (TensorIterator's common type)."""
    tensors = [s for s in signature.inputs if s.shape]
    types = {s.dtype for s in tensors}
    if not types:
        return with_copies(signature, ())
    floats = [d for d in types if d in (*FLOATS, *HALVES)]
    if len(types & set(HALVES)) > 1 or any(d.startswith("complex") for d in types):
        return None
    if any(isinstance(a, float) for a in signature.args) and not floats:
        common = "float32"
    else:
        common = max(floats or types, key=lambda d: ITEM_BYTES[d])
    casts = (s.elements * ITEM_BYTES[common] for s in tensors if s.dtype != common)
    return with_copies(signature, casts, first=True)


def chosen(signature: Signature) -> Events:
    """What `where` chooses from is converted to the result's type first."""
    (y,) = signature.results
    others = (s for s in signature.inputs[1:] if s.shape and s.dtype != y.dtype)
    return with_copies(signature, (s.elements * y.item_bytes for s in others))


def roll(signature: Signature) -> Events:
    """One dimension after the other, each into a new tensor that stays until all are done (`roll_common`); without
    dimensions, all elements in a row, copied if they are not."""
    x, (y,) = signature.inputs[0], signature.results
    if not signature.argument(2, "dims", ()):
        return with_copies(signature, () if contiguous(x) else (x.nbytes,))
    return with_copies(signature, (y.nbytes,) * (len(signature.args[1]) - 1))


def pooling_backward(signature: Signature) -> Events:
    """Gradient, result and indices in the memory format of the incoming gradient (AveragePoolKernel.cpp,
    AdaptiveAvgPoolKernel.cpp, MaxPoolKernel.cpp)."""
    gradient, (result,) = signature.inputs[0], signature.results
    indices = [s for s in signature.inputs[2:] if s.dtype == "int64"]
    fits = in_channels_last if _suggests_channels_last(gradient) else contiguous
    return with_copies(signature, (s.nbytes for s in (gradient, *indices, result) if not fits(s)))


def in_channels_last(spec: TensorSpec) -> bool:
    """Whether an image's elements lie in the order NHWC without gaps; it may lie in NCHW as well."""
    return channels_last(spec) or (len(spec.shape) == 4 and contiguous(_as_nhwc(spec)))


def _as_nhwc(spec: TensorSpec) -> TensorSpec:
    n, c, h, w = range(4)
    order = (n, h, w, c)
    return TensorSpec(
        shape=tuple(spec.shape[k] for k in order),
        stride=tuple(spec.stride[k] for k in order),
        dtype=spec.dtype,
    )


def _suggests_channels_last(spec: TensorSpec) -> bool:
    """torch's guess from strides alone, where one pixel lies in both orders (`is_channels_last_strides_2d_s4`)."""
    if len(spec.shape) != 4 or spec.stride[1] == 0:
        return False
    least = 0
    for k in (1, 3, 2, 0):
        size, stride = spec.shape[k], spec.stride[k]
        if size == 0 or stride < least or (k == 0 and least == spec.stride[1]):
            return False
        least = stride * max(1, size)
    return True


def enlarged(taps: int, *, to_last: bool = False) -> Callable[[Signature], Events]:
    """Interpolation: for each place along an edge of the result the sources and their weights (UpSampleKernel.cpp).

    Args:
        taps: how many sources a place has along one edge.
        to_last: whether small results (and by one thread, images of three colours) are made in channels last, from a
            copy and to be copied.
    """

    def rule(signature: Signature) -> Events:
        x, (y,) = signature.inputs[0], signature.results
        colours = taps == 2 and x.shape[1] == 3 and threads() == 1
        small = to_last and sum(y.shape[-2:]) <= 128
        if small or (to_last and (colours or (in_channels_last(x) and x.shape[1] > 3))):
            return with_copies(signature, (s.nbytes for s in (x, y) if not in_channels_last(s)))
        return with_copies(signature, [sum(y.shape[2:]) * taps * (ITEM_BYTES["int64"] + y.item_bytes)])

    return rule


def batch_norm_backward(signature: Signature) -> Events:
    """A second image beside the gradient, if gradient and input lie in memory the same way; else two sums."""
    gradient, x = signature.args[:2]
    same = any(fits(gradient) and fits(x) for fits in (contiguous, channels_last))
    channels = signature.results[-1].nbytes if len(signature.results) > 1 else 0
    return with_copies(signature, (x.nbytes if same else channels,))
