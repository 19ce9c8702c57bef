"""The integer programmes of the benchmarks against each other, exhaustive search and the certified bound."""

from __future__ import annotations

import pytest

from simulator.bounds.bound import lower_bound
from simulator.core.problem import Problem
from tests.bench import checkmate, moccasin
from tests.bench.small import Small, problem_of, without_takeovers
from tests.exhaust import budgets, draw_trace, frontier, optimum
from tests.synthetic import ladder
from tests.tiny import chain
from traces.records.trace import Trace

SECONDS = 20.0


def cases(seeds: range) -> list[tuple[Trace, Small, dict[int, int]]]:
    """Drawn traces with every plan of ours that has no drops, but for those with too many."""
    out = []
    for seed in seeds:
        trace = without_takeovers(draw_trace(seed))
        front = frontier(trace, most=300)
        if front is not None and len(front) > 1:
            out.append((trace, problem_of(trace), front))
    return out


def test_with_everything_kept_no_programme_adds_anything_and_a_byte_less_is_another_matter() -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("ortools")
    for seed in range(25):
        trace = without_takeovers(draw_trace(seed))
        problem = problem_of(trace)
        peak = Problem(trace).saved.timeline.peak_allocated_bytes
        for solve in (checkmate.solve, moccasin.solve):
            assert solve(problem, peak, SECONDS).added_ns == 0
            less = solve(problem, peak - 1, SECONDS)
            assert less.proved
            assert less.added_ns is None or less.added_ns > 0  # every op of forward takes time


def test_checkmates_optimum_is_never_above_ours_and_never_below_the_bound() -> None:
    pytest.importorskip("scipy")
    equal = total = 0
    for trace, problem, front in cases(range(60)):
        for budget_bytes in list(budgets(front))[:3]:
            best = optimum(front, budget_bytes)
            found = checkmate.solve(problem, budget_bytes, SECONDS)
            assert found.proved
            if best is not None:
                assert found.added_ns is not None
                assert found.added_ns <= best
            if found.added_ns is not None:
                bound = lower_bound(Problem(trace), budget_bytes)
                assert bound.feasible
                assert bound.added_time_ns <= found.added_ns
                published = checkmate.solve(problem, budget_bytes, SECONDS, as_ours=False)
                assert published.added_ns is not None
                assert published.added_ns <= found.added_ns
            total += 1
            equal += found.added_ns == best
    # Where it is below, a value is dropped between two uses in backward, or an output of an op is bound once more.
    assert total > 50
    assert equal > 0.85 * total


@pytest.mark.parametrize("trace", [chain(5), chain(9), ladder(8, seed=1), ladder(10, seed=3)])
def test_both_programmes_find_the_same_optimum(trace: Trace) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("ortools")
    problem = problem_of(trace)
    peak = Problem(trace).saved.timeline.peak_allocated_bytes
    for share in (0.9, 0.75, 0.6):
        one = checkmate.solve(problem, int(share * peak), SECONDS)
        two = moccasin.solve(problem, int(share * peak), SECONDS)
        assert one.proved
        assert two.proved
        if two.added_ns is not None:  # with two runs of an op at most
            assert one.added_ns is not None
            assert one.added_ns <= two.added_ns
        if share >= 0.75:
            assert one.added_ns == two.added_ns


def test_a_chain_worked_out_by_hand() -> None:
    pytest.importorskip("scipy")
    # x0 .. x3 of 4 bytes, w of 4; g3 = f(x3), g2 = f(g3, x2), ... Everything kept: w, four x and g3 are 24 bytes while
    # the first op of backward runs. In 20 bytes one of x0, x1, x2 goes and is made again when x3 is gone: 1 ns.
    problem = problem_of(chain(3))
    assert checkmate.solve(problem, 24, SECONDS).added_ns == 0
    assert checkmate.solve(problem, 20, SECONDS).added_ns == 1
