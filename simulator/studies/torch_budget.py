"""Turn torch's saved sets into rows that say what each really peaks at and costs, beside our plans."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from simulator.core.graph import analyse
from simulator.core.limits import Limits
from simulator.core.replay import run
from simulator.core.schedule import build
from simulator.core.timeline import Timeline
from simulator.planners import plan_with
from simulator.planners.outcome import percent
from simulator.planners.torch_budget import TorchPlan, plans
from simulator.studies.comparison import Contest, Entrant
from traces.errors import BudgetError
from traces.plan import Plan
from traces.saved_sets import SavedSets
from traces.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One of torch's plans by the exact replay, and ours within the same peak."""

    label: str
    settings: dict[str, Any]
    valid: bool  # whether torch would compute the right gradients; the replayed plan keeps random values
    random_ops_again: int
    peak_bytes: int
    overhead_percent: float
    recomputed_flops_percent: float  # FLOPs that run again, in percent of the step's
    recomputed_ops: int
    solve_seconds: float
    ours_overhead_percent: float | None  # None: no plan of ours within that peak
    ours_recomputed_flops_percent: float | None
    ours_peak_bytes: int | None
    ours_solve_seconds: float
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "plan"}


def rows(
    trace: Trace,
    sets: SavedSets,
    planner: str,
    limits: Limits,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Row, ...]:
    """Replay each of torch's plans and plan with `planner` for each of their peaks.

    Raises:
        PlanError: the sets are of another trace.
    """
    graph = analyse(trace)
    base = run(trace, build(trace, (), graph), graph)
    ours: dict[int, tuple[Plan | None, Timeline | None, float]] = {}
    out = []
    for p in plans(trace, sets, graph):
        peak = p.timeline.peak_allocated_bytes
        if peak not in ours:
            progress(f"{p.choice.label}: planning with {planner} for the same peak")
            begin = time.perf_counter()
            try:
                plan = plan_with(planner, trace, peak, limits)
            except BudgetError:
                ours[peak] = (None, None, time.perf_counter() - begin)
            else:
                seconds = time.perf_counter() - begin
                ours[peak] = (plan, run(trace, build(trace, plan.actions, graph), graph), seconds)
        out.append(_row(trace, base, p, *ours[peak][1:]))
    return tuple(out)


def _row(trace: Trace, base: Timeline, p: TorchPlan, ours: Timeline | None, seconds: float) -> Row:
    return Row(
        label=p.choice.label,
        settings=dict(p.choice.settings),
        valid=p.choice.valid,
        random_ops_again=len(p.choice.random_again),
        peak_bytes=p.timeline.peak_allocated_bytes,
        overhead_percent=added_percent(base, p.timeline),
        recomputed_flops_percent=flops_percent(trace, p.timeline),
        recomputed_ops=p.timeline.recomputed_ops,
        solve_seconds=p.choice.solve_seconds,
        ours_overhead_percent=None if ours is None else added_percent(base, ours),
        ours_recomputed_flops_percent=None if ours is None else flops_percent(trace, ours),
        ours_peak_bytes=None if ours is None else ours.peak_allocated_bytes,
        ours_solve_seconds=seconds,
        plan=p.plan,
    )


def entrants(contest: Contest, sets: SavedSets) -> tuple[Entrant, ...]:
    """torch's plans as rows of a contest; budgets for which torch makes the same plan share a row.

    A plan whose gradients torch would get wrong does not count as feasible, whatever its peak.

    Raises:
        PlanError: the sets are of another trace.
    """
    same: dict[tuple[tuple[int, ...], tuple[int, ...]], list[TorchPlan]] = {}
    for p in plans(contest.trace, sets):
        same.setdefault((p.choice.saved, p.choice.recomputed), []).append(p)
    out = []
    for group in same.values():
        first = group[0]
        notes = []
        if not first.choice.valid:
            again = len(first.choice.random_again)
            notes.append(
                f"wrong gradients as torch runs it ({again} random ops again); replayed with them kept"
            )
        if len(group) > 1:
            notes.append("the same plan for " + ", ".join(p.choice.label for p in group[1:]))
        name, seconds = f"torch {first.choice.label}", first.choice.solve_seconds
        row = contest.judged(name, first.plan, seconds, peer=True, message="; ".join(notes))
        if not first.choice.valid:
            row = replace(row, feasible=False, gap_points=None)
        out.append(row)
    return tuple(out)


def added_percent(base: Timeline, planned: Timeline) -> float:
    """The time that a plan adds, in percent of the step with everything kept."""
    return percent(planned.step_time_ns - base.step_time_ns, base.step_time_ns)


def flops_percent(trace: Trace, planned: Timeline) -> float:
    """The FLOPs of the ops that run again, in percent of the step's; as `Ops.flops` counts them."""
    flops = trace.ops.flops
    again = sum(flops[i] for i, a in zip(planned.op, planned.recompute, strict=True) if a)
    return percent(again, sum(flops))
