"""Turn convolutions, matrix products and attention in bfloat16 into what oneDNN and aten allocate inside them on a CPU.

Source of every rule: what torch 2.13's profiler showed of 400 calls on one thread of a processor with AVX-512 and its
bfloat16 instructions, without AMX; the sizes of scratch are those of oneDNN's jit_avx512_core_bf16 and brgemm kernels
as far as they could be told from these. Without these instructions (tried by ONEDNN_MAX_CPU_ISA=AVX512_CORE) the
layouts are the same and products have sums of their whole result in float32. Where oneDNN has no bfloat16, aten's own
kernels run (`tracer.costs.rules_cpu.convolutions`); on AMX nothing was measured, and there is no rule.

Counts: reorders into blocked layouts and back, sums in float32 (of a 1x1 convolution's image, of a weight's gradient),
transposed copies of one image a thread, the blocks of a matrix product, the tiles of attention. Ignores: some hundred
bytes of scratch; what several threads share; dilated and one- or three-dimensional convolutions, which have no rule.

Confidence: of 150 random calls the peak inside was right to 1 % in 87 %, to 5 % in 90 %. The others are convolutions
of less than 16 channels, most of which are told too high, and the scratch of strided ones (good to about 12 KiB).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

from tracer.costs.rules_cpu import layouts as layouts_cpu
from tracer.costs.rules_cpu import onednn
from tracer.costs.signature import Signature, TensorSpec

ITEM: Final = 2
FLOAT: Final = 4
WIDE: Final = 64  # columns of a block of a product
TALL: Final = 256  # rows of one, at most
DEEP: Final = 512  # of its sums, at most
MOST_WIDE: Final = 1024  # columns whose sums are kept at once
LEAST_PRODUCT: Final = 16**3  # smaller ones are aten's own (mkldnn_gemm_min_size in LinearAlgebra.cpp)
TRANSPOSED: Final = 8580  # beside the transposed images of a weight's gradient
STRIDED: Final = 32768  # about what a strided kernel has beside one image
BLOCK_ROWS: Final = 8216  # of a kernel for channels last

Events = tuple[int, ...]


def known_here() -> bool:
    """Whether oneDNN has the kernels here that these rules are about."""
    return onednn.block() == 16 and not onednn.has_amx()


def _even(n: int) -> int:
    return n + n % 2


def _image(spec: TensorSpec, per_group: int, groups: int) -> int:
    """Bytes of an image tensor in blocks of 16 channels; channels in groups stay as they are."""
    n, c, h, w = spec.shape
    return n * (c if groups > 1 and per_group > 1 else onednn.padded(c)) * h * w * ITEM


def _weight(w: TensorSpec, groups: int) -> int:
    """Bytes of a weight in blocks of 16 by 16 channels."""
    out, per_group = w.shape[:2]
    taps = w.shape[2] * w.shape[3]
    if groups > 1:
        return onednn.padded(groups) * taps * ITEM if _depthwise(w, groups) else w.nbytes
    return onednn.padded(out) * onednn.padded(per_group) * taps * ITEM


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    """One call: the image, the weight, what is made of them (or its gradient), and how."""

    x: TensorSpec
    w: TensorSpec
    y: TensorSpec
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    transposed: bool
    groups: int
    last: bool  # whether kernels for channels last run

    @property
    def per_group(self) -> int:
        return self.w.shape[1]

    @property
    def taps(self) -> int:
        return self.w.shape[2] * self.w.shape[3]

    @property
    def strided(self) -> bool:
        return any(s != 1 for s in self.stride)

    @property
    def depthwise(self) -> bool:
        return _depthwise(self.w, self.groups)

    @property
    def one_tap(self) -> bool:
        return self.w.shape[2:] == (1, 1) and not any(self.padding)

    @property
    def first(self) -> bool:
        """Whether this is a first layer, which reads the plain image."""
        return self.groups == 1 and self.x.shape[1] < 4 and self.w.shape[2:] != (1, 1)

    @property
    def turned(self) -> _Convolution:
        """The one whose weight's gradient this one has: of a transposed one, images change places."""
        return replace(self, x=self.y, y=self.x, transposed=False) if self.transposed else self

    def blocked(self, image: TensorSpec) -> int:
        return _image(image, self.per_group, self.groups)


def _of_call(x: TensorSpec, w: TensorSpec, y: TensorSpec, how: Any) -> _Convolution | None:
    """The call; None: there is no rule for it here. how: stride, padding, dilation, transposed, _, groups."""
    stride, padding, dilation, transposed, _, groups = how
    if not known_here() or len(x.shape) != 4 or any(d != 1 for d in dilation):
        return None
    if transposed and (groups > 1 or onednn.channels_last(x)):
        return None
    return _Convolution(
        x=x,
        w=w,
        y=y,
        stride=tuple(stride) * (2 // len(stride)),  # one number may stand for both
        padding=tuple(padding) * (2 // len(padding)),
        transposed=bool(transposed),
        groups=groups,
        last=onednn.channels_last(x),
    )


def _depthwise(w: TensorSpec, groups: int) -> bool:
    return groups > 1 and w.shape[1] == 1 and w.shape[0] == groups


def _made_and_undone(*sizes: int) -> list[int]:
    return [*sizes, *(-n for n in reversed(sizes))]


def convolution(signature: Signature) -> Events | None:
    """Forward; a transposed convolution is the gradient of a plain one."""
    x, w, bias, *how = signature.args
    call = _of_call(x, w, signature.results[0], how)
    if call is None:
        return None
    copy = () if onednn.contiguous(x) or onednn.channels_last(x) else (x.nbytes,)
    undo = tuple(-c for c in copy)
    if call.transposed:
        return (*copy, *_transposed(call, bias is not None), *undo)
    if call.last:
        return _channels_last(call)
    y, threads = call.y, onednn.threads()
    took = []
    if call.one_tap and call.groups == 1:
        places = y.shape[2] * y.shape[3]
        scratch = threads * onednn.padded(y.shape[1]) * places * FLOAT + 128
        if call.strided:
            scratch += threads * onednn.padded(x.shape[1]) * places * ITEM + 128
        took.append(scratch)
    if call.first:
        took.append(onednn.padded(w.shape[0]) * _even(call.per_group) * call.taps * ITEM)
    else:
        took += [call.blocked(x), _weight(w, call.groups)]
    blocked = call.blocked(y)
    return (*copy, *took, blocked, *(-n for n in reversed(took)), y.nbytes, -blocked, *undo)


def _channels_last(call: _Convolution) -> Events:
    w, made = call.w, call.y.nbytes
    if call.groups > 1:
        return (made, *_made_and_undone(_weight(w, call.groups)))
    weight = onednn.padded(w.shape[0]) * _even(w.shape[1]) * call.taps * ITEM
    copy = [] if call.one_tap else [w.nbytes]
    return (*copy, made, *_made_and_undone(BLOCK_ROWS, weight), *(-c for c in copy))


def _transposed(call: _Convolution, bias: bool) -> Events:
    x, w, y = call.x, call.w, call.y
    if not call.strided:
        swapped = TensorSpec(shape=(w.shape[1], w.shape[0], *w.shape[2:]), stride=w.stride, dtype=w.dtype)
        image, inside = _image(x, 2, 1), _image(y, 2, 1)
        took = [*([2 * inside + 128] if bias else []), image, _weight(swapped, 1)]
        return (*took, inside, *(-n for n in reversed(took)), y.nbytes, -inside)
    scratch = onednn.threads() * (x.nbytes // x.shape[0]) + STRIDED
    if bias and any(k % s for k, s in zip(w.shape[2:], call.stride, strict=True)):
        scratch += 2 * y.nbytes
    took = [scratch, x.nbytes, onednn.padded(w.shape[1]) * _even(w.shape[0]) * call.taps * ITEM]
    return (*took, y.nbytes, *(-n for n in reversed(took)), y.nbytes, y.nbytes, -y.nbytes, -y.nbytes)


def convolution_backward(signature: Signature) -> Events | None:
    """The gradient of the input, then of weight and bias."""
    dy, x, w, _bias, *how, mask = signature.args
    call = _of_call(x, w, dy, how)
    if call is None:
        return None
    fits = onednn.channels_last if call.last else onednn.contiguous
    copies = [s.nbytes for s in (dy, x) if not fits(s)]
    if call.last and call.groups == 1 and not call.one_tap:
        copies.append(w.nbytes)
    bias = [w.shape[1 if call.transposed else 0] * ITEM] if mask[2] else []
    events = list(copies)
    if mask[0]:
        events += _input_gradient(call)
    if mask[1]:
        events += _weight_gradient(call.turned, bias)
    return (*events, *(-c for c in copies))


def _input_gradient(call: _Convolution) -> list[int]:
    dy, x, w, groups = call.y, call.x, call.w, call.groups
    threads, strided = onednn.threads(), call.strided and not call.transposed
    if strided and call.depthwise:
        weight = groups * 2 * onednn.block() * call.taps * ITEM
    elif strided or call.last:
        weight = (
            w.nbytes if groups > 1 else onednn.padded(call.per_group) * _even(w.shape[0]) * call.taps * ITEM
        )
    else:
        weight = _weight(w, groups)
    scratch = threads * (dy.nbytes // dy.shape[0]) + STRIDED if strided else BLOCK_ROWS + 128
    if call.last and groups > 1 and not strided:
        return [x.nbytes, *_made_and_undone(_weight(w, groups))]
    if call.last:
        return [x.nbytes, *_made_and_undone(weight, scratch)]
    if strided:
        # These kernels take channels last, and what they make needs two reorders.
        begin = [dy.nbytes, weight, x.nbytes, scratch, -scratch, -weight, -dy.nbytes]
        return [*begin, x.nbytes, x.nbytes, -x.nbytes, -x.nbytes]
    grad, image = call.blocked(dy), call.blocked(x)
    if call.one_tap and groups == 1:
        sums = threads * onednn.padded(x.shape[1]) * x.shape[2] * x.shape[3] * FLOAT + 128
        return [grad, weight, image, sums, -sums, -weight, -grad, x.nbytes, -image]
    return [grad, weight, image, -weight, -grad, x.nbytes, -image]


def _weight_gradient(call: _Convolution, bias: list[int]) -> list[int]:
    """bias: the bytes of its gradient, if it is wanted."""
    dy, x, w, last = call.y, call.x, call.w, call.last
    threads = onednn.threads()
    took = [call.blocked(dy), call.blocked(x)]
    if call.depthwise and max(w.shape[2:]) <= 3:
        weight = _weight(w, call.groups)
        scratch = 2 * weight + 128
    elif call.groups > 1 or (call.first and w.shape[0] % onednn.block()):
        # Columns, and sums in float32.
        took, weight = [], w.nbytes
        columns = threads * call.per_group * call.taps * dy.shape[2] * dy.shape[3] * ITEM
        scratch = 4 * FLOAT * w.elements + columns + 384
    elif call.one_tap:
        weight = _weight(w, call.groups)
        scratch = 2 * weight + 128
        if last or call.strided:
            scratch += threads * onednn.padded(x.shape[1]) * x.shape[2] * x.shape[3] * ITEM + 256
        if last:
            scratch += threads * onednn.padded(dy.shape[1]) * dy.shape[2] * dy.shape[3] * ITEM
    else:
        weight = w.nbytes if call.first else _weight(w, call.groups)
        took = took[:1] if call.first else took
        scratch = 2 * weight + threads * onednn.padded(dy.shape[1]) * dy.shape[2] * _even(dy.shape[3]) * ITEM
        if not call.first or last:
            channels = x.shape[1] if call.first else onednn.padded(x.shape[1])
            scratch += threads * channels * x.shape[2] * _padded_row(call) * ITEM
        scratch += TRANSPOSED
    if last:
        return [weight, *bias, scratch, -scratch, w.nbytes, w.nbytes, -w.nbytes, -weight]
    begin = [*took, weight, scratch, *bias, -scratch, *(-n for n in reversed(took))]
    return [*begin, *bias, w.nbytes, -weight, *(-b for b in bias)]


def _padded_row(call: _Convolution) -> int:
    """Elements in a row of a transposed image, with what the kernel reads on either side of it."""
    width, out, step, left = call.x.shape[3], call.y.shape[3], call.stride[1], call.padding[1]
    right = max(0, (out - 1) * step + call.w.shape[3] - width - left)
    return _even(-(-width // step) + _even(max(left, right + 1))) * step


def product(signature: Signature) -> Events | None:
    """A matrix product, or one a batch: blocks of the second factor, sums, and the first factor if it is transposed."""
    a, b = signature.inputs[-2:]
    (y,) = signature.results
    if not known_here() or len(a.shape) < 2:
        return None
    rows, depth, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if math.prod(a.shape) * columns <= LEAST_PRODUCT:
        return layouts_cpu.own_product(signature)
    fits = layouts_cpu.fits_blas if len(a.shape) == 2 else layouts_cpu.in_rows_or_columns
    copies = [s.nbytes for s in (a, b) if not fits(s)]
    if not onednn.has_bfloat16():
        return (y.nbytes, *_made_and_undone(*copies, rows * columns * FLOAT + 128))
    transposed = fits(a) and a.stride[-1] != 1
    return (y.nbytes, *_made_and_undone(*copies, product_scratch(rows, depth, columns, transposed)))


def product_scratch(rows: int, depth: int, columns: int, transposed: bool) -> int:
    """Bytes of one product's blocks, of all threads."""
    tall = max(d for d in range(1, min(rows, TALL) + 1) if rows % d == 0)
    if rows > TALL > 2 * tall:  # no divisor near: blocks of unequal height
        tall = TALL
    padded = math.ceil(depth / 32) * 32
    deep = min(padded, DEEP if transposed or padded <= 2 * DEEP else 2 * DEEP)
    # A deep product keeps the sums of many columns until the last of its depth is added.
    wide = min(columns, MOST_WIDE if transposed and padded > DEEP + 32 else WIDE)
    size = deep * WIDE * ITEM + tall * wide * FLOAT + 1024
    if transposed:
        size += tall * (padded if padded < DEEP else DEEP + 32) * ITEM + 128
    return onednn.threads() * size


def attention(signature: Signature, rows: int, columns: int) -> Events:
    """Tiles of scores, of sums and of output in float32, and of scores in bfloat16 (FlashAttentionKernel.cpp)."""
    width = signature.inputs[0].shape[3]
    tiles = onednn.threads() * rows * (columns + 2 + width) * FLOAT
    reduced = onednn.threads() * rows * columns * ITEM
    return (*(s.nbytes for s in signature.results), *_made_and_undone(tiles, reduced))


def attention_backward(signature: Signature, rows: int, columns: int, copy: Events) -> Events:
    """Two tiles in either type, a row of sums, and the larger of two products' blocks."""
    width = signature.inputs[1].shape[3]
    tiles, reduced = (onednn.threads() * 2 * rows * columns * size for size in (FLOAT, ITEM))
    blocks = 0
    if known_here() and onednn.has_bfloat16():
        first, second = (
            product_scratch(columns, rows, width, True),
            product_scratch(rows, columns, width, False),
        )
        blocks = max(first, second)
    made = tuple(s.nbytes for s in signature.results)
    return (*made, *copy, *_made_and_undone(tiles, reduced, rows * FLOAT, blocks), *(-c for c in copy))
