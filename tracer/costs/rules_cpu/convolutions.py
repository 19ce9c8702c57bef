"""Turn a convolution's signature into what it allocates on a CPU, by torch's choice of kernel and oneDNN's layouts.

A transposed convolution is the gradient of a convolution that goes the other way, in oneDNN as in mathematics: its
forward is that one's gradient of the image, and its gradient of the image is that one's forward. So everything here is
about one `Pair` of tensors, the image that a convolution reads and the one that it makes. A convolution along one
dimension runs as one of images of a single row (`view1d_as_2d` in aten/src/ATen/native/Convolution.cpp).

The sequences were read off torch 2.13's profiler, float32, on a processor with AVX-512, with one and two threads.

Counts: reorders into oneDNN's layouts and back, its scratch for strided kernels, for those that go through columns
(`gemm`) and for biases that are padded, the columns and slices of torch's own kernels. Ignores: scratch in which
threads sum the gradients of weights; other types than float32 and bfloat16; channels last in other than two dimensions.
"""

from __future__ import annotations

import math
from typing import Any, Final

from tracer.costs.rules_cpu import onednn, workspaces_bf16
from tracer.costs.rules_cpu.convolution_pair import FORWARD, IMAGE, WEIGHT, Pair, pair_of
from tracer.costs.rules_cpu.onednn import FLOAT, block, channels_last, contiguous, padded
from tracer.costs.signature import Signature, TensorSpec

Events = list[int]
MOST_COLUMNS: Final = 829_440  # bytes, about: forward makes columns in parts that the cache holds


def convolution(signature: Signature) -> tuple[int, ...] | None:
    """Forward."""
    if _in_bfloat16(signature.args[0]):
        return workspaces_bf16.convolution(signature)
    pair, transposed = pair_of(signature, signature.results[0])
    if pair is None:
        return None
    x, y, w = (pair.made, pair.read, pair.weight) if transposed else (pair.read, pair.made, pair.weight)
    has_bias = signature.args[2] is not None
    if channels_last(x) and not transposed and x.dtype == "float32":
        copy = () if pair.groups > 1 else (w.nbytes,)
        weight = pair.blocked_weight(plain=x.shape[1] < 4)
        return (*copy, y.nbytes, weight, -weight, *(-c for c in copy))
    copy = () if contiguous(x) else (x.nbytes,)
    undo = tuple(-c for c in copy)
    if not _uses_onednn(x, pair):
        return (*copy, *_native(pair, x, y, transposed=transposed, has_bias=has_bias), *undo)
    events = _transposed(pair, has_bias) if transposed else _forward(pair, has_bias)
    return (*copy, *events, *undo)


def convolution_backward(signature: Signature) -> tuple[int, ...] | None:
    """The gradients of the input, then of weight and bias."""
    if _in_bfloat16(signature.args[1]):
        return workspaces_bf16.convolution_backward(signature)
    pair, transposed = pair_of(signature, signature.args[0])
    if pair is None:
        return None
    dy, x = (pair.read, pair.made) if transposed else (pair.made, pair.read)
    mask = signature.args[-1]
    bias = dy.shape[1] * dy.item_bytes if mask[2] else 0
    if not _uses_onednn(x, pair):
        return _native_backward(pair, x, dy, bias, mask, transposed=transposed)
    if channels_last(x) and not transposed:
        return _channels_last_backward(pair, bias, mask)
    copies = [s.nbytes for s in (dy, x) if not contiguous(s)]
    events = list(copies)
    if mask[0]:
        events += _forward(pair, False) if transposed else _image_gradient(pair)
    if mask[1]:
        events += _weight_gradient(pair, bias)
    return (*events, *(-c for c in copies))


def _in_bfloat16(x: TensorSpec) -> bool:
    return x.dtype == "bfloat16" and onednn.bfloat16_in_onednn()


def _uses_onednn(x: TensorSpec, pair: Pair) -> bool:
    """torch's own choice (`use_mkldnn` in aten/src/ATen/native/Convolution.cpp) for float32 on the CPU."""
    if x.dtype != "float32":
        return False
    kernel = pair.kernel[-2:]
    worth = (
        pair.strided
        or any(d != 1 for d in pair.dilation)
        or x.shape[0] >= 16
        or any(k != 1 for k in kernel)
        or onednn.threads() > 1
    )
    large = pair.groups > 1 or all(k > 3 for k in kernel) or x.shape[0] > 1 or math.prod(x.shape[:4]) > 20480
    return worth and large


# ---------------------------------------------------------------------------------------------------------------------
# oneDNN


def _strided_scratch(pair: Pair, most: int = 1 << 30) -> int:
    """oneDNN runs a strided 1x1 convolution on a thinned copy of one image a thread (`rtus`); 0: none."""
    if pair.kernel[-2:] != (1, 1) or len(pair.kernel) > 2 or not pair.strided or pair.groups > 1:
        return 0
    pixels = math.prod(pair.made.shape[2:])
    return onednn.threads() * min(most, padded(pair.read.shape[1])) * pixels * FLOAT + 128


def _padded_bias(pair: Pair) -> int:
    """A bias is copied where it does not fill whole blocks of channels."""
    channels = pair.made.shape[1]
    whole = pair.groups > 1 and not pair.depthwise
    return 0 if whole or channels == padded(channels) else padded(channels) * FLOAT + 128


def _forward(pair: Pair, has_bias: bool) -> Events:
    y = pair.made.nbytes
    if pair.gemm(FORWARD) and not pair.depthwise:
        scratch = (
            onednn.threads() * min(pair.columns, MOST_COLUMNS if pair.groups == 1 else pair.columns) + 128
        )
        return [scratch, y, -scratch, y, -y]
    inside = pair.blocked(pair.made)
    scratch = _strided_scratch(pair) or (_padded_bias(pair) if has_bias else 0)
    image = 0 if pair.first else pair.blocked(pair.read)
    took = [n for n in (scratch, image, pair.blocked_weight(plain=pair.first)) if n]
    # A depthwise volume's result is in channels last.
    twice = [y, -y] if pair.depthwise and len(pair.kernel) > 2 else []
    return [*took, inside, *(-n for n in reversed(took)), y, *twice, -inside]


def _image_gradient(pair: Pair) -> Events:
    """The gradient of what the convolution reads."""
    dx = pair.read.nbytes
    if pair.gemm(IMAGE):
        scratch = onednn.threads() * pair.columns + 128
        return [dx, scratch, -scratch, dx, -dx]
    if pair.batched:
        grad, weight, scratch = _strided_gradient(pair)
        return [grad, weight, dx, scratch, -scratch, -weight, -grad, dx, dx, -dx, -dx]
    grad, image = pair.blocked(pair.made), pair.blocked(pair.read)
    weight = pair.blocked_weight()
    return [grad, weight, image, -weight, -grad, dx, -image]


def _transposed(pair: Pair, has_bias: bool) -> Events:
    """The same as a transposed convolution's forward; its bias is added to a second result inside."""
    y = pair.read.nbytes
    if pair.batched and not pair.gemm(IMAGE):
        grad, weight, scratch = _strided_gradient(pair)
        scratch += 128
        return [scratch, grad, weight, y, -weight, -grad, -scratch, y, y, -y, -y]
    events = _image_gradient(pair)
    if not has_bias or pair.gemm(IMAGE):
        return events
    grad, weight, image, *_ = events
    second = image + 128
    return [second, grad, weight, image, -weight, -grad, -second, y, -image]


def _strided_gradient(pair: Pair) -> tuple[int, int, int]:
    """Gradient, weight and scratch of matrix products in batches: in channels last, those read not padded."""
    weight = pair.weight.shape[0] * padded(pair.weight.shape[1]) * pair.taps * FLOAT
    return pair.made.nbytes, weight, 12_288 + 24_600 * onednn.threads()


def _weight_gradient(pair: Pair, bias: int) -> Events:
    dw = pair.weight.nbytes
    given = [bias] if bias else []
    if pair.gemm(WEIGHT):
        # A matrix of columns and four of weights a thread.
        scratch = onednn.threads() * (pair.columns + 4 * dw) + 256
        return [dw, scratch, *given, -scratch, *given, dw, -dw, *(-b for b in given)]
    few, tiny = pair.first, pair.first and pair.read.shape[1] < 4
    if few and not tiny:
        weight, *took = _in_half_blocks(pair)
    else:
        took = [pair.blocked(pair.made)] + ([] if tiny else [pair.blocked(pair.read)])
        weight = pair.blocked_weight(plain=tiny)
    scratch = _strided_scratch(pair, most=128)
    if bias and not scratch and not pair.depthwise:
        scratch = _padded_bias(pair)
    during = [scratch, *given, -scratch] if scratch else given
    freed = [-n for n in reversed(took)]
    return [*took, weight, *during, *freed, *given, dw, -weight, *(-b for b in given)]


def _in_half_blocks(pair: Pair) -> tuple[int, int, int]:
    """Weight, image made and image read where few channels are read: both in blocks of half a vector register."""

    def whole(channels: int) -> int:
        half = block() // 2
        return -(-channels // half) * half

    made, read = (x.shape[0] * whole(x.shape[1]) * math.prod(x.shape[2:]) for x in (pair.made, pair.read))
    weight = whole(pair.weight.shape[0]) * whole(pair.weight.shape[1]) * pair.taps
    return weight * FLOAT, made * FLOAT, read * FLOAT


def _channels_last_backward(pair: Pair, bias: int, mask: Any) -> tuple[int, ...]:
    """Weights and images are copied to channels last where they are not; a grouped kernel sums dense blocks."""
    weight = pair.blocked_weight(plain=pair.read.shape[1] < 4)
    copies = [s.nbytes for s in (pair.made, pair.read) if not channels_last(s)]
    if pair.groups == 1:
        copies.append(pair.weight.nbytes)
    events = list(copies)
    if mask[0]:
        events += [pair.read.nbytes, weight, -weight]
    if mask[1]:
        dense = pair.groups * onednn.block() ** 2 * pair.taps * FLOAT if pair.groups > 1 else 2 * weight
        events += [dense, *([bias] if bias else []), pair.weight.nbytes, -dense]
    return (*events, *(-c for c in reversed(copies)))


# ---------------------------------------------------------------------------------------------------------------------
# torch's own kernels


def _native_columns(pair: Pair, x: TensorSpec, *, plain: bool) -> int:
    """The whole batch as columns, for what is no plain matrix product already."""
    if plain:
        return 0
    # Of a transposed convolution, the columns are those of its result, at the places of its input.
    return x.shape[0] * pair.read.shape[1] * pair.taps * math.prod(pair.made.shape[2:]) * x.item_bytes


def _native(pair: Pair, x: TensorSpec, y: TensorSpec, *, transposed: bool, has_bias: bool) -> Events:
    plain = all(k == 1 for k in pair.kernel) and not pair.strided and not any(pair.padding)
    if pair.groups > 1:
        part = x.nbytes // pair.groups  # one group after the other, and all put together
        return [y.nbytes, part, -part, y.nbytes, -y.nbytes]
    columns = _native_columns(pair, x, plain=plain and not transposed)
    if transposed:
        # Of volumes, ones by which the bias is added.
        ones = math.prod(y.shape[2:]) * y.item_bytes if has_bias and len(pair.kernel) > 2 else 0
        return [y.nbytes, columns, *((ones, -ones) if ones else ()), -columns]
    return [columns, y.nbytes, -columns] if columns else [y.nbytes]


def _native_backward(
    pair: Pair, x: TensorSpec, dy: TensorSpec, bias: int, mask: Any, *, transposed: bool
) -> tuple[int, ...]:
    copies = [s.nbytes for s in (dy, x) if not contiguous(s)]
    made = [x.nbytes] * bool(mask[0]) + ([bias] if bias else []) + [pair.weight.nbytes] * bool(mask[1])
    if pair.groups > 1:
        return (
            *copies,
            *made,
            *made,
            *(-n for n in made),
            *(-c for c in copies),
        )  # in parts, and put together
    plain = all(k == 1 for k in pair.kernel) and dy.shape[2:] == x.shape[2:] and not transposed
    # A volume's gradient goes through columns even so.
    columns = _native_columns(pair, x, plain=plain and len(pair.kernel) == 2)
    inside = [columns, -columns] if columns else []
    return (*copies, *made, *inside, *(-c for c in copies))
