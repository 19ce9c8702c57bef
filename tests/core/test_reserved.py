"""Schedules through the allocator: every byte worked out in a comment."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from simulator.allocator.caching import OutOfMemory
from simulator.allocator.requests import Requests, requests_of
from simulator.allocator.reserved import reserved_peak
from simulator.core.problem import Problem, run
from simulator.core.schedule import build
from tests.strategies import traces_with_actions
from tests.tiny import bwd, chain, fwd, opt, trace
from traces.records.plan import RECOMPUTE, Action
from traces.records.trace import BACKWARD, FORWARD, GRADIENT, OPTIMIZER, WORKSPACE, Trace

MIB = 1 << 20


def test_an_iteration_that_asks_for_new_memory_may_have_the_largest_blocks() -> None:
    # First: 6 in a segment of 20, 15 in one of 16, whose rest of 1 is not split off; then 12, for good, into the 16.
    # Second: 6 in the 20, of which 14 are left; so 15 gets a new 16: 12 + 6 + 16. Third: 6 in that, 15 in the 20: 33.
    sizes = (6 * MIB, 15 * MIB, 0, 0)
    asked = Requests(
        residents=(),
        blocks=(0, 1, ~1, ~0),
        sizes=sizes,
        once=((4, 12 * MIB),),
        count=2,
        phases=((FORWARD, 0),),
    )
    t = chain(1, 4)
    figures = reserved_peak(Problem(t), build(Problem(t)), requests=asked)
    assert [i.peak_block_bytes for i in figures.iterations] == [22 * MIB, 34 * MIB, 33 * MIB]
    assert figures.peak_block_bytes == figures.phases[FORWARD].peak_block_bytes == 34 * MIB
    assert figures.peak_reserved_bytes == 52 * MIB


def test_measured_temporaries_count_and_outputs_stay() -> None:
    # The op allocates a 30 MiB scratch, its 2 MiB output, frees the scratch. w: 2 MiB in a 20 MiB segment.
    # Peak allocated: 2 (w) + 30 + 2. Reserved: 20 (w and the output) + 30 (scratch, cached afterwards).
    ops = [fwd({"x": 2 * MIB}, "w", events=(30 * MIB, 2 * MIB, -30 * MIB)), bwd({"g": 2 * MIB}, "x")]
    t = trace(ops, {"w": 2 * MIB})
    figures = reserved_peak(Problem(t), build(Problem(t)))
    assert figures.peak_block_bytes == 34 * MIB
    assert figures.peak_reserved_bytes == 50 * MIB


def with_workspace(t: Trace, first_op: int) -> Trace:
    """The trace whose storage "lib" is a library's workspace, used from an op on."""
    sts, at = t.storages, t.storages.name.index("lib")
    uses = (*sts.first_forward_use[:at], first_op, *sts.first_forward_use[at + 1 :])
    return replace(t, storages=replace(sts, first_forward_use=uses))


def test_a_library_asks_for_its_workspace_in_its_first_op() -> None:
    ops = [
        fwd({"x": 2 * MIB}, "w", events=(30 * MIB, 2 * MIB, -30 * MIB)),
        fwd({"y": 512}, "x"),
        bwd({"g": 512}, "y"),
    ]
    t = trace(ops, {"w": 512, "lib": 24 * MIB}, categories={"lib": WORKSPACE})
    # Unknown when: 2 (w) + 24, then 20 (x) + 30 (scratch): 76.
    first = reserved_peak(Problem(t), build(Problem(t))).iterations[0]
    assert (first.peak_block_bytes, first.reserved_bytes) == (56 * MIB + 512, 76 * MIB)
    # In op 1: 2 + 20 + 30, and the workspace lies where the scratch was: 52, never more allocated than 32 and w. In the
    # second iteration the scratch finds 6 of its 30 left and gets new ones: 82.
    figures = reserved_peak(Problem(with_workspace(t, 1)), build(Problem(t)))
    first, last = figures.iterations[0], figures.iterations[-1]
    assert (first.peak_block_bytes, first.reserved_bytes) == (32 * MIB + 512, 52 * MIB)
    assert (last.peak_block_bytes, last.reserved_bytes) == (56 * MIB + 512, 82 * MIB)


def test_backward_asks_for_its_workspaces_when_it_runs_such_an_op_again() -> None:
    ops = [
        fwd({"x": 4 * MIB}, "w", name="aten.addmm.default"),
        fwd({"y": 512}, "x"),
        bwd({"g": 30 * MIB}, "y"),
        bwd({"h": 512}, "x", "g", name="aten.mm.default"),
    ]
    t = trace(ops, {"w": 512, "lib": 24 * MIB}, categories={"lib": WORKSPACE})
    sts, at = t.storages, t.storages.name.index("lib")
    uses = (*sts.first_backward_use[:at], 3, *sts.first_backward_use[at + 1 :])
    t = replace(
        t,
        storages=replace(sts, first_backward_use=uses),
        meta=replace(t.meta, rerun_workspaces={"aten.addmm.default": 0}),
    )
    kept = build(Problem(t))
    plan = build(Problem(t), [Action(storage=t.storages.name.index("x"), recipe=RECOMPUTE)])
    assert plan.op == (0, 1, 2, 0, 3)
    requests = requests_of(Problem(t), plan)
    # w is there; x, y, x given back, g, x again: then 24 MiB, before h.
    assert requests.sizes[:5] == (4 * MIB, 512, 0, 30 * MIB, 0)
    assert requests.once == ((6, 24 * MIB),)
    assert requests_of(Problem(t), kept).once == ((5, 24 * MIB),)


def adding_up(**options: object) -> Trace:
    """The last part of an iteration whose gradients add up."""
    ops = [
        fwd({"x": 4 * MIB}, "w"),
        bwd({"g": 30 * MIB, "h": 512}, "x"),
        bwd({}, "sum", "g", mutates=("sum",)),
        bwd({}, "wide", "h", mutates=("wide",)),
        opt({"t": 2 * MIB}, "sum", "wide", mutates=("w",)),
    ]
    resident = {"w": 512, "sum": 30 * MIB, "wide": 1024}
    t = trace(ops, resident, categories={"sum": GRADIENT, "wide": GRADIENT})
    return replace(t, meta=replace(t.meta, options=options))


def asked(of: Requests) -> list[tuple[int, int]]:
    return list(zip(of.blocks, of.sizes, strict=True))


def test_the_first_part_of_an_iteration_leaves_the_gradients_to_which_others_are_added() -> None:
    t = adding_up(accumulate=2)
    found = requests_of(Problem(t), build(Problem(t)))
    # In the first part g stays; h, of which all elements are one, is copied. The second has all beside them.
    x, g, h = 4 * MIB, 30 * MIB, 512
    first = [(0, x), (1, g), (2, h), (~0, 0), (3, 1024), (~2, 0)]
    second = [(4, x), (5, g), (6, h), (~4, 0), (~5, 0), (~6, 0), (7, 2 * MIB), (~7, 0)]
    assert asked(found) == [*first, *second, (~1, 0), (~3, 0)]
    assert (found.residents, found.first) == ((512,), None)
    assert found.phases == ((FORWARD, 0), (BACKWARD, 1), (FORWARD, 6), (BACKWARD, 7), (OPTIMIZER, 12))


def test_what_the_loop_holds_of_a_part_goes_when_the_next_one_s_is_there() -> None:
    """As a name does to which a loop binds its loss: the new one is there before the old one goes."""
    ops = [
        fwd({"x": 4 * MIB, "loss": 512}, "w"),
        bwd({"g": 30 * MIB}, "x"),
        bwd({}, "sum", "g", mutates=("sum",)),
        opt({"t": 2 * MIB}, "sum", mutates=("w",)),
    ]
    t = trace(ops, {"w": 512, "sum": 30 * MIB}, hold={"loss": 3}, categories={"sum": GRADIENT})
    problem = Problem(replace(t, meta=replace(t.meta, options={"accumulate": 2})))
    x, loss, g = 4 * MIB, 512, 30 * MIB
    first = [(0, x), (1, loss), (2, g), (~0, 0)]
    second = [(3, x), (4, loss), (~1, 0), (5, g), (~3, 0), (~5, 0), (6, 2 * MIB), (~4, 0), (~6, 0)]
    assert asked(requests_of(problem, build(problem))) == [*first, *second, (~2, 0)]


@pytest.mark.parametrize("way", ["keep", "none"])
def test_gradients_that_stay_are_made_in_the_first_iteration(way: str) -> None:
    t = adding_up(zero_grad=way)
    found = requests_of(Problem(t), build(Problem(t)))
    x, g, h = 4 * MIB, 30 * MIB, 512
    assert asked(found) == [
        (0, x), (1, g), (2, h), (~0, 0), (~1, 0), (~2, 0), (3, 2 * MIB), (~3, 0),
    ]  # fmt: skip
    assert found.first is not None
    # Numbers that no later iteration gives back.
    assert asked(found.first) == [
        (4, x), (5, g), (6, h), (~4, 0), (7, 1024), (~6, 0), (8, 2 * MIB), (~8, 0),
    ]  # fmt: skip
    assert found.residents == (512,)
    figures = reserved_peak(Problem(t), build(Problem(t)))
    whole = 512 + 30 * MIB + 1024 + x + g + h
    assert [i.peak_requested_bytes for i in figures.iterations] == [x + g + h + 512, whole, whole][
        : len(figures.iterations)
    ]


def test_an_output_taken_over_in_place_needs_no_block() -> None:
    # x1 takes over x0's 20 MiB: w 20 + one 20 in forward; then g beside it: 60 in 3 segments.
    ops = [
        fwd({"x0": 20 * MIB}, "w"),
        fwd({"x1": 20 * MIB}, "x0", overwrites="x0"),
        bwd({"g": 20 * MIB}, "x1"),
    ]
    t = trace(ops, {"w": 20 * MIB})
    assert build(Problem(t)).takes == (-1, 1, -1)
    figures = reserved_peak(Problem(t), build(Problem(t)))
    assert figures.peak_block_bytes == figures.peak_reserved_bytes == 60 * MIB


def test_a_device_that_is_too_small_says_so() -> None:
    t = chain(1, 11 * MIB)
    with pytest.raises(OutOfMemory, match="11,534,336 bytes"):
        reserved_peak(
            Problem(t), build(Problem(t)), device_memory_bytes=40 * MIB
        )  # the fourth segment of 12 MiB does not fit


@settings(max_examples=60, deadline=None)
@given(traces_with_actions())
def test_requested_bytes_are_those_of_the_engine(case) -> None:
    of, actions = case
    schedule = build(Problem(of), actions)
    figures = reserved_peak(Problem(of), schedule, iterations=2)
    requested = figures.iterations[-1].peak_requested_bytes
    engine = run(Problem(of), schedule).peak_allocated_bytes
    # Memory taken over in place is there before the op, so an op's own temporaries come on top of it.
    if all(s < 0 for s in schedule.takes):
        assert requested == engine
    else:
        assert requested >= engine
    assert requested <= figures.peak_block_bytes <= figures.peak_reserved_bytes
