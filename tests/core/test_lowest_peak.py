"""A refusal below the floor names the lowest peak that a short search reaches, not where the greedy ends."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.bounds import bounder_of
from simulator.core import limits as clocks
from simulator.core.limits import DEFAULTS, Levers, Limits
from simulator.core.problem import Problem
from simulator.planners import plan_with, search
from simulator.planners.mu_two import Search
from simulator.planners.outcome import Infeasible
from simulator.prediction.ask import Question, ask
from simulator.prediction.step import Prediction
from tests.exhaust import draw_trace, frontier
from traces.records.store import load
from traces.records.trace import Trace

ALONE = Levers(kinds=())  # recomputation and nothing else


@pytest.fixture(autouse=True)
def _no_machine_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks are as long as their seconds say, and the clock stands still."""
    monkeypatch.setattr(clocks, "now", lambda: 0.0)


def answered(of: Trace | Problem, budget: int, **words: Any) -> Prediction:
    problem = of if isinstance(of, Problem) else Problem(of)
    return ask(problem, Question(**{"budget": budget, "levers": ALONE, **words})).planned


def refused(of: Trace, budget_bytes: int, limits: Limits = DEFAULTS) -> tuple[int, str]:
    """The lowest peak that the answer tells, and its words."""
    with pytest.raises(Infeasible) as told:
        answered(of, budget_bytes, limits=limits)
    return told.value.figures["lowest_peak_bytes"], str(told.value)


def test_it_goes_on_where_the_greedy_ends_and_a_plan_of_that_peak_is_found() -> None:
    of = load("resnet152-cpu/trace-b8")
    floor_bytes = bounder_of(Problem(of)).floor.peak_bytes
    now, words = refused(of, floor_bytes // 2)
    # Some KiB above the floor; the greedy ends 6.3 MiB above.
    assert floor_bytes <= now < floor_bytes + (1 << 19)
    assert f"({now} bytes), and no plan at all can go below" in words
    plan = plan_with("search", Problem(of), now, Limits(seconds=1.0))
    assert plan.predicted["plan"]["peak_allocated_bytes"] <= now


def test_a_named_peak_is_one_that_a_walk_within_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for SKResNet-18, whose walk within the peak that another walk came by ended 512 bytes above it."""
    problem, tried = Problem(draw_trace(0)), []

    def shortly(problem: Problem, budget_bytes: int, _: Limits) -> tuple[Search, Any]:
        tried.append(budget_bytes)
        walked = Search(problem, budget_bytes)
        walked.lowest_peak_bytes = max(1512, budget_bytes)
        return walked, "a plan" if budget_bytes >= 1512 else None

    monkeypatch.setattr(search, "_shortly", shortly)
    monkeypatch.setattr(search, "cheapest", lambda _: None)
    assert search._reached(problem, 1000, DEFAULTS) == 1512
    assert tried == [1000, 1512]


def test_it_is_never_below_what_any_plan_reaches() -> None:
    seen = 0
    for of in map(draw_trace, range(120)):
        front = frontier(of, drops=2, most=1_500)
        if front is None:
            continue
        floor_bytes = bounder_of(Problem(of)).floor.peak_bytes
        now, _ = refused(of, floor_bytes - 1, Limits(seconds=0.05))
        assert min(front) <= now
        seen += 1
    assert seen >= 40


def test_only_below_the_floor_and_by_the_planner_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    of = load("resnet152-cpu/trace-b8")
    floor_bytes = bounder_of(Problem(of)).floor.peak_bytes
    monkeypatch.setattr(search, "Annealer", None)  # whoever walks fails
    with pytest.raises(Infeasible, match="the lowest peak that mu-two reaches"):
        answered(of, floor_bytes // 2, planner="mu-two")
    with pytest.raises(TypeError):
        answered(of, floor_bytes // 2)
