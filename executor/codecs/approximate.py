"""Numbers in the formats that do not come back in every bit, in torch's own passes over `CHUNK` numbers at a time.

The passes work in buffers that are made once, so that what they take beside their result is what `Format` counts.
`fewbit*` has of each number the interval that it lies in: those in which constants are nearest to the activation's
derivative, in squares over `REACH` on both sides of 0, found by dynamic programming over a grid (Few-Bit Backward,
Novikov et al. 2022, arXiv:2202.00441, section 3). What comes back is the interval's point, so that torch's own backward
op gives the interval's constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Final

import torch

from executor.inverted.formulas import FORWARD
from simulator.core.formats import CHUNK, FORMATS, GROUP, SCALE_BYTES

FP8: Final = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
TINY: Final = torch.finfo(torch.float32).tiny  # the scale of a group of zeros, or of equal numbers
REACH: Final = 10.0
GRID: Final = 1000  # points


@cache
def noise(device: torch.device) -> torch.Generator:
    """The random numbers of rounding: the model's random stream stays as it is."""
    return torch.Generator(device).manual_seed(0)


def pack_groups(flat: torch.Tensor, payload: torch.Tensor, format: str) -> None:
    buffer = _buffer(flat)
    rounding = torch.empty_like(buffer) if format not in FP8 else buffer
    bits = FORMATS[format].bits
    levels = (1 << bits) - 1
    for numbers, scales, codes in _chunks(flat, payload, format):
        x, r = buffer[: len(codes)], rounding[: len(codes)]
        line = x.view(-1)
        line[: len(numbers)].copy_(numbers)
        line[len(numbers) :].copy_(numbers[-1:].expand(x.numel() - len(numbers)))  # fill up the last group
        if format in FP8:
            torch.linalg.vector_norm(x, float("inf"), dim=1, out=scales[0])
            scales[0].div_(torch.finfo(FP8[format]).max).clamp_min_(TINY)
            codes.view(FP8[format]).copy_(x.div_(scales[0][:, None]))
            continue
        least, width = scales
        torch.aminmax(x, dim=1, out=(least, width))
        width.sub_(least).clamp_min_(TINY)
        r.uniform_(generator=noise(flat.device))
        # The sum may round up to the level above the last.
        r.addcdiv_(x.sub_(least[:, None]), width[:, None], value=levels).clamp_max_(levels)
        if bits < 8:
            first, *others = r.floor_().split(GROUP * bits // 8, dim=1)
            for k, part in enumerate(others, 1):
                first.add_(part, alpha=1 << bits * k)
            r = first
        codes.copy_(r)


def unpack_groups(flat: torch.Tensor, payload: torch.Tensor, format: str) -> None:
    buffer, bits = _buffer(flat), FORMATS[format].bits
    for numbers, scales, codes in _chunks(flat, payload, format):
        x = buffer[: len(codes)]
        if format in FP8:
            x.copy_(codes.view(FP8[format])).mul_(scales[0][:, None])
        else:
            parts = x.split(GROUP * bits // 8, dim=1)
            for k, part in enumerate(parts):
                part.copy_(codes)
                if k:
                    part.sub_(part, alpha=1 - 0.5 ** (bits * k)).floor_()
            for part, above in pairwise(parts):
                part.sub_(above, alpha=1 << bits)
            least, width = (row[:, None] for row in scales)
            torch.addcmul(least, x, width, value=1 / ((1 << bits) - 1), out=x)
        numbers.copy_(x.view(-1)[: len(numbers)])


def _buffer(flat: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Room for a chunk of these numbers, by groups."""
    groups = min(CHUNK // GROUP, -(-len(flat) // GROUP))
    return torch.empty((groups, GROUP), dtype=dtype, device=flat.device)


def _chunks(
    flat: torch.Tensor, payload: torch.Tensor, format: str
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]:
    """The numbers of each chunk; their groups' scales, one row a kind; and their codes, one row a group."""
    groups = -(-len(flat) // GROUP)
    end = SCALE_BYTES * FORMATS[format].scales * groups
    scales = payload[:end].view(torch.float32).view(-1, groups)
    codes = payload[end:].view(groups, -1)
    step = CHUNK // GROUP
    for a in range(0, groups, step):
        numbers = flat[a * GROUP : (a + step) * GROUP]
        yield numbers, [row[a : a + step] for row in scales], codes[a : a + step]


def pack_intervals(flat: torch.Tensor, payload: torch.Tensor, format: str) -> None:
    """The numbers of eight intervals, one of each eighth of a chunk, make one word, of which the lower bytes stay."""
    bits, buffer, bounds = _few_bits(flat, format, 0)
    for numbers, codes in zip(flat.split(CHUNK), payload.view(-1, bits).split(CHUNK // 8), strict=True):
        places = buffer[: 8 * len(codes)]
        torch.bucketize(numbers, bounds, out_int32=True, out=places[: len(numbers)])
        places[len(numbers) :].zero_()
        words, *others = places.view(8, -1)
        for k, row in enumerate(others, 1):
            words.bitwise_or_(row.bitwise_left_shift_(bits * k))
        codes.copy_(words.view(torch.uint8).view(-1, 4)[:, :bits])


def unpack_intervals(flat: torch.Tensor, payload: torch.Tensor, format: str) -> None:
    bits, buffer, points = _few_bits(flat, format, 1)
    for numbers, codes in zip(flat.split(CHUNK), payload.view(-1, bits).split(CHUNK // 8), strict=True):
        places = buffer[: 8 * len(codes)]
        words, *others = places.view(8, -1)
        words.zero_().view(torch.uint8).view(-1, 4)[:, :bits].copy_(codes)
        for k, row in enumerate(others, 1):
            torch.bitwise_right_shift(words, bits * k, out=row).bitwise_and_((1 << bits) - 1)
        words.bitwise_and_((1 << bits) - 1)
        torch.index_select(points, 0, places[: len(numbers)], out=numbers)


def _few_bits(flat: torch.Tensor, format: str, which: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The bits of a number; room for a chunk of places; and the bounds (0) or the points (1) of the intervals."""
    name, _, activation = format.partition(":")
    bits, buffer = FORMATS[name].bits, _buffer(flat, torch.int32).view(-1)
    return bits, buffer, flat.new_tensor(intervals(activation, 1 << bits)[which])


@cache
def intervals(activation: str, count: int) -> tuple[list[float], list[float]]:
    """So many best intervals' inner bounds, and their points."""
    edges = torch.linspace(-REACH, REACH, GRID + 1, dtype=torch.float64)
    slope = FORWARD[activation](edges).diff() / (2 * REACH / GRID)  # its mean between neighbours on the grid
    sums, squares = (torch.cat([v.new_zeros(1), v.cumsum(0)]) for v in (slope, slope * slope))
    size = torch.arange(GRID + 1)[None, :] - torch.arange(GRID + 1)[:, None]  # of the interval [row, column)
    means = (sums[None, :] - sums[:, None]) / size.clamp(min=1)
    costs = squares[None, :] - squares[:, None] - size * means * means
    costs[size <= 0] = float("inf")
    least, ways = costs[0], []
    for _ in range(count - 1):
        least, way = (least[:, None] + costs).min(0)
        ways.append(way)
    ends = [GRID]
    for way in reversed(ways):
        ends.append(int(way[ends[-1]]))
    parts = list(pairwise((0, *reversed(ends))))
    points = [a + int((slope[a:b] - means[a, b]).abs().argmin()) for a, b in parts]
    return edges[[a for a, _ in parts[1:]]].tolist(), (edges[points] + REACH / GRID).tolist()
