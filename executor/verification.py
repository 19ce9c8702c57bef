"""What verifying a plan finds: whether training with it gives what training without it does."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome: `bit_equal` means every bit of every tensor after every step.

    `equal` is the verdict: equal in every value (0 and -0 are, and one NaN and another), or within the noise of an
    untouched model that differs from itself.
    """

    equal: bool
    bit_equal: bool
    steps: int
    max_abs_difference: dict[str, float] = field(default_factory=dict)  # by kind; NaN against NaN is equal
    first_difference: str = ""  # where the first bit differed
    losses: tuple[float, ...] = ()
    first_step_relative: float = 0.0  # of the first step: largest difference / largest value, by kind
    gradient_error: float = 0.0  # of the first step: relative L2 of the whole gradient
    note: str = ""  # how the verdict was reached, where it was not at the first comparison
    # Eager against itself; empty: not needed.
    control_difference: dict[str, float] = field(default_factory=dict)
