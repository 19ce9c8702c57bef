"""Hold what the user allows a planner: a budget as it is typed, time, a seed, and rewrites of the step."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from simulator.kernels import now
from traces.errors import SpecError
from traces.records.plan import APPROXIMATE, EXACT, EXACTNESS, FP

if TYPE_CHECKING:
    from traces.records.gradient_errors import GradientErrors

# Decimal and binary units as IEC 80000-13 writes them; a bare K, M, G or T is binary, as memory usually is.
UNITS: Final = {
    "": 1,
    "b": 1,
    **{p + of: n**k for k, p in enumerate("kmgt", 1) for of, n in (("b", 1000), ("ib", 1024), ("", 1024))},
}
SIZES: Final = "give bytes (8589934592), a size (8GiB, 8GB, 512MiB)"
BUDGET: Final = "budget"
MOST_BYTES: Final = 1 << 62  # what is more is no limit, and does not fit 64 bits
_NUMBER: Final = re.compile(r"([+-]?(?:\d{1,400}(?:\.\d{,400})?|\.\d{1,400}))\s*([a-zA-Z%]*)", re.ASCII)


def parse_budget(text: str, saved_peak_bytes: int = 1 << 60, what: str = BUDGET) -> int:
    """The budget in bytes, rounded down, at most `MOST_BYTES`: of bytes, a size with a unit, or a percentage of
    `saved_peak_bytes` (without it, of any trace), which may exceed 100 and is offered of a budget alone. Raises
    SpecError: the text is none."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How a planner may look for a plan.

    `seconds`: after about so much processor time a planner that searches stops improving and returns the best plan so
    far; the others end by themselves. `seed`: of random choices; for one seed a plan depends on the machine only if the
    time ran out.
    """

    seconds: float = 5.0
    seed: int = 0
    until: float = math.inf  # of `now`: no later than that, however many seconds are left
    # A plan whose step takes no longer will do, and a refusal is not explained; 0: the best plan.
    enough_ns: int = 0
    hasty: bool = False  # take the first such plan as it is

    def started(self) -> Limits:
        """Return the same for all plans together, which take no more than `seconds` from now on, or `until` then."""
        return replace(self, until=min(now() + self.seconds, self.until))

    @property
    def over(self) -> bool:
        """Whether a planner has to stop."""
        return now() >= self.until


DEFAULTS: Final = Limits()
HOST_BYTES: Final = 32 << 30
ALLOW: Final = {"bit": EXACT, "fp": FP, "approximate": APPROXIMATE}  # as the user says it


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """Which rewrites of the step a plan may take, beside what it recomputes."""

    allow: str = "bit"  # of ALLOW: gradients equal in every bit, but for rounding, or within a measured error
    # Of `simulator.levers.LEVERS`; None: all of `UNASKED`, and what `errors` were measured of.
    kinds: tuple[str, ...] | None = None
    host_bytes: int = HOST_BYTES  # of pinned host memory, for copies
    host_bytes_per_s: int = 0  # of copies, either way; 0: what the device table has
    errors: GradientErrors | None = None  # of approximate kinds, which no plan takes without
    max_gradient_error: float | None = None  # of a plan's rewrites together, relative L2

    def __post_init__(self) -> None:
        if self.allow not in ALLOW:
            raise SpecError(f"--allow {self.allow}: give one of {', '.join(ALLOW)}.")
        if self.allow != "approximate" and (self.errors or self.max_gradient_error is not None):
            raise SpecError("errors of gradients are of plans with --allow approximate.")
        if self.max_gradient_error is not None and not 0 < self.max_gradient_error < math.inf:
            raise SpecError(f"--max-gradient-error {self.max_gradient_error:g}: give a share such as 0.01.")

    def allows(self, exactness: str) -> bool:
        """Return whether gradients may be so far from the untouched step's."""
        return EXACTNESS.index(exactness) <= EXACTNESS.index(ALLOW[self.allow])


BIT_EXACT: Final = Levers()
