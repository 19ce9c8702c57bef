"""Turn one question about allocator settings and a device into an answer for each of many schedules of a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.allocator.device import DeviceMemory
from simulator.allocator.question import ask, reserve
from simulator.allocator.reserved import ReservedFigures, reserved_peak
from simulator.core.problem import Problem
from simulator.core.schedule import Schedule
from simulator.core.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a schedule takes."""

    reserved: ReservedFigures | None  # None: a CPU's trace
    fits: bool | None  # into the device; None: none was named


class Asking:
    """The question, and what is known so far; a schedule that is asked about twice is worked out once."""

    def __init__(
        self, problem: Problem, alloc_conf: str | None = None, device: DeviceMemory | None = None
    ) -> None:
        """Raises SpecError for settings that do not exist, or any for a CPU's trace."""
        question = ask(problem.trace.meta, alloc_conf, device)
        self.problem, self.device = problem, device
        self.question = (
            None if question is None else replace(question, asked=False)
        )  # no comparison with others
        self._known: dict[
            int, tuple[Schedule, Verdict]
        ] = {}  # by identity, with the schedule so that it stays

    @property
    def alloc_conf(self) -> str | None:
        """The settings; None for a CPU's trace."""
        return None if self.question is None else self.question.alloc_conf

    def of(self, schedule: Schedule, timeline: Timeline) -> Verdict:
        """The answer for one schedule and its replay. On a GPU reserved memory decides, on the CPU allocated memory."""
        key = id(schedule)
        if key not in self._known:
            self._known[key] = (schedule, self._ask(schedule, timeline))
        return self._known[key][1]

    def _ask(self, schedule: Schedule, timeline: Timeline) -> Verdict:
        question, device = self.question, self.device
        if question is None:
            fits = None if device is None else timeline.peak_allocated_bytes <= device.usable_bytes
            return Verdict(reserved=None, fits=fits)
        if device is None:
            figures = reserved_peak(self.problem, schedule, question.settings, compiled=True)
            return Verdict(reserved=figures, fits=None)
        answer = reserve(self.problem, schedule, question)
        return Verdict(reserved=answer.figures, fits=answer.fits)
