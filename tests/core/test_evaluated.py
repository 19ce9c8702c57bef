"""What a planner's state reserves is what the allocator says of the schedule, on random steps and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.allocator.evaluated import Reserver
from simulator.allocator.reserved import reserved_peak
from simulator.allocator.settings import LOWEST_ADDRESS, OLDER_SEGMENT, AllocatorSettings, parse_alloc_conf
from simulator.core.evaluator import Evaluator
from simulator.core.problem import Problem
from simulator.core.schedule import build
from tests.strategies import traces_with_actions
from tests.tiny import bwd, fwd, opt, trace
from traces.records.plan import Action
from traces.records.trace import OPTIMIZER_STATE, Trace

MIB = 1 << 20


def larger(of: Trace, factor: int) -> Trace:
    """The same step with every size so many times as large, so that both pools and several segments are in use."""
    ops, sts, wanted = of.ops, of.storages, of.meta.rerun_workspaces
    events = tuple(tuple(n * factor for n in each) for each in ops.events)
    return replace(
        of,
        ops=replace(ops, events=events),
        storages=replace(sts, nbytes=tuple(n * factor for n in sts.nbytes)),
        meta=replace(of.meta, rerun_workspaces={k: n * factor for k, n in wanted.items()}),
    )


@settings(max_examples=300, deadline=None)
@given(
    drawn=traces_with_actions(reruns=True),
    conf=st.sampled_from(
        ["", "expandable_segments:True", "large_segment_size_mb:12", "max_split_size_mb:20"]
    ),
    ties=st.sampled_from([LOWEST_ADDRESS, OLDER_SEGMENT]),
    factor=st.sampled_from([1, 1 << 15, 1 << 17, 3 << 16]),
)
def test_a_state_reserves_what_its_schedule_does(
    drawn: tuple[Trace, tuple[Action, ...]], conf: str, ties: str, factor: int
) -> None:
    of, actions = drawn
    problem = Problem(larger(of, factor))
    late = tuple(
        replace(a, evict_after=tuple(c for c in a.evict_after if c >= problem.forward_end)) for a in actions
    )
    chosen = replace(parse_alloc_conf(conf), ties=ties)
    evaluator = Evaluator(problem)
    said = Reserver(evaluator, chosen).reserved_bytes(evaluator.state(late))
    assert said == reserved_peak(problem, build(problem, late), chosen).peak_reserved_bytes


@pytest.mark.parametrize(
    ("conf", "recomputed", "expected"),
    [
        # x 12, y 30 and, in backward, g 12 that takes over nothing; w 4 B. Saved: 2 for w, 12, 30, and g.
        ("", False, 2 + 12 + 30 + 12),
        # x goes when y is made, and comes back into the segment that it had.
        ("", True, 2 + 12 + 30 + 12),
        # Pages of 20: x 20, y to 42 in all, that is 60; g 12 behind them in what is mapped.
        ("expandable_segments:True", False, 2 + 60),
    ],
)
def test_by_hand(conf: str, recomputed: bool, expected: int) -> None:
    of = trace(
        [fwd({"x": 12 * MIB}, "w"), fwd({"y": 30 * MIB}, "x"), bwd({"g": 12 * MIB}, "x", "y")], {"w": 4}
    )
    evaluator = Evaluator(Problem(of))
    state = evaluator.state([Action(storage=1)] if recomputed else [])
    assert Reserver(evaluator, parse_alloc_conf(conf)).reserved_bytes(state) == expected * MIB


def test_state_that_is_made_late_comes_before_what_its_op_makes() -> None:
    """w 4 B; x 14 goes, m 12 stays in its segment, and u 14 needs another: m in one of its own would be 12."""
    of = trace(
        [fwd({"x": 14 * MIB}, "w"), bwd({"g": 4}, "x"), opt({"u": 14 * MIB}, "w", "m")],
        {"w": 4, "m": 12 * MIB},
        categories={"m": OPTIMIZER_STATE},
    )
    uses = (of.storages.first_backward_use[0], 2, *of.storages.first_backward_use[2:])
    of = replace(of, storages=replace(of.storages, first_backward_use=uses))
    evaluator = Evaluator(Problem(of))
    assert Reserver(evaluator, AllocatorSettings()).reserved_bytes(evaluator.state([])) == (2 + 14 + 14) * MIB
    problem = Problem(of)
    assert (
        reserved_peak(problem, build(problem), AllocatorSettings()).peak_reserved_bytes == (2 + 14 + 14) * MIB
    )


def test_work_space_grows() -> None:
    of = trace([fwd({"x": MIB}, "w"), bwd({"g": MIB}, "x")], {"w": 4})
    evaluator = Evaluator(Problem(of))
    reserver = Reserver(evaluator, AllocatorSettings())
    state = evaluator.state()
    reserver.make_room(1)
    reserver.stream = reserver.stream._replace(blocks=reserver.stream.blocks[:1])
    assert reserver.reserved_bytes(state) == Reserver(evaluator, AllocatorSettings()).reserved_bytes(state)
