"""The compiled allocator reserves what the simulated one does, on random requests and on random steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.allocator.caching import Allocator, AllocatorFigures
from simulator.allocator.requests import Requests, requests_of
from simulator.allocator.reserved import ReservedFigures, reserved_peak, rules_of
from simulator.allocator.settings import (
    LOWEST_ADDRESS,
    OLDER_BLOCK,
    OLDER_SEGMENT,
    AllocatorSettings,
    parse_alloc_conf,
)
from simulator.core.problem import Problem
from simulator.core.schedule import build
from simulator.kernels.best_fit import MOST, SUMS, memory, play
from simulator.kernels.compiled import compiled as machine_code
from tests.strategies import traces_with_actions
from tests.tiny import bwd, fwd, trace
from traces.records.plan import Action
from traces.records.trace import Trace

MIB = 1 << 20
# Around every border: of rounding, of the small pool, of the segments of 2 MiB, 20 MiB and their own size.
SIZES = st.sampled_from(
    [
        1,
        511,
        512,
        513,
        4096,
        MIB - 1,
        MIB,
        MIB + 1,
        2 * MIB,
        3 * MIB + 7,
        10 * MIB - 1,
        10 * MIB,
        11 * MIB + 1,
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> Requests:
    blocks: list[int] = []
    sizes: list[int] = []
    there: list[int] = []
    count = 0
    for _ in range(draw(st.integers(0, 40))):
        if there and draw(st.booleans()):
            blocks.append(~there.pop(draw(st.integers(0, len(there) - 1))))
            sizes.append(0)
        else:
            there.append(count)
            blocks.append(count)
            sizes.append(draw(SIZES))
            count += 1
    if draw(st.integers(0, 3)):  # else some are never given back
        blocks += [~b for b in there]
        sizes += [0] * len(there)
    residents = draw(st.lists(SIZES, max_size=4))
    if residents:  # some are given back
        residents += [~k for k in draw(st.sets(st.integers(0, len(residents) - 1)))]
    places = sorted(draw(st.lists(st.integers(0, len(blocks)), max_size=3)))
    return Requests(
        residents=tuple(residents),
        blocks=tuple(blocks),
        sizes=tuple(sizes),
        once=tuple((k, draw(SIZES)) for k in places),
        count=count,
    )


CONFS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "expandable_segments:True,large_segment_size_mb:12",
        "expandable_segments:True,max_split_size_mb:20",
        "max_split_size_mb:20",
        "max_split_size_mb:11,large_segment_size_mb:11",
        "max_split_size_mb:11,large_segment_size_mb:11,max_non_split_rounding_mb:12",
        "large_segment_size_mb:64",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[1:8,2:0,>:4],expandable_segments:True",
    ]
)


def simulated(of: Requests, iterations: int, given: AllocatorSettings | None = None) -> ReservedFigures:
    """By the allocator itself, request by request."""
    allocator = Allocator(given)
    moved = []
    for size in of.residents:
        if size >= 0:
            moved.append(allocator.malloc(size))
        else:
            allocator.free(moved[~size])
    figures: list[AllocatorFigures] = []
    steady = False
    while len(figures) < iterations and not steady:
        before = len(allocator.segment_events)
        allocator.reset_peaks()
        if allocator.settings.ahead_bytes and not figures:
            allocator.free(allocator.malloc(allocator.settings.ahead_bytes))
        held = {}
        for k in range(len(of.blocks) + 1):
            for at, size in of.once:
                if at == k and not figures:
                    allocator.malloc(size)
            if k < len(of.blocks):
                if of.blocks[k] >= 0:
                    held[of.blocks[k]] = allocator.malloc(of.sizes[k])
                else:
                    allocator.free(held[~of.blocks[k]])
        steady = len(figures) > 0 and len(allocator.segment_events) == before
        figures.append(allocator.figures())
    return ReservedFigures(
        iterations=tuple(figures), segment_requests=len(allocator.segment_events), steady=steady
    )


@machine_code
def played(residents, blocks, sizes, once, rows, m):  # type: ignore[no-untyped-def]
    return play(residents, blocks, sizes, blocks.shape[0], once, rows, MOST, m)


def compiled(of: Requests, iterations: int, given: AllocatorSettings) -> ReservedFigures:
    """By the machine code."""
    rows = np.zeros(iterations, SUMS)
    in_all = len(of.residents) + len(of.once) + iterations * of.count  # what is never given back stays
    ran, steady = played(
        np.array(of.residents, np.int64),
        np.array(of.blocks, np.int64),
        np.array(of.sizes, np.int64),
        np.array(of.once, np.int64).reshape(-1, 2),
        rows,
        memory(in_all, *rules_of(given)),
    )
    figures = tuple(
        AllocatorFigures(
            allocated_bytes=row[0],
            requested_bytes=row[1],
            active_bytes=row[0],
            reserved_bytes=row[2],
            peak_allocated_bytes=row[3],
            peak_requested_bytes=row[4],
            peak_active_bytes=row[3],
            peak_reserved_bytes=row[5],
            num_alloc_retries=0,
            num_ooms=0,
        )
        for row in rows[:ran].tolist()
    )
    return ReservedFigures(
        iterations=figures, segment_requests=int(rows["segments"][ran - 1]), steady=bool(steady)
    )


@settings(max_examples=300, deadline=None)
@given(
    of=requests(),
    iterations=st.integers(1, 4),
    conf=CONFS,
    ties=st.sampled_from([LOWEST_ADDRESS, OLDER_BLOCK, OLDER_SEGMENT]),
    ahead=st.just(0) | SIZES,
)
def test_the_compiled_allocator_is_the_simulated_one(
    of: Requests, iterations: int, conf: str, ties: str, ahead: int
) -> None:
    chosen = replace(parse_alloc_conf(conf), ties=ties, ahead_bytes=ahead)
    assert compiled(of, iterations, chosen) == simulated(of, iterations, chosen)


@settings(max_examples=150, deadline=None)
@given(
    drawn=traces_with_actions(),
    conf=CONFS,
    ties=st.sampled_from([LOWEST_ADDRESS, OLDER_BLOCK, OLDER_SEGMENT]),
    ahead=st.just(0) | SIZES,
)
def test_what_a_step_reserves_is_what_the_simulated_allocator_does(
    drawn: tuple[Trace, tuple[Action, ...]], conf: str, ties: str, ahead: int
) -> None:
    of, actions = drawn
    schedule = build(Problem(of), actions)
    chosen = replace(parse_alloc_conf(conf), ties=ties, ahead_bytes=ahead)
    expected = simulated(requests_of(Problem(of), schedule), 5, chosen)
    assert reserved_peak(Problem(of), schedule, chosen) == expected


def test_segments_that_grow_reserve_pages() -> None:
    """A value of 30 MiB gets a segment of its own size by default, and two pages of 20 MiB where segments grow."""
    of = trace([fwd({"x": 30 * MIB}, "w"), bwd({"g": 4}, "x")], {"w": 4})
    schedule = build(Problem(of))
    default = reserved_peak(Problem(of), schedule, AllocatorSettings())
    grown = reserved_peak(Problem(of), schedule, parse_alloc_conf("expandable_segments:True"))
    assert default.peak_reserved_bytes == 32 * MIB  # 2 for the small ones
    assert grown.peak_reserved_bytes == 42 * MIB
