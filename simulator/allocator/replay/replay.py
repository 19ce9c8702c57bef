"""Replay a Recording through the simulated allocator, as it was or under other settings, and compare."""

from __future__ import annotations

import time
from dataclasses import dataclass

from simulator.allocator.caching import Allocator, AllocatorFigures, Block, OutOfMemory
from simulator.allocator.replay.recording import GETS, GIVES_BACK, Recording
from simulator.allocator.settings import AllocatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The simulated allocator's answer to a recording's requests."""

    figures: AllocatorFigures
    segment_requests: tuple[int, ...]  # bytes asked of the driver, in order
    allocations: int
    same_addresses: int  # allocations that landed where the recording says
    out_of_memory: str | None  # why and where it stopped; None: it went through
    seconds: float


def replay(
    recording: Recording, settings: AllocatorSettings | None = None, device_memory_bytes: int | None = None
) -> Replay:
    """Send every request of the recording to a simulated allocator, in the recorded order.

    Args:
        recording: what was asked.
        settings: under which segments come and go as the allocator has it; None: under the recorded settings they come
            and go where and as the recording says.
        device_memory_bytes: how much the device has; None: enough.

    Ignores: what the program would have done otherwise with other settings.
    """
    segments = iter([(e.address, e.size_bytes) for e in recording.events if e.action == "segment_alloc"])
    pages = [e.address for e in recording.events if e.action == "segment_map"]
    end = max(e.address + e.size_bytes for e in recording.events)

    def place(size: int, stream: int, expandable: bool) -> int:
        """Where it was recorded, as long as it is the same memory; an expandable range begins with its first pages."""
        nonlocal end
        mapped = sum(s.action == "segment_map" for s in allocator.segment_events) if expandable else 0
        if expandable and mapped < len(pages):
            return pages[mapped]
        at, recorded = (0, -1) if expandable else next(segments, (0, -1))
        if recorded == size:
            return at
        end += size
        return end - size

    as_recorded = settings is None
    chosen = settings or recording.settings
    allocator = Allocator(chosen, device_memory_bytes, place if as_recorded else None)
    there: dict[int, Block] = {}
    allocations = same_addresses = 0
    giving_back = False  # in the middle of one call of empty_cache()
    stopped, begin = None, time.perf_counter()
    for e in recording.events:
        if e.action == "alloc":
            try:
                there[e.address] = allocator.malloc(e.size_bytes, e.stream)
            except OutOfMemory as error:
                wanted = sum(e.action == "alloc" for e in recording.events)
                stopped = f"after {allocations} of {wanted} allocations: {error}"
                break
            allocations += 1
            same_addresses += there[e.address].address == e.address
        elif e.action == "free_requested":
            allocator.request_free(there[e.address])
        elif e.action == "free_completed":
            allocator.complete_free(there.pop(e.address))
        elif e.action in GIVES_BACK and as_recorded:
            allocator.release_at(e.address, e.size_bytes)
        elif e.action in GIVES_BACK and not giving_back:
            allocator.release_cached()
        giving_back = e.action in GIVES_BACK or (giving_back and e.action == "free_completed")
    asked = tuple(s.size_bytes for s in allocator.segment_events if s.action in GETS)
    seconds = time.perf_counter() - begin
    return Replay(
        figures=allocator.figures(), segment_requests=asked, allocations=allocations,
        same_addresses=same_addresses, out_of_memory=stopped, seconds=seconds,
    )  # fmt: skip
