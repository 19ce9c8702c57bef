"""Turn a call into a convolution as the CPU's rules see it: what it reads and makes, and which kernels it gets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from tracer.costs.rules_cpu.onednn import FLOAT, block, padded
from tracer.costs.signature import Signature, TensorSpec

# What is to be made.
FORWARD: Final = "forward"
IMAGE: Final = "gradient of the image"
WEIGHT: Final = "gradient of the weight"
# Elements of a row that a kernel makes at once, by the blocks of channels that it makes at once.
PIECE: Final = {1: 15, 2: 10, 3: 7, 4: 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A convolution: what it reads, what it makes, and its weight (channels made, channels read / groups, kernel)."""

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
        return self.groups == 1 and self.read.shape[1] < block() and self.taps > 1

    def blocked(self, image: TensorSpec) -> int:
        """Bytes of an image in oneDNN's layout, its channels in whole blocks (not if they are in groups)."""
        whole = self.groups > 1 and not self.depthwise
        channels = image.shape[1] if whole else padded(image.shape[1])
        return image.shape[0] * channels * math.prod(image.shape[2:]) * FLOAT

    def blocked_weight(self, *, plain: bool = False) -> int:
        """Bytes of the weight in oneDNN's layout; plain: where the channels that are read are as they are."""
        made, read = self.weight.shape[:2]
        if self.depthwise:
            return padded(self.groups) * self.taps * FLOAT
        if self.groups > 1:
            return self.weight.nbytes
        return padded(made) * (read if plain else padded(read)) * self.taps * FLOAT

    @property
    def columns(self) -> int:
        """Bytes of one image of a group as a matrix of columns; of a volume, one slice."""
        return self.per_group[0] * self.taps * math.prod(self.made.shape[-2:]) * FLOAT

    def gemm(self, task: str) -> bool:
        """Whether oneDNN has nothing better than columns and a matrix product for this task."""
        if self._too_wide(task):
            return True
        if self.groups == 1:
            return False
        volume = len(self.kernel) > 2
        if self.depthwise and any(d != 1 for d in self.dilation):
            return True
        if not self.depthwise:
            least = 4 if task != WEIGHT else block() if volume else 8
            return any(c % least for c in self.per_group)
        # Depthwise gradients of weights have a kernel for 3 x 3, on images of so many pixels.
        small = any(
            n < k + s - 1 for n, k, s in zip(self.read.shape[2:], self.kernel, self.stride, strict=True)
        )
        return volume or (task == WEIGHT and (max(self.kernel) > 3 or small))

    def _too_wide(self, task: str) -> bool:
        """Whether rows of the weight or what is padded to those of the image are too long for oneDNN's own kernels."""
        width, taps, left = self.read.shape[-1], self.kernel[-1], self.padding[-1]
        if len(self.kernel) > 2:
            front = self.padding[
                0
            ]  # slices; so few that a part of the weight reads nothing but these and those behind
            few = front > 0 and self.read.shape[2] <= self.kernel[0] - front
            return task == WEIGHT and block() == 16 and self.groups == 1 and few
        if task == WEIGHT and block() == 8 and width < taps:
            return True  # without AVX-512, rows that are shorter than the weight's
        if block() != 16 or self.groups > 1:
            return False
        if task == WEIGHT and taps > 14:
            return True
        if self.strided:
            return False
        if taps > 14:
            return task == IMAGE or left > 0
        if task == WEIGHT:
            return taps > 1 and (2 * left >= width or left > 28)
        # A row is made in pieces, which its left end may not be longer than; short rows of three taps are one piece.
        made = self.weight.shape[0] if task == FORWARD else self.weight.shape[1]
        short = 28 if task == FORWARD else 30
        return taps == 3 and width > short and left > PIECE[_together(-(-made // block()), task)]

    @property
    def batched(self) -> bool:
        """Whether the gradient of the image is made by matrix products in batches, in channels last."""
        return self.strided and (self.groups == 1 or self.per_group[1] > block())


def _together(blocks: int, task: str) -> int:
    """Blocks of channels that a kernel makes at once: as many as divide them, at most four, or three of gradients."""
    most = max(n for n in (1, 2, 3, 4) if blocks % n == 0)
    return min(most, 4 if task == FORWARD else 3)


def pair_of(signature: Signature, y: TensorSpec) -> tuple[Pair | None, bool]:
    """The convolution that a call is or is the transpose of, and which; None: no rule says what it does."""
    at = 1 if "backward" in signature.target else 0
    x, w = signature.args[at], signature.args[at + 1]
    stride, padding, dilation, transposed, more, groups = signature.args[at + 3 : at + 9]
    if transposed and any(m >= s for m, s in zip(more, stride, strict=True)):
        return None, False
    if x.dtype != w.dtype or x.dtype not in ("float32", "bfloat16") or not 3 <= len(x.shape) <= 5:
        return None, False
    if len(x.shape) == 3:
        x, y, w = _one_row(x), _one_row(y), _one_row(w)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    read, made = (y, x) if transposed else (x, y)
    pair = Pair(
        read=read,
        made=made,
        weight=w,
        stride=tuple(stride),
        padding=tuple(padding),
        dilation=tuple(dilation),
        groups=groups,
    )
    return pair, bool(transposed)


def _one_row(spec: TensorSpec) -> TensorSpec:
    n, c, length = spec.shape
    a, b, s = spec.stride
    return replace(spec, shape=(n, c, 1, length), stride=(a, b, length * s, s))
