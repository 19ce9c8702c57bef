"""What a convolution allocates on a CPU, by torch's choice of kernel and oneDNN's layouts.

Counts: of images in float32 whose channels come first, reorders into oneDNN's layouts and back, its scratch for strided
kernels and for those that go through columns, the columns of torch's own kernels. Ignores: scratch in which threads sum
the gradients of weights; copies of biases; that forward makes large columns in parts. No rule: other types, one or
three dimensions, transposed convolutions, images in channels last; there, `--calibrate` measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from tracer.costs.rules_cpu import onednn
from tracer.costs.rules_cpu.onednn import channels_last, padded
from tracer.costs.signature import Signature, TensorSpec
from tracer.costs.table import Events, copied, round_up

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
    def kernel(self) -> tuple[int, ...]:
        return self.weight.shape[2:]

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def strided(self) -> bool:
        return any(s != 1 for s in self.stride)

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
        return self.groups == 1 and self.taps > 1 and self.read.shape[1] < onednn.block()

    def blocked(self, image: TensorSpec, width: int = 0) -> int:
        """Bytes of an image in oneDNN's layout, its channels in whole blocks (not if they are in groups)."""
        channels = image.shape[1]
        if self.groups == 1 or self.depthwise:
            channels = round_up(channels, width or onednn.block())
        return image.shape[0] * channels * pixels(image) * image.item_bytes

    def blocked_weight(self, *, plain: bool = False, width: int = 0) -> int:
        """Bytes of the weight in oneDNN's layout; plain: where the channels that are read are as they are."""
        made, read = self.weight.shape[:2]
        width = width or onednn.block()
        if self.depthwise:
            return padded(self.groups) * self.taps * 4
        if self.groups > 1:
            return self.weight.nbytes
        return round_up(made, width) * (read if plain else round_up(read, width)) * self.taps * 4

    @property
    def columns(self) -> int:
        """Bytes of one image of a group as a matrix of columns."""
        return self.per_group[0] * self.taps * pixels(self.made) * 4

    def through_columns(self, task: str) -> bool:
        """Whether oneDNN has nothing better than columns and a matrix product for this task."""
        # Depthwise gradients of weights have a kernel for 3 x 3, on images of so many pixels.
        large = max(self.kernel) > 3
        if self.groups == 1:
            return self._too_wide(task)
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
        over = left if task == FORWARD else (taps - 1) * self.dilation[-1] - left
        return taps == 3 and over > self._piece(task)

    def _piece(self, task: str) -> int:
        """Elements of a row that oneDNN's kernel for 3 taps keeps in registers; its end may not be longer.

        Source: oneDNN, `init_conf` in jit_avx512_common_conv_kernel.cpp. Counts: blocks of channels, the first cache.
        Ignores: that forward takes fewer blocks at once where threads share the work better so.
        """
        read, made, high = self.read.shape[-1], self.made.shape[-1], self.kernel[0]
        # All in vectors of 16 numbers: rows of what is read and made, and two blocks of the weight.
        weight = 96 * high
        if task == FORWARD:
            channels, most, width = self.weight.shape[0], 5, made
            fits = 64 * (read * high + 2 * made + weight) < onednn.first_cache()
            whole = (made <= 28 and fits) or (self.read.shape[0] == 1 and made <= 147 and channels <= 96)
        else:
            channels, most, width = self.read.shape[1], 4, read
            fits = 64 * (2 * read * high + made + weight) <= onednn.first_cache()
            whole = fits and not (read <= 5 or 8 < read <= 13)
        blocks = padded(channels) // onednn.block()
        at_once = max(n for n in range(1, most + 1) if blocks % n == 0)
        return min(width, 28 if whole else 31 // (at_once + 1))


def convolution(signature: Signature) -> Events | None:
    """Forward."""
    x, w, _bias, *how = signature.args
    call = _of_call(x, w, signature.results[0], how)
    if call is None:
        return None
    copy = [copied(x)] if copied(x) else []
    if _uses_onednn(call):
        return (*copy, *_forward(call), *_back(copy))
    columns = _native_columns(call)
    return (*copy, *columns, signature.results[0].nbytes, *_back(columns), *_back(copy))


def convolution_backward(signature: Signature) -> Events | None:
    """The gradients of the input, then of weight and bias."""
    dy, x, w, _bias, *how, mask = signature.args
    call = _of_call(x, w, dy, how)
    if call is None:
        return None
    bias = [dy.shape[1] * dy.item_bytes] if mask[2] else []
    events = copies = [copied(s) for s in (dy, x) if copied(s)]
    if not _uses_onednn(call):
        made = [x.nbytes] * mask[0] + bias + [w.nbytes] * mask[1]
        columns = _native_columns(call)
        return (*copies, *made, *columns, *_back(columns), *_back(copies))
    if mask[0]:
        events = events + _image_gradient(call)
    if mask[1]:
        events = events + _weight_gradient(call, bias)
    return (*events, *_back(copies))


def _of_call(x: TensorSpec, w: TensorSpec, y: TensorSpec, how: Any) -> Convolution | None:
    """The convolution that a call with these arguments is; None: no rule says what it does."""
    stride, padding, dilation, transposed, _, groups = how
    if {x.dtype, w.dtype} != {"float32"} or len(x.shape) != 4 or transposed or channels_last(x):
        return None
    return Convolution(
        read=x,
        made=y,
        weight=w,
        stride=tuple(stride) * (2 // len(stride)),  # one number may stand for both
        padding=tuple(padding) * (2 // len(padding)),
        dilation=tuple(dilation) * (2 // len(dilation)),
        groups=groups,
    )


def _uses_onednn(call: Convolution) -> bool:
    """torch's own choice (`use_mkldnn` in aten/src/ATen/native/Convolution.cpp) on the CPU."""
    x = call.read
    worth = call.strided or x.shape[0] >= 16 or max(*call.kernel, *call.dilation, onednn.threads()) > 1
    large = call.groups > 1 or min(call.kernel) > 3 or x.shape[0] > 1 or math.prod(x.shape[:4]) > 20480
    return worth and large


def _native_columns(call: Convolution) -> list[int]:
    """In torch's own kernels the whole batch as columns, for what is no plain matrix product already."""
    if call.taps == 1 and not any(call.padding) and not call.strided:
        return []
    return [call.read.shape[0] * call.read.shape[1] * call.taps * 4 * pixels(call.made)]


# oneDNN


def pixels(image: TensorSpec) -> int:
    return math.prod(image.shape[2:])


def _back(sizes: list[int]) -> list[int]:
    return [-n for n in reversed(sizes)]


def _forward(call: Convolution) -> list[int]:
    y = call.made.nbytes
    if call.through_columns(FORWARD) and not call.depthwise:
        scratch = onednn.threads() * call.columns + 128
        return [scratch, y, -scratch, y, -y]
    inside, scratch = call.blocked(call.made), _strided_scratch(call)
    image = 0 if call.first else call.blocked(call.read)
    took = [n for n in (scratch, image, call.blocked_weight(plain=call.first)) if n]
    return [*took, inside, *_back(took), y, -inside]


def _strided_scratch(call: Convolution, most: int = 1 << 30) -> int:
    """oneDNN runs a strided 1x1 convolution on a thinned copy of one image a thread (`rtus`); 0: none."""
    if call.kernel != (1, 1) or not call.strided or call.groups > 1:
        return 0
    channels = min(most, padded(call.read.shape[1]))
    return onednn.threads() * channels * pixels(call.made) * call.read.item_bytes + 128


def _image_gradient(call: Convolution) -> list[int]:
    """The gradient of what the convolution reads."""
    dx = call.read.nbytes
    if call.through_columns(IMAGE):
        scratch = onednn.threads() * call.columns + 128
        return [dx, scratch, -scratch, dx, -dx]
    if call.strided and (call.groups == 1 or call.per_group[1] > onednn.block()):
        # By matrix products in batches, in channels last, those read not padded.
        weight = call.weight.shape[0] * padded(call.weight.shape[1]) * call.taps * 4
        grad, scratch = call.made.nbytes, 12_288 + 24_600 * onednn.threads()
        return [grad, weight, dx, scratch, -scratch, -weight, -grad, dx, dx, -dx, -dx]
    grad, image, weight = call.blocked(call.made), call.blocked(call.read), call.blocked_weight()
    return [grad, weight, image, -weight, -grad, dx, -image]


def _weight_gradient(call: Convolution, bias: list[int]) -> list[int]:
    """bias: the bytes of its gradient, if it is wanted."""
    dw = call.weight.nbytes
    if call.through_columns(WEIGHT):
        # A matrix of columns a thread, and four of weights.
        scratch = onednn.threads() * (call.columns + 16 * call.weight.elements) + 256
        return [dw, scratch, *bias, -scratch, *bias, dw, -dw, *_back(bias)]
    tiny = call.first and call.read.shape[1] < 4
    # Few channels that are read lie, as those that are made, in blocks of half a vector register.
    width = onednn.block() // 2 if call.first and not tiny else onednn.block()
    took = [call.blocked(call.made, width)] + ([] if tiny else [call.blocked(call.read, width)])
    weight = call.blocked_weight(plain=tiny, width=width)
    scratch = _strided_scratch(call, most=128)
    during = [scratch, *bias, -scratch] if scratch else bias
    return [*took, weight, *during, *_back(took), *bias, dw, -weight, *_back(bias)]
