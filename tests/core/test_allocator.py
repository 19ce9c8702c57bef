"""The caching allocator's rules, one by one, with the bytes worked out; then against a model that is searched whole."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.allocator.caching import Allocator, Block, OutOfMemory
from simulator.allocator.settings import AllocatorSettings, parse_alloc_conf, round_up
from tests.streams import StreamAllocator
from traces.errors import SpecError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def conf(text: str) -> AllocatorSettings:
    return parse_alloc_conf(text)


def segments(a: Allocator, action: str = "segment_alloc") -> list[int]:
    return [e.size_bytes for e in a.segment_events if e.action == action]


# Rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "got"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1025, 1536)])
def test_requests_round_to_512(asked: int, got: int) -> None:
    a = Allocator()
    assert a.malloc(asked).size == got
    assert a.allocated == got
    assert a.requested == asked


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (1200, 1536),  # up to 512 * 4 bytes: multiples of 512
        (2048, 2048),  # a power of two stays
        (2049, 2560),  # steps of 2048 / 4 = 512: 2048, 2560, ...
        (1100 * MIB, 1280 * MIB),  # steps of 1024 / 4 = 256 MiB
        (5 * MIB, 5 * MIB),  # steps of 1 MiB between 4 and 8
        (5 * MIB + 1, 6 * MIB),
    ],
)
def test_roundup_power2_divisions(asked: int, got: int) -> None:
    assert round_up(asked, conf("roundup_power2_divisions:4")) == got


def test_roundup_power2_divisions_by_size() -> None:
    c = conf("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    # Powers from 256 MiB on have entries; what is smaller follows the first one. 1 division: no rounding to it.
    assert c.roundup_divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert round_up(300 * MIB + 1, c) == 300 * MIB + 512
    assert round_up(513 * MIB, c) == 768 * MIB  # steps of 256
    assert round_up(1025 * MIB, c) == 1280 * MIB  # steps of 256
    assert round_up(2049 * MIB, c) == 2304 * MIB  # eight steps of 256


# Segments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),  # 1 MiB still belongs to the small pool
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # from 10 MiB on: multiples of 2 MiB
        (10 * MIB + 1, 12 * MIB),
        (11 * MIB, 12 * MIB),
        (100 * MIB, 100 * MIB),
    ],
)
def test_segment_sizes(asked: int, segment: int) -> None:
    a = Allocator()
    a.malloc(asked)
    assert segments(a) == [segment]
    assert a.reserved == segment


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


def test_large_segment_size_is_a_setting() -> None:
    a = Allocator(conf("large_segment_size_mb:40"))
    a.malloc(2 * MIB)
    assert segments(a) == [40 * MIB]


# Splitting and merging --------------------------------------------------------------------------------------------


def test_a_rest_of_one_mib_stays_with_its_block_in_the_large_pool() -> None:
    a = Allocator()
    a.malloc(11 * MIB)  # in 12 MiB: the rest of 1 MiB is not more than 1 MiB
    assert (a.requested, a.allocated, a.reserved) == (11 * MIB, 12 * MIB, 12 * MIB)
    a.malloc(11 * MIB - 512)  # in 12 MiB: the rest of 1 MiB + 512 is split off
    assert a.allocated == 12 * MIB + 11 * MIB - 512


def test_the_small_pool_splits_from_512_bytes_on() -> None:
    a = Allocator()
    first = a.malloc(MIB)
    a.malloc(MIB - 512)
    last = a.malloc(1)  # the last 512 bytes of the segment
    assert a.reserved == a.allocated == 2 * MIB
    assert last.address == first.address + 2 * MIB - 512


def test_freed_neighbours_merge_on_both_sides() -> None:
    a = Allocator()
    one, two, three = (a.malloc(4 * MIB) for _ in range(3))  # of 20 MiB, 8 stay free
    a.free(one)
    a.free(three)  # merges with the 8 MiB behind it
    assert [b.size for b in a.large.blocks()] == [4 * MIB, 12 * MIB]
    a.free(two)
    assert [b.size for b in a.large.blocks()] == [20 * MIB]
    assert (a.allocated, a.reserved) == (0, 20 * MIB)


def test_best_fit_and_the_lowest_address_on_ties() -> None:
    a = Allocator()
    blocks = [a.malloc(n * MIB) for n in (14, 30, 12, 12, 12)]
    for k in (0, 1, 4, 2):
        a.free(blocks[k])
    # 10.5 MiB fit into 14, 30, 12 (third) and 12 (fifth): 12 is best, and the third lies lower.
    assert a.malloc(10 * MIB + 512 * KIB).address == blocks[2].address
    assert a.malloc(13 * MIB).address == blocks[0].address


# Other streams ----------------------------------------------------------------------------------------------------


def test_freeing_twice_is_a_mistake() -> None:
    a = Allocator()
    block = a.malloc(1)
    a.free(block)
    with pytest.raises(ValueError, match="twice"):
        a.free(block)


# max_split_size ---------------------------------------------------------------------------------------------------


def test_max_split_size_keeps_large_blocks_whole() -> None:
    a = Allocator(conf("max_split_size_mb:32"))
    big = a.malloc(64 * MIB)
    a.free(big)
    a.malloc(16 * MIB)  # less than 32: may not touch a block of 32 or more
    assert segments(a) == [64 * MIB, 16 * MIB]
    a.malloc(44 * MIB)  # 64 is not less than 44 + 20
    assert segments(a) == [64 * MIB, 16 * MIB, 44 * MIB]
    assert a.malloc(45 * MIB).size == 64 * MIB  # 64 < 45 + 20: taken, and never split
    assert a.allocated == (16 + 44 + 64) * MIB


# Running out ------------------------------------------------------------------------------------------------------


def test_a_retry_gives_all_cached_segments_back() -> None:
    a = Allocator(device_memory_bytes=100 * MIB)
    keep, half = a.malloc(30 * MIB), a.malloc(4 * MIB)  # 30 + 20, of which 16 stay free
    a.free(a.malloc(40 * MIB))
    a.free(a.malloc(1))
    # Reserved 30 + 20 + 40 + 2 = 92. 45 MiB: 40 and 2 go back, the split segment of 20 cannot.
    a.malloc(45 * MIB)
    assert segments(a, "segment_free") == [40 * MIB, 2 * MIB]
    assert a.reserved == (30 + 20 + 46) * MIB
    assert (a.num_alloc_retries, a.num_ooms) == (1, 0)
    assert keep.allocated
    assert half.allocated


def test_out_of_memory_changes_nothing_else() -> None:
    a = Allocator(device_memory_bytes=64 * MIB)
    a.malloc(40 * MIB)
    with pytest.raises(OutOfMemory, match="30,000,000 bytes"):
        a.malloc(30_000_000)
    assert (a.num_alloc_retries, a.num_ooms) == (1, 1)
    assert a.malloc(24 * MIB).size == 24 * MIB


# Expandable segments ----------------------------------------------------------------------------------------------


def test_expandable_segments_grow_by_pages() -> None:
    a = Allocator(conf("expandable_segments:True"))
    x = a.malloc(30 * MIB)  # two pages of 20: 10 stay free
    y = a.malloc(30 * MIB)  # the 10 and one page more: none of it is lost
    assert segments(a, "segment_map") == [40 * MIB, 20 * MIB]
    assert y.address == x.address + 30 * MIB
    assert a.allocated == a.reserved == 60 * MIB
    a.malloc(512)  # the small pool has a range of its own, with pages of 2 MiB
    assert segments(a, "segment_map")[-1] == 2 * MIB


def test_expandable_segments_split_to_512_bytes() -> None:
    a = Allocator(conf("expandable_segments:True"))
    assert a.malloc(11 * MIB).size == 11 * MIB
    assert a.malloc(8 * MIB).size == 8 * MIB
    assert [b.size for b in a.large.blocks()] == [MIB]
    assert a.reserved == 20 * MIB


def test_giving_back_unmaps_whole_pages() -> None:
    a = Allocator(conf("expandable_segments:True"))
    low, high = a.malloc(30 * MIB), a.malloc(30 * MIB)
    a.free(high)  # 30..60 is free: only the page 40..60 is whole
    a.release_cached()
    assert segments(a, "segment_unmap") == [20 * MIB]
    assert a.reserved == 40 * MIB
    again = a.malloc(24 * MIB)  # the 10 left, and one page mapped again
    assert again.address == high.address
    assert a.reserved == 60 * MIB
    a.free(again)
    a.free(low)
    a.release_cached()
    assert a.reserved == 0


def test_a_full_device_unmaps_and_tries_again() -> None:
    a = Allocator(conf("expandable_segments:True"), device_memory_bytes=64 * MIB)
    a.free(a.malloc(50 * MIB))  # 60 mapped
    a.malloc(512)  # 62
    a.malloc(MIB, stream=3)  # 64 and full
    a.malloc(4 * MIB, stream=3)  # another range: a page of 20 needs 60 unmapped
    assert a.num_alloc_retries == 1
    assert a.reserved == (2 + 2 + 20) * MIB


# Settings ---------------------------------------------------------------------------------------------------------


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


# Everything at once -----------------------------------------------------------------------------------------------


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
        assert sum(b.size for b in live + waiting) == a.active
        assert a.allocated <= a.active <= a.reserved <= a.peak_reserved
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
    assert a.reserved == a.allocated == a.active == a.requested == 0
    assert not list(a.small.blocks())
    assert not list(a.large.blocks())
