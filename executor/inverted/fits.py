"""Coefficients: each activation's derivative as a function of its output, on either side of its minimum.

They are least squares fits, in double precision, with weights that are raised where the error is large (Lawson) and a
denominator from the round before (Sanathanan and Koerner). Right of the minimum, s = sqrt(y - y_min) removes the fold,
and f' = s * over(s - middle) / under(s - middle); left of it u = sqrt(-log(y / y_min)) grows like the input, and
f' = y / y_min * left(u).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp
from typing import Final

from simulator.levers.invert import DIGITS, TWO_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One activation's coefficients, lowest power first.

    `y_top` is the output from which on the derivative is taken to be constant. `error` is the largest absolute error of
    f' in exact arithmetic. What is measured is larger, since y is rounded and its slope is 0 at the minimum: against
    float64, relative L2 for inputs from N(0, 1), at most 4e-6 in float32, 7e-4 in float16, 3e-3 in bfloat16 (of which
    1.9e-3 is the rounding of the result, which torch's own has, too). There no function of GELU's y and the one bit is
    better than 2.8e-3; of SiLU's it would be 3.0e-3, so SiLU has a second bit.
    """

    x_min: float
    y_min: float
    y_top: float
    middle: float
    over: tuple[float, ...]
    under: tuple[float, ...]
    left: tuple[float, ...]
    error: float


# fmt: off
FITS: Final[dict[str, Fit]] = {
    "gelu": Fit(
        x_min=-0.7517915246935645, y_min=-0.16997120747990369, y_top=5.5, middle=1.19,
        over=(0.94819993, -1.8944444, 2.3300425, -0.28520352, -0.37208307, 0.74132252, -0.029410202),
        under=(1, -1.1987732, 1.7168398, 0.12639716, 0.52740616, 0.59896648, 0.27783903, 0.10134906),
        left=(-4.9324458e-07, -0.38294627, 0.20322831, -0.17851912, 0.11537115, -0.055112167, 0.018074594,
            -0.0035402079, 0.0003058664),
        error=8.4e-07,
    ),
    "gelu_tanh": Fit(
        x_min=-0.7524614220710162, y_min=-0.17004075057125406, y_top=5.2, middle=1.16,
        over=(0.97065236, -2.1821334, 2.5106794, -0.51161376, -0.59943898, 0.72893497, -0.087845724),
        under=(1, -1.4845633, 1.7186495, -0.22203198, 0.23982263, 0.34381867, 0.13012904, 0.065269538),
        left=(-2.9859322e-07, -0.38255508, 0.20364671, -0.18025406, 0.11680997, -0.058981666, 0.019589199,
            -0.0036879109, 0.00029770769),
        error=6.3e-07,
    ),
    "silu": Fit(
        x_min=-1.278464542761074, y_min=-0.2784645427610738, y_top=16.0, middle=2.02,
        over=(0.52310327, 0.34718433, 0.58724709, 0.31531759, 0.12440987, 0.040950722, 0.0033530451),
        under=(1, 1.28232, 1.5738018, 1.1430275, 0.60200672, 0.20809993, 0.04349332, 0.0041514399),
        left=(-4.1796767e-07, -0.34825506, 0.24950878, -0.15959491, 0.11626645, -0.070688594, 0.027127255,
            -0.005660674, 0.00049037964),
        error=4.2e-07,
    ),
}
# fmt: on


def half_cell(kind: str, digits: int) -> float:
    """By how much outputs around the minimum are rounded at most, in a type of so many binary digits; where an element
    has two bits, half of that, since one says in what half of the cell the output lies."""
    half = 2.0 ** (frexp(FITS[kind].y_min)[1] - digits - 1)
    return half / 2 if two_bits(kind, digits) else half


def two_bits(kind: str, digits: int) -> bool:
    """True if a second bit an element says in what half of its cell an output lies: without it gradients would be off
    by more than 3e-3."""
    return digits == DIGITS["bfloat16"] and kind in TWO_BITS
