"""A recording of a real GPU's allocator, and what its addresses tell of the state that it began in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, Literal

from simulator.allocator.blocks import BlockState, SegmentState
from simulator.allocator.settings import MIB, AllocatorSettings
from traces.errors import TraceError

Action = Literal[
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"
]  # fmt: skip
GETS: Final = ("segment_alloc", "segment_map")  # from the driver
GIVES_BACK: Final = ("segment_free", "segment_unmap")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened."""

    action: Action
    address: int
    size_bytes: int  # as requested for blocks, as obtained for segments
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One device's allocator: its state at first, what happened then, and what it said of itself."""

    source: str
    device: int
    start: tuple[SegmentState, ...]
    events: tuple[Event, ...]
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    peak_reserved_bytes: int
    final_reserved_bytes: int
    final_allocated_bytes: int | None = None  # None: not recorded
    notes: tuple[str, ...] = ()  # what makes the recording less than complete, for people

    @property
    def segment_requests(self) -> tuple[int, ...]:
        """Bytes of each segment or run of pages that the allocator asked the driver for, in order."""
        return tuple(e.size_bytes for e in self.events if e.action in GETS)


def running_reserved(start: Sequence[SegmentState], events: Sequence[Event]) -> tuple[int, int]:
    """The peak and the last value of reserved bytes that the segment events spell out."""
    now = peak = sum(s.size_bytes for s in start)
    for e in events:
        if e.action in GETS:
            now += e.size_bytes
            peak = max(peak, now)
        elif e.action in GIVES_BACK:
            now -= e.size_bytes
    return peak, now


def own_remainders(
    segments: Sequence[SegmentState], events: Sequence[Event], max_split_bytes: int
) -> tuple[SegmentState, ...]:
    """Give each block the rest behind it that the allocator did not split off.

    In the large pool nothing of up to 1 MiB stands alone, and blocks from `max_split_bytes` on are never split. Where
    more than 1 MiB is free behind a block, part of it may still be the block's own: whoever is first to get memory
    there gets the beginning of the free block, and so shows where that is.
    """
    first_touch = _first_touches(segments, events)

    def whole(b: BlockState, end: int) -> BlockState:
        own = first_touch.get(b.address, b.address + b.size_bytes)
        if end - (b.address + b.size_bytes) <= MIB or b.size_bytes >= max_split_bytes:
            own = end
        return replace(b, size_bytes=own - b.address)

    return tuple(
        s if s.small or s.expandable else replace(s, blocks=tuple(whole(b, end) for b, end in with_ends(s)))
        for s in segments
    )


def with_ends(segment: SegmentState) -> list[tuple[BlockState, int]]:
    """Each block with where the next one, or the segment's end, begins."""
    after = [*(b.address for b in segment.blocks), segment.address + segment.size_bytes][1:]
    return list(zip(segment.blocks, after, strict=True))


def _first_touches(segments: Sequence[SegmentState], events: Sequence[Event]) -> dict[int, int]:
    """By address of a block: where within 1 MiB behind it the first allocation landed while it was there."""
    spaces = sorted(
        (b.address + b.size_bytes, min(end, b.address + b.size_bytes + MIB + 1), b.address)
        for s in segments
        if not s.small and not s.expandable
        for b, end in with_ends(s)
        if end > b.address + b.size_bytes
    )
    starts = [start for start, _, _ in spaces]
    open_blocks = {at for _, _, at in spaces}
    out: dict[int, int] = {}
    for e in events:
        if e.action == "free_requested":
            open_blocks.discard(e.address)
        elif e.action == "alloc":
            k = bisect_right(starts, e.address) - 1
            if k >= 0 and e.address < spaces[k][1] and spaces[k][2] in open_blocks:
                out[spaces[k][2]] = e.address
                open_blocks.discard(spaces[k][2])
    return out


def place_blocks(
    segments: Sequence[SegmentState], blocks: Sequence[BlockState], source: str
) -> tuple[SegmentState, ...]:
    """Put blocks into the segments that hold their addresses; raises TraceError if they do not fit or overlap."""
    ordered = sorted(segments, key=lambda s: s.address)
    starts = [s.address for s in ordered]
    inside: list[list[BlockState]] = [[] for _ in ordered]
    for before, after in pairwise(ordered):
        if before.address + before.size_bytes > after.address:
            raise TraceError(f"{source}: the segments at {before.address} and {after.address} overlap.")
    for b in sorted(blocks, key=lambda b: b.address):
        k = bisect_right(starts, b.address) - 1
        if not b.size_bytes:
            raise TraceError(f"{source}: the block at {b.address} is empty; the file is damaged or foreign.")
        if k < 0 or b.address + b.size_bytes > ordered[k].address + ordered[k].size_bytes:
            raise TraceError(
                f"{source}: the block of {b.size_bytes} bytes at {b.address} lies in no segment; record again from "
                "before the first allocation."
            )
        if inside[k] and inside[k][-1].address + inside[k][-1].size_bytes > b.address:
            raise TraceError(f"{source}: the blocks at {inside[k][-1].address} and {b.address} overlap.")
        inside[k].append(b)
    return tuple(replace(s, blocks=tuple(held)) for s, held in zip(ordered, inside, strict=True))
