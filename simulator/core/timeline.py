"""Timeline: what memory and time a schedule takes, step by step, as columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Figures per step of a Schedule; peaks and totals are derived.

    `peak_bytes[k]` is the most that is allocated while step k runs, `live_bytes[k]` what is left when it has ended.
    """

    op: tuple[int, ...]
    recompute: tuple[bool, ...]
    start_ns: tuple[int, ...]
    duration_ns: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    live_bytes: tuple[int, ...]
    resident_bytes: int

    @property
    def peak_allocated_bytes(self) -> int:
        """The peak of the whole step."""
        return max(self.peak_bytes, default=self.resident_bytes)

    @property
    def peak_step(self) -> int:
        """The first step at which the peak is reached; -1 for an empty schedule."""
        return self.peak_bytes.index(self.peak_allocated_bytes) if self.peak_bytes else -1

    @property
    def step_time_ns(self) -> int:
        return sum(self.duration_ns)

    @property
    def recomputed_ops(self) -> int:
        """Recompute steps that take time: views run again at no cost and are not counted."""
        return sum(1 for r, d in zip(self.recompute, self.duration_ns, strict=True) if r and d)
