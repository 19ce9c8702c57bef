"""Put an allocator into the state that a snapshot shows, or one that is as if the same blocks had been asked of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from simulator.allocator.blocks import Block, SegmentState
from simulator.allocator.caching import Allocator
from simulator.allocator.segments import DEFAULT_RANGE_BYTES
from simulator.allocator.settings import LOWEST_ADDRESS

MAX_RANGE_BYTES: Final = 1 << 38  # farther apart, two addresses are not in one range


def restore(
    allocator: Allocator, segments: Iterable[SegmentState], mapped_later: Sequence[tuple[int, bool, int]] = ()
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
    last: dict[
        tuple[bool, int], Block
    ] = {}  # (small, stream) -> the last block of the expandable range so far
    for segment in ordered:
        pool = allocator.small if segment.small else allocator.large
        block: Block | None = Block(segment.address, segment.size_bytes, segment.stream, pool)
        assert block is not None
        key = (segment.small, segment.stream)
        if segment.expandable:
            block.expandable = True
            if key in last:
                _link_pages(last[key], block)
            else:
                _add_unmapped_head(block, [at for at, *of in mapped_later if tuple(of) == key])
        end = block
        for state in sorted(segment.blocks, key=lambda b: b.address):
            assert block is not None
            if state.address > block.address:
                free, block = block, block.cut(state.address - block.address)
                pool.insert(free)
            used = end = block
            block = used.cut(state.size_bytes) if state.size_bytes < used.size else None
            allocator.adopt(used, state.requested_bytes)
            out[used.address] = used
            if state.pending:
                allocator.request_free(used)
        if block is not None:
            pool.insert(block)
            end = block
        if segment.expandable:
            last[key] = end
        allocator.adopt_segment(segment.address, segment.size_bytes)
    starts = [s.address for s in ordered]
    for end in last.values():
        _add_unmapped_tail(allocator, end, starts)
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
        for state in sorted(segment.blocks, key=lambda b: b.address):
            out[state.address] = allocator.malloc(state.requested_bytes, segment.stream)
            if state.pending:
                allocator.request_free(out[state.address])
    allocator.reset_peaks()
    return out


def _link_pages(last: Block, pages: Block) -> None:
    """Link mapped pages behind those before them in the same range, with the unmapped gap between."""
    end = last.address + last.size
    pages.origin, pages.segment_serial = last.origin, last.segment_serial
    if pages.address > end:
        gap = _unmapped(last, pages.address - end)
        last.pool.insert_unmapped(gap)
        last = gap
    last.next, pages.prev = pages, last


def _add_unmapped_head(pages: Block, mapped_later: list[int]) -> None:
    """Let the range of these first pages begin where pages are mapped later on."""
    start = min(
        (a for a in mapped_later if pages.address - MAX_RANGE_BYTES < a < pages.address), default=None
    )
    if start is None:
        return
    head = Block(start, pages.address - start, pages.stream, pages.pool)
    head.expandable, head.mapped = True, False
    pages.origin = start
    head.next, pages.prev = pages, head
    pages.pool.insert_unmapped(head)


def _add_unmapped_tail(allocator: Allocator, last: Block, starts: list[int]) -> None:
    """Let the range of a snapshot go on behind its last page, up to the next thing that has an address."""
    end = last.address + last.size
    above = [a for a in starts if a >= end]
    length = min(min(above) - end, DEFAULT_RANGE_BYTES) if above else DEFAULT_RANGE_BYTES
    if length:
        last.pool.insert_unmapped(_unmapped(last, length))
        allocator.reach(end + length)


def _unmapped(last: Block, length: int) -> Block:
    out = Block(last.address + last.size, length, last.stream, last.pool)
    out.expandable, out.mapped, out.origin = True, False, last.origin
    out.segment_serial = last.segment_serial
    out.prev, last.next = last, out
    return out
