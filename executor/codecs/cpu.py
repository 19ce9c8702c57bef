"""Packing and unpacking on the CPU: one compiled pass each over the numbers, in float32.

A floating-point type is (digits, bias of the exponent, infinity, NaN, place of the sign), of which infinity may be NaN;
numbers of such a type come as their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from executor.codecs.fewbit import intervals
from executor.loops import bits_of, over
from simulator.core.formats import CHUNK, FORMATS, GROUP
from simulator.kernels.compiled import compiled, inner

Array = np.ndarray[Any, Any]
Type = tuple[np.uint32, ...]
u32 = np.uint32
f32 = np.float32


def floats(digits: int, bias: int, infinity: int, nan: int, sign: int) -> Type:
    return u32(digits), u32(bias), u32(infinity), u32(nan), u32(sign)


TYPES: Final = {
    "torch.float32": floats(23, 127, 0x7F800000, 0x7FC00000, 31),
    "torch.bfloat16": floats(7, 127, 0x7F80, 0x7FC0, 15),
    "torch.float16": floats(10, 15, 0x7C00, 0x7E00, 15),
    "torch.float8_e4m3fn": floats(3, 7, 0x7F, 0x7F, 7),
    "torch.float8_e5m2": floats(2, 15, 0x7C, 0x7F, 7),
}
FP8: Final = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ROWS: Final = CHUNK // 8  # of a chunk, of eight numbers each
BLOCK: Final = 1024  # rows that few bits are worked on at a time
TINY: Final = f32(np.finfo(np.float32).tiny)  # the scale of a group of zeros, or of equal numbers
ONE, TWO, EXPONENT, INF, REST = u32(1), u32(2), u32(23), u32(0x7F800000), u32(0x7FFFFFFF)


def convert(
    flat: torch.Tensor,
    scales: Sequence[torch.Tensor],
    codes: torch.Tensor,
    format: str,
    keys: tuple[int, int] | None,
) -> None:
    """Write scales and codes of numbers that lie one after another; the keys are those of rounding's noise. Without
    keys, write the numbers of scales and codes."""
    name, _, activation = format.partition(":")
    x, of, bits, packing = bits_of(flat), TYPES[str(flat.dtype)], FORMATS[name].bits, keys is not None
    rows, made = [bits_of(row).view(f32) for row in scales], bits_of(codes)
    key, other = map(u32, keys or (0, 0))

    def loop(begin: int, end: int) -> None:
        wide, words = np.empty(BLOCK if activation else GROUP, f32), np.empty(BLOCK, u32)
        if activation and packing:
            bounds = _numbers(activation, bits, 0, flat.dtype).view(f32)
            pack_few(x, of, bounds, made, bits, wide, np.empty(BLOCK, u32), words, begin, end)
        elif activation:
            unpack_few(made, bits, _numbers(activation, bits, 1, flat.dtype), x, words, begin, end)
        elif name in FP8 and packing:
            largest = f32(torch.finfo(FP8[name]).max)
            pack_floats(x, of, rows[0], made, TYPES[str(FP8[name])], largest, wide, begin, end)
        elif name in FP8:
            unpack_floats(rows[0], made, TYPES[str(FP8[name])], x, of, wide, begin, end)
        elif packing:
            pack_levels(x, of, rows[0], rows[1], made, bits, key, other, wide, begin, end)
        else:
            unpack_levels(rows[0], rows[1], made, bits, x, of, wide, begin, end)

    over(loop, len(made) // bits if activation else len(rows[0]), len(x))


@cache
def _numbers(activation: str, bits: int, which: int, dtype: torch.dtype) -> Array:
    """The bits of the bounds of intervals (0), in float32, or of points (1), in memory that torch does not count."""
    made = torch.tensor(intervals(activation, 1 << bits)[which], dtype=dtype)
    return bits_of(made if which else made.float()).copy()


@inner
def _number(bits: Any) -> f32:
    return np.uint32(bits).view(np.float32)


@inner
def _bits(number: f32) -> u32:
    return np.float32(number).view(np.uint32)


@inner
def _rounded(value: f32, of: Type) -> u32:
    """The bits of the nearest number of a type, as torch's casts have them."""
    bits = _bits(value)
    size, shift = u32(bits & REST), u32(EXPONENT - of[0])
    least = u32((u32(127) - of[1]) << EXPONENT)
    if size < u32(least + (ONE << EXPONENT)):  # below the least normal number: let an addition round
        even = u32(least + ((shift + ONE) << EXPONENT))
        made = u32(_bits(_number(size) + _number(even)) - even)
    else:
        half = u32((ONE << u32(shift - ONE)) - ONE)
        made = u32(u32(size - least + half + ((size >> shift) & ONE)) >> shift)
    made = of[3] if size > INF else min(made, of[2])
    return u32(made | u32(bits >> u32(31)) << of[4])


@inner
def _widened(bits: u32, of: Type) -> f32:
    size, up = u32(bits & u32((ONE << of[4]) - ONE)), u32(EXPONENT - of[0])
    # Below the least normal number, unless float32 has the same.
    if size < u32(ONE << of[0]) and of[1] != u32(127):
        made = _bits(f32(size) * _number((u32(128) - of[1] - of[0]) << EXPONENT))
    else:
        made = u32(u32(size << up) + u32((u32(127) - of[1]) << EXPONENT))
    made = made if size < of[2] else u32(INF | u32(size << up))
    return _number(made | u32(u32(bits >> of[4]) << u32(31)))


@inner
def _take(x: Array, of: Type, wide: Array) -> None:
    if of[0] == EXPONENT:
        for j in range(len(x)):
            wide[j] = _number(x[j])
    else:
        for j in range(len(x)):
            wide[j] = _widened(u32(x[j]), of)


@inner
def _put(wide: Array, of: Type, out: Array) -> None:
    if of[0] == EXPONENT:
        for j in range(len(out)):
            out[j] = _bits(wide[j])
    else:
        for j in range(len(out)):
            out[j] = _rounded(wide[j], of)


@inner
def _group(x: Array, of: Type, wide: Array) -> u32:
    """Take a group, filled up by its last number; the bits of its largest magnitude, or of a NaN."""
    _take(x, of, wide)
    wide[len(x) :] = wide[len(x) - 1]
    top = u32(0)
    for j in range(GROUP):
        top = max(top, u32(_bits(wide[j]) & REST))
    return top


@compiled
def pack_floats(
    x: Array, of: Type, scales: Array, codes: Array, to: Type, largest: f32, wide: Array, begin: int, end: int
) -> None:
    for g in range(begin, end):
        scale = _number(_group(x[g * GROUP : (g + 1) * GROUP], of, wide)) / largest
        scales[g] = scale = TINY if scale < TINY else scale
        made = codes[g * GROUP : (g + 1) * GROUP]
        for j in range(GROUP):
            made[j] = _rounded(wide[j] / scale, to)


@compiled
def unpack_floats(
    scales: Array, codes: Array, to: Type, out: Array, of: Type, wide: Array, begin: int, end: int
) -> None:
    for g in range(begin, end):
        given, scale = codes[g * GROUP : (g + 1) * GROUP], scales[g]
        for j in range(GROUP):
            wide[j] = _widened(u32(given[j]), to) * scale
        _put(wide, of, out[g * GROUP : (g + 1) * GROUP])


@inner
def noise(i: u32, key: u32, other: u32) -> f32:
    """An even draw from [0, 1) for a number by its place: two rounds of a hash of 32 bits (lowbias32, Wellons 2018)."""
    h = u32(i ^ key)
    h = u32(u32(h ^ h >> u32(16)) * u32(0x7FEB352D))
    h = u32(u32(u32(h ^ h >> u32(15)) + other) * u32(0x846CA68B))
    return f32(u32(h ^ h >> u32(16)) >> u32(8)) * f32(2.0**-24)


@inner
def _order(bits: Any) -> np.int32:
    """Integers that lie as the numbers of these bits lie; of such, the bits again."""
    signed = np.uint32(bits).view(np.int32)
    return np.int32(signed ^ ((signed >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled
def pack_levels(
    x: Array, of: Type, least: Array, width: Array, codes: Array, bits: int, key: u32, other: u32, wide: Array,
    begin: int, end: int,
) -> None:  # fmt: skip
    levels, per, shift = f32((1 << bits) - 1), GROUP * bits // 8, u32(bits)
    for g in range(begin, end):
        top = _group(x[g * GROUP : (g + 1) * GROUP], of, wide)
        made = codes[g * per : (g + 1) * per]
        low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for j in range(GROUP):
            at = _order(_bits(wide[j]))
            low, high = min(low, at), max(high, at)
        first = _number(_order(low))
        range_ = max(f32(_number(_order(high)) - first), TINY)
        if top >= INF or _bits(range_) >= INF:
            least[g] = width[g] = f32(np.nan)
            made[:] = 0
            continue
        least[g], width[g] = first, range_
        for k in range(8 // bits):
            part, place, up = wide[k * per : (k + 1) * per], u32(g * GROUP + k * per), u32(shift * u32(k))
            for j in range(per):
                level = noise(u32(place + u32(j)), key, other) + levels * (part[j] - first) / range_
                # The sum may round up to the level above the last.
                code = u32(np.int32(min(f32(level), levels))) << up
                made[j] = code if k == 0 else made[j] | code


@compiled
def unpack_levels(
    least: Array,
    width: Array,
    codes: Array,
    bits: int,
    out: Array,
    of: Type,
    wide: Array,
    begin: int,
    end: int,
) -> None:
    mask, per, shift = u32((1 << bits) - 1), GROUP * bits // 8, u32(bits)
    level = f32(1 / ((1 << bits) - 1))
    for g in range(begin, end):
        given, first, range_ = codes[g * per : (g + 1) * per], least[g], width[g]
        for k in range(8 // bits):
            part, up = wide[k * per : (k + 1) * per], u32(shift * u32(k))
            for j in range(per):
                part[j] = first + level * f32(u32((u32(given[j]) >> up) & mask)) * range_
        _put(wide, of, out[g * GROUP : (g + 1) * GROUP])


@inner
def _place(row: int, rows: int) -> tuple[int, int, int]:
    """Of a row: the first number of its chunk, the first row, and how many rows the chunk has."""
    first = row // ROWS * ROWS
    return first * 8, first, min(ROWS, rows - first)


@compiled
def pack_few(
    x: Array, of: Type, bounds: Array, codes: Array, bits: int, wide: Array, places: Array, words: Array, begin: int,
    end: int,
) -> None:  # fmt: skip
    """The numbers of eight intervals, one of each eighth of a chunk, make one word, of which the lower bytes stay."""
    rows = len(codes) // bits
    a = begin
    while a < end:
        chunk, first, m = _place(a, rows)
        b = min(a + BLOCK, end, first + m)
        words[:] = 0
        for k in range(8):
            at = chunk + k * m + a - first
            numbers = x[at : at + b - a]
            _take(numbers, of, wide)
            places[:] = 0
            for bound in bounds:
                for j in range(BLOCK):
                    places[j] += u32(0) if bound >= wide[j] else ONE
            for j in range(len(numbers)):
                words[j] |= places[j] << u32(bits * k)
        made = codes[a * bits : b * bits]
        for j in range(b - a):
            for k in range(bits):
                made[j * bits + k] = words[j] >> u32(8 * k)
        a = b


@compiled
def unpack_few(
    codes: Array, bits: int, points: Array, out: Array, words: Array, begin: int, end: int
) -> None:
    rows, mask = len(codes) // bits, u32((1 << bits) - 1)
    a = begin
    while a < end:
        chunk, first, m = _place(a, rows)
        b = min(a + BLOCK, end, first + m)
        given = codes[a * bits : b * bits]
        for j in range(b - a):
            word = u32(0)
            for k in range(bits):
                word |= u32(given[j * bits + k]) << u32(8 * k)
            words[j] = word
        for k in range(8):
            at = chunk + k * m + a - first
            made, shift = out[at : at + b - a], u32(bits * k)
            for j in range(len(made)):
                made[j] = points[(words[j] >> shift) & mask]
        a = b
