"""`exact` against every plan that there is on tiny traces, and every planner and the bound against `exact`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from simulator.bounds.bound import lower_bound
from simulator.core.limits import Constraints, Limits
from simulator.core.problem import Problem
from simulator.core.schedule import build
from simulator.planners import REGISTRY, plan_with
from simulator.planners.outcome import Infeasible
from tests import exact
from tests.exhaust import budgets, draw_trace, frontier, optimum, peak_and_time, walk
from tests.synthetic import resnet
from tests.tiny import bwd, chain, fwd, trace
from traces.errors import PlanError, SpecError
from traces.records.plan import SAVE, Plan
from traces.records.trace import Trace

BASELINES = tuple(f"tests.bench.baselines.{name}:plan" for name in ("rotor", "cheap_ops", "min_cut"))
EXACT = "tests.exact:plan"
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
def test_exact_finds_the_optimum_and_no_planner_beats_it(chunk: int, rerun_bytes: int) -> None:
    for of, front in cases(range(60 * chunk, 60 * chunk + 60), rerun_bytes):
        for budget in list(budgets(front))[:8]:
            best = optimum(front, budget)
            assert added(of, EXACT, budget) == best
            for name in (*REGISTRY, *BASELINES):
                other = added(of, name, budget)
                if other is not None and (best is None or other < best):
                    assert says_more(of, name, budget)
                    assert lower_bound(Problem(of), budget).added_time_ns <= other
            if best is not None:
                assert lower_bound(Problem(of), budget).added_time_ns <= best


def test_exact_needs_drops_and_second_runs() -> None:
    """A chain at the lowest budget that any plan meets: every value is made again more than once."""
    of = chain(4, size=100)
    lowest = None
    top = Problem(of).saved.timeline.peak_allocated_bytes
    assert top % 100 == 0  # as every peak is: so no other budget makes a difference
    for budget in range(top, 0, -100):
        time_ns = added(of, EXACT, budget)
        if time_ns is None:
            break
        lowest = (budget, time_ns)
    assert lowest is not None
    plan = plan_with(EXACT, Problem(of), lowest[0], PATIENT)
    again = build(Problem(of), plan.actions).recomputed_ops
    assert len(again) > len(set(again))
    with pytest.raises(Infeasible, match="Proven"):
        plan_with(EXACT, Problem(of), lowest[0] - 4, PATIENT)


def test_exact_saves_a_link_where_that_is_best() -> None:
    of = trace(
        [
            fwd({"link": 10}, "w", time_ns=500),
            fwd({"low": 100}, "link", time_ns=5),
            fwd({"mid": 100}, "link", time_ns=5),
            fwd({"top": 150}, "low", "mid", time_ns=1),
            bwd({"g0": 1}, "top"),
            bwd({"g1": 1}, "g0", "mid"),
            bwd({"g2": 1}, "g1", "low"),
        ],
        {"w": 0},
    )
    # at top: low + mid + top = 350, and link 10 if saved; at g0 351, or 251 with low away, or 161 with both
    assert added(of, EXACT, 360) == 0
    with pytest.raises(Infeasible):
        plan_with(EXACT, Problem(of), 349, PATIENT)


def test_exact_refuses_what_is_too_large_or_takes_too_long() -> None:
    for of in (resnet((1, 1, 1, 1), batch=8, side=64), chain(12)):
        tight = Problem(of).saved.timeline.peak_allocated_bytes - 1
        with pytest.raises(SpecError, match="small graphs"):
            plan_with(EXACT, Problem(of), tight)
        assert plan_with(EXACT, Problem(of), tight + 1).actions == ()  # nothing must be added: proven at once
    of = chain(7, size=100)
    with pytest.raises(SpecError, match="did not finish in 0 s"):
        plan_with(EXACT, Problem(of), Problem(of).saved.timeline.peak_allocated_bytes // 2, Limits(seconds=0))


def test_exact_obeys_constraints() -> None:
    of = trace(
        [
            fwd({"a": 100}, "w", time_ns=1, module="a"),
            fwd({"b": 100}, "w", time_ns=9, module="b"),
            fwd({"c": 200}, "a", "b", module="c"),
            bwd({"g": 1}, "c"),
            bwd({"h": 1}, "g", "a", "b"),
        ],
        {"w": 0},
    )
    budget = 400
    free = plan_with(EXACT, Problem(of), budget, PATIENT)
    assert free.predicted["plan"]["recomputed_ops"] >= 1
    bound = Problem(of, Constraints(never=("a ::",)))
    plan = plan_with(EXACT, bound, budget, PATIENT)
    assert {of.ops.name[i] for i in build(Problem(of), plan.actions).recomputed_ops} == {"b"}
    assert plan.predicted["plan"]["step_time_ns"] - of.time_ns == 9


def test_the_price_at_tight_instants_is_never_too_high() -> None:
    """The bound inside the tree, at its root, is below the optimum of every small case."""
    for of, front in cases(range(200)):
        problem = Problem(of)
        evaluator = exact.Evaluator(problem)
        values = exact.decisions(problem, evaluator)
        for budget in list(budgets(front))[:6]:
            best = optimum(front, budget)
            tree = exact.Tree(problem, evaluator, values, budget, PATIENT.clock(), None)
            if best is not None:
                assert tree._least_ns(0, {}) <= of.time_ns + best


def test_no_plan_is_faster_than_what_its_decisions_imply() -> None:
    """For random complete plans: each op behind a released value runs again as often as the tree counts."""
    draw = random.Random(0)
    seen = 0
    for of in (*(draw_trace(seed) for seed in range(150)), chain(4, size=100)):
        problem = Problem(of)
        evaluator = exact.Evaluator(problem)
        try:
            values = exact.decisions(problem, evaluator)
        except SpecError:
            continue
        tree = exact.Tree(problem, evaluator, values, 1 << 40, PATIENT.clock(), None)
        for _ in range(12):
            actions, reruns = [], {}
            for v in values:
                option = draw.choice(v.options)
                if option is not None:
                    actions.append(option)
                    if v.wanted:
                        p = evaluator.producer[v.storage]
                        reruns[p] = max(reruns.get(p, 0), tree._runs(option))
            try:
                _, time_ns = evaluator.cost(evaluator.state(actions))
            except PlanError:
                continue
            assert tree._least_ns(len(values), reruns) <= time_ns
            seen += any(n > 1 for n in reruns.values())
    assert seen > 20
