"""Turn a trace into its front: the cheapest plan found for each of many budgets, and what each further byte costs.

A plan for one budget keeps to every larger one, so each budget gets the cheapest of all plans that keep to it,
whichever budget it was made for. The front is therefore monotone: a larger budget never gives a slower plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from simulator.allocator.asking import Asking
from simulator.allocator.device import DeviceMemory
from simulator.bounds.bound import Bound, bound_curve, bounder_of
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.core.schedule import Schedule
from simulator.core.timeline import Timeline
from simulator.planners import plan_with
from simulator.planners.outcome import Refusal, figures, percent
from simulator.studies.warnings import warnings_of
from traces.errors import UnfinishedError
from traces.measurement import RunFigures
from traces.plan import Plan
from traces.trace import Trace

GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One budget of the front. The plan's figures are empty where no plan was found."""

    budget_bytes: int
    feasible: bool
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_time_ns: int | None = None
    overhead_percent: float | None = None
    recomputed_ops: int | None = None
    fits: bool | None = None  # into the device that was named
    made_for_bytes: int | None = None  # the budget that the plan was made for: this one or a smaller
    bound_overhead_percent: float | None = None  # certified; None: no plan can fit
    gap_points: float | None = None
    # Time that one GiB less costs here: by the plans up to the next smaller budget, and by the bound at this one.
    price_ns_per_gib: int | None = None
    bound_price_ns_per_gib: int | None = None
    solve_seconds: float | None = None
    finished: bool = (
        True  # whether the planner came to an end; if not, a plan that is here was made for another budget
    )
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """All points, by rising budget; the last is the peak with everything kept."""

    problem: Problem
    trace_name: str
    planner: str
    kept: Timeline
    baseline: RunFigures  # of the step with everything kept
    floor_bytes: int  # no plan can go below
    points: tuple[Point, ...]
    solve_seconds: float
    plans: tuple[Plan | None, ...]  # by point
    alloc_conf: str | None = None  # None: a CPU's trace
    device: DeviceMemory | None = None

    @property
    def trace(self) -> Trace:
        return self.problem.trace

    def to_json(self) -> dict[str, Any]:
        """What `simulate pareto --json` prints."""
        meta = self.trace.meta
        reached = [p.peak_allocated_bytes for p in self.points if p.peak_allocated_bytes is not None]
        return {
            "trace": self.trace_name,
            "model": meta.model,
            "batch_size": meta.batch_size,
            "target": meta.target,
            "fingerprint": meta.fingerprint,
            "alloc_conf": self.alloc_conf,
            "device": None if self.device is None else self.device.to_json(),
            "planner": self.planner,
            "solve_seconds": round(self.solve_seconds, 3),
            "baseline": self.baseline.headline(),
            "warnings": list(warnings_of(self.problem)),
            "floor_bytes": self.floor_bytes,
            "smallest_peak_bytes": min(reached, default=None),
            "points": [asdict(p) for p in self.points],
        }


def front(
    problem: Problem,
    trace_name: str,
    planner: str,
    points: int,
    limits: Limits,
    progress: Callable[[str], None] = lambda line: None,
    asking: Asking | None = None,
) -> Front:
    """The front with so many budgets, evenly from the floor to the keep-all peak.

    Args:
        problem, trace_name: what to plan, and how to call it.
        planner: makes every plan.
        points: number of budgets, at least 2.
        limits: `seconds` is for the whole front. Most budgets are easy, so each plan may take twice an equal share of
            it as long as there is time: the same for each, so that equal seeds make equal fronts.
        progress: told one line about each plan.
        asking: about which allocator settings and device; None: the trace's own settings, and no device.

    A budget for which the planner does not end in time is said to be so, and the others stand.

    Raises:
        SpecError: the planner cannot plan this trace at all.
    """
    start = time.perf_counter()
    kept = problem.saved
    least, most = bounder_of(problem).floor.peak_bytes, kept.timeline.peak_allocated_bytes
    budgets = sorted({least + (most - least) * k // (points - 1) for k in range(points)})
    clock = limits.clock()
    plans: list[Pick | None] = []
    seconds: list[float] = []
    refusals: list[Refusal | UnfinishedError | None] = []
    # From the largest budget down: should the time run out, then at those that are hardest to meet.
    for k, budget in enumerate(reversed(budgets)):
        progress(f"budget {k + 1} of {len(budgets)}: {budget} bytes")
        began = time.perf_counter()
        share = min(2 * limits.seconds / len(budgets), clock.left_seconds)
        try:
            plan = plan_with(planner, problem, budget, replace(limits, seconds=share))
            plans.append(pick_of(problem, plan, budget))
            refusals.append(None)
        except (Refusal, UnfinishedError) as error:
            plans.append(None)
            refusals.append(error)
        seconds.append(time.perf_counter() - began)
    plans.reverse()
    seconds.reverse()
    refusals.reverse()
    bounds = bound_curve(problem, budgets).bounds
    chosen = cheapest(budgets, plans)
    asking = asking or Asking(problem)
    rows = [
        _point(
            kept.timeline,
            budget,
            pick,
            asking,
            bound,
            spent,
            refusal,
        )
        for budget, pick, bound, spent, refusal in zip(
            budgets, chosen, bounds, seconds, refusals, strict=True
        )
    ]
    return Front(
        problem=problem,
        trace_name=trace_name,
        planner=planner,
        kept=kept.timeline,
        baseline=figures(kept.timeline, asking.of(kept.schedule, kept.timeline).reserved),
        floor_bytes=least,
        points=_priced(rows),
        solve_seconds=time.perf_counter() - start,
        plans=tuple(None if pick is None else pick.plan for pick in chosen),
        alloc_conf=asking.alloc_conf,
        device=asking.device,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A plan with its replay, and the budget that it was made for."""

    plan: Plan
    schedule: Schedule
    timeline: Timeline
    made_for_bytes: int


def pick_of(problem: Problem, plan: Plan, made_for_bytes: int) -> Pick:
    """A plan, replayed."""
    replay = problem.unconstrained.replay(plan.actions)
    return Pick(plan=plan, schedule=replay.schedule, timeline=replay.timeline, made_for_bytes=made_for_bytes)


def cheapest(budgets: Sequence[int], plans: Sequence[Pick | None]) -> tuple[Pick | None, ...]:
    """For each budget, the fastest of all plans that keep to it; of equally fast ones the one with the lowest peak."""
    made = [p for p in plans if p is not None]

    def key(pick: Pick) -> tuple[int, int, int]:
        return pick.timeline.step_time_ns, pick.timeline.peak_allocated_bytes, pick.made_for_bytes

    return tuple(
        min((p for p in made if p.timeline.peak_allocated_bytes <= b), key=key, default=None) for b in budgets
    )


def _point(
    kept: Timeline,
    budget_bytes: int,
    pick: Pick | None,
    asking: Asking,
    bound: Bound,
    solve_seconds: float,
    refusal: Refusal | UnfinishedError | None,
) -> Point:
    finished = not isinstance(refusal, UnfinishedError)
    least = bound.overhead_percent if bound.feasible else None
    price = round(bound.price_ns * GIB / bound.price_bytes) if bound.feasible else None
    if pick is None:
        return Point(
            budget_bytes=budget_bytes,
            feasible=False,
            bound_overhead_percent=least,
            bound_price_ns_per_gib=price,
            solve_seconds=round(solve_seconds, 3),
            finished=finished,
            message=str(refusal or ""),
        )
    base_ns = kept.step_time_ns
    added_ns = pick.timeline.step_time_ns - base_ns
    verdict = asking.of(pick.schedule, pick.timeline)
    run_figures = figures(pick.timeline, verdict.reserved)
    return Point(
        budget_bytes=budget_bytes,
        feasible=True,
        peak_allocated_bytes=run_figures.peak_allocated_bytes,
        peak_reserved_bytes=run_figures.peak_reserved_bytes,
        step_time_ns=run_figures.step_time_ns,
        overhead_percent=round(percent(added_ns, base_ns), 4),
        recomputed_ops=pick.timeline.recomputed_ops,
        fits=verdict.fits,
        made_for_bytes=pick.made_for_bytes,
        bound_overhead_percent=least,
        gap_points=round(percent(added_ns - bound.added_time_ns, base_ns), 4) if bound.feasible else None,
        bound_price_ns_per_gib=price,
        solve_seconds=round(solve_seconds, 3),
        finished=finished,
        message="" if finished else str(refusal),
    )


def _priced(points: Sequence[Point]) -> tuple[Point, ...]:
    """With what one GiB less costs: the time between a point and the next smaller one, per byte between them."""
    out: list[Point] = []
    below: Point | None = None
    for point in points:
        price = None
        if (
            below is not None
            and below.step_time_ns is not None
            and point.step_time_ns is not None
            and point.budget_bytes > below.budget_bytes
        ):
            more_ns = below.step_time_ns - point.step_time_ns
            price = round(more_ns * GIB / (point.budget_bytes - below.budget_bytes))
        out.append(replace(point, price_ns_per_gib=price))
        below = point
    return tuple(out)
