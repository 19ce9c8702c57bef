"""The compiled evaluation says what the schedule and the engine say: steps, bytes at every step, time."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from simulator.core.evaluator import Evaluator
from simulator.core.problem import Problem, run
from simulator.core.schedule import build
from tests.strategies import random_actions, traces_with_actions
from tests.tiny import bwd, chain, fwd, trace
from tests.walked import evaluate, state_of
from traces.errors import PlanError
from traces.records.plan import Action
from traces.records.store import load
from traces.records.trace import RANDOM, Trace


def check(of: Trace, evaluator: Evaluator, actions: tuple[Action, ...]) -> None:
    """Both ways agree on every step; the evaluator leaves out most views, which neither add nor release at the peak."""
    timeline = run(evaluator.problem, build(evaluator.problem, actions))
    state = state_of(evaluator, actions)
    result = evaluate(evaluator, state)
    assert result.peak_bytes == timeline.peak_allocated_bytes
    assert result.time_ns == timeline.step_time_ns
    assert evaluator.cost(state) == (result.peak_bytes, result.time_ns)
    assert result.peaks[result.peak_step : result.peak_step + 1] == [result.peak_bytes][: len(result.peaks)]
    op = [*evaluator.op_id[: evaluator.forward], *(evaluator.op_id[k] for k in result.seq)]
    again = [*[False] * evaluator.forward, *result.again]
    ours = list(zip(op, again, result.peaks, strict=True))
    is_view = evaluator.problem.is_view
    theirs = zip(timeline.op, timeline.recompute, timeline.peak_bytes, strict=True)
    assert [x for x in ours if not is_view[x[0]]] == [x for x in theirs if not is_view[x[0]]]


@settings(max_examples=200, deadline=None)
@given(traces_with_actions())
def test_it_agrees_on_any_trace_and_plan(case: tuple[Trace, tuple[Action, ...]]) -> None:
    of, actions = case
    problem = Problem(of)
    check(of, Evaluator(problem), late(problem, actions))


def late(problem: Problem, actions: Iterable[Action]) -> tuple[Action, ...]:
    """It knows no evictions while forward runs."""
    turn = problem.forward_end
    return tuple(replace(a, evict_after=tuple(c for c in a.evict_after if c >= turn)) for a in actions)


@pytest.mark.parametrize("name", ["resnet152", "bert-base", "resnet152-cpu/trace-b8"])
def test_it_agrees_on_the_gallery(name: str) -> None:
    of = load(name)
    evaluator = Evaluator(Problem(of))
    draw = random.Random(name)
    for _ in range(12):
        check(of, evaluator, late(evaluator.problem, random_actions(of, draw)))


def test_a_long_plan_makes_the_arrays_grow() -> None:
    """Nothing shared, one long chain: the steps grow with the square of the ops, far beyond the first arrays."""
    n = 60
    of = chain(n)
    actions = tuple(Action(storage=s, retain=False) for s in Problem(of).candidates)
    evaluator = Evaluator(Problem(of))
    check(of, evaluator, actions)
    assert len(evaluate(evaluator, state_of(evaluator, actions)).seq) > n * n // 2


def test_a_chain_through_an_op_that_may_not_run_again_is_an_error() -> None:
    of = trace(
        [
            fwd({"x": 4}, "w"),
            fwd({"r": 4}, "x", flags=RANDOM),
            fwd({"y": 4}, "r"),
            bwd({"g": 4}, "y"),
            bwd({"h": 4}, "g", "r"),
        ],
        {"w": 4},
    )
    evaluator = Evaluator(Problem(of))
    state = evaluator.state()
    for name in ("r", "y"):
        state.saved[of.storages.name.index(name)] = 0
    with pytest.raises(PlanError, match="op 3 needs op 1 again, which may not run a second time"):
        evaluator.cost(state)
    state.saved[of.storages.name.index("y")] = 1
    with pytest.raises(PlanError, match="op 4 needs op 1 again"):
        evaluator.cost(state)
