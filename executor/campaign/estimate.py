"""Turn the durations of what is done into how long the rest will take."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(slots=True)
class Estimate:
    """Durations of shared steps (traces, eager, keep-all) and of single cases, in seconds."""

    steps: list[float] = field(default_factory=list)
    cases: list[float] = field(default_factory=list)

    def remaining_s(self, steps_left: int, cases_left: int) -> float | None:
        """Mean durations times what is left; None as long as nothing of a kind that is left was seen.

        Counts: the mean of all steps and of all cases. Ignores: that a large model takes longer than a small one.
        """
        if (steps_left and not self.steps) or (cases_left and not self.cases):
            return None
        parts = ((steps_left, self.steps), (cases_left, self.cases))
        return sum(left * statistics.fmean(seen) for left, seen in parts if left)


def show_duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
