"""The default planner: never worse than the greedy, near the best plan there is, the same every time."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.bounds import bounder_of
from simulator.core import limits
from simulator.core.evaluator import Evaluator
from simulator.core.limits import Limits
from simulator.core.problem import Problem, run
from simulator.core.schedule import build
from simulator.kernels.anneal import anneal
from simulator.planners import plan_with, search
from simulator.planners.annealing import Annealer
from simulator.planners.mu_two import Found, Search
from simulator.planners.outcome import Infeasible
from simulator.planners.search import bounded
from tests.exhaust import draw_trace, frontier, optimum
from tests.strategies import traces
from tests.tiny import bwd, chain, fwd, trace
from traces.records.trace import Trace

LONG = Limits(seconds=60)


def time_of(planner: str, of: Trace, budget_bytes: int, limits: Limits = LONG) -> int | None:
    """The added time of its plan; None if it refuses."""
    try:
        plan = plan_with(planner, Problem(of), budget_bytes, limits)
    except Infeasible:
        return None
    return Problem(of).replay(plan.actions).timeline.step_time_ns - of.time_ns


@settings(max_examples=60, deadline=None)
@given(of=traces(), percent=st.integers(20, 100))
def test_it_is_never_worse_than_the_greedy_nor_better_than_the_bound(of: Trace, percent: int) -> None:
    budget_bytes = Problem(of).saved.timeline.peak_allocated_bytes * percent // 100
    ours, greedy = time_of("search", of, budget_bytes), time_of("mu-two", of, budget_bytes)
    bound = bounder_of(Problem(of)).bound(budget_bytes)
    if greedy is not None:
        assert ours is not None
        assert ours <= greedy
    if ours is not None:
        assert bound.feasible
        assert ours >= bound.added_time_ns


@settings(max_examples=200, deadline=None)
@given(of=traces(), percent=st.integers(20, 100))
def test_what_the_bound_saves_fits_there_and_costs_a_step_more_at_most(of: Trace, percent: int) -> None:
    search = Search(Problem(of), Problem(of).saved.timeline.peak_allocated_bytes * percent // 100)
    instants, sts = bounder_of(search.problem), of.storages
    bound = instants.bound(search.budget_bytes)
    if bound.feasible:
        saved, at = instants.split(search.budget_bytes), instants.at(bound.op)
        saved_bytes = sum(sts.nbytes[s] for s, stays in saved.items() if stays)
        assert at.unavoidable_bytes + saved_bytes <= search.budget_bytes
        added_ns = sum(of.ops.time_ns[p] for p in {sts.producer[s] for s, kept in saved.items() if not kept})
        assert 0 <= added_ns - bound.added_time_ns <= max((ns for ns, _ in at.steps), default=0)
        bounded(search)  # no op that may not run again


def test_it_finds_the_best_plan_of_tiny_traces() -> None:
    """Against exhaustive search over all plans but those that drop values in between."""
    compared = 0
    for number in range(150):
        of = draw_trace(number)
        front = frontier(of, most=1_500)
        if front is None:
            continue
        for budget_bytes in sorted(front)[:6]:
            compared += 1
            ours, least = time_of("search", of, budget_bytes), optimum(front, budget_bytes)
            assert least is not None, number
            if ours is None:  # a value must go where the op that reads it can take its memory over
                assert (number, budget_bytes) == (144, 116)
                continue
            assert ours <= least, number
    assert compared > 100


@settings(max_examples=60, deadline=None)
@given(of=traces(), seed=st.integers(0, 9), percent=st.integers(20, 100))
def test_what_a_walk_evaluates_is_what_its_actions_mean(of: Trace, seed: int, percent: int) -> None:
    problem = Problem(of)
    budget_bytes = problem.saved.timeline.peak_allocated_bytes * percent // 100
    evaluator = Evaluator(problem)
    annealer = Annealer(evaluator, budget_bytes, seed)
    for _ in range(4):
        found = annealer.run(evaluator.state(), 200, clock=LONG.started())
        if found is None:
            return
        assert evaluator.cost(found.state)[1] == found.time_ns
        timeline = run(problem, build(problem, evaluator.actions(found.state)))
        assert timeline.step_time_ns == found.time_ns
        assert timeline.peak_allocated_bytes <= budget_bytes


@settings(max_examples=60, deadline=None)
@given(of=traces(), seed=st.integers(0, 9))
def test_a_move_taken_back_leaves_no_trace(of: Trace, seed: int) -> None:
    """After some moves that are all taken, none is better than a state said to save time."""
    evaluator = Evaluator(Problem(of))
    annealer = Annealer(evaluator, 1 << 40, seed)
    if not len(annealer.values):
        return
    walk = annealer.begin(evaluator.state())
    rest = (1 << 40, annealer.values, evaluator.facts, evaluator.work_space(0), walk, annealer.retaining)
    anneal(0, 20, 1e30, 0.0, -1, *rest)
    before = walk.saved.copy()
    walk.figures["added_ns"] = -(1 << 40)
    anneal(0, 40, 1e-9, 0.0, -1, *rest)
    assert (walk.saved == before).all()


@pytest.mark.parametrize(
    ("gap_ns", "gain_ns", "goes_on"),
    [(10_000, 1_200, False), (10_000, 1_300, True), (500, 90, False), (500, 110, True), (40_000, 0, True)],
)
def test_walks_go_on_where_the_first_one_closes_enough_of_the_gap(
    monkeypatch: pytest.MonkeyPatch, gap_ns: int, gain_ns: int, goes_on: bool
) -> None:
    """A step of a million ns: an eighth of the gap, a ten thousandth of the step; from far off, in any case."""
    of = shared_link()
    of = replace(of, ops=replace(of.ops, time_ns=(10**6, *[0] * (len(of.ops) - 1))))
    greedy = Search(Problem(of), 215)
    start = Found(state=greedy.evaluator.state(), time_ns=10**6 + gap_ns)
    better = replace(start, time_ns=start.time_ns - gain_ns)
    walked: list[int] = []
    monkeypatch.setattr(Annealer, "run", lambda *_, **__: walked.append(1) or better)
    monkeypatch.setattr(search, "tidy", lambda *_: better)
    search.anneal(greedy, start, LONG, 10**6, 0)
    assert (len(walked) > 1) == goes_on


def shared_link() -> Trace:
    """`c` and `d` are made from `b`, which backward does not read; forward ends with the large `p`."""
    return trace(
        [
            fwd({"a": 10}, "x", time_ns=100),
            fwd({"b": 100}, "a", time_ns=50),
            fwd({"c": 50}, "b", time_ns=1),
            fwd({"d": 50}, "b", time_ns=1),
            fwd({"y": 1}, "c", "d", time_ns=1),
            fwd({"p": 200}, "y", time_ns=1),
            bwd({"e": 1}, "p", time_ns=1),
            bwd({"f": 1}, "e", "d", time_ns=1),
            bwd({"g": 1}, "f", "c", time_ns=1),
            bwd({"h": 1}, "g", "a", time_ns=1),
        ],
        {"x": 0},
    )


def test_a_link_that_two_chains_need_is_rebuilt_once() -> None:
    """Everything kept: a 10, c 50, d 50, y 1 and p 200 at once are 311 bytes. In 215 neither c nor d is kept.

    When they are rebuilt p has gone. d takes b and d, 51 ns. c takes 1 ns more if b stays until then, and 51 if not.
    """
    of = shared_link()
    assert Problem(of).saved.timeline.peak_allocated_bytes == 311
    assert time_of("search", of, 215) == 52
    assert time_of("search", of, 262) == 51  # one of them is enough


def test_the_time_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of which a second goes by whenever it is looked at, and more steps than any machine can walk."""
    ticks = count()
    monkeypatch.setattr(limits, "now", lambda: float(next(ticks)))
    of = shared_link()
    evaluator = Evaluator(Problem(of))
    annealer = Annealer(evaluator, 215, 0)
    annealer.run(evaluator.state(), 10**15, clock=Limits(seconds=3.0).started())
    assert 3 <= next(ticks) < 6


@pytest.mark.parametrize("percent", [35, 60])
def test_a_seed_decides_the_plan_however_fast_the_machine_is(
    percent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that jumps and one that stands still, as long as neither says that the time is over.

    35 % is below what the greedy reaches, so walks look for a first plan; at 60 % they improve one.
    """
    of = chain(40)
    budget_bytes = Problem(of).saved.timeline.peak_allocated_bytes * percent // 100
    plans = []
    for step_s in (0.0, 1e-4, 7e-4):
        ticks = count()
        monkeypatch.setattr(limits, "now", lambda ticks=ticks, step_s=step_s: step_s * next(ticks))
        plans.append(plan_with("search", Problem(of), budget_bytes, Limits(seconds=2.0, seed=3)))
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].actions


def test_a_refusal_names_the_lowest_peak_seen() -> None:
    of = shared_link()
    with pytest.raises(Infeasible) as refused:  # y and p alone are 201 bytes
        plan_with("search", Problem(of), 200, LONG)
    assert refused.value.figures["floor"]["peak_allocated_bytes"] == 201
    assert 201 <= refused.value.figures["lowest_peak_bytes"] <= 211
