"""The largest whole number that gets a yes before the first no, found in few questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

PATIENCE: Final = 4  # guesses by a straight line in a row before the bracket is halved
STRIDE: Final = 4  # from the first probe to the second, when there is no line yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One answer. `excess` says how far over the limit the number is, as a share of it: the line crosses 0 there."""

    fits: bool
    excess: float


def boundary(
    ask: Callable[[int], Verdict],
    *,
    first: int,
    step: int = 1,
    top: int = 1 << 20,
    fits: int = 0,
    fits_excess: float = -1.0,
) -> int:
    """The number whose successor does not fit.

    Args:
        ask: asked at most once for each number.
        first: where to begin, more than `fits`.
        step: all numbers are multiples of it.
        top: the largest number to try.
        fits: known to fit without asking, with `fits_excess`; 0 stands for nothing at all.

    Returns:
        a number b that fits (0: not even `step` does), while b + step does not, or b = top.
    """
    low, high = fits, top + step
    known: dict[int, float] = {fits: fits_excess} if fits else {}
    b, guesses = first, 0
    while True:
        verdict = ask(b)
        known[b] = verdict.excess
        if verdict.fits:
            low = b
        else:
            high = b
        if high - low <= step:
            return low
        guess = _crossing(known, low, high)
        guesses += 1
        if guess is not None and guesses <= PATIENCE and low <= guess < high + step:
            b = int(guess // step) * step
        elif high <= top:
            b, guesses = (low + high) // 2 // step * step, 0
        else:  # everything has fitted so far
            b = STRIDE * low
        b = min(max(b, low + step), high - step)


def _crossing(known: dict[int, float], low: int, high: int) -> float | None:
    """Where the line through the last that fits and the first that does not crosses the limit; None if none does.

    Where only one of these was asked about, the line goes through the two that are nearest to the limit.
    """
    ends = [b for b in (low, high) if b in known]
    if len(ends) < 2:
        ends = sorted(sorted(known, key=lambda b: (abs(known[b]), b))[:2])
    if len(ends) < 2:
        return None
    a, b = ends
    rise = known[b] - known[a]
    return a - known[a] * (b - a) / rise if rise > 0 else None
