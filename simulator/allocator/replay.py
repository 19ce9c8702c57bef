"""Replay a Recording through the simulated allocator, as it was or under other settings, and compare."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from simulator.allocator.blocks import Block
from simulator.allocator.caching import SMALL_BYTES, Allocator, AllocatorFigures, OutOfMemory
from simulator.allocator.recording import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Events,
    Recording,
)
from simulator.allocator.settings import AllocatorSettings
from simulator.allocator.start import PageRun, repack, restore


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
    from_scratch: bool | None = None,
) -> Replay:
    """Send every request of the recording to a simulated allocator.

    Args:
        settings: other settings than the recording's.
        device_memory_bytes: how much the device has; None: enough.
        from_scratch: ask anew for the blocks that existed at first instead of taking the recorded segments over.
            Needed, and the default, if the settings or the device are others: what they would have led to by then
            is not what was recorded.

    Counts: every request and free in the recorded order; frees that waited for other streams wait as long as recorded.
    A recorded return of segments to the driver is repeated exactly from the recorded start, and else as one
    empty_cache(). Ignores: what the program would have done otherwise with other settings.
    """
    if from_scratch is None:
        from_scratch = (
            settings or recording.settings
        ) != recording.settings or device_memory_bytes is not None
    settings = settings or recording.settings
    e = recording.events
    feed = None if from_scratch else _Addresses(recording)
    allocator = Allocator(settings, device_memory_bytes, None if feed is None else feed.place)
    if feed is not None:
        feed.allocator = allocator
    stopped: str | None = None
    there: dict[int, Block] = {}
    allocations = same = unknown = 0
    requests_before = 0
    freeing: dict[int, Block] = {}
    giving_back = False  # within a run of recorded returns to the driver
    begin = time.perf_counter()
    try:
        if from_scratch:
            there = repack(allocator, recording.start)
        else:
            there = restore(allocator, recording.start, _page_runs(recording.events))
        freeing = {at: b for at, b in there.items() if not b.allocated}
        there = {at: b for at, b in there.items() if b.allocated}
        requests_before = len(allocator.segment_events)
        for k, (action, at, size) in enumerate(zip(e.action, e.address, e.size_bytes, strict=True)):
            if action == ALLOC:
                giving_back = False
                block = allocator.malloc(size, e.stream[k])
                there[at] = block
                allocations += 1
                same += block.address == at
            elif action == FREE_REQUESTED:
                giving_back = False
                block_or_none = there.pop(at, None)
                if block_or_none is None:
                    unknown += 1
                else:
                    allocator.request_free(block_or_none)
                    freeing[at] = block_or_none
            elif action == FREE_COMPLETED:
                if at in freeing:
                    allocator.complete_free(freeing.pop(at))
            elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
                if not from_scratch:
                    allocator.release_at(at, size)
                elif not giving_back:
                    allocator.release_cached()
                giving_back = True
            elif action in (SEGMENT_ALLOC, SEGMENT_MAP, OOM):
                giving_back = False
    except OutOfMemory as error:
        stopped = f"after {allocations} of {e.action.count(ALLOC)} allocations: {error}"
    seconds = time.perf_counter() - begin
    return Replay(
        figures=allocator.figures(),
        segment_requests=tuple(
            s.size_bytes
            for s in allocator.segment_events[requests_before:]
            if s.action in (SEGMENT_ALLOC, SEGMENT_MAP)
        ),
        allocations=allocations,
        same_addresses=same,
        unknown_frees=unknown,
        out_of_memory=stopped,
        seconds=seconds,
    )


def _page_runs(events: Events) -> list[PageRun]:
    """The maps of a recording; whose they are tells the allocation that follows, on whose behalf they happened."""
    out: list[PageRun] = []
    waiting: list[int] = []
    for action, address, size, stream in zip(
        events.action, events.address, events.size_bytes, events.stream, strict=True
    ):
        if action == SEGMENT_MAP:
            waiting.append(address)
        elif action == ALLOC:
            out += [PageRun(address=a, small=size <= SMALL_BYTES, stream=stream) for a in waiting]
            waiting.clear()
    return out


class _Addresses:
    """The driver's side of a replay: new memory lands where the recording says, as long as it is the same memory."""

    def __init__(self, recording: Recording) -> None:
        e = recording.events
        rows = list(zip(e.action, e.address, e.size_bytes, strict=True))
        self.segments = deque((at, n) for a, at, n in rows if a == SEGMENT_ALLOC)
        self.maps = [at for a, at, _ in rows if a == SEGMENT_MAP]
        self.allocator: Allocator | None = None
        self.end = max(
            [at + n for _, at, n in rows] + [s.address + s.size_bytes for s in recording.start], default=0
        )

    def place(self, size: int, stream: int, expandable: bool) -> int:
        assert self.allocator is not None
        if expandable:
            # Maps follow each other as recorded, so the next one tells where this range begins.
            done = sum(1 for s in self.allocator.segment_events if s.action == SEGMENT_MAP)
            if done < len(self.maps):
                return self.maps[done]
        elif self.segments:
            at, recorded = self.segments.popleft()
            if recorded == size:
                return at
        self.end += size
        return self.end - size
