"""Exchanges: one dear value kept again in place of cheap ones, judged by the exact walk."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.bounds import Instants
from simulator.core.problem import Problem
from simulator.planners.mu_two import Found, Search, exchanged, tidy, unevicted
from tests.strategies import traces
from tests.tiny import bwd, chain, fwd, trace
from tests.walked import state_of
from traces.records.plan import Action
from traces.records.trace import Trace

HUGE = 100_000  # makes values of 10 bytes negligible to the greedy, which looks from 100,000 / 4,096 = 24 bytes on


def norm_beside_matmul() -> Trace:
    """A norm that runs again for its large output, three small ones that it makes as well, and a dear value of 30.

    The peak with everything kept is at t: x 5, y 100,000, m, q, r 10 each, dear 30, end 1 and t 200,000: 300,066.
    """
    return trace(
        [
            fwd({"x": 5}, "w", time_ns=1),
            fwd({"y": HUGE, "m": 10, "q": 10, "r": 10}, "x", time_ns=2),
            fwd({"dear": 30}, "x", time_ns=50),
            fwd({"end": 1}, "y", "m", "q", "r", "dear", time_ns=1),
            bwd({"t": 200_000}, "end", time_ns=1),
            bwd({"u": 1}, "t", time_ns=1),
            bwd({"g3": 1}, "u", "dear", time_ns=1),
            bwd({"g2": 1}, "g3", "y", "m", "q", "r", time_ns=1),
            bwd({"g1": 1}, "g2", "x", time_ns=1),
        ],
        {"w": 0},
    )


BUDGET = 200_036  # at t: x 5, end 1, t 200,000, and 30: dear, or m, q and r


def released(of: Trace, search: Search, there: object) -> set[str]:
    return {of.storages.name[s] for s in search.problem.candidates if not there[s]}  # type: ignore[index]


def test_small_values_that_cost_nothing_make_room_for_a_dear_one() -> None:
    of = norm_beside_matmul()
    assert Problem(of).saved.timeline.peak_allocated_bytes == 300_066
    search = Search(Problem(of), BUDGET)
    state = search.evaluator.state()
    assert search.evict(state)
    found = search.save_again(state)
    # the greedy lets y go, which is cheap, and then dear, since the others are negligible
    assert released(of, search, found.state.saved) == {"y", "dear"}
    assert found.time_ns == of.time_ns + 2 + 50
    better = exchanged(search, found)
    assert released(of, search, better.state.saved) == {"y", "m", "q", "r"}
    assert search.evaluator.cost(better.state) == (BUDGET, better.time_ns) == (BUDGET, of.time_ns + 2)
    assert released(of, search, found.state.saved) == {"y", "dear"}  # as it was given


@settings(max_examples=300, deadline=None)
@given(of=traces(max_forward=12, max_backward=12), part=st.integers(0, 20))
def test_an_exchange_is_never_slower_and_never_over_the_budget(of: Trace, part: int) -> None:
    problem = Problem(of)
    search = Search(problem, 0)
    most, least = search.evaluator.cost(search.evaluator.state())[0], Instants(problem).floor.peak_bytes
    search = Search(problem, least + (most - least) * part // 20)
    state = search.evaluator.state()
    if not search.evict(state):
        return
    found = search.save_again(state)
    before = found.state.copy()
    better = exchanged(search, found)
    assert (before.saved == found.state.saved).all()
    assert (before.retained == found.state.retained).all()
    assert better.time_ns <= found.time_ns
    tidied = tidy(search, found.state.copy())
    assert tidied.time_ns <= found.time_ns
    timeline = Problem(of).replay(search.evaluator.actions(tidied.state)).timeline
    assert timeline.step_time_ns == tidied.time_ns
    assert timeline.peak_allocated_bytes <= search.budget_bytes
    assert search.evaluator.cost(better.state)[1] == better.time_ns


def test_an_eviction_that_nothing_asks_for_is_taken_back() -> None:
    """x1 is made again for g5, evicted although there is room, and made once more."""
    of = chain(5)
    search, x1 = Search(Problem(of), 1 << 40), of.storages.name.index("x1")
    state = state_of(search.evaluator, [Action(storage=x1, evict_after=(search.evaluator.forward,))])
    found = Found(state=state, time_ns=search.evaluator.cost(state)[1])
    better = unevicted(search, found)
    assert (found.state.evictions, better.state.evictions) == ({search.evaluator.forward: (x1,)}, {})
    assert better.time_ns <= found.time_ns
