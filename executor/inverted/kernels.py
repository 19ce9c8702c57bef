"""One kernel each way for CUDA, in Triton: activation and side bits, and the gradient from the output.

Imported only where there is a CUDA tensor, or to test it in Triton's interpreter. A program takes BLOCK bytes of the
side, with the 8 × BLOCK elements whose bits they hold. All arithmetic is in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from executor.inverted.fits import FITS, X_MIN, half_cell, two_bits
from executor.inverted.formulas import DIGITS, LOWER, TINY

try:
    import triton
    import triton.language as tl
except ImportError:  # no kernel can be launched, but the module can be looked at
    triton = None

BLOCK = 512


def _jit(function: Any) -> Any:
    return triton.jit(function) if triton else function


@_jit
def _activation(v, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    if kind == "gelu":
        y = 0.5 * v * (1 + tl.erf(v * 0.7071067811865476))
    elif kind == "gelu_tanh":
        y = v / (1 + tl.exp(-1.5957691216057308 * (v + 0.044715 * v * v * v)))
    elif kind == "silu":
        y = v / (1 + tl.exp(-v))
    elif kind == "mish":
        e = tl.exp(tl.minimum(v, 20.0))
        y = v * ((e * (e + 2)) / (e * (e + 2) + 2))
    elif kind == "quick_gelu":
        y = v / (1 + tl.exp(-1.702 * v))
    else:
        y = v * tl.minimum(tl.maximum(v + 3, 0.0), 6.0) / 6
    return y


@_jit
def _forward(  # type: ignore[no-untyped-def]
    x, y, side, n, m, x_min: tl.constexpr, kind: tl.constexpr, with_y: tl.constexpr, two: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    left = tl.zeros((block,), tl.int32)
    up = tl.zeros((block,), tl.int32)
    for k in tl.static_range(8):
        i = k * m + j
        there = (j < m) & (i < n)
        v = tl.load(x + i, there, other=0.0).to(tl.float32)
        left |= (v < x_min).to(tl.int32) << k
        if with_y or two:
            value = _activation(v, kind)
            rounded = value.to(x.dtype.element_ty)
            if with_y:
                tl.store(y + i, rounded, there)
            if two:
                up |= (tl.abs(value) >= tl.abs(rounded.to(tl.float32))).to(tl.int32) << k
    tl.store(side + j, left.to(tl.uint8), j < m)
    if two:
        tl.store(side + m + j, up.to(tl.uint8), j < m)


@_jit
def _horner(c: tl.constexpr, t):  # type: ignore[no-untyped-def]
    value = t * c[len(c) - 1] + c[len(c) - 2]
    for k in tl.static_range(len(c) - 2):
        value = value * t + c[len(c) - 3 - k]
    return value


@_jit
def _slope(  # type: ignore[no-untyped-def]
    y, left, half: tl.constexpr, lower: tl.constexpr, scale: tl.constexpr, top: tl.constexpr, y_min: tl.constexpr,
    tiny: tl.constexpr, middle: tl.constexpr, over: tl.constexpr, under: tl.constexpr, falling: tl.constexpr,
):  # fmt: skip
    y = y * scale
    height = tl.minimum(tl.maximum(y - y_min, -half), top - y_min)
    height = tl.maximum(height - lower * half, (height + half) / 4)
    s = tl.sqrt(height)
    if len(over) == 0:  # a parabola
        root = s * 0.8164965809277260
        falls = tl.where(y < 0, -root, 0.0)
        rises = tl.where(y >= 3, 1.0, root)
    else:
        share = height * (1 / y_min) + 1
        share = tl.where(share > tiny, share, tiny)
        share = tl.where(y != y, tiny, share)
        falls = share * _horner(falling, tl.sqrt(tl.maximum(-tl.log(share), 0.0)))
        rises = s * _horner(over, s - middle) / _horner(under, s - middle)
    return tl.where(left, falls, tl.where(y != y, y, rises))  # minimum and maximum may lose a NaN


@_jit
def _backward(  # type: ignore[no-untyped-def]
    grad, y, side, out, n, m, two: tl.constexpr, half: tl.constexpr, lower: tl.constexpr, scale: tl.constexpr,
    top: tl.constexpr, y_min: tl.constexpr, tiny: tl.constexpr, middle: tl.constexpr, over: tl.constexpr,
    under: tl.constexpr, falling: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    left = tl.load(side + j, j < m, other=0).to(tl.int32)
    up = tl.load(side + m + j, j < m, other=0).to(tl.int32) if two else left
    for k in tl.static_range(8):
        i = k * m + j
        there = (j < m) & (i < n)
        v = tl.load(y + i, there, other=0.0).to(tl.float32)
        if two:
            v = v * tl.where(((up >> k) & 1) != 0, 1 - half / y_min, 1 + half / y_min)
        below = ((left >> k) & 1) != 0
        slope = _slope(v, below, half, lower, scale, top, y_min, tiny, middle, over, under, falling)
        tl.store(out + i, tl.load(grad + i, there, other=0.0).to(tl.float32) * slope, there)


def constants(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel of backward is specialized on."""
    fit = FITS[kind]
    return {
        "two": two_bits(kind, DIGITS[dtype]),
        "half": half_cell(kind, DIGITS[dtype]),
        "lower": LOWER,
        "scale": fit.scale,
        "top": fit.y_top,
        "y_min": fit.y_min,
        "tiny": TINY,
        "middle": fit.middle,
        "over": fit.over,
        "under": fit.under,
        "falling": fit.left,
        "block": BLOCK,
    }


def forward(x: torch.Tensor, kind: str, with_output: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation of a dense x (x itself where its output is not wanted), and its side bits."""
    m = (x.numel() + 7) // 8
    y = torch.empty_like(x) if with_output else x
    two = two_bits(kind, DIGITS[x.dtype])
    side = x.new_empty((m * (1 + two),), dtype=torch.uint8)
    with torch.cuda.device_of(x):
        if m:
            of = {"x_min": X_MIN[kind], "kind": kind, "with_y": with_output, "two": two, "block": BLOCK}
            _forward[(-(-m // BLOCK),)](x, y, side, x.numel(), m, **of)
    return y, side


def backward(grad: torch.Tensor, y: torch.Tensor, side: torch.Tensor, kind: str) -> torch.Tensor:
    """The gradient, laid out as y, which is dense; a `grad` that lies otherwise is laid into it first."""
    out = torch.empty_like(y)
    grad = grad if grad.stride() == y.stride() else out.copy_(grad)
    with torch.cuda.device_of(y):
        if m := (y.numel() + 7) // 8:
            _backward[(-(-m // BLOCK),)](grad, y, side, out, y.numel(), m, **constants(kind, y.dtype))
    return out
