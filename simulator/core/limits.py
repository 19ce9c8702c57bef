"""Hold what the user allows a planner: time, a seed, and what no plan may do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from simulator.kernels.clock import now
from traces.errors import SpecError
from traces.records.plan import APPROXIMATE, EXACT, EXACTNESS, FP

if TYPE_CHECKING:
    from traces.records.gradient_errors import GradientErrors


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The things that no plan may do, as selectors of ops (`module glob :: op glob`).

    `never`: these ops do not run again. `always_save`: what these ops make is saved.
    """

    never: tuple[str, ...] = ()
    always_save: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.never or self.always_save)

    def to_json(self) -> dict[str, Any]:
        """Return them as a plan records them; those that are not given are left out."""
        out: dict[str, Any] = {}
        if self.never:
            out["never"] = list(self.never)
        if self.always_save:
            out["always_keep"] = list(self.always_save)
        return out


NONE: Final = Constraints()


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

    def clock(self) -> Clock:
        """A clock that starts now and runs for `seconds`, or `until` then."""
        return Clock(deadline=min(now() + self.seconds, self.until))

    def together(self) -> Limits:
        """Return the same for several plans, which all together take no more than `seconds` from now on."""
        return replace(self, until=self.clock().deadline)


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
            raise SpecError(
                f"--max-gradient-error {self.max_gradient_error:g}: give a share of the gradient such as 0.01."
            )

    def allows(self, exactness: str) -> bool:
        """Return whether gradients may be so far from the untouched step's."""
        return EXACTNESS.index(exactness) <= EXACTNESS.index(ALLOW[self.allow])


BIT_EXACT: Final = Levers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When a planner has to stop."""

    deadline: float  # of `now`

    @property
    def over(self) -> bool:
        return now() >= self.deadline
