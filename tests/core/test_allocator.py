"""Settings of the caching allocator, and its books, which always balance; programs of torch's judge its rules."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.allocator.caching import Allocator, Block, OutOfMemory
from simulator.allocator.settings import AllocatorSettings, parse_alloc_conf
from tests.streams import StreamAllocator
from traces.errors import SpecError

MIB = 1 << 20


def conf(text: str) -> AllocatorSettings:
    return parse_alloc_conf(text)


def test_rounding_without_a_split_is_the_large_segment_size_unless_said() -> None:
    # Oversize requests may take a block that is less than max_non_split_rounding larger: 42 + 40 = 82.
    for cached, taken in ((80, True), (84, False)):
        a = Allocator(conf("large_segment_size_mb:40,max_split_size_mb:40"))
        a.free(a.malloc(cached * MIB))
        a.malloc(42 * MIB)
        assert a.reserved == (cached if taken else cached + 42) * MIB
    assert (
        conf("large_segment_size_mb:40,max_non_split_rounding_mb:64").max_non_split_rounding_bytes == 64 * MIB
    )
    assert conf("max_non_split_rounding_mb:20").max_non_split_rounding_bytes == 20 * MIB


def test_freeing_twice_is_a_mistake() -> None:
    a = Allocator()
    block = a.malloc(1)
    a.free(block)
    with pytest.raises(ValueError, match="twice"):
        a.free(block)


def test_settings_are_read() -> None:
    c = conf(
        "max_split_size_mb:128, garbage_collection_threshold:0.8,expandable_segments:True,backend:native"
    )
    assert c.max_split_bytes == 128 * MIB
    assert c.expandable_segments
    assert conf("") == AllocatorSettings()
    assert conf("pinned_use_background_threads:True") == AllocatorSettings()


@pytest.mark.parametrize(
    "text",
    [
        "nonsense:1",
        "expandable_segments",
        "expandable_segments:yes",
        "expandable_segments:true",  # torch 2.11 to 2.13 take True and False only
        "max_split_size_mb:19",
        "max_split_size_mb:-1",
        "max_split_size_mb:1\u0662",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:0",
        "max_split_size_mb:31,large_segment_size_mb:32",  # in either order
        "large_segment_size_mb:32,max_non_split_rounding_mb:25",
        "large_segment_size_mb:10",
        "per_process_memory_fraction:0.9",  # not simulated, nor is the next
        "throw_on_cudamalloc_oom:True",
        "roundup_power2_divisions:[256:1",
        "roundup_power2_divisions:[:]",
        "roundup_power2_divisions:[3:1]",
        "backend:cudaMallocAsync",
    ],
)
def test_bad_settings_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        conf(text)


REQUESTS = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 40 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 11 * MIB, 12 * MIB]),
)
CONFS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:20",
        "roundup_power2_divisions:4",
        "expandable_segments:True,large_segment_size_mb:40",
    ]
)
MORE_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["malloc", "malloc", "malloc", "free", "free", "share", "done", "empty"]),
        REQUESTS,
        st.integers(0, 2),
    ),
    max_size=60,
)


def chained(a: Allocator, live: list[Block]) -> Iterator[Block]:
    """Every mapped block that can be reached from the live and the free ones."""
    seen: dict[int, Block] = {}
    for start in [*live, *a.small.blocks(), *a.large.blocks()]:
        block: Block | None = start
        while block is not None and block.prev is not None:
            block = block.prev
        while block is not None and id(block) not in seen:
            seen[id(block)] = block
            block = block.next
    yield from (b for b in seen.values() if b.mapped)


@settings(max_examples=150, deadline=None)
@given(CONFS, st.sampled_from([None, 64 * MIB, 200 * MIB]), MORE_ACTIONS)
def test_books_always_balance(text: str, memory: int | None, actions) -> None:
    a = StreamAllocator(conf(text), device_memory_bytes=memory)
    live: list[Block] = []
    waiting: list[Block] = []
    for what, n, stream in actions:
        if what == "malloc":
            try:
                live.append(a.malloc(n, stream))
            except OutOfMemory:
                assert memory is not None
        elif what == "free" and live:
            block = live.pop(n % len(live))
            a.free(block)
            waiting += [block] * bool(block.pending)
        elif what == "share" and live:
            a.record_stream(live[n % len(live)], stream)
        elif what == "done":
            a.stream_done(stream)
        elif what == "empty":
            a.release_cached()
        waiting = [b for b in waiting if b.pending]
        blocks = sorted(chained(a, live + waiting), key=lambda b: b.address)
        assert all(x.address + x.size <= y.address for x, y in pairwise(blocks))
        assert sum(b.size for b in blocks) == a.reserved
        assert sum(b.size for b in live) == a.allocated
        assert a.allocated <= a.reserved <= a.peak_reserved
        assert memory is None or a.reserved <= memory
        booked = sum(
            e.size_bytes * (1 if e.action in ("segment_alloc", "segment_map") else -1)
            for e in a.segment_events
        )
        assert booked == a.reserved
    for block in live:
        a.free(block)
    for stream in range(3):
        a.stream_done(stream)
    a.release_cached()
    # Everything has merged back into whole segments and pages, and these have gone.
    assert a.reserved == a.allocated == a.requested == 0
    assert not list(a.small.blocks())
    assert not list(a.large.blocks())
