"""Every planner and the bound against every plan that there is of tiny traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from simulator.bounds.bound import lower_bound
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.planners import REGISTRY, plan_with
from simulator.planners.outcome import Infeasible
from tests.exhaust import budgets, draw_trace, frontier, optimum, peak_and_time, walk
from traces.records.plan import SAVE, Plan
from traces.records.trace import Trace

BASELINES = ("tests.bench.baselines.min_cut:plan",)
PATIENT = Limits(seconds=60)


def made(of: Trace, name: str, budget_bytes: int) -> Plan | None:
    """A planner's plan; None: refused."""
    try:
        return plan_with(name, Problem(of), budget_bytes, PATIENT)
    except Infeasible:
        return None


def added(of: Trace, name: str, budget_bytes: int) -> int | None:
    """Added time of a planner's plan by the replay, which must be within the budget; None: refused."""
    plan = made(of, name, budget_bytes)
    if plan is None:
        return None
    timeline = Problem(of).replay(plan.actions).timeline
    assert timeline.peak_allocated_bytes <= budget_bytes
    return timeline.step_time_ns - of.time_ns


def says_more(of: Trace, name: str, budget_bytes: int) -> bool:
    """Whether a planner's plan evicts a saved value, as none of `cases` does, and the slow walk confirms it."""
    plan = made(of, name, budget_bytes)
    assert plan is not None
    peak_bytes, time_ns = peak_and_time(of, walk(of, plan.actions))
    assert peak_bytes <= budget_bytes
    assert time_ns - of.time_ns == added(of, name, budget_bytes)
    return any(a.recipe == SAVE and a.evict_after for a in plan.actions)


def cases(seeds: Iterable[int], rerun_bytes: int = 0) -> Iterator[tuple[Trace, dict[int, int]]]:
    """Traces with the whole frontier of their plans, drops included; only those with something to decide.

    rerun_bytes: what a library keeps once any op of theirs runs again.
    """
    for seed in seeds:
        of = draw_trace(seed)
        if rerun_bytes:
            kept = dict.fromkeys(of.ops.target, rerun_bytes)
            of = replace(of, meta=replace(of.meta, rerun_workspaces=kept))
        front = frontier(of, drops=2, most=1_500)
        if front is not None and len(front) > 2:
            yield of, front


def test_there_are_cases() -> None:
    found = list(cases(range(100)))
    assert len(found) >= 6
    assert any(t for _, front in found for t in front.values())


@pytest.mark.parametrize(
    ("chunk", "rerun_bytes"),
    [
        *((chunk, 0) for chunk in range(4)),
        *(pytest.param(chunk, 0, marks=pytest.mark.slow) for chunk in range(4, 10)),
        (10, 4),
        (11, 40),
    ],
)
def test_no_planner_beats_the_optimum(chunk: int, rerun_bytes: int) -> None:
    for of, front in cases(range(60 * chunk, 60 * chunk + 60), rerun_bytes):
        for budget in list(budgets(front))[:8]:
            best = optimum(front, budget)
            for name in (*REGISTRY, *BASELINES):
                other = added(of, name, budget)
                if other is not None and (best is None or other < best):
                    assert says_more(of, name, budget)
                    assert lower_bound(Problem(of), budget).added_time_ns <= other
            if best is not None:
                assert lower_bound(Problem(of), budget).added_time_ns <= best
