"""One kernel each way for CUDA, in Triton: activation and side bits, and the gradient from the output.

Imported only where there is a CUDA tensor, or to test it in Triton's interpreter. A program takes BLOCK bytes of the
side, with the 8 × BLOCK elements whose bits they hold. All arithmetic is in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from executor.inverted.fits import FITS, X_MIN, least_output
from executor.inverted.formulas import DIGITS, TINY

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
    else:
        y = v * tl.minimum(tl.maximum(v + 3, 0.0), 6.0) / 6
    return y


@_jit
def _forward(  # type: ignore[no-untyped-def]
    x, y, side, n, m, x_min: tl.constexpr, kind: tl.constexpr, with_y: tl.constexpr, block: tl.constexpr
):
    j = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    byte = tl.zeros((block,), tl.int32)
    for k in tl.static_range(8):
        i = k * m + j
        there = (j < m) & (i < n)
        v = tl.load(x + i, there, other=0.0).to(tl.float32)
        byte |= (v < x_min).to(tl.int32) << k
        if with_y:
            tl.store(y + i, _activation(v, kind), there)
    tl.store(side + j, byte.to(tl.uint8), j < m)


@_jit
def _horner(c: tl.constexpr, t):  # type: ignore[no-untyped-def]
    value = t * c[len(c) - 1] + c[len(c) - 2]
    for k in tl.static_range(len(c) - 2):
        value = value * t + c[len(c) - 3 - k]
    return value


@_jit
def _slope(  # type: ignore[no-untyped-def]
    y, left, least: tl.constexpr, top: tl.constexpr, y_min: tl.constexpr, tiny: tl.constexpr, middle: tl.constexpr,
    over: tl.constexpr, under: tl.constexpr, falling: tl.constexpr,
):  # fmt: skip
    inside = tl.minimum(tl.maximum(y, least), top)
    share = inside * (1 / y_min)
    share = tl.where(share > tiny, share, tiny)
    share = tl.where(y != y, tiny, share)
    s = tl.sqrt(inside - y_min)
    right = s * _horner(over, s - middle) / _horner(under, s - middle)
    right = tl.where(y != y, y, right)  # minimum and maximum may lose a NaN
    return tl.where(left, share * _horner(falling, tl.sqrt(tl.maximum(-tl.log(share), 0.0))), right)


@_jit
def _parabola(y, left, least: tl.constexpr):  # type: ignore[no-untyped-def]
    root = tl.sqrt(6 * tl.maximum(y, least) + 2.25) / 3
    right = tl.where(y != y, y, tl.where(y >= 3, 1.0, root))
    return tl.where(left, tl.where(y < 0, -root, 0.0), right)


@_jit
def _backward(  # type: ignore[no-untyped-def]
    grad, y, side, out, n, m, fitted: tl.constexpr, least: tl.constexpr, top: tl.constexpr, y_min: tl.constexpr,
    tiny: tl.constexpr, middle: tl.constexpr, over: tl.constexpr, under: tl.constexpr, falling: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    byte = tl.load(side + j, j < m, other=0).to(tl.int32)
    for k in tl.static_range(8):
        i = k * m + j
        there = (j < m) & (i < n)
        v = tl.load(y + i, there, other=0.0).to(tl.float32)
        left = ((byte >> k) & 1) != 0
        slope = (
            _slope(v, left, least, top, y_min, tiny, middle, over, under, falling)
            if fitted
            else _parabola(v, left, least)
        )
        tl.store(out + i, tl.load(grad + i, there, other=0.0).to(tl.float32) * slope, there)


def constants(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel of backward is specialized on."""
    fit = FITS.get(kind)
    return {
        "fitted": fit is not None,
        "least": least_output(kind, DIGITS[dtype]),
        "top": fit.y_top if fit else 0.0,
        "y_min": fit.y_min if fit else 0.0,
        "tiny": TINY,
        "middle": fit.middle if fit else 0.0,
        "over": fit.over if fit else (),
        "under": fit.under if fit else (),
        "falling": fit.left if fit else (),
        "block": BLOCK,
    }


def forward(x: torch.Tensor, kind: str, with_output: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation of a dense x (x itself where its output is not wanted), and its side bits."""
    m = (x.numel() + 7) // 8
    y = torch.empty_like(x) if with_output else x
    side = x.new_empty((m,), dtype=torch.uint8)
    with torch.cuda.device_of(x):
        if m:
            grid = (-(-m // BLOCK),)
            _forward[grid](
                x, y, side, x.numel(), m, x_min=X_MIN[kind], kind=kind, with_y=with_output, block=BLOCK
            )
    return y, side


def backward(grad: torch.Tensor, y: torch.Tensor, side: torch.Tensor, kind: str) -> torch.Tensor:
    """The gradient, laid out as y and grad are, which are dense."""
    out = torch.empty_like(y)
    with torch.cuda.device_of(y):
        if m := side.numel():
            _backward[(-(-m // BLOCK),)](grad, y, side, out, y.numel(), m, **constants(kind, y.dtype))
    return out
