"""Read a budget as a user types it: bytes, a size, or a share of the step's own peak."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from traces.errors import SpecError

# Decimal and binary units as IEC 80000-13 writes them; a bare K, M, G or T is binary, as memory usually is.
UNITS: Final = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**k for k, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**k for k, p in enumerate("kmgt", 1)},
    **{p: 1024**k for k, p in enumerate("kmgt", 1)},
}
SIZES: Final = "give bytes (8589934592), a size (8GiB, 8GB, 512MiB)"
BUDGET: Final = "budget"
MOST_BYTES: Final = 1 << 62  # what is more is no limit, and does not fit 64 bits
_NUMBER: Final = re.compile(r"([+-]?(?:\d{1,400}(?:\.\d{,400})?|\.\d{1,400}))\s*([a-zA-Z%]*)", re.ASCII)


def parse_budget(text: str, saved_peak_bytes: int, what: str = BUDGET) -> int:
    """The budget in bytes, rounded down, at most `MOST_BYTES`.

    Args:
        text: bytes, a size with a unit, or a percentage, which may exceed 100.
        saved_peak_bytes: what 100 % stands for.
        what: an error is about; a share is offered of a budget alone.

    Raises:
        SpecError: the text is no budget, or it is less than one byte.
    """
    meaning = f"{SIZES}, or a share of the step's own peak (60%)" if what == BUDGET else SIZES
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"{what} {text!r} is not a number of bytes; {meaning}.")
    number, unit = Fraction(match[1]), match[2]
    if number <= 0:
        raise SpecError(f"{what} {text!r} is not more than zero; {meaning}.")
    if unit == "%":
        budget_bytes = int(number * saved_peak_bytes / 100)
    elif unit.lower() in UNITS:
        budget_bytes = int(number * UNITS[unit.lower()])
    else:
        raise SpecError(f"{what} {text!r} has the unknown unit {unit!r}; {meaning}.")
    if budget_bytes < 1:
        hint = f" (did you mean {100 * float(number):g}%?)" if not unit else ""
        raise SpecError(f"{what} {text!r} is less than one byte{hint}; {meaning}.")
    return min(budget_bytes, MOST_BYTES)


def check_budget(text: str) -> None:
    """Raise SpecError if the text cannot be a budget for any trace; needs no trace."""
    parse_budget(text, 1 << 60)
