"""The floor that asks how an op's inputs come back, on tiny traces with the bytes worked out, and on the gallery."""

from __future__ import annotations

import pytest

from simulator.bounds import lowest as lowest_module
from simulator.bounds.bound import Bounder, lower_bound
from simulator.bounds.instants import Instants
from simulator.bounds.lowest import lowest
from simulator.core.problem import Problem
from simulator.planners import plan_with
from simulator.planners.outcome import Infeasible
from tests.exhaust import draw_trace, frontier
from tests.synthetic import resnet
from tests.tiny import bwd, fwd, trace
from traces.records.trace import Trace


def far_apart(taken: str = "") -> Trace:
    """w 4 resident; a 8, b 50 and c 50 form a chain, of which backward reads c, at its end; g 40 stays till then.

    While t (60) is there, c cannot be: 4 + 40 + 60 + 50 = 154.
    """
    return trace(
        [
            fwd({"a": 8}, "w"),
            fwd({"b": 50}, "a"),
            fwd({"c": 50}, "b", overwrites=taken),
            fwd({"e": 4}, "c"),
            bwd({"g": 40}, "e"),
            bwd({"t": 60}, "g"),
            bwd({}, "t"),
            bwd({}, "g", "c"),
        ],
        {"w": 4},
    )


def test_what_an_op_reads_must_be_brought_back() -> None:
    of = far_apart()
    # One op at a time: op 2 in forward has w 4, b 50, c 50; op 5 has w 4, g 40, t 60: both 104.
    assert Instants(Problem(of)).floor.peak_bytes == 104
    # But c comes back for op 7 only beside g: before op 6 with t 60 there, or before op 7: w 4, g 40, b 50, c 50.
    found = lowest(Instants(Problem(of)))
    assert (found.peak_bytes, found.op, found.brings_back) == (144, 7, True)
    assert (found.resident_bytes, found.gradient_bytes, found.working_bytes) == (4, 40, 100)
    front = frontier(of)
    assert front is not None
    assert min(front) == 144


def test_an_op_that_takes_over_its_input_needs_less_to_run_again() -> None:
    # c takes b's memory: b comes back beside a, 4 + 40 + 8 + 50 = 102, less than op 5's own 104.
    of = far_apart("b")
    assert lowest(Instants(Problem(of))) == Instants(Problem(of)).floor
    front = frontier(of)
    assert front is not None
    assert min(front) == 104


def test_what_two_inputs_need_together() -> None:
    """Op 5 adds x and y, 30 each; each comes from a value of 20, and what stands between leaves room for neither."""
    of = trace(
        [
            fwd({"u": 20, "v": 20}, "w"),
            fwd({"x": 30}, "u"),
            fwd({"y": 30}, "v"),
            fwd({"e": 2}, "x", "y"),
            bwd({"g": 10}, "e"),
            bwd({"t": 76}, "g"),
            bwd({}, "t"),
            bwd({}, "g", "x", "y"),
        ],
        {"w": 4},
    )
    # Forward: op 2 has w 4, x 30, v 20, y 30 = 84; op 5 has w 4, g 10, t 76 = 90, and op 7 w 4, g 10, x 30, y 30.
    assert Instants(Problem(of)).floor.peak_bytes == 90
    # Before op 7, w 4 and g 10 are there. The last of x and y to come back, y say, is made beside x: 30 + 20 + 30,
    # 94 in all. Before that, x and v: v comes with u, 20 + 20 beside x or before it, which is less.
    found = lowest(Instants(Problem(of)))
    assert (found.peak_bytes, found.op) == (94, 7)
    # What holds x and v together is u, v and x at once: 14 + 70 = 84. So 94 is what a plan reaches, too.
    front = frontier(of)
    assert front is not None
    assert min(front) == 94


def test_an_op_runs_at_most_once_in_a_gap() -> None:
    """Op 8 reads a and b, and b comes from a by way of t and u, 30 each, which leave no room for a beside them."""
    of = trace(
        [
            fwd({"s": 40}, "w"),
            fwd({"a": 10}, "s"),
            fwd({"t": 30}, "a"),
            fwd({"u": 30}, "t"),
            fwd({"b": 10}, "u"),
            fwd({"e": 2}, "b"),
            bwd({"g": 40}, "e"),
            bwd({"x": 65}, "g"),
            bwd({}, "g", "a", "b"),
        ],
        {"w": 4},
    )
    # Op 7 has w 4, g 40 and x 65: 109, and neither a nor b has room beside that within 118.
    assert Instants(Problem(of)).floor.peak_bytes == 109
    # Before op 8, w 4 and g 40 are there. Were a made twice, first for t and then, beside b, from s, it would take
    # 44 + 30 + 30 and 44 + 10 + 40 + 10. It is made once, so it waits while u is made: 44 + 10 + 30 + 30.
    found = lowest(Instants(Problem(of)))
    assert (found.peak_bytes, found.op) == (114, 8)
    front = frontier(of)
    assert front is not None
    assert min(front) == 114


def test_the_close_floor_is_looked_for_where_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    of = far_apart()
    monkeypatch.setattr(lowest_module, "MOST_STATES", 0)  # so that the quick floor is that of single ops, 104
    bounder = Bounder(Problem(of))
    assert (bounder.floor.peak_bytes, bounder.close_floor.peak_bytes) == (104, 144)
    assert [bounder.below_floor(b) for b in (103, 104, 116)] == [True] * 3
    assert not bounder.below_floor(117)  # more than NEAR times 104: not worth the time
    assert not lower_bound(Problem(of), 116).feasible


def test_the_close_floor_is_not_looked_for_where_a_step_that_needs_more_leaves_a_plan_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lowest_module, "MOST_STATES", 0)
    bounder = Bounder(Problem(far_apart()))
    for budget in (103, 104):
        bounder.leave_open(budget)
    assert [bounder.below_floor(b) for b in (103, 104, 105)] == [True, False, True]


def test_a_budget_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bounder = Bounder(Problem(far_apart()))
    first = [bounder.below_floor(b) for b in (143, 144)]
    monkeypatch.setattr(lowest_module.Pebbles, "least_bytes", lambda *_: pytest.fail("searched again"))
    assert first == [True, False] == [bounder.below_floor(b) for b in (143, 144)]


def test_it_stays_below_every_plan_and_often_reaches_the_best_one() -> None:
    seen = higher = reached = 0
    for seed in range(400):
        of = draw_trace(seed)
        front = frontier(of, most=300)
        if not front:
            continue
        instants = Instants(Problem(of))
        simple, found = Instants(Problem(of)).floor, lowest(instants)
        close = lowest(instants, close=True)
        assert simple.peak_bytes <= found.peak_bytes <= close.peak_bytes <= min(front), seed
        seen += 1
        higher += found.peak_bytes > simple.peak_bytes
        reached += found.peak_bytes == min(front)
    assert seen >= 200
    assert higher >= 5
    assert reached >= seen // 2


def test_too_much_work_counts_as_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowest_module, "MOST_STATES", 0)
    assert lowest(Instants(Problem(far_apart()))) == Instants(Problem(far_apart())).floor
    monkeypatch.setattr(lowest_module, "MOST_STATES", 300)
    monkeypatch.setattr(lowest_module, "MOST_WORK", 0)
    assert lowest(Instants(Problem(far_apart()))) == Instants(Problem(far_apart())).floor
    monkeypatch.setattr(lowest_module, "CLOSE_STATES", 0)
    assert lowest(Instants(Problem(far_apart())), close=True) == Instants(Problem(far_apart())).floor


def test_the_bound_and_the_refusal_know_it() -> None:
    of = far_apart()
    assert not lower_bound(Problem(of), 143).feasible
    assert lower_bound(Problem(of), 144).feasible
    with pytest.raises(
        Infeasible, match=r"No plan can stay within .*to bring back what that op reads"
    ) as refused:
        plan_with("search", Problem(of), 143)
    assert refused.value.figures["floor"]["peak_allocated_bytes"] == 144
    assert plan_with("search", Problem(of), 144).predicted["plan"]["peak_allocated_bytes"] == 144


def test_on_a_network_the_parts_make_the_whole() -> None:
    of = resnet((1, 1, 1, 1), batch=2, side=64)
    found = Bounder(Problem(of)).floor
    assert found.peak_bytes == found.resident_bytes + found.gradient_bytes + found.working_bytes
    assert Instants(Problem(of)).floor.peak_bytes <= found.peak_bytes
