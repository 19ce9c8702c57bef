"""The side bits and the derivative from the output in torch's own ops: run eagerly, or compiled into one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch.nn import functional

from executor.inverted.fits import FITS, X_MIN, least_output

# y in the exact bits that torch's own module gives.
FORWARD: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "mish": functional.mish,
    "hardswish": functional.hardswish,
}
DIGITS: Final = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # of the mantissa
TINY: Final = 1e-37  # the least share of y_min that is told from 0


def pack(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The eight rows of x, 8 × m, as m bytes: bit k is set where row k lies left of the function's minimum."""
    bits = [(row.float() < X_MIN[kind]).to(torch.int32) << k for k, row in enumerate(x.unbind())]
    while len(bits) > 1:
        bits = [a | b for a, b in zip(bits[::2], bits[1::2], strict=True)]
    return bits[0].to(torch.uint8)


def gradient(grad: torch.Tensor, y: torch.Tensor, side: torch.Tensor, kind: str) -> torch.Tensor:
    """grad * f'(x) in grad's type, from y = f(x), both 8 × m, and the m bytes of `pack`."""
    # As int32: shifts of bytes are not vectorized.
    shifts = torch.arange(8, dtype=torch.int32, device=y.device)[:, None]
    left = ((side.to(torch.int32) >> shifts) & 1) != 0
    return (grad.float() * slope(y.float(), left, kind, least_output(kind, DIGITS[y.dtype]))).to(grad.dtype)


def slope(y: torch.Tensor, left: torch.Tensor, kind: str, least: float) -> torch.Tensor:
    """f'(x) in y's type; NaN where y is, but for left of the minimum, where an input of -inf made it and f' is 0."""
    if kind == "hardswish":
        root = torch.sqrt(6 * torch.clamp(y, min=least) + 2.25) / 3
        return torch.where(left, torch.where(y < 0, -root, 0.0), torch.where(y >= 3, 1.0, root))
    fit = FITS[kind]
    y = torch.clamp(y, least, fit.y_top)
    share = y * (1 / fit.y_min)
    share = torch.where(share > TINY, share, TINY)
    u = torch.sqrt(torch.clamp(-torch.log(share), min=0))
    s = torch.sqrt(y - fit.y_min)
    t = s - fit.middle
    return torch.where(left, share * horner(fit.left, u), s * horner(fit.over, t) / horner(fit.under, t))


def horner(coefficients: Sequence[float], t: torch.Tensor) -> torch.Tensor:
    """The polynomial at t, lowest power first."""
    value = t * coefficients[-1] + coefficients[-2]
    for c in coefficients[-3::-1]:
        value = value * t + c
    return value
