"""Count what a planned model did so far: steps with and without its plan, and how graphs fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from traces.records.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureNote:
    """One graph that serves calls."""

    fit: str  # "exact", "resized", "with all values saved" or "replanned"
    steps: int  # that it served


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The training calls of a planned model so far; evaluation does not count."""

    plan: Plan | None = None  # None: each part is planned to its share, or each block has its own
    planned_steps: int
    unplanned_steps: int
    unplanned_because: Mapping[str, int]  # why, and how many
    captures: tuple[CaptureNote, ...]
    breaks: tuple[str, ...] = ()  # why a graph ended before the model did, where parts are planned

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.planned_steps} steps by the plan, {self.unplanned_steps} without",
                *(f"  {n} without it: {why}" for why, n in self.unplanned_because.items()),
                *(f"  {c.steps} {c.fit}" for c in self.captures),
                *(f"  a graph ends: {why}" for why in self.breaks),
            ]
        )
