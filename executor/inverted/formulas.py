"""The bits beside an output and the derivative from both in torch's own ops: run eagerly, or compiled into one loop.

Elements are 8 × m, bytes planes × m; bit k of a byte belongs to row k. The coefficients are least squares fits, in
double precision, with weights that are raised where the error is large (Lawson) and a denominator from the round before
(Sanathanan and Koerner). Right of the minimum, s = sqrt(y - y_min) removes the fold, and f' = s * over(s - middle) /
under(s - middle); left of it u = sqrt(-log(y / y_min)) grows like the input, and f' = y / y_min * left(u).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import frexp
from typing import Final

import torch
from torch.nn import functional

from simulator.levers import invert


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One activation's coefficients, lowest power first; from `y_top` on the derivative is taken to be constant.

    Against float64, relative L2 for inputs from N(0, 1), f' is off by at most 4e-6 in float32, 7e-4 in float16, 3e-3 in
    bfloat16 (of which 1.9e-3 is the rounding of the result). There no function of GELU's y and the one bit is better
    than 2.8e-3; of SiLU's it would be 3.0e-3, so SiLU has a second bit.
    """

    x_min: float
    y_min: float
    y_top: float
    middle: float
    over: tuple[float, ...]
    under: tuple[float, ...]
    left: tuple[float, ...]


# fmt: off
FITS: Final[dict[str, Fit]] = {
    "gelu": Fit(
        x_min=-0.7517915246935645, y_min=-0.16997120747990369, y_top=5.5, middle=1.19,
        over=(0.94819993, -1.8944444, 2.3300425, -0.28520352, -0.37208307, 0.74132252, -0.029410202),
        under=(1, -1.1987732, 1.7168398, 0.12639716, 0.52740616, 0.59896648, 0.27783903, 0.10134906),
        left=(-4.9324458e-07, -0.38294627, 0.20322831, -0.17851912, 0.11537115, -0.055112167, 0.018074594,
            -0.0035402079, 0.0003058664),
    ),
    "gelu_tanh": Fit(
        x_min=-0.7524614220710162, y_min=-0.17004075057125406, y_top=5.2, middle=1.16,
        over=(0.97065236, -2.1821334, 2.5106794, -0.51161376, -0.59943898, 0.72893497, -0.087845724),
        under=(1, -1.4845633, 1.7186495, -0.22203198, 0.23982263, 0.34381867, 0.13012904, 0.065269538),
        left=(-2.9859322e-07, -0.38255508, 0.20364671, -0.18025406, 0.11680997, -0.058981666, 0.019589199,
            -0.0036879109, 0.00029770769),
    ),
    "silu": Fit(
        x_min=-1.278464542761074, y_min=-0.2784645427610738, y_top=16.0, middle=2.02,
        over=(0.52310327, 0.34718433, 0.58724709, 0.31531759, 0.12440987, 0.040950722, 0.0033530451),
        under=(1, 1.28232, 1.5738018, 1.1430275, 0.60200672, 0.20809993, 0.04349332, 0.0041514399),
        left=(-4.1796767e-07, -0.34825506, 0.24950878, -0.15959491, 0.11626645, -0.070688594, 0.027127255,
            -0.005660674, 0.00049037964),
    ),
}
# fmt: on
# y in the exact bits that torch's own module gives.
FORWARD: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
DIGITS: Final = {getattr(torch, name): digits for name, digits in invert.DIGITS.items()}  # of the mantissa
# Of half a cell: the root's mean over a cell beside the minimum's is that much below its middle.
LOWER: Final = 0.3
TINY: Final = 1e-37  # the least share of y_min that is told from 0


def half_cell(kind: str, digits: int) -> float:
    """By how much outputs around the minimum are rounded at most; a second bit says in what half of that they lie."""
    half = 2.0 ** (frexp(FITS[kind].y_min)[1] - digits - 1)
    return half / 2 if two_bits(kind, digits) else half


def two_bits(kind: str, digits: int) -> bool:
    """True if a second bit an element says in what half of its cell an output lies."""
    return digits == invert.DIGITS["bfloat16"] and kind in invert.TWO_BITS


def pack(x: torch.Tensor, kind: str) -> torch.Tensor:
    """One bit where x lies left of the function's minimum; in a second plane, where there is one, one bit where its
    output is no nearer to 0 than what it was rounded to."""
    wide = x.float()
    planes = [wide < FITS[kind].x_min]
    if two_bits(kind, DIGITS[x.dtype]):
        y = FORWARD[kind](wide)
        planes.append(y.abs() >= y.to(x.dtype).float().abs())
    return torch.cat([_bytes(plane) for plane in planes])


def _bytes(plane: torch.Tensor) -> torch.Tensor:
    bits = [row.to(torch.int32) << k for k, row in enumerate(plane.unbind())]
    while len(bits) > 1:
        bits = [a | b for a, b in zip(bits[::2], bits[1::2], strict=True)]
    return bits[0].to(torch.uint8)


def gradient(grad: torch.Tensor, y: torch.Tensor, side: torch.Tensor, kind: str) -> torch.Tensor:
    """grad * f'(x) in grad's type, from y = f(x) and what `pack` made of x."""
    # As int32: shifts of bytes are not vectorized.
    shifts = torch.arange(8, dtype=torch.int32, device=y.device)[:, None]
    digits, wide = DIGITS[y.dtype], y.float()
    planes = side.view(1 + two_bits(kind, digits), -1)
    left, *up = (((plane.to(torch.int32) >> shifts) & 1) != 0 for plane in planes.unbind())
    if up:
        share = half_cell(kind, digits) / -FITS[kind].y_min
        wide = wide * torch.where(up[0], 1 + share, 1 - share)
    return (grad.float() * slope(wide, left, kind, half_cell(kind, digits))).to(grad.dtype)


def derivative(y: torch.Tensor, side: torch.Tensor, kind: str) -> torch.Tensor:
    """f'(x) in y's type."""
    return gradient(y.new_ones(()), y, side, kind)


def slope(y: torch.Tensor, left: torch.Tensor, kind: str, half: float) -> torch.Tensor:
    """f'(x) in y's type; NaN where y is, but for left of the minimum, where an input of -inf made it and f' is 0.

    y stands for a cell of outputs, `half` above and below but not below the minimum, over which the root of the height
    is even: it is taken at its mean, or nearly so.
    """
    fit = FITS[kind]
    height = torch.clamp(y - fit.y_min, -half, fit.y_top - fit.y_min)
    height = torch.maximum(height - LOWER * half, (height + half) / 4)
    s = torch.sqrt(height)
    share = height * (1 / fit.y_min) + 1
    share = torch.where(share > TINY, share, TINY)
    u = torch.sqrt(torch.clamp(-torch.log(share), min=0))
    t = s - fit.middle
    return torch.where(left, share * horner(fit.left, u), s * horner(fit.over, t) / horner(fit.under, t))


def horner(coefficients: Sequence[float], t: torch.Tensor) -> torch.Tensor:
    """The polynomial at t, lowest power first."""
    value = t * coefficients[-1] + coefficients[-2]
    for c in coefficients[-3::-1]:
        value = value * t + c
    return value
