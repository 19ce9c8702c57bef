"""The certified bound on tiny traces with the arithmetic written out, and the exact cuts under it."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

from simulator.bounds.bound import bound_curve, lower_bound
from simulator.bounds.components import Corner, Link, Network, Rerun, corners
from simulator.bounds.instants import TURN, Instants
from simulator.core.problem import Problem
from simulator.planners import plan_with
from tests.exhaust import frontier, optimum
from tests.synthetic import resnet
from tests.tiny import Op, bwd, chain, fwd, trace
from traces.records.trace import EAGER, RANDOM, Trace


def two_values() -> Trace:
    """w 4 resident; a 40 (5 ns), b 20 (7 ns), c 4 from forward; backward reads c, then b, then a.

    Everything kept: at the end of forward 4 + 40 + 20 + 4 = 68.
    """
    return trace(
        [
            fwd({"a": 40}, "w", time_ns=5),
            fwd({"b": 20}, "w", time_ns=7),
            fwd({"c": 4}, "b", time_ns=1, flags=RANDOM),
            bwd({"g": 4}, "c"),
            bwd({"h": 4}, "g", "b"),
            bwd({}, "h", "a"),
        ],
        {"w": 4},
    )


def test_a_budget_that_keep_all_meets_adds_nothing() -> None:
    bound = lower_bound(Problem(two_values()), 72)  # while g is made: 4 + 40 + 20 + 4 (c) + 4 (g)
    assert (bound.feasible, bound.added_time_ns, bound.op) == (True, 0, TURN)
    assert bound.overhead_percent == 0.0


def test_cheapest_bytes_first_and_a_part_of_one_storage() -> None:
    # While op 3 makes g: w 4 + c 4 (it reads it) + g 4 = 12 whatever the plan; a and b, 60 bytes, may be kept.
    # a costs 5/40 ns per byte, b 7/20. Budget 48 is 24 too little: 5 * 24 / 40 = 3 ns; 49 is 23 too little: 2.9,
    # rounded down. The turn has 68 bytes: 5 * 20 / 40 = 2.5.
    # Op 4 has 72 too (w, g, b, h 32 and a 40), and as the later one it is the one looked at.
    bound = lower_bound(Problem(two_values()), 48)
    assert (bound.added_time_ns, bound.op) == (3, 4)
    assert Instants(Problem(two_values())).at(3).added(48) == (3, 5, 40)
    assert Instants(Problem(two_values())).at(3).added(49) == (2, 5, 40)
    assert Instants(Problem(two_values())).at(TURN).added(48) == (2, 5, 40)
    assert (bound.price_ns, bound.price_bytes) == (5, 40)
    assert bound.overhead_percent == pytest.approx(100 * 3 / 16)  # 5 + 7 + 1 + 1 + 1 + 1 ns
    # Budget 32 is exactly all of a; 22 is 10 less, half of b: 5 + 7 * 10 / 20 = 8.5. The instant would allow both,
    # but the last op reads a again: w 4 + h 4 + a 40 = 48 is the floor.
    assert not lower_bound(Problem(two_values()), 32).feasible
    assert Instants(Problem(two_values())).at(3).added(32) == (5, 5, 40)
    assert Instants(Problem(two_values())).at(3).added(22) == (8, 7, 20)
    assert Instants(Problem(two_values())).at(3).added(11) is None


def test_a_link_is_made_again_or_saved_whichever_costs_less() -> None:
    # y is read in backward, x only by y's op. Without y: x again too, 3 + 2 = 5 ns, or x saved: 10 bytes for 3 ns.
    of = trace(
        [
            fwd({"x": 10}, "w", time_ns=2),
            fwd({"y": 30}, "x", time_ns=3),
            fwd({"z": 4}, "y", time_ns=1),
            bwd({"g": 4}, "z"),
            bwd({}, "g", "y"),
        ],
        {"w": 4},
    )
    instant = Instants(Problem(of)).at(3)  # w 4, z 4, g 4
    assert (instant.unavoidable_bytes, instant.most_bytes) == (12, 30)
    # The hull from (0 ns, 30 bytes) over (3 ns, 10 bytes) to (5 ns, 0 bytes): 3/20 and 2/10 ns per byte.
    assert instant.steps == ((3, 20), (2, 10))


def test_an_op_with_two_outputs_is_paid_once() -> None:
    of = trace(
        [
            fwd({"x": 10, "y": 30}, "w", time_ns=4),
            fwd({"z": 4}, "y", time_ns=1),
            bwd({"g": 4}, "z"),
            bwd({}, "g", "y", "x"),
        ],
        {"w": 4},
    )
    assert Instants(Problem(of)).at(2).steps == ((4, 40),)


def test_what_may_not_run_again_is_kept() -> None:
    of = trace(
        [
            fwd({"r": 16}, "w", time_ns=2, flags=RANDOM),  # a link that is random: y's op needs it saved
            fwd({"y": 40}, "r", time_ns=3),
            fwd({"e": 8}, "y", flags=EAGER),
            bwd({"g": 4}, "e", flags=EAGER),
            bwd({}, "g", "r", "y"),
        ],
        {"w": 4},
    )
    # While g is made: w 4, e 8, g 4, and r 16, which backward reads and nothing can make again.
    instant = Instants(Problem(of)).at(3)
    assert (instant.unavoidable_bytes, instant.most_bytes, instant.steps) == (32, 40, ((3, 40),))


def test_a_storage_that_is_taken_over_counts_only_if_it_survives() -> None:
    ops = [
        fwd({"x": 40}, "w", time_ns=5),
        bwd({"g": 40}, "x", overwrites="x", time_ns=1),
        bwd({}, "g", time_ns=1),
    ]
    # x is last read by op 1, which writes into its memory: 4 + 40 in all.
    assert Instants(Problem(trace(ops, {"w": 4}))).at(1).unavoidable_bytes == 44
    # Read once more later, x stays (40 more) or is computed again after op 1.
    ops.append(bwd({}, "x", time_ns=1))
    instant = Instants(Problem(trace(ops, {"w": 4}))).at(1)
    assert (instant.unavoidable_bytes, instant.most_bytes, instant.steps) == (44, 40, ((5, 40),))


def test_an_instant_during_backward_can_decide() -> None:
    # Three buffers of 100 in the loss's backward; the end of forward has one.
    of = trace(
        [
            fwd({"x": 50}, "w", time_ns=9),
            fwd({"y": 50}, "x", time_ns=9),
            fwd({"l": 100}, "y", time_ns=1),
            bwd({"d1": 100}, "l"),
            bwd({"d2": 100}, "d1", "l"),
            bwd({"d3": 4}, "d2", "y"),
            bwd({}, "d3", "x"),
        ],
        {"w": 4},
    )
    # Op 4: w 4, d1 100, l 100, d2 100 = 304; x and y beside them make 404. Budget 354: 50 too many, 9 ns.
    # The turn has only w 4, x 50, y 50, l 100 = 204.
    bound = lower_bound(Problem(of), 354)
    assert (bound.added_time_ns, bound.op) == (9, 4)
    assert Instants(Problem(of)).at(TURN).added(354) == (0, 0, 1)


def test_an_instant_of_forward_can_decide() -> None:
    # The peak is in forward: h and i are gone when it ends.
    of = trace(
        [
            fwd({"x": 50}, "w", time_ns=9),
            fwd({"h": 200}, "w", time_ns=1),
            fwd({"i": 200}, "h", time_ns=1),
            fwd({"l": 4}, "i", time_ns=1),
            bwd({"g": 4}, "l"),
            bwd({}, "g", "x"),
        ],
        {"w": 4},
    )
    # Op 2: w 4, h 200, i 200 = 404, and x 50 unless it is computed again: 9 ns. l is made later and free here.
    bound = lower_bound(Problem(of), 420)
    assert (bound.added_time_ns, bound.op) == (9 * 34 // 50, 2)


def test_a_hold_that_outlasts_the_instant_counts() -> None:
    ops = [fwd({"x": 8}, "w"), bwd({"g": 40}, "x"), bwd({"k": 8}, "x"), bwd({}, "w")]
    assert Instants(Problem(trace(ops, {"w": 4}))).at(2).unavoidable_bytes == 4 + 8 + 8
    assert Instants(Problem(trace(ops, {"w": 4}, {"g": 3}))).at(2).unavoidable_bytes == 4 + 8 + 8 + 40


def test_below_the_floor_is_infeasible_with_the_reason() -> None:
    of = chain(4)
    bound = lower_bound(Problem(of), Instants(Problem(of)).floor.peak_bytes - 1)
    assert not bound.feasible
    assert bound.reason.startswith("no plan fits: while ")
    assert (
        lower_bound(Problem(of), Instants(Problem(of)).floor.peak_bytes - 1).to_json()["overhead_percent"]
        is None
    )


def test_chain_bound_equals_the_optimum_where_one_instant_says_it_all() -> None:
    # Five values of 4 bytes, each 1 ns, w 4 resident: one value less at the end of forward costs one op again.
    of = chain(4)
    front = frontier(of)
    assert front is not None
    top = max(p for p, added in front.items() if added == 0)
    for below in (0, 4):
        truth = optimum(front, top - below)
        assert truth is not None
        assert lower_bound(Problem(of), top - below).added_time_ns == below // 4 == truth


def test_curve_falls_with_the_budget_and_agrees_with_single_bounds() -> None:
    of = resnet((1, 2, 2, 1))
    top = max(Instants(Problem(of)).peaks)
    curve = bound_curve(Problem(of), [top * k // 20 for k in range(21)])
    assert [b.budget_bytes for b in curve] == sorted(b.budget_bytes for b in curve)
    known = [b.overhead_percent for b in curve if b.feasible]
    assert known == sorted(known, reverse=True)
    assert known[-1] == 0.0
    assert not curve[0].feasible
    for bound in curve:
        alone = lower_bound(Problem(of), bound.budget_bytes)
        assert alone.feasible or not bound.feasible
        assert alone.added_time_ns <= bound.added_time_ns or not bound.feasible


@pytest.mark.parametrize("share", [90, 70, 50, 40])
def test_bound_stands_close_below_a_planner(share: int) -> None:
    of = resnet((1, 2, 2, 1))
    budget = max(Instants(Problem(of)).peaks) * share // 100
    plan = plan_with("mu-two", Problem(of), budget)
    bound = lower_bound(Problem(of), budget)
    assert bound.overhead_percent <= plan.predicted["plan"]["overhead_percent"] + 1e-4  # it is rounded there
    assert bound.overhead_percent > 0


def test_a_bound_as_json_has_what_simulate_prints() -> None:
    answer = lower_bound(Problem(two_values()), 48).to_json()
    assert answer["overhead_percent"] == pytest.approx(18.75)
    assert answer["feasible"] is True
    assert answer["op"] == 4


def brute_corners(ops: tuple[Rerun, ...], links: tuple[Link, ...]) -> list[tuple[int, int]]:
    """(time, bytes) of every choice of what runs again."""
    out = []
    for again in product((False, True), repeat=len(ops)):
        if any(a and o.time_ns < 0 for a, o in zip(again, ops, strict=True)):
            continue
        kept = sum(o.saved_bytes for a, o in zip(again, ops, strict=True) if not a)
        saved = sum(x.nbytes for x in links if any(again[p] for p in x.readers) and not again[x.maker])
        out.append((sum(o.time_ns for a, o in zip(again, ops, strict=True) if a), kept + saved))
    return out


@pytest.mark.parametrize("seed", range(150))
def test_corners_are_the_lower_hull_of_every_choice(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randrange(1, 8)
    ops = tuple(
        Rerun(-1 if draw.random() < 0.15 else draw.randrange(10), draw.choice((0, 4, 9, 30)))
        for _ in range(n)
    )
    links = tuple(
        Link(draw.choice((0, 4, 9, 30)), maker, tuple(draw.sample(range(maker + 1, n), k=1)))
        for maker in draw.choices(range(n), k=n)
        if maker + 1 < n
    )
    every = brute_corners(ops, links)
    found = corners(ops, links)
    assert {(c.time_ns, c.nbytes) for c in found} <= set(every)
    for a, b in pairwise(found):
        assert a.time_ns < b.time_ns
        assert a.nbytes > b.nbytes
    for per_ns, per_byte in [(1, 0), (0, 1), *((draw.randrange(60), draw.randrange(60)) for _ in range(40))]:
        best = min(per_ns * t + per_byte * m for t, m in every)
        assert min(per_ns * c.time_ns + per_byte * c.nbytes for c in found) == best


def test_cut_of_a_network_with_huge_capacities_is_exact() -> None:
    # 0 -> 1 -> 2 with 2**100 + 1 and 2**100: only the second edge is cut, so 1 lies on the source's side.
    net = Network(3)
    net.edge(0, 1, 2**100 + 1)
    net.edge(1, 2, 2**100)
    assert net.source_side(0, 2) == [True, True, False]


def test_an_empty_component_of_no_cost_has_one_corner() -> None:
    assert corners((Rerun(0, 8),), ()) == (Corner(time_ns=0, nbytes=0),)


def test_no_backward_and_no_ops() -> None:
    only_forward = trace([fwd({"x": 8}, "w")], {"w": 4})
    assert lower_bound(Problem(only_forward), 12).added_time_ns == 0
    assert not lower_bound(Problem(only_forward), 11).feasible
    assert lower_bound(Problem(trace([Op("optimizer", {}, ("w",))], {"w": 4})), 4).added_time_ns == 0


def test_the_parts_of_a_networks_floor_make_the_whole() -> None:
    found = Instants(Problem(resnet((1, 1, 1, 1), batch=2, side=64))).floor
    assert found.peak_bytes == found.resident_bytes + found.gradient_bytes + found.working_bytes
