"""Replay a Recording through the simulated allocator, as it was or under other settings, and compare."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from simulator.allocator.blocks import Block
from simulator.allocator.caching import Allocator, AllocatorFigures, OutOfMemory
from simulator.allocator.replay.pages import page_runs
from simulator.allocator.replay.recording import GETS, GIVES_BACK, Event, Recording
from simulator.allocator.replay.start import repack, restore
from simulator.allocator.settings import AllocatorSettings


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
        feed = None if from_scratch else _Addresses(recording)
        self.allocator = Allocator(settings, device_memory_bytes, None if feed is None else feed.place)
        if feed is not None:
            feed.allocator = self.allocator
        self.there: dict[int, Block] = {}
        self.freeing: dict[int, Block] = {}
        self.allocations = self.same_addresses = self.unknown_frees = self.requests_before = 0
        self.giving_back = False  # within a run of recorded returns to the driver

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


class _Addresses:
    """The driver's side of a replay: new memory lands where the recording says, as long as it is the same memory."""

    def __init__(self, recording: Recording) -> None:
        events = recording.events
        self.segments = deque((e.address, e.size_bytes) for e in events if e.action == "segment_alloc")
        self.maps = [e.address for e in events if e.action == "segment_map"]
        self.allocator: Allocator | None = None
        ends = [e.address + e.size_bytes for e in events]
        self.end = max(ends + [s.address + s.size_bytes for s in recording.start], default=0)

    def place(self, size: int, stream: int, expandable: bool) -> int:
        assert self.allocator is not None
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
