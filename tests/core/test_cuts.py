"""Plans from the cuts behind the bound: what each cut frees, and where the search begins from them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.bounds import TURN, bounder_of
from simulator.core.evaluator import Evaluator
from simulator.core.problem import Problem
from simulator.planners.mu_two import Search
from simulator.planners.search import best_cut, states
from tests.strategies import traces
from tests.tiny import bwd, fwd, trace
from traces.records.trace import Trace


def pairs() -> Trace:
    """Three pairs, each one op's input and its cheap output; backward reads all six.

    No residents. a, b, c are dear (100 ns, 40 bytes), their outputs p, q, r cheap (1, 2 and 3 ns, 30 bytes).
    """
    return trace(
        [
            fwd({"a": 40}, "x", time_ns=100),
            fwd({"p": 30}, "a", time_ns=1),
            fwd({"b": 40}, "p", time_ns=100),
            fwd({"q": 30}, "b", time_ns=2),
            fwd({"c": 40}, "q", time_ns=100),
            fwd({"r": 30}, "c", time_ns=3),
            bwd({"g": 1}, "r", "c", time_ns=1),
            bwd({"h": 1}, "g", "q", "b", time_ns=1),
            bwd({"i": 1}, "h", "p", "a", time_ns=1),
        ],
        {"x": 0},
    )


def test_each_cut_frees_what_it_says_at_the_turn() -> None:
    """Everything kept: 3 * 70 = 210. By price per byte p goes first (1 ns for 30 bytes), then q, then r; then all."""
    of = pairs()
    problem = Problem(of)
    evaluator = Evaluator(problem)
    seen = [
        (level, sorted(of.storages.name[s] for s in problem.candidates if not state.saved[s]))
        for level, state in states(evaluator, problem, bounder_of(problem), TURN)
    ]
    assert seen[:4] == [(210, []), (180, ["p"]), (150, ["p", "q"]), (120, ["p", "q", "r"])]
    levels = [level for level, _ in seen]
    assert levels == sorted(levels, reverse=True)
    assert levels[-1] == 0


@settings(max_examples=80, deadline=None)
@given(of=traces())
def test_the_level_of_a_state_is_what_is_in_memory_then(of: Trace) -> None:
    """At the turn nothing has run again, so the level is the bytes of what the replay has when forward has ended."""
    problem = Problem(of)
    evaluator = Evaluator(problem)
    instants = bounder_of(problem)
    setting = instants.setting(TURN)
    for level, state in states(evaluator, problem, instants, TURN):
        kept = {s for s in evaluator.made_forward if state.saved[s] and not setting.forced[s]}
        assert level == setting.unavoidable_bytes + sum(of.storages.nbytes[s] for s in kept)


def test_a_plan_from_cuts_costs_what_the_bound_says() -> None:
    """In 150 p and q must go, 3 ns, and no less is enough; the chains take 30 bytes when c and b have gone."""
    of = pairs()
    problem = Problem(of)
    search = Search(problem, 151)  # and the 1 byte of g
    bound = bounder_of(problem).bound(151)
    found = best_cut(search, bound, 0)
    assert found is not None
    assert search.evaluator.cost(found.state)[0] <= 151
    assert found.time_ns - of.time_ns == 3


@settings(max_examples=60, deadline=None)
@given(of=traces(), percent=st.integers(20, 100))
def test_a_plan_from_cuts_keeps_to_the_budget(of: Trace, percent: int) -> None:
    problem = Problem(of)
    budget_bytes = Problem(of).saved.timeline.peak_allocated_bytes * percent // 100
    found = best_cut(Search(problem, budget_bytes), bounder_of(problem).bound(budget_bytes), 0)
    if found is not None:
        peak_bytes, time_ns = Evaluator(problem).cost(found.state)
        assert peak_bytes <= budget_bytes
        assert time_ns == found.time_ns
