"""Turn a trace, a budget and several planners into a table: what each reaches, what it costs, how far from optimal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from simulator.allocator.asking import Asking
from simulator.bounds.bound import Bound, lower_bound
from simulator.core.breaches import breach
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.core.timeline import Timeline
from simulator.planners import find, plan_with
from simulator.planners.outcome import Refusal, figures, percent
from simulator.studies.warnings import warnings_of
from traces.errors import LowtideError
from traces.plan import Plan
from traces.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One planner's answer, or another system's plan replayed. The figures are empty where there is no plan."""

    planner: str
    feasible: bool  # a plan is there, its replayed peak is within the budget, and it obeys the constraints
    solve_seconds: float | None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_time_ns: int | None = None
    overhead_percent: float | None = None
    gap_points: float | None = (
        None  # the overhead less the certified bound's; only for a plan within the budget
    )
    recomputed_ops: int | None = None
    fits: bool | None = None  # into the device that was named
    lowest_peak_bytes: int | None = None  # of a refusal: the lowest peak that the planner reached
    message: str = ""  # why there is no plan, or what is wrong with it
    peer: bool = False  # another system's plan, imported


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One trace and one budget under several planners."""

    problem: Problem  # what the bound assumes of a plan, beside the budget, are its constraints
    trace_name: str
    budget_bytes: int
    kept: Timeline
    bound: Bound
    asking: Asking
    entrants: tuple[Entrant, ...] = ()

    @property
    def trace(self) -> Trace:
        return self.problem.trace

    def with_entrants(self, entrants: Iterable[Entrant]) -> Contest:
        """The same with more rows."""
        return replace(self, entrants=(*self.entrants, *entrants))

    def judged(
        self, planner: str, plan: Plan, solve_seconds: float | None, *, peer: bool = False, message: str = ""
    ) -> Entrant:
        """A plan's row, by the exact replay, also if the plan is over the budget or breaks the constraints.

        Neither makes a plan that can be had, and the bound says nothing of them.

        Raises:
            PlanError: the plan does not fit the trace.
        """
        replay = self.problem.unconstrained.replay(plan.actions)
        schedule, timeline = replay.schedule, replay.timeline
        verdict = self.asking.of(schedule, timeline)
        run_figures = figures(timeline, verdict.reserved)
        base_ns = self.kept.step_time_ns
        added_ns = timeline.step_time_ns - base_ns
        broken = breach(self.problem, schedule)
        if broken:
            message = "; ".join(part for part in (f"breaks the constraints: {broken}", message) if part)
        feasible = timeline.peak_allocated_bytes <= self.budget_bytes and not broken
        gap = percent(added_ns - self.bound.added_time_ns, base_ns)
        return Entrant(
            planner=planner,
            feasible=feasible,
            solve_seconds=None if solve_seconds is None else round(solve_seconds, 3),
            peak_allocated_bytes=run_figures.peak_allocated_bytes,
            peak_reserved_bytes=run_figures.peak_reserved_bytes,
            step_time_ns=run_figures.step_time_ns,
            overhead_percent=round(percent(added_ns, base_ns), 4),
            gap_points=round(gap, 4) if feasible and self.bound.feasible else None,
            recomputed_ops=timeline.recomputed_ops,
            fits=verdict.fits,
            message=message,
            peer=peer,
        )

    def to_json(self) -> dict[str, Any]:
        """What `simulate compare --json` prints."""
        meta, bound, device = self.trace.meta, self.bound, self.asking.device
        kept = self.asking.of(self.problem.unconstrained.saved.schedule, self.kept)
        return {
            "trace": self.trace_name,
            "model": meta.model,
            "batch_size": meta.batch_size,
            "target": meta.target,
            "fingerprint": meta.fingerprint,
            "alloc_conf": self.asking.alloc_conf,
            "device": None if device is None else device.to_json(),
            "budget_bytes": self.budget_bytes,
            "feasible": any(e.feasible for e in self.entrants),
            "baseline": figures(self.kept, kept.reserved).headline(),
            "bound": {
                "overhead_percent": bound.overhead_percent if bound.feasible else None,
                "added_time_ns": bound.added_time_ns if bound.feasible else None,
                "feasible": bound.feasible,
                "reason": bound.reason,
            },
            "warnings": list(warnings_of(self.problem)),
            "planners": [asdict(e) for e in self.entrants],
        }


def open_contest(
    problem: Problem, trace_name: str, budget_bytes: int, asking: Asking | None = None
) -> Contest:
    """A contest without entrants; the bound is that of the constrained problem."""
    return Contest(
        problem=problem,
        trace_name=trace_name,
        budget_bytes=budget_bytes,
        kept=problem.unconstrained.saved.timeline,
        asking=asking or Asking(problem),
        bound=lower_bound(problem, budget_bytes),
    )


def enter(
    contest: Contest, planners: Iterable[str], limits: Limits, progress: Callable[[str], None]
) -> Contest:
    """The contest with a row for each planner, in the order given.

    Each planner has `limits.seconds` for itself. One that cannot plan this trace or budget has a row that says why.
    """
    rows = []
    for name in planners:
        progress(f"planning with {name}")
        find(name)  # what it imports is not its solve time
        start = time.perf_counter()
        try:
            plan = plan_with(name, contest.problem, contest.budget_bytes, limits)
        except LowtideError as error:
            lowest = error.figures["lowest_peak_bytes"] if isinstance(error, Refusal) else None
            rows.append(
                Entrant(
                    planner=name,
                    feasible=False,
                    solve_seconds=round(time.perf_counter() - start, 3),
                    lowest_peak_bytes=lowest,
                    message=str(error),
                )
            )
            continue
        rows.append(contest.judged(name, plan, time.perf_counter() - start))
    return contest.with_entrants(rows)


def ranked(entrants: tuple[Entrant, ...]) -> list[Entrant]:
    """Within the budget by time, then over it by peak, then those without a plan."""

    def key(e: Entrant) -> tuple[int, int]:
        if e.feasible:
            return 0, e.step_time_ns or 0
        return (2, 0) if e.peak_allocated_bytes is None else (1, e.peak_allocated_bytes)

    return sorted(entrants, key=key)
