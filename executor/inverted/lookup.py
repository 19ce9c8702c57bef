"""bfloat16 on the CPU: side bits and derivatives of the 65,536 inputs and outputs that there are, looked up in tables.

The tables hold what `formulas` gives, so that the values are the same.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Final

import numpy as np
import torch

from executor.inverted import formulas
from executor.inverted.fits import two_bits
from executor.loops import bits_of, over
from simulator.kernels.compiled import compiled

BLOCK: Final = 4096  # bytes of the side, which are read eight times, once for each bit


def side(x: torch.Tensor, kind: str) -> torch.Tensor:
    """What `ops.side` makes of a dense tensor, where there are two bits an element."""
    m = (x.numel() + 7) // 8
    made = torch.empty(2 * m, dtype=torch.uint8)
    over(partial(_pack, bits_of(x), _codes(kind), bits_of(made)), m, x.numel())
    return made


def gradient(grad: torch.Tensor, y: torch.Tensor, side: torch.Tensor, kind: str) -> torch.Tensor:
    """The gradient, laid out as y is, which is dense."""
    out = torch.empty_like(y)
    if grad.stride() != y.stride():
        grad = out.copy_(grad)  # each number is read before it is written
    given = (bits_of(grad), bits_of(y), bits_of(side), _slopes(kind), bits_of(out))
    over(partial(_scale, *given), (y.numel() + 7) // 8, y.numel())
    return out


def _every() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


@cache
def _codes(kind: str) -> np.ndarray:
    """By an input's bits: the bit of each plane, the first lowest."""
    planes = formulas.pack(_every().view(8, -1), kind).view(2, 1, -1).to(torch.int32)
    left, up = (planes >> torch.arange(8)[:, None]) & 1
    return bits_of((left + 2 * up).to(torch.uint8)).copy()  # in memory that torch does not count


@cache
def _slopes(kind: str) -> np.ndarray:
    """By an output's bits times four, plus the planes' bits: the derivative, in float32."""
    y = _every().repeat_interleave(4).view(8, -1)
    # Columns have the codes in turn, in every row.
    planes = [255 * (torch.arange(y.shape[1]) >> k & 1) for k in range(1 + two_bits(kind, 8))]
    made = formulas.gradient(torch.ones(y.shape), y, torch.cat(planes).to(torch.uint8), kind)
    # Rounding leaves this one a NaN; others have bits that it would carry over.
    made[made.isnan()] = torch.nan
    return bits_of(made).view(np.float32).copy()


@compiled
def _pack(x: np.ndarray, codes: np.ndarray, side: np.ndarray, begin: int, end: int) -> None:
    n, m = len(x), len(side) // 2
    for a in range(begin, end, BLOCK):
        b = min(a + BLOCK, end)
        left, up = side[a:b], side[m + a : m + b]
        for k in range(8):
            inputs = x[k * m + a : min(k * m + b, n)]
            if k == 0:
                left[:] = 0
                up[:] = 0
            for j in range(len(inputs)):
                code = codes[inputs[j]]
                left[j] |= (code & 1) << k
                up[j] |= (code >> 1) << k


@compiled
def _scale(
    grad: np.ndarray,
    y: np.ndarray,
    side: np.ndarray,
    slopes: np.ndarray,
    out: np.ndarray,
    begin: int,
    end: int,
) -> None:
    n, m = len(y), (len(y) + 7) // 8
    one, two, half, top = np.uint32(1), np.uint32(2), np.uint32(16), np.uint32(0x7FFF)
    for a in range(begin, end, BLOCK):
        b = min(a + BLOCK, end)
        left = side[a:b]
        up = side[m + a : m + b] if len(side) > m else left
        for k in range(8):
            # Slices, whose numbers are from 0 on: numba looks no more for others.
            first, last, shift = k * m + a, min(k * m + b, n), np.uint32(k)
            grads, outputs, made = grad[first:last], y[first:last], out[first:last]
            for j in range(len(made)):
                bits = (np.uint32(left[j]) >> shift) & one | (((np.uint32(up[j]) >> shift) & one) << one)
                wide = np.uint32(np.uint32(grads[j]) << half).view(np.float32)
                value = np.float32(wide * slopes[np.uint32(outputs[j]) << two | bits]).view(np.uint32)
                made[j] = (value + top + ((value >> half) & one)) >> half  # to nearest, ties to even
