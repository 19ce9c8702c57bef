"""Packing and unpacking on CUDA: one kernel each way, in Triton, by the arithmetic of `executor.codecs.cpu`.

Imported only where there is a CUDA tensor, or to test it in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from executor.codecs.cpu import FP8, ROWS, TINY, TYPES
from executor.codecs.fewbit import intervals
from simulator.core.formats import FORMATS, GROUP

try:
    import triton
    import triton.language as tl
except ImportError:  # no kernel can be launched, but the module can be looked at
    triton = None

GROUPS: Final = 4  # of a program
BLOCK: Final = 256  # rows of a program, of eight numbers each; a chunk is a whole number of them


def _jit(function: Any) -> Any:
    return triton.jit(function) if triton else function


def convert(
    flat: torch.Tensor, scales: Sequence[torch.Tensor], codes: torch.Tensor, format: str, keys: Any
) -> None:
    """Write scales and codes of numbers that lie one after another; the keys are those of rounding's noise. Without
    keys, write the numbers of scales and codes."""
    name, _, activation = format.partition(":")
    bits, packing = FORMATS[name].bits, keys is not None
    rows = len(codes) // bits if activation else len(scales[0])
    grid = (-(-rows // (BLOCK if activation else GROUPS)),)
    given = (flat, *scales, codes) if packing else (*scales, codes, flat)
    if activation:
        kernel, of = (
            _pack_few if packing else _unpack_few,
            few(activation, bits, int(not packing), flat.dtype),
        )
    elif name in FP8:
        kernel, of = _pack_floats if packing else _unpack_floats, float8(name, packing)
    else:
        kernel, of = _pack_levels if packing else _unpack_levels, levels(bits, packing)
    noise = [k - (k >> 31 << 32) for k in keys] if kernel is _pack_levels else []
    with torch.cuda.device_of(flat):
        kernel[grid](*given, flat.numel(), rows, *noise, **of)


def float8(name: str, packing: bool) -> dict[str, Any]:
    """What the kernels of `fp8_*` are specialized on."""
    digits, bias, infinity, nan, _ = map(int, TYPES[str(FP8[name])])
    ends = {"nan": nan, "largest": torch.finfo(FP8[name]).max, "tiny": float(TINY)} if packing else {}
    return {"digits": digits, "bias": bias, "infinity": infinity, **ends, "size": GROUP, "many": GROUPS}


def levels(bits: int, packing: bool) -> dict[str, Any]:
    """What the kernels of `int*` are specialized on."""
    ends = {"tiny": float(TINY)} if packing else {}
    return {"bits": bits, **ends, "per": GROUP * bits // 8, "size": GROUP, "many": GROUPS}


def few(activation: str, bits: int, which: int, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernels of `fewbit*` are specialized on: the bounds of the intervals (0) or their points (1)."""
    numbers = torch.tensor(intervals(activation, 1 << bits)[which], dtype=dtype).tolist()
    return {"numbers": tuple(numbers), "bits": bits, "whole": ROWS, "block": BLOCK}


@_jit
def _rounded(v, digits: tl.constexpr, bias: tl.constexpr, infinity: tl.constexpr, nan: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = v.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - digits
    least: tl.constexpr = (127 - bias) << 23
    even: tl.constexpr = least + ((shift + 1) << 23)
    low = (size.to(tl.float32, bitcast=True) + 2.0 ** (shift + 1 - bias)).to(tl.int32, bitcast=True) - even
    high = (size - least + ((1 << (shift - 1)) - 1) + ((size >> shift) & 1)) >> shift
    made = tl.minimum(tl.where(size < least + (1 << 23), low, high), infinity)
    return tl.where(size > 0x7F800000, nan, made) | ((bits >> 31) & 1) << 7


@_jit
def _widened(code, digits: tl.constexpr, bias: tl.constexpr, infinity: tl.constexpr):  # type: ignore[no-untyped-def]
    size = code & 127
    up: tl.constexpr = 23 - digits
    low = size.to(tl.float32) * 2.0 ** (1 - bias - digits)
    high = ((size << up) + ((127 - bias) << 23)).to(tl.float32, bitcast=True)
    end = (0x7F800000 | (size << up)).to(tl.float32, bitcast=True)
    made = tl.where(size >= infinity, end, tl.where(size < (1 << digits), low, high))
    return tl.where(code >= 128, -made, made)


@_jit
def _pack_floats(  # type: ignore[no-untyped-def]
    x, scales, codes, n, groups, digits: tl.constexpr, bias: tl.constexpr, infinity: tl.constexpr,
    nan: tl.constexpr, largest: tl.constexpr, tiny: tl.constexpr, size: tl.constexpr, many: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)
    i, there = g[:, None] * size + tl.arange(0, size)[None, :], (g < groups)[:, None]
    v = tl.load(x + tl.minimum(i, n - 1), there, other=0.0).to(tl.float32)  # the last fills its group up
    top = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = top.to(tl.float32, bitcast=True) / largest
    scale = tl.where(scale < tiny, tiny, scale)
    tl.store(scales + g, scale, g < groups)
    made = _rounded(v / scale[:, None], digits, bias, infinity, nan)
    tl.store(codes + i, made.to(tl.uint8), there)


@_jit
def _unpack_floats(  # type: ignore[no-untyped-def]
    scales, codes, out, n, groups, digits: tl.constexpr, bias: tl.constexpr, infinity: tl.constexpr,
    size: tl.constexpr, many: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)
    i = g[:, None] * size + tl.arange(0, size)[None, :]
    scale = tl.load(scales + g, g < groups, other=0.0)
    code = tl.load(codes + i, i < n, other=0).to(tl.int32)
    tl.store(out + i, _widened(code, digits, bias, infinity) * scale[:, None], i < n)


@_jit
def _noise(i, key, other):  # type: ignore[no-untyped-def]
    h = i.to(tl.uint32) ^ key.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = ((h ^ (h >> 15)) + other.to(tl.uint32)) * 0x846CA68B
    return ((h ^ (h >> 16)) >> 8).to(tl.float32) * 5.9604644775390625e-08


@_jit
def _pack_levels(  # type: ignore[no-untyped-def]
    x, least, width, codes, n, groups, key, other, bits: tl.constexpr, tiny: tl.constexpr, per: tl.constexpr,
    size: tl.constexpr, many: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)
    j, there = tl.arange(0, per)[None, :], (g < groups)[:, None]
    low = tl.full((many,), float("inf"), tl.float32)
    high = tl.full((many,), float("-inf"), tl.float32)
    top = tl.zeros((many,), tl.int32)
    for k in tl.static_range(8 // bits):
        i = tl.minimum(g[:, None] * size + k * per + j, n - 1)  # the last fills its group up
        v = tl.load(x + i, there, other=0.0).to(tl.float32)
        low, high = tl.minimum(low, tl.min(v, axis=1)), tl.maximum(high, tl.max(v, axis=1))
        top = tl.maximum(top, tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    wide = tl.maximum(high - low, tiny)
    bad = (top >= 0x7F800000) | (wide == float("inf"))
    tl.store(least + g, tl.where(bad, float("nan"), low), g < groups)
    tl.store(width + g, tl.where(bad, float("nan"), wide), g < groups)
    made = tl.zeros((many, per), tl.int32)
    levels: tl.constexpr = (1 << bits) - 1
    for k in tl.static_range(8 // bits):
        at = g[:, None] * size + k * per + j
        v = tl.load(x + tl.minimum(at, n - 1), there, other=0.0).to(tl.float32)
        level = _noise(at, key, other) + levels * (v - low[:, None]) / wide[:, None]
        # The sum may round up to the level above the last.
        code = tl.minimum(level, levels * 1.0).to(tl.int32)
        made |= tl.where(bad[:, None], 0, code) << (bits * k)
    tl.store(codes + g[:, None] * per + j, made.to(tl.uint8), there)


@_jit
def _unpack_levels(  # type: ignore[no-untyped-def]
    least, width, codes, out, n, groups, bits: tl.constexpr, per: tl.constexpr, size: tl.constexpr,
    many: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)
    j, there = tl.arange(0, per)[None, :], (g < groups)[:, None]
    low = tl.load(least + g, g < groups, other=0.0)[:, None]
    wide = tl.load(width + g, g < groups, other=0.0)[:, None]
    given = tl.load(codes + g[:, None] * per + j, there, other=0).to(tl.int32)
    levels: tl.constexpr = (1 << bits) - 1
    for k in tl.static_range(8 // bits):
        i = g[:, None] * size + k * per + j
        code = ((given >> (bits * k)) & levels).to(tl.float32)
        tl.store(out + i, low + code * (1.0 / levels) * wide, i < n)


@_jit
def _pack_few(  # type: ignore[no-untyped-def]
    x, codes, n, rows, numbers: tl.constexpr, bits: tl.constexpr, whole: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    first = tl.program_id(0).to(tl.int64) * block // whole * whole  # of the chunk
    m = tl.minimum(rows - first, whole)
    words = tl.zeros((block,), tl.uint32)
    for k in tl.static_range(8):
        i = first * 7 + k * m + row
        there = (row < rows) & (i < n)
        v = tl.load(x + i, there, other=0.0).to(tl.float32)
        place = tl.zeros((block,), tl.uint32)
        for b in tl.static_range(len(numbers)):
            place += tl.where(numbers[b] >= v, 0, 1).to(tl.uint32)
        words |= tl.where(there, place, 0).to(tl.uint32) << (bits * k)
    for b in tl.static_range(bits):
        tl.store(codes + row * bits + b, ((words >> (8 * b)) & 255).to(tl.uint8), row < rows)


@_jit
def _unpack_few(  # type: ignore[no-untyped-def]
    codes, out, n, rows, numbers: tl.constexpr, bits: tl.constexpr, whole: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    first = tl.program_id(0).to(tl.int64) * block // whole * whole
    m = tl.minimum(rows - first, whole)
    words = tl.zeros((block,), tl.uint32)
    for b in tl.static_range(bits):
        words |= tl.load(codes + row * bits + b, row < rows, other=0).to(tl.uint32) << (8 * b)
    for k in tl.static_range(8):
        i = first * 7 + k * m + row
        at = ((words >> (bits * k)) & ((1 << bits) - 1)).to(tl.int32)
        v = tl.zeros((block,), tl.float32)
        for b in tl.static_range(len(numbers)):
            v = tl.where(at == b, numbers[b], v)
        tl.store(out + i, v, (row < rows) & (i < n))
