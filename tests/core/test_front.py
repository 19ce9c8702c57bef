"""What the budgets of one trace share changes no plan: segmentations, arrays, replays."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.evaluator import Evaluator
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.planners import plan_with
from simulator.planners.outcome import Infeasible
from simulator.planners.segments import segmentations, split
from simulator.studies.pareto import pareto
from tests.strategies import traces
from tests.tiny import chain
from tests.walked import evaluate, state_of
from traces.records.plan import Action, Plan
from traces.records.trace import Trace

NO_LIMIT = Limits(seconds=float("inf"))


def alone_for(of: Trace, budget_bytes: int) -> tuple[Plan | None, str]:
    try:
        return plan_with("mu-two", Problem(of), budget_bytes, NO_LIMIT), ""
    except Infeasible as refusal:
        return None, str(refusal)


@settings(max_examples=150, deadline=None)
@given(of=traces(max_forward=12, max_backward=12))
def test_every_point_is_no_slower_than_the_plan_made_for_its_budget_alone(of: Trace) -> None:
    done = pareto(of, 6, planner="mu-two", seconds=1e6)
    times = [p.step_time_ns for p in done.rows if p.step_time_ns is not None]
    assert times == sorted(times, reverse=True)
    for point, plan in zip(done.rows, done.plans, strict=True):
        alone, why_not = alone_for(of, point.budget_bytes)
        if not point.feasible:
            assert point.message == why_not
        if alone is not None:
            assert plan is not None
            timeline = Problem(of).replay(alone.actions).timeline
            assert point.step_time_ns is not None
            assert point.step_time_ns <= timeline.step_time_ns
            if point.made_for_bytes == point.budget_bytes:
                assert plan.actions == alone.actions
        if plan is not None:
            timeline = Problem(of).replay(plan.actions).timeline
            assert (point.peak_allocated_bytes, point.step_time_ns) == (
                timeline.peak_allocated_bytes,
                timeline.step_time_ns,
            )
            assert timeline.peak_allocated_bytes <= point.budget_bytes


@settings(max_examples=150, deadline=None)
@given(of=traces(max_forward=12, max_backward=12))
def test_segmentations_are_those_of_the_segments(of: Trace) -> None:
    problem = Problem(of)
    ev = Evaluator(problem)
    row = [(segment.tolist(), state, peak_bytes) for segment, state, peak_bytes in segmentations(ev)]
    assert row
    for segment, state, peak_bytes in row:
        for s in ev.made_forward:
            if (problem.saved_by_default[s] and s not in problem.candidates) or problem.pinned[s]:
                continue
            crosses = any(
                s in of.ops.reads[i] and segment[i] != segment[of.storages.producer[s]]
                for i in range(problem.forward_end)
            )
            assert state.saved[s] == crosses
        assert ev.cost(state_of(ev, ev.actions(state))) == ev.cost(state)
        assert ev.cost(state)[0] == peak_bytes


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12), st.integers(0, 3))
def test_a_split_leaves_enough_on_either_side_where_least_crosses(
    ops: list[tuple[int, int]], first: int
) -> None:
    weight = np.array([0] * first + [w for w, _ in ops])
    crossing = np.array([0] * first + [c for _, c in ops])
    members = np.arange(first, first + len(ops))
    total, seen, best = int(weight.sum()), 0, (0, 0, -1)
    for i in members[:-1].tolist():
        seen += int(weight[i])
        if total and 0.3 * total - 1e-9 <= seen <= 0.7 * total + 1e-9:
            key = (int(crossing[i]), abs(2 * seen - total), i)
            if best[2] < 0 or key < best:
                best = key
    assert split(members, weight, crossing) == best[2]


def test_drops_that_are_edited_between_two_walks_count() -> None:
    of = chain(5)
    ev = Evaluator(Problem(of))
    x1, x2 = (of.storages.name.index(n) for n in ("x1", "x2"))
    g5 = ev.forward
    state = state_of(ev, [Action(storage=x1, evict_after=(g5,)), Action(storage=x2)])
    for drops in ((x2,), (x1, x2), ()):
        ev.cost(state)
        state.evictions[g5] = drops
        fresh = Evaluator(Problem(of))
        assert evaluate(ev, state) == evaluate(fresh, state)
