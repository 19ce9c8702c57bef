"""Replay a Recording through the simulated allocator, as it was or under other settings, and compare."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from simulator.allocator.caching import DEFAULT_RANGE_BYTES, Allocator, AllocatorFigures, Block, OutOfMemory
from simulator.allocator.replay.recording import (
    GETS,
    GIVES_BACK,
    BlockState,
    Event,
    Recording,
    SegmentState,
    page_runs,
)
from simulator.allocator.settings import LOWEST_ADDRESS, AllocatorSettings

MAX_RANGE_BYTES: Final = 1 << 38  # farther apart, two addresses are not in one range


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the simulated allocator did with a recording's requests."""

    figures: AllocatorFigures
    segment_requests: tuple[int, ...]  # bytes asked of the driver, in order
    allocations: int
    same_addresses: int  # allocations that landed where the recording says
    unknown_frees: int  # frees of blocks that the recording never showed
    out_of_memory: str | None  # why and where it stopped; None: it went through
    seconds: float

    @property
    def fragmentation(self) -> float:
        """Peak reserved over peak allocated, less one."""
        peak = self.figures.peak_allocated_bytes
        return self.figures.peak_reserved_bytes / peak - 1 if peak else 0.0

    @property
    def address_share(self) -> float:
        """Share of the allocations that landed at the recorded address."""
        return self.same_addresses / self.allocations if self.allocations else 1.0

    @property
    def microseconds_per_pair(self) -> float:
        """Time for one allocation and its free."""
        return 1e6 * self.seconds / self.allocations if self.allocations else 0.0


def replay(
    recording: Recording,
    settings: AllocatorSettings | None = None,
    device_memory_bytes: int | None = None,
    from_scratch: bool = False,
) -> Replay:
    """Send every request of the recording to a simulated allocator.

    Args:
        settings: other settings than the recording's.
        device_memory_bytes: how much the device has; None: enough.
        from_scratch: ask anew for the blocks that existed at first instead of taking the recorded segments over.
            Needed if the settings or the device are others: what they would have led to by then is not what was
            recorded.

    Counts: every request and free in the recorded order; frees that waited for other streams wait as long as recorded.
    A recorded return of segments to the driver is repeated exactly from the recorded start, and else as one
    empty_cache(). Ignores: what the program would have done otherwise with other settings.
    """
    stopped: str | None = None
    begin = time.perf_counter()
    run = _Run(recording, settings or recording.settings, device_memory_bytes, from_scratch)
    try:
        run.start()
        for event in recording.events:
            run.step(event)
    except OutOfMemory as error:
        wanted = sum(e.action == "alloc" for e in recording.events)
        stopped = f"after {run.allocations} of {wanted} allocations: {error}"
    seconds = time.perf_counter() - begin
    return Replay(
        figures=run.allocator.figures(),
        segment_requests=tuple(
            s.size_bytes for s in run.allocator.segment_events[run.requests_before :] if s.action in GETS
        ),
        allocations=run.allocations,
        same_addresses=run.same_addresses,
        unknown_frees=run.unknown_frees,
        out_of_memory=stopped,
        seconds=seconds,
    )


class _Run:
    """An allocator in the middle of a recording."""

    def __init__(
        self,
        recording: Recording,
        settings: AllocatorSettings,
        device_memory_bytes: int | None,
        from_scratch: bool,
    ) -> None:
        self.recording = recording
        self.from_scratch = from_scratch
        self.allocator = Allocator(settings, device_memory_bytes, None if from_scratch else self.place)
        self.there: dict[int, Block] = {}
        self.freeing: dict[int, Block] = {}
        self.allocations = self.same_addresses = self.unknown_frees = self.requests_before = 0
        self.giving_back = False  # within a run of recorded returns to the driver
        events = recording.events
        self.segments = deque((e.address, e.size_bytes) for e in events if e.action == "segment_alloc")
        self.maps = [e.address for e in events if e.action == "segment_map"]
        ends = [e.address + e.size_bytes for e in events]
        self.end = max(ends + [s.address + s.size_bytes for s in recording.start], default=0)

    def place(self, size: int, stream: int, expandable: bool) -> int:
        """New memory lands where the recording says, as long as it is the same memory."""
        if expandable:
            # Maps follow each other as recorded, so the next one tells where this range begins.
            done = sum(1 for s in self.allocator.segment_events if s.action == "segment_map")
            if done < len(self.maps):
                return self.maps[done]
        elif self.segments:
            at, recorded = self.segments.popleft()
            if recorded == size:
                return at
        self.end += size
        return self.end - size

    def start(self) -> None:
        """Take the start state over, or ask for its blocks."""
        first, allocator = self.recording.start, self.allocator
        if self.from_scratch:
            held = repack(allocator, first)
        else:
            page_bytes = allocator.settings.large_segment_bytes
            held = restore(allocator, first, page_runs(first, self.recording.events, page_bytes))
        self.freeing = {at: b for at, b in held.items() if not b.allocated}
        self.there = {at: b for at, b in held.items() if b.allocated}
        self.requests_before = len(allocator.segment_events)

    def step(self, event: Event) -> None:
        """One event."""
        allocator = self.allocator
        action, at, size = event.action, event.address, event.size_bytes
        if action == "free_completed":
            if at in self.freeing:
                allocator.complete_free(self.freeing.pop(at))
            return
        if action in GIVES_BACK:
            if not self.from_scratch:
                allocator.release_at(at, size)
            elif not self.giving_back:
                allocator.release_cached()
            self.giving_back = True
            return
        self.giving_back = False
        if action == "alloc":
            likely = None if self.from_scratch else at
            self.there[at] = allocator.malloc(size, event.stream, likely)
            self.allocations += 1
            self.same_addresses += self.there[at].address == at
        elif action == "free_requested":
            if at in self.there:
                self.freeing[at] = self.there.pop(at)
                allocator.request_free(self.freeing[at])
            else:
                self.unknown_frees += 1


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
