"""What a convolution allocates on a CPU, by torch's choice of kernel and oneDNN's layouts.

A transposed convolution is the gradient of a convolution that goes the other way, in oneDNN as in mathematics: its
forward is that one's gradient of the image, and its gradient of the image is that one's forward. So everything here is
about one `Convolution`, the image that it reads and the one that it makes. Along one dimension it runs on images of a
single row (`view1d_as_2d` in aten/src/ATen/native/Convolution.cpp).

Counts: reorders into oneDNN's layouts and back, its scratch for strided kernels and for those that go through columns,
the columns of torch's own kernels; in bfloat16 sums in float32 and transposed copies of one image a thread. Ignores:
scratch in which threads sum the gradients of weights; copies of biases; some KB of kernels in bfloat16 and in channels
last; volumes in channels last. No rule: bfloat16 dilated or in one or three dimensions, other types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

from tracer.costs.rules_cpu import onednn
from tracer.costs.rules_cpu.onednn import channels_last, padded
from tracer.costs.signature import Signature, TensorSpec
from tracer.costs.table import Events, ceil_div, copied, round_up

FORWARD: Final = "forward"
IMAGE: Final = "gradient of the image"
WEIGHT: Final = "gradient of the weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """What it reads, what it makes, and its weight (channels made, channels read / groups, kernel)."""

    read: TensorSpec
    made: TensorSpec
    weight: TensorSpec
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def half(self) -> bool:
        """Whether it is in bfloat16; else in float32."""
        return self.read.item_bytes == 2

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight.shape[2:]

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def strided(self) -> bool:
        return any(s != 1 for s in self.stride)

    @property
    def one_tap(self) -> bool:
        return self.taps == 1 and not any(self.padding)

    @property
    def per_group(self) -> tuple[int, int]:
        """Channels of a group: read, made."""
        return self.weight.shape[1], self.weight.shape[0] // self.groups

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.per_group == (1, 1)

    @property
    def first(self) -> bool:
        """Whether this is a first layer, whose forward reads the image as it is."""
        return (
            self.groups == 1 and self.taps > 1 and self.read.shape[1] < (4 if self.half else onednn.block())
        )

    def blocked(self, image: TensorSpec, width: int = 0) -> int:
        """Bytes of an image in oneDNN's layout, its channels in whole blocks (not if they are in groups)."""
        channels = image.shape[1]
        if self.groups == 1 or self.depthwise:
            channels = round_up(channels, width or onednn.block())
        return image.shape[0] * channels * pixels(image) * image.item_bytes

    def blocked_weight(self, *, plain: bool = False, width: int = 0) -> int:
        """Bytes of the weight in oneDNN's layout; plain: where the channels that are read are as they are."""
        made, read = self.weight.shape[:2]
        width, item = width or onednn.block(), self.weight.item_bytes
        if self.depthwise:
            return padded(self.groups) * self.taps * item
        if self.groups > 1:
            return self.weight.nbytes
        columns = round_up(read, 4 // item) if plain else round_up(read, width)
        return round_up(made, width) * columns * self.taps * item

    @property
    def last_weight(self) -> int:
        """Bytes of the weight in oneDNN's layout for images in channels last."""
        return self.blocked_weight(plain=self.half or self.read.shape[1] < 4)

    @property
    def weight_copy(self) -> list[int]:
        """Bytes of the weight, which is copied to channels last too."""
        return [] if self.groups > 1 or (self.half and self.one_tap) else [self.weight.nbytes]

    @property
    def columns(self) -> int:
        """Bytes of one image of a group as a matrix of columns; of a volume, one slice."""
        return self.per_group[0] * self.taps * math.prod(self.made.shape[-2:]) * self.read.item_bytes

    def through_columns(self, task: str) -> bool:
        """Whether oneDNN has nothing better than columns and a matrix product for this task."""
        # Depthwise gradients of weights have a kernel for 3 x 3, on images of so many pixels.
        large = max(self.kernel) > 3
        if self.half:
            unaligned = self.first and self.weight.shape[0] % onednn.block() > 0
            return task == WEIGHT and (unaligned or (self.groups > 1 and (large or not self.depthwise)))
        if self.groups == 1:
            return self._too_wide(task) if len(self.kernel) == 2 else self._too_few(task)
        if not self.depthwise:
            return any(c % (8 if task == WEIGHT else 4) for c in self.per_group)
        few = zip(self.read.shape[2:], self.kernel, self.stride, strict=True)
        small = any(n < k + s - 1 for n, k, s in few)
        return any(d != 1 for d in self.dilation) or (task == WEIGHT and (large or small))

    def _too_wide(self, task: str) -> bool:
        """Whether rows of the weight or what is padded to those of the image are too long for oneDNN's own kernels."""
        width, taps, left = self.read.shape[-1], self.kernel[-1], self.padding[-1]
        if onednn.block() != 16:
            return task == WEIGHT and width < taps
        if taps > 14:
            return task == WEIGHT or (not self.strided and (task == IMAGE or left > 0))
        if self.strided:
            return False
        if task == WEIGHT:
            # Both ends of a short row are padding, and more of it than the taps of a convolution that keeps its size.
            return taps > 1 and (taps < 2 * left >= width or left > 28)
        # A row is made in pieces of 6 to 15 elements, which its left end may not be longer than.
        return taps == 3 and width > 30 and left > 7

    def _too_few(self, task: str) -> bool:
        """Whether a volume has so few slices that a part of the weight reads nothing but padding."""
        front = self.padding[0]
        return (
            task == WEIGHT
            and onednn.block() == 16
            and front > 0
            and self.read.shape[2] <= self.kernel[0] - front
        )

    @property
    def batched(self) -> bool:
        """Whether the gradient of the image is made by matrix products in batches, in channels last."""
        return self.strided and (self.half or self.groups == 1 or self.per_group[1] > onednn.block())


def convolution(signature: Signature) -> Events | None:
    """Forward."""
    x, w, bias, *how = signature.args
    call = _of_call(x, w, signature.results[0], how)
    if call is None:
        return None
    y, transposed = signature.results[0], how[3]
    if channels_last(x) and not transposed:
        return (*call.weight_copy, y.nbytes, *_around(call.last_weight), *_back(call.weight_copy))
    copy = [copied(x)] if copied(x) else []
    if not _uses_onednn(x, call):
        columns = _native_columns(call, transposed)
        begin = [y.nbytes, *columns] if transposed else [*columns, y.nbytes]
        return (*copy, *begin, *_back(columns), *_back(copy))
    events = _transposed(call, bias is not None) if transposed else _forward(call)
    return (*copy, *events, *_back(copy))


def convolution_backward(signature: Signature) -> Events | None:
    """The gradients of the input, then of weight and bias."""
    dy, x, w, _bias, *how, mask = signature.args
    call = _of_call(x, w, dy, how)
    if call is None:
        return None
    transposed = how[3]
    bias = [dy.shape[1] * dy.item_bytes] if mask[2] else []
    if not _uses_onednn(x, call):
        made = [x.nbytes] * mask[0] + bias + [w.nbytes] * mask[1]
        copies = [copied(s) for s in (dy, x) if copied(s)]
        # A volume's gradient goes through columns even so.
        columns = _native_columns(call, transposed or len(call.kernel) > 2)
        return (*copies, *made, *_around(*columns), *_back(copies))
    if channels_last(x) and not transposed:
        return _channels_last_backward(call, bias, mask)
    events = copies = [copied(s) for s in (dy, x) if copied(s)]
    if mask[0]:
        events = events + (_forward(call) if transposed else _image_gradient(call))
    if mask[1]:
        events = events + _weight_gradient(call, bias)
    return (*events, *_back(copies))


def _of_call(x: TensorSpec, w: TensorSpec, y: TensorSpec, how: Any) -> Convolution | None:
    """The convolution that a call with these arguments is or is the transpose of; None: no rule says what it does."""
    stride, padding, dilation, transposed, more, groups = how
    if x.dtype != w.dtype or not 3 <= len(x.shape) <= 5:
        return None
    if transposed and any(m >= s for m, s in zip(more, stride, strict=False)):
        return None
    if x.dtype == "bfloat16":
        known = onednn.bfloat16_in_onednn() and onednn.known_bfloat16() and len(x.shape) == 4
        if not known or any(d != 1 for d in dilation) or (transposed and (groups > 1 or channels_last(x))):
            return None
    elif x.dtype != "float32":
        return None
    if len(x.shape) == 3:
        x, y, w = _one_row(x), _one_row(y), _one_row(w)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    rank = len(x.shape) - 2
    return Convolution(
        read=y if transposed else x,
        made=x if transposed else y,
        weight=w,
        stride=tuple(stride) * (rank // len(stride)),  # one number may stand for all
        padding=tuple(padding) * (rank // len(padding)),
        dilation=tuple(dilation) * (rank // len(dilation)),
        groups=groups,
    )


def _one_row(spec: TensorSpec) -> TensorSpec:
    n, c, length = spec.shape
    a, b, s = spec.stride
    return replace(spec, shape=(n, c, 1, length), stride=(a, b, length * s, s))


def _uses_onednn(x: TensorSpec, call: Convolution) -> bool:
    """torch's own choice (`use_mkldnn` in aten/src/ATen/native/Convolution.cpp) on the CPU."""
    kernel = call.kernel[-2:]
    worth = call.strided or x.shape[0] >= 16 or max(*kernel, *call.dilation, onednn.threads()) > 1
    large = call.groups > 1 or min(kernel) > 3 or x.shape[0] > 1 or math.prod(x.shape[:4]) > 20480
    return call.half or (worth and large)


def _native_columns(call: Convolution, always: bool) -> list[int]:
    """In torch's own kernels the whole batch as columns, for what is no plain matrix product already."""
    if call.one_tap and not call.strided and not always:
        return []
    return [call.read.shape[0] * call.read.shape[1] * call.taps * call.read.item_bytes * pixels(call.made)]


# ---------------------------------------------------------------------------------------------------------------------
# oneDNN


def pixels(image: TensorSpec) -> int:
    return math.prod(image.shape[2:])


def _back(sizes: list[int]) -> list[int]:
    return [-n for n in reversed(sizes)]


def _around(*sizes: int) -> list[int]:
    return [*sizes, *_back([*sizes])]


def _forward(call: Convolution) -> list[int]:
    y = call.made.nbytes
    if call.through_columns(FORWARD) and not call.depthwise:
        scratch = onednn.threads() * call.columns + 128
        return [scratch, y, -scratch, y, -y]
    inside, scratch = call.blocked(call.made), _strided_scratch(call)
    if call.half and call.one_tap and call.groups == 1:
        scratch += _row_sums(call.made, call)
    image = 0 if call.first else call.blocked(call.read)
    took = [n for n in (scratch, image, call.blocked_weight(plain=call.first)) if n]
    return [*took, inside, *_back(took), y, -inside]


def _strided_scratch(call: Convolution, most: int = 1 << 30) -> int:
    """oneDNN runs a strided 1x1 convolution on a thinned copy of one image a thread (`rtus`); 0: none."""
    if call.kernel != (1, 1) or not call.strided or call.groups > 1:
        return 0
    channels = min(most, padded(call.read.shape[1]))
    return onednn.threads() * channels * pixels(call.made) * call.read.item_bytes + 128


def _row_sums(image: TensorSpec, call: Convolution) -> int:
    """In bfloat16, one image a thread is summed in float32 by a 1x1 convolution."""
    return onednn.threads() * padded(image.shape[1]) * pixels(image) * 4 + 128


def _image_gradient(call: Convolution) -> list[int]:
    """The gradient of what the convolution reads."""
    dx = call.read.nbytes
    if call.through_columns(IMAGE):
        scratch = onednn.threads() * call.columns + 128
        return [dx, scratch, -scratch, dx, -dx]
    if call.batched:
        weight, scratch = _batched(call)
        grad = call.made.nbytes
        return [grad, weight, dx, scratch, -scratch, -weight, -grad, dx, dx, -dx, -dx]
    grad, image, weight = call.blocked(call.made), call.blocked(call.read), call.blocked_weight()
    sums = _around(_row_sums(call.read, call)) if call.half and call.one_tap and call.groups == 1 else []
    return [grad, weight, image, *sums, -weight, -grad, dx, -image]


def _batched(call: Convolution) -> tuple[int, int]:
    """Weight and scratch of matrix products in batches: in channels last, those read not padded."""
    made, read = call.weight.shape[:2]
    if not call.half:
        return made * padded(read) * call.taps * 4, 12_288 + 24_600 * onednn.threads()
    scratch = onednn.threads() * (call.made.nbytes // call.made.shape[0]) + 32_768
    if call.depthwise:
        return call.groups * 2 * onednn.block() * call.taps * 2, scratch
    dense = padded(read) * round_up(made, 2) * call.taps * 2
    return (call.weight.nbytes if call.groups > 1 else dense), scratch


def _transposed(call: Convolution, has_bias: bool) -> list[int]:
    """The same as a transposed convolution's forward; its bias is added to a second result inside."""
    y = call.read.nbytes
    if call.batched and not call.through_columns(IMAGE):
        weight, scratch = _batched(call)
        took = [scratch + 128, call.made.nbytes, weight]
        return [*took, y, *_back(took), *_around(y, y)]
    events = _image_gradient(call)
    if not has_bias or call.through_columns(IMAGE):
        return events
    grad, weight, image, *_ = events
    took = [image * 4 // call.read.item_bytes + 128, grad, weight]
    return [*took, image, *_back(took), y, -image]


def _weight_gradient(call: Convolution, bias: list[int]) -> list[int]:
    """bias: the bytes of its gradient, if it is wanted."""
    dw = call.weight.nbytes
    if call.through_columns(WEIGHT):
        scratch = _column_scratch(call)
        return [dw, scratch, *bias, -scratch, *bias, dw, -dw, *_back(bias)]
    tiny = call.first and call.read.shape[1] < 4
    # Few channels that are read lie, as those that are made, in blocks of half a vector register.
    width = onednn.block() // 2 if call.first and not tiny else onednn.block()
    took = [call.blocked(call.made, width)] + ([] if tiny else [call.blocked(call.read, width)])
    weight = dw if call.half and tiny else call.blocked_weight(plain=tiny, width=width)
    scratch = _half_scratch(call, weight) if call.half else _strided_scratch(call, most=128)
    during = [scratch, *bias, -scratch] if scratch else bias
    return [*took, weight, *during, *_back(took), *bias, dw, -weight, *_back(bias)]


def _column_scratch(call: Convolution) -> int:
    """A matrix of columns a thread, and four of weights (a thread, in float32)."""
    return (
        onednn.threads() * call.columns
        + 16 * call.weight.elements * (1 if call.half else onednn.threads())
        + 256
    )


def _half_scratch(call: Convolution, weight: int) -> int:
    """In bfloat16: sums of the weight's gradient in float32, and one image a thread of both kinds, transposed."""
    read, made, last = call.read, call.made, channels_last(call.read)
    scratch = 2 * weight + 128
    if call.through_columns(WEIGHT):
        return _column_scratch(call)
    if call.depthwise:
        return scratch
    if call.one_tap:
        images = [read] * (last or call.strided) + [made] * last
        return scratch + sum(onednn.threads() * padded(x.shape[1]) * pixels(x) * 2 + 128 for x in images)
    scratch += (
        onednn.threads() * padded(made.shape[1]) * made.shape[2] * round_up(made.shape[3], 2) * 2 + 8452
    )
    if call.first and not last:
        return scratch
    width, step, left = read.shape[3], call.stride[1], call.padding[1]
    right = max(0, (made.shape[3] - 1) * step + call.kernel[1] - width - left)
    row = round_up(ceil_div(width, step) + round_up(max(left, right + 1), 2), 2) * step
    channels = read.shape[1] if call.first else padded(read.shape[1])
    return scratch + onednn.threads() * channels * read.shape[2] * row * 2


def _channels_last_backward(call: Convolution, bias: list[int], mask: Any) -> Events:
    """Images are copied to channels last where they are not; a grouped kernel sums dense blocks."""
    weight, dw = call.last_weight, call.weight.nbytes
    copies = [s.nbytes for s in (call.made, call.read) if not channels_last(s)] + call.weight_copy
    events = list(copies)
    if mask[0]:
        inside = _batched(call) if call.batched and call.half else (weight,)
        events += [call.read.nbytes, *_around(*inside)]
    if mask[1] and call.half:
        weight = dw if call.first or call.through_columns(WEIGHT) else call.blocked_weight()
        scratch = _half_scratch(call, weight)
        events += [weight, *bias, *_around(scratch), dw, *_around(dw), -weight]
    elif mask[1]:
        dense = call.groups * onednn.block() ** 2 * call.taps * 4 if call.groups > 1 else 2 * weight
        events += [dense, *bias, dw, -dense]
    return (*events, *_back(copies))
