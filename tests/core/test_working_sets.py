"""What must run again twice, on a tiny trace with every byte and nanosecond worked out."""

from __future__ import annotations

import pytest

from simulator.bounds import working_sets as module
from simulator.bounds.bound import NO_WAY, TWICE, Bound, Bounder
from simulator.bounds.instants import TURN
from simulator.bounds.working_sets import WorkingSets
from simulator.core.problem import Problem
from tests.exhaust import frontier, optimum
from tests.tiny import bwd, fwd, trace
from traces.records.trace import Trace


def chain(*times_ns: int) -> Trace:
    """w 4 resident; a chain of values of 10 bytes, of which backward reads two neighbours at a time."""
    names = "abcdefghijklmnop"[: len(times_ns)]
    forward = [
        fwd({name: 10}, before, time_ns=time_ns)
        for name, before, time_ns in zip(names, ("w", *names), times_ns, strict=False)
    ]
    backward = [bwd({}, y, x) for x, y in zip(names[-2::-1], names[:0:-1], strict=True)]
    return trace([*forward, *backward], {"w": 4})


def bound(of: Trace, budget_bytes: int) -> Bound:
    """Worked out anew."""
    return Bounder(Problem(of)).bound(budget_bytes)


def test_what_has_no_room_runs_again_twice() -> None:
    of = chain(5, 7, 11, 13)
    # Within 24 bytes only two values are there at a time. Op 4 reads d and c, which can be there when forward ends; so
    # a and b are made again. For op 5, b is made beside a, and then c beside b: a 5, b 7, c 11. For op 6 a is made once
    # more beside b: 5. In all 28.
    found = bound(of, 24)
    assert (found.feasible, found.added_time_ns, found.reason) == (True, 28, TWICE)
    # No instant alone shows more than a, b and c once each.
    instants = Bounder(Problem(of)).instants
    alone = [instants.at(op).added(24) for op in range(-1, len(of.ops))]
    assert max(added[0] for added in alone if added) <= 23
    # A schedule cannot let c go that it has kept so far. So c and d are made again for op 4 as well, with a and b
    # before them: 36. For op 5 a, b and c, 23; for op 6 a, then b beside it, 12.
    front = frontier(of)
    assert front is not None
    assert optimum(front, 24) == 36 + 23 + 12


def test_with_room_for_one_more_each_runs_once() -> None:
    of = chain(5, 7, 11, 13)
    # Within 34 bytes b, c and d stay; only a is made again.
    front = frontier(of)
    assert front is not None
    assert bound(of, 34).added_time_ns == optimum(front, 34) == 5


@pytest.mark.parametrize(("name", "value"), [("MOST_STATES", 1), ("STALE_STATES", 1), ("ROOM", 0)])
def test_a_search_that_is_cut_short_says_less(name: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = chain(*range(3, 15))
    whole = bound(of, 24)
    assert whole.reason == TWICE
    monkeypatch.setattr(module, name, value)
    less = bound(of, 24)
    assert (less.feasible, less.added_time_ns < whole.added_time_ns) == (True, True)


@pytest.mark.parametrize(("name", "value"), [("MOST_GROWN", -1), ("MOST_VISITS", -1), ("MOST_LEFT", 0)])
def test_a_search_that_is_cut_short_says_less_without_all_cuts(
    name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = chain(*range(3, 15))
    monkeypatch.setattr(module, "MOST_STATES", 30)
    whole = bound(of, 24)
    monkeypatch.setattr(module, name, value)
    less = bound(of, 24)
    assert 0 < less.added_time_ns < whole.added_time_ns


def test_without_a_way_back_there_is_no_plan() -> None:
    # Within 23 bytes no op can read two values.
    sets = WorkingSets(Bounder(Problem(chain(5, 7, 11, 13))).instants)
    assert sets.added_ns(23, TURN, 1, 1) is None
    assert sets.added_ns(24, TURN, 1, 1) is not None


def test_a_budget_without_a_way_back_is_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkingSets, "added_ns", lambda *_: None)
    found = bound(chain(5, 7, 11, 13), 24)
    assert (found.feasible, found.added_time_ns, found.reason) == (False, 0, NO_WAY)


def test_small_storages_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    of = chain(*range(3, 11))
    whole = bound(of, 24)
    monkeypatch.setattr(module, "FEW", 0.5)  # below twice the largest: all
    monkeypatch.setattr(module, "SMALL", 0.5)
    assert bound(of, 24).added_time_ns < whole.added_time_ns


def test_of_a_state_that_is_full_the_smallest_storages_are_not_asked_for() -> None:
    # An op reads 40 values of 10 to 49 bytes, each made from w in as many ns. Nothing of them can stay beside g.
    sizes = {f"x{k}": 10 + k for k in range(40)}
    forward = [fwd({name: nbytes}, "w", time_ns=nbytes) for name, nbytes in sizes.items()]
    total = sum(sizes.values())
    of = trace(
        [*forward, bwd({"g": total}), bwd({}, "g"), bwd({}, *sizes)],
        {"w": 4},
    )
    found = bound(of, total + 4)
    # The 24 largest are 26 to 49 bytes and ns; what is wanted at an instant is counted in full.
    assert sum(range(26, 50)) <= found.added_time_ns <= total
