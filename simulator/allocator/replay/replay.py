"""Replay a Recording through the simulated allocator, as it was or under other settings, and compare."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.allocator.caching import DEFAULT_RANGE_BYTES, Allocator, AllocatorFigures, Block, OutOfMemory
from simulator.allocator.replay.recording import GETS, GIVES_BACK, BlockState, Event, Recording, SegmentState
from simulator.allocator.settings import LOWEST_ADDRESS, AllocatorSettings


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
        """Peak reserved over the peak in blocks, less one."""
        peak = self.figures.peak_block_bytes
        return self.figures.peak_reserved_bytes / peak - 1 if peak else 0.0

    @property
    def same_address_percent(self) -> float:
        """Of the allocations, those that landed at the recorded address."""
        return 100 * self.same_addresses / self.allocations if self.allocations else 100.0


def replay(
    recording: Recording,
    settings: AllocatorSettings | None = None,
    device_memory_bytes: int | None = None,
    from_scratch: bool = False,
) -> Replay:
    """Send every request of the recording to a simulated allocator, in the recorded order.

    Args:
        recording: what was asked.
        settings: other settings than the recording's.
        device_memory_bytes: how much the device has; None: enough.
        from_scratch: ask anew for the blocks that existed at first instead of taking the recorded segments over.
            Needed if the settings or the device are others: what they would have led to by then was not recorded.

    Ignores: what the program would have done otherwise with other settings.
    """
    run, stopped, begin = (
        _Run(recording, settings, device_memory_bytes, from_scratch),
        None,
        time.perf_counter(),
    )
    try:
        run.start()
        for event in recording.events:
            run.step(event)
    except OutOfMemory as error:
        wanted = sum(e.action == "alloc" for e in recording.events)
        stopped = f"after {run.allocations} of {wanted} allocations: {error}"
    asked = run.allocator.segment_events[run.requests_before :]
    return Replay(
        figures=run.allocator.figures(),
        segment_requests=tuple(s.size_bytes for s in asked if s.action in GETS),
        allocations=run.allocations,
        same_addresses=run.same_addresses,
        unknown_frees=run.unknown_frees,
        out_of_memory=stopped,
        seconds=time.perf_counter() - begin,
    )


class _Run:
    """An allocator in the middle of a recording."""

    def __init__(
        self,
        recording: Recording,
        settings: AllocatorSettings | None,
        device_memory_bytes: int | None,
        from_scratch: bool,
    ) -> None:
        self.recording, self.from_scratch = recording, from_scratch
        place = None if from_scratch else self.place
        self.allocator = Allocator(settings or recording.settings, device_memory_bytes, place)
        self.there: dict[int, Block] = {}
        self.freeing: dict[int, Block] = {}
        self.allocations = self.same_addresses = self.unknown_frees = self.requests_before = 0
        self.giving_back = False  # within a run of recorded returns to the driver
        self.new = deque((e.address, e.size_bytes) for e in recording.events if e.action == "segment_alloc")
        self.maps = [e.address for e in recording.events if e.action == "segment_map"]
        seen: list[Event | SegmentState] = [*recording.events, *recording.start]
        self.end = max((x.address + x.size_bytes for x in seen), default=0)

    def place(self, size: int, stream: int, expandable: bool) -> int:
        """New memory lands where the recording says, as long as it is the same memory."""
        mapped = sum(s.action == "segment_map" for s in self.allocator.segment_events) if expandable else 0
        if expandable and mapped < len(self.maps):
            return self.maps[mapped]
        if not expandable and self.new:
            at, recorded = self.new.popleft()
            if recorded == size:
                return at
        self.end += size
        return self.end - size

    def start(self) -> None:
        """Take the start state over, or ask for its blocks in order of their addresses."""
        for segment in sorted(self.recording.start, key=lambda s: s.address):
            found = (
                [self.allocator.malloc(b.requested_bytes or 0, segment.stream) for b in segment.blocks]
                if self.from_scratch
                else self.adopted(segment)
            )
            for state, block in zip(segment.blocks, found, strict=True):
                waits = state.state != "active_allocated"
                (self.freeing if waits else self.there)[state.address or 0] = block
                if waits:
                    self.allocator.request_free(block)
        self.allocator.reset_peaks()
        if not self.from_scratch and self.allocator.settings.ties != LOWEST_ADDRESS:
            self.allocator.first_serial = Block(0, 0, 0, self.allocator.small).serial
        self.requests_before = len(self.allocator.segment_events)

    def adopted(self, segment: SegmentState) -> list[Block]:
        """The blocks in use of a segment that the allocator takes over; pages are a range that can grow behind them."""
        allocator = self.allocator
        pool = allocator.small if segment.segment_type == "small" else allocator.large
        allocator.adopt_segment(segment.address, segment.size_bytes)
        whole = Block(segment.address, segment.size_bytes, segment.stream, pool)
        if segment.expandable:
            above = [s.address for s in self.recording.start if s.address > segment.address]
            end = min([segment.address + segment.size_bytes + DEFAULT_RANGE_BYTES, *above])
            whole.size, whole.expandable = end - segment.address, True
            if whole.size > segment.size_bytes:
                rest = whole.cut(segment.size_bytes)
                rest.mapped = False
                pool.insert_unmapped(rest)
                allocator.reach(end)
        return _carved(allocator, whole, segment.blocks)

    def step(self, event: Event) -> None:
        """One event."""
        allocator, at = self.allocator, event.address
        if event.action in GIVES_BACK:
            if not self.from_scratch:
                allocator.release_at(at, event.size_bytes)
            elif not self.giving_back:
                allocator.release_cached()
            self.giving_back = True
            return
        if event.action == "free_completed":
            if at in self.freeing:
                allocator.complete_free(self.freeing.pop(at))
            return
        self.giving_back = False
        if event.action == "alloc":
            self.there[at] = allocator.malloc(
                event.size_bytes, event.stream, None if self.from_scratch else at
            )
            self.allocations += 1
            self.same_addresses += self.there[at].address == at
        elif event.action == "free_requested":
            if at in self.there:
                self.freeing[at] = self.there.pop(at)
                allocator.request_free(self.freeing[at])
            else:
                self.unknown_frees += 1


def _carved(allocator: Allocator, free: Block, states: Sequence[BlockState]) -> list[Block]:
    """Take blocks in use out of a free one; what is left of it goes to its pool."""
    out: list[Block] = []
    rest: Block | None = free
    for state in states:
        assert rest is not None
        assert state.address is not None
        if state.address > rest.address:
            free, rest = rest, rest.cut(state.address - rest.address)
            free.pool.insert(free)
        used, rest = rest, rest.cut(state.size_bytes) if state.size_bytes < rest.size else None
        allocator.adopt(used, state.requested_bytes or 0)
        out.append(used)
    if rest is not None:
        rest.pool.insert(rest)
    return out
