"""The bits beside an output and the derivative from both in torch's own ops: run eagerly, or compiled into one loop.

Elements are 8 × m, bytes planes × m; bit k of a byte belongs to row k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch.nn import functional

from executor.inverted.fits import FITS, half_cell, two_bits
from simulator.levers import invert

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
