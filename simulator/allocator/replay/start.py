"""Put an allocator into the state that a snapshot shows, or one that is as if the same blocks had been asked of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from simulator.allocator.blocks import Block, BlockState, SegmentState
from simulator.allocator.caching import DEFAULT_RANGE_BYTES, Allocator
from simulator.allocator.settings import LOWEST_ADDRESS

MAX_RANGE_BYTES: Final = 1 << 38  # farther apart, two addresses are not in one range


def restore(
    allocator: Allocator,
    segments: Iterable[SegmentState],
    mapped_later: Sequence[tuple[int, bool, int]] = (),
) -> dict[int, Block]:
    """Give a fresh allocator these segments; returns the blocks in use by address.

    Args:
        mapped_later: address, pool and stream of pages that are known to be mapped later on: they tell that a range
            begins before its first mapped page.

    Counts: every segment, block and free piece in between. Ignores: expandable ranges that lay behind others of the
    same pool and stream, which become one range, and unmapped pages before the first one that nobody maps later.
    """
    out: dict[int, Block] = {}
    ordered = sorted(segments, key=lambda s: s.address)
    ranges: dict[tuple[bool, int], list[SegmentState]] = {}
    for s in ordered:
        allocator.adopt_segment(s.address, s.size_bytes)
        if s.expandable:
            ranges.setdefault((s.small, s.stream), []).append(s)
        else:
            pool = allocator.small if s.small else allocator.large
            out |= _carved(allocator, Block(s.address, s.size_bytes, s.stream, pool), s.blocks)
    for key, pages in ranges.items():
        first, end = pages[0].address, pages[-1].address + pages[-1].size_bytes
        before = [at for at, *of in mapped_later if tuple(of) == key and first - MAX_RANGE_BYTES < at < first]
        # The range goes on behind its last page, up to the next thing that has an address.
        above = [s.address for s in ordered if s.address >= end]
        end = min([end + DEFAULT_RANGE_BYTES, *above])
        out |= _mapped(allocator, min([first, *before]), end, pages)
    allocator.reset_peaks()
    if allocator.settings.ties != LOWEST_ADDRESS:
        allocator.first_serial = Block(0, 0, 0, allocator.small).serial
    return out


def repack(allocator: Allocator, segments: Iterable[SegmentState]) -> dict[int, Block]:
    """Ask a fresh allocator for the blocks of a snapshot in order of their addresses; returns them by old address.

    Ignores: the order in which they were really asked for, which nobody knows, and all cached memory in between.
    """
    out: dict[int, Block] = {}
    for segment in sorted(segments, key=lambda s: s.address):
        for state in segment.blocks:
            out[state.address] = allocator.malloc(state.requested_bytes, segment.stream)
            if state.pending:
                allocator.request_free(out[state.address])
    allocator.reset_peaks()
    return out


def _mapped(allocator: Allocator, start: int, end: int, pages: Sequence[SegmentState]) -> dict[int, Block]:
    """Make one expandable range with these pages mapped; returns the blocks in use in them."""
    pool = allocator.small if pages[0].small else allocator.large
    rest: Block | None
    whole = rest = Block(start, end - start, pages[0].stream, pool)
    whole.expandable, whole.mapped = True, False
    out: dict[int, Block] = {}
    for s in pages:
        assert rest is not None
        if s.address > rest.address:
            gap, rest = rest, rest.cut(s.address - rest.address)
            pool.insert_unmapped(gap)
        block, rest = rest, rest.cut(s.size_bytes) if s.size_bytes < rest.size else None
        block.mapped = True
        out |= _carved(allocator, block, s.blocks)
    if rest is not None:
        pool.insert_unmapped(rest)
        allocator.reach(end)
    return out


def _carved(allocator: Allocator, free: Block, states: Sequence[BlockState]) -> dict[int, Block]:
    """Take blocks in use out of a free one, by address; what is left of it goes to its pool."""
    out: dict[int, Block] = {}
    rest: Block | None = free
    for state in states:
        assert rest is not None
        if state.address > rest.address:
            free, rest = rest, rest.cut(state.address - rest.address)
            free.pool.insert(free)
        used, rest = rest, rest.cut(state.size_bytes) if state.size_bytes < rest.size else None
        allocator.adopt(used, state.requested_bytes)
        out[used.address] = used
        if state.pending:
            allocator.request_free(used)
    if rest is not None:
        rest.pool.insert(rest)
    return out
