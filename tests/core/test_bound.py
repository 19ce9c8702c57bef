"""The certified bound on tiny traces with the arithmetic written out, and the exact cuts under it."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

from simulator.bounds import TURN, Instants, bounder_of
from simulator.bounds.networks import Corner, Link, Network, Rerun, corners
from simulator.core.problem import Problem
from tests.tiny import Op, bwd, chain, fwd, trace
from traces.records.trace import RANDOM, Trace


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
    bound = bounder_of(Problem(two_values())).bound(72)  # while g is made: 4 + 40 + 20 + 4 (c) + 4 (g)
    assert (bound.feasible, bound.added_time_ns, bound.op) == (True, 0, TURN)
    assert bound.overhead_percent == 0.0


def test_cheapest_bytes_first_and_a_part_of_one_storage() -> None:
    # While op 3 makes g: w 4 + c 4 (it reads it) + g 4 = 12 whatever the plan; a and b, 60 bytes, may be kept.
    # a costs 5/40 ns per byte, b 7/20. Budget 48 is 24 too little: 5 * 24 / 40 = 3 ns; 49 is 23 too little: 2.9,
    # rounded down. The turn has 68 bytes: 5 * 20 / 40 = 2.5.
    # Op 4 has 72 too (w, g, b, h 32 and a 40), and as the later one it is the one looked at.
    bound = bounder_of(Problem(two_values())).bound(48)
    assert (bound.added_time_ns, bound.op) == (3, 4)
    assert Instants(Problem(two_values())).at(3).added(48) == (3, 5, 40)
    assert Instants(Problem(two_values())).at(3).added(49) == (2, 5, 40)
    assert Instants(Problem(two_values())).at(TURN).added(48) == (2, 5, 40)
    assert (bound.price_ns, bound.price_bytes) == (5, 40)
    told = bound.to_json()
    assert (told["feasible"], told["op"], told["overhead_percent"]) == (True, 4, bound.overhead_percent)
    assert bound.overhead_percent == pytest.approx(100 * 3 / 16)  # 5 + 7 + 1 + 1 + 1 + 1 ns
    # Budget 32 is exactly all of a; 22 is 10 less, half of b: 5 + 7 * 10 / 20 = 8.5. The instant would allow both,
    # but the last op reads a again: w 4 + h 4 + a 40 = 48 is the floor.
    assert not bounder_of(Problem(two_values())).bound(32).feasible
    assert Instants(Problem(two_values())).at(3).added(32) == (5, 5, 40)
    assert Instants(Problem(two_values())).at(3).added(22) == (8, 7, 20)
    assert Instants(Problem(two_values())).at(3).added(11) is None


def test_below_the_floor_is_infeasible_with_the_reason() -> None:
    of = chain(4)
    bound = bounder_of(Problem(of)).bound(Instants(Problem(of)).floor.peak_bytes - 1)
    assert not bound.feasible
    assert bound.reason.startswith("no plan fits: while ")
    assert bound.to_json()["overhead_percent"] is None


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
    assert bounder_of(Problem(only_forward)).bound(12).added_time_ns == 0
    assert not bounder_of(Problem(only_forward)).bound(11).feasible
    assert bounder_of(Problem(trace([Op("optimizer", {}, ("w",))], {"w": 4}))).bound(4).added_time_ns == 0
