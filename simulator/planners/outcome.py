"""How a planner ends: the actions that it chose become a complete Plan, or a refusal with its reasons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulator.bounds import bounder_of
from simulator.core.problem import Problem, Timeline
from traces.errors import BudgetError
from traces.records.measurement import RunFigures
from traces.records.plan import SAVE, Action, Plan, label_actions
from traces.records.trace import Trace
from traces.units import show_bytes


class Infeasible(BudgetError):
    """No plan within the budget, with the figures behind the answer.

    `budget_bytes`, `lowest_peak_bytes` (what the planner reached), `floor` (below which no plan can go) and what
    makes the floor, as plain data in `figures`.
    """

    def __init__(self, message: str, figures: dict[str, Any]) -> None:
        super().__init__(message)
        self.figures = figures


def finish(problem: Problem, planner: str, budget_bytes: int, actions: Iterable[Action]) -> Plan:
    """The plan for these actions, judged by the exact replay, with the actions that change nothing left out. Raises
    BudgetError: its peak is over the budget; PlanError: an action is impossible."""
    trace = problem.trace
    chosen = label_actions(trace, actions)
    again = {s for op in problem.replay(chosen).schedule.recomputed_ops for s in trace.ops.reads[op]}
    chosen = tuple(a for a in chosen if a.recipe != SAVE or a.evict_after or a.storage in again)
    timeline = problem.replay(chosen).timeline
    if timeline.peak_allocated_bytes > budget_bytes:
        raise refuse(problem, planner, budget_bytes, timeline.peak_allocated_bytes)
    return Plan(
        meta=trace.meta,
        actions=chosen,
        planner=planner,
        budget_bytes=budget_bytes,
        predicted=figures_of_plan(figures(problem.saved.timeline), figures(timeline), timeline),
    )


def figures_of_plan(baseline: RunFigures, planned: RunFigures, timeline: Timeline) -> dict[str, Any]:
    """The figures that a plan carries: of the step with everything saved, and with the plan, of that timeline."""
    base_ns = baseline.step_time_ns or 0
    return {
        "baseline": baseline.headline(),
        "plan": {
            **planned.headline(),
            "overhead_percent": round(percent(timeline.step_time_ns - base_ns, base_ns), 4),
            "recomputed_ops": timeline.recomputed_ops,
        },
    }


def figures(timeline: Timeline) -> RunFigures:
    """A timeline's headline figures; what CUDA's allocator makes of it is not known here."""
    return RunFigures(peak_allocated_bytes=timeline.peak_allocated_bytes, step_time_ns=timeline.step_time_ns)


def percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0


def where(trace: Trace, op: int) -> str:
    """An op for people: its name, phase and module."""
    if op < 0:
        return "the start of the step"
    module = trace.ops.module[op]
    return f"{trace.ops.name[op]} ({trace.ops.phase[op]}{', ' + module if module else ''})"


def refuse(
    problem: Problem, planner: str, budget_bytes: int, lowest_peak_bytes: int, note: str = ""
) -> Infeasible:
    """The error that says why a budget cannot be met, and what to do."""
    trace, least = problem.trace, bounder_of(problem).floor
    op, place = least.op, ("op", "phase", "module")
    named = (trace.ops.name[op], trace.ops.phase[op], trace.ops.module[op]) if op >= 0 else (None,) * 3
    parts = (
        f"{show_bytes(least.resident_bytes)} resident (parameters, optimizer state, buffers, inputs), "
        f"{show_bytes(least.gradient_bytes)} gradients and values that must stay, "
        f"{show_bytes(least.working_bytes)} read, made and used by that op"
    )
    within, other = f"within {show_bytes(budget_bytes)} ({budget_bytes} bytes)", ""
    verdict = f"No plan can stay {within}"
    if budget_bytes >= least.peak_bytes:
        verdict = f"{planner} found no plan {within}"
        other = "" if planner == "search" else ", try --planner search"
    return Infeasible(
        f"{verdict}: the lowest peak that {planner} reaches is {show_bytes(lowest_peak_bytes)} "
        f"({lowest_peak_bytes} bytes), "
        f"and no plan at all can go below {show_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), at "
        f"{where(trace, op)}: {parts}. {note}Give a budget of {show_bytes(lowest_peak_bytes)} or more{other}, or use a "
        "smaller batch.",
        {
            "budget_bytes": budget_bytes,
            "lowest_peak_bytes": lowest_peak_bytes,
            "floor": {
                "peak_allocated_bytes": least.peak_bytes,
                **dict(zip(place, named, strict=True)),
                "resident_bytes": least.resident_bytes,
                "gradient_bytes": least.gradient_bytes,
                "working_bytes": least.working_bytes,
            },
        },
    )
