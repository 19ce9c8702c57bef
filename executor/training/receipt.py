"""Count what a planned model did so far: steps with and without its plan, how graphs fit, the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from traces.records.plan import Plan
from traces.units import show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureNote:
    """One graph that serves calls."""

    fit: str  # "exact", "resized", "with all values saved" or "replanned"
    steps: int  # that it served
    seconds: float  # that compiling it by the plan took


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The training calls of a planned model so far; evaluation does not count."""

    plan: Plan | None  # None: each part is planned to its share
    planned_steps: int
    unplanned_steps: int
    unplanned_because: Mapping[str, int]  # why, and how many
    captures: tuple[CaptureNote, ...]
    breaks: tuple[str, ...] = ()  # why a graph ended before the model did, where parts are planned
    # The highest of the process so far, by CUDA's allocator; None on a CPU, where nobody counts.
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None

    def __str__(self) -> str:
        peak = "not counted on a CPU"
        if self.peak_allocated_bytes is not None:
            peak = f"{show_bytes(self.peak_allocated_bytes)} allocated, {show_bytes(self.peak_reserved_bytes)} reserved"
        return "\n".join(
            [
                f"{self.planned_steps} steps by the plan, {self.unplanned_steps} without; peak {peak}",
                *(f"  {n} without it: {why}" for why, n in self.unplanned_because.items()),
                *(f"  {c.steps} {c.fit}, compiled in {c.seconds:.1f} s" for c in self.captures),
                *(f"  a graph ends: {why}" for why in self.breaks),
            ]
        )
