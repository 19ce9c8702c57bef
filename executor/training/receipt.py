"""What a planned model did so far: steps with and without its plan, what was captured and why, and the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from traces.records.plan import Plan
from traces.units import show_bytes

EXACT: Final = "exact"  # the graph is the plan's to the byte
RESIZED: Final = "resized"  # it has the plan's structure, and other sizes
# A size of one makes another graph, which takes less without any eviction.
SAVED: Final = "with all values saved"
REPLANNED: Final = "replanned"  # it is another graph, with a plan of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureNote:
    """One capture that serves calls."""

    why: str  # "first call", or what had changed since the last capture
    fit: str  # EXACT, RESIZED, SAVED or REPLANNED
    steps: int  # that it served
    seconds: float  # that capturing, planning and rewriting took


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The training calls of a planned model so far; evaluation does not count."""

    plan: Plan
    planned_steps: int
    larger_steps: int  # of them, that had larger arguments than the plan's, and may need more than it holds
    unplanned_steps: int
    unplanned_because: Mapping[str, int]  # why, and how many
    captures: tuple[CaptureNote, ...]
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
                *[f"  {self.larger_steps} were larger than the plan's, and may need more"][
                    : self.larger_steps
                ],
                *(f"  {n} without it: {why}" for why, n in self.unplanned_because.items()),
                *(f"  {c.steps} {c.fit}, captured in {c.seconds:.1f} s: {c.why}" for c in self.captures),
            ]
        )
