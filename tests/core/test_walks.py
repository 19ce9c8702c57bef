"""Walks: what becomes of rebuilt values follows from what is saved and from the room that there is."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simulator.core.evaluator import Evaluator, State
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.kernels.anneal import anneal
from simulator.kernels.compiled import compiled
from simulator.kernels.retain import retain
from simulator.planners.annealing import Annealer, state_of
from tests.strategies import trace_of, traces
from tests.tiny import bwd, fwd, trace
from traces.records.trace import Trace

NEVER = Limits()


def ladder(hold: dict[str, int] | None = None) -> Trace:
    """Three values made from each other; the first is dear, the others cost nothing to speak of."""
    return trace(
        [
            fwd({"a": 10}, "x", time_ns=100),
            fwd({"b": 10}, "a", time_ns=1),
            fwd({"c": 10}, "b", time_ns=1),
            fwd({"y": 1}, "c", time_ns=1),
            bwd({"e": 1}, "y", time_ns=1),
            bwd({"f": 15}, "e", "c", time_ns=1),
            bwd({"g": 20}, "f", "b", time_ns=1),
            bwd({"h": 1}, "g", "a", time_ns=1),
        ],
        {"x": 0},
        hold,
    )


@compiled
def walked(facts: Any, r: Any, work: Any, budget_bytes: int, saved: Any, evictions: Any) -> Any:
    """A kernel that does nothing else."""
    return retain(facts, r, work, budget_bytes, saved, evictions)


def decided(annealer: Annealer, state: State) -> State:
    """With what the state saves, what a walk does with the rest."""
    ev, knows = annealer.evaluator, annealer.retaining
    pairs = np.zeros((2, 4 * len(ev.op_id) + 64), np.int32)
    n = walked(ev.facts, knows, ev.work_space(0), annealer.budget_bytes, state.saved, pairs)
    return state_of(state.saved, knows.may_stay, pairs[:, :n])


def nothing_kept(of: Trace, budget_bytes: int) -> tuple[Annealer, State]:
    problem = Problem(of)
    evaluator = Evaluator(problem)
    state = evaluator.state()
    state.saved[list(problem.candidates)] = 0
    return Annealer(evaluator, budget_bytes, 0), state


@pytest.mark.parametrize(
    ("budget_bytes", "drops", "added_ns"),
    [
        # e rebuilds a, b, c and y. While f runs: a, b, c, e and f, 10 + 10 + 10 + 1 + 15 = 46
        # bytes. While g runs: a, b, f and g, 10 + 10 + 15 + 20 = 55.
        (55, {}, 103),
        # In 54 a is idle while g runs: it goes after e, which had it last, and h makes it again.
        (54, {4: ("a",)}, 203),
        # In 45 one must go while f runs: b, which is cheap. g makes it again from a, which then goes for want of room.
        (45, {4: ("b",), 6: ("a",)}, 204),
    ],
)
def test_what_is_idle_goes_where_there_is_no_room(
    budget_bytes: int, drops: dict[int, tuple[str, ...]], added_ns: int
) -> None:
    of = ladder()
    annealer, state = nothing_kept(of, budget_bytes)
    found = decided(annealer, state)
    names = of.storages.name
    assert {k: tuple(sorted(names[s] for s in d)) for k, d in found.evictions.items()} == drops
    assert annealer.evaluator.cost(found)[1] - of.time_ns == added_ns
    assert budget_bytes < 54 or annealer.evaluator.cost(found)[0] <= budget_bytes


def test_what_is_held_needs_nothing_that_it_was_made_from() -> None:
    """c, which is saved, goes with f, though y is held to the end: a, b, f, g and y are 56 bytes while g runs."""
    annealer, state = nothing_kept(ladder({"y": 7}), 56)
    state.saved[annealer.evaluator.trace.storages.name.index("c")] = 1
    assert not decided(annealer, state).evictions


@settings(max_examples=80, deadline=None)
@example(of=trace_of(8, 2, 505462), percent=28, keep=0)
@given(of=traces(), percent=st.integers(20, 100), keep=st.integers(0, 2**16))
def test_it_drops_only_what_is_rebuilt_and_read_again(of: Trace, percent: int, keep: int) -> None:
    annealer, state = nothing_kept(of, Problem(of).saved.timeline.peak_allocated_bytes * percent // 100)
    evaluator = annealer.evaluator
    for k, s in enumerate(evaluator.problem.candidates):
        state.saved[s] = keep >> (k % 16) & 1
    found = decided(annealer, state)
    for k, dropped in found.evictions.items():
        assert evaluator.forward <= k < len(evaluator.op_id)
        for s in dropped:
            assert not found.saved[s]
            # What only chains read in backward, which make other values again, goes from its last reader on.
            use = evaluator.last_backward_use[s]
            assert use < 0 or evaluator.before[use] > k
    annealer.budget_bytes = 1 << 60
    assert not decided(annealer, state).evictions


def chain(length: int) -> Trace:
    """v0, v1, ... of 10 bytes, each made from the one before; backward reads them from the last to the first."""
    forward = [fwd({f"v{k}": 10}, f"v{k - 1}" if k else "x", time_ns=10) for k in range(length)]
    first = bwd({"g": 1}, f"v{length - 1}", time_ns=1)
    backward = [
        bwd({f"g{k}": 1}, "g" if k == length - 1 else f"g{k + 1}", f"v{k}", time_ns=1)
        for k in reversed(range(length))
    ]
    return trace([*forward, first, *backward], {"x": 0})


def test_a_walk_finds_the_checkpoints_of_a_chain() -> None:
    """30 values of 10 bytes in 120: with √30 kept values and as many at a time rebuilt, each is made again about once.

    Keep-all needs 30 * 10 and the gradients. Chen's bound: 5 borders and a segment of 5, 100 bytes, and what one op of
    backward needs; no more than forward itself is added, 30 * 10 ns.
    """
    of = chain(30)
    evaluator = Evaluator(Problem(of))
    best = Annealer(evaluator, 120, 0).run(evaluator.state(), 2_000 * 100, clock=NEVER)
    assert best is not None
    assert evaluator.cost(best.state)[0] <= 120
    assert best.time_ns <= of.time_ns + 300


def test_a_walk_finds_the_checkpoints_of_a_long_chain_in_little_memory() -> None:
    """60 values of 10 bytes in 80: seven at a time and the gradients, where √60 borders and a segment need 16.

    So segments are rebuilt from borders that are rebuilt themselves.
    """
    evaluator = Evaluator(Problem(chain(60)))
    found = Annealer(evaluator, 80, 0).run(evaluator.state(), 2_000 * 200, clock=NEVER)
    assert found is not None
    assert evaluator.cost(found.state)[0] <= 80


def test_the_kernel_is_compiled_once_for_all_that_walks_give_it() -> None:
    evaluator = Evaluator(Problem(chain(6)))
    Annealer(evaluator, 60, 0).run(evaluator.state(), 2_000, clock=NEVER)
    assert len(cast(Any, anneal).signatures) == 1
