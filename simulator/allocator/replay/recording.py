"""A recording of a real GPU's allocator, and what its addresses tell of the state that it began in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from simulator.allocator.caching import SMALL_SEGMENT_BYTES
from simulator.allocator.settings import MIB, AllocatorSettings
from traces.errors import TraceError

Action = Literal[
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"
]  # fmt: skip
GETS: Final = ("segment_alloc", "segment_map")  # from the driver
GIVES_BACK: Final = ("segment_free", "segment_unmap")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """A block as a snapshot shows it."""

    address: int
    size_bytes: int
    requested_bytes: int
    pending: bool = False  # freed, but another stream still uses it
    sure: bool = True  # whether the size was seen, or follows from the request


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentState:
    """A segment as a snapshot shows it; what its blocks do not cover is free."""

    address: int
    size_bytes: int
    small: bool
    stream: int = 0
    expandable: bool = False
    blocks: tuple[BlockState, ...] = ()


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


# Whose the pages of expandable segments are: which stream's, which pool's. An unmap names its stream and not its pool.
# What tells the pool: the small pool maps one page of 2 MiB at a time, the large one whole pages of
# `large_segment_size_mb`, which are longer; and no block of up to 1 MiB is in the large pool.


class _Part(NamedTuple):
    """Mapped pages that follow each other in one range."""

    start: int
    end: int
    stream: int
    small: bool | None  # None: not known yet

    def touches(self, other: _Part) -> bool:
        return self.stream == other.stream and self.start <= other.end and other.start <= self.end


class Pages:
    """The mapped parts of expandable ranges, as intervals that grow and shrink."""

    def __init__(self, segments: Iterable[SegmentState], large_page_bytes: int) -> None:
        self.large_page_bytes = large_page_bytes
        self.parts: list[_Part] = []  # by address
        for s in segments:
            if s.expandable:
                self._insert(_Part(s.address, s.address + s.size_bytes, s.stream, s.small))

    def take_out(self, start: int, size_bytes: int) -> set[tuple[bool | None, int]]:
        """These pages are not mapped; returns whose they were."""
        end = start + size_bytes
        kept: list[_Part] = []
        owners: set[tuple[bool | None, int]] = set()
        for p in self.parts:
            if p.end <= start or p.start >= end:
                kept.append(p)
                continue
            owners.add((p.small, p.stream))
            if p.start < start:
                kept.append(p._replace(end=start))
            if p.end > end:
                kept.append(p._replace(start=end))
        self.parts = kept
        return owners

    def put_in(self, start: int, size_bytes: int, stream: int, small: bool | None = None) -> None:
        """These pages are mapped, of a pool that is not known unless said."""
        if small is None and size_bytes % self.large_page_bytes:
            small = True
        self._insert(_Part(start, start + size_bytes, stream, small))

    def learn(self, address: int, small: bool) -> None:
        """What is at this address belongs to the small or the large pool."""
        k = bisect_right(self.parts, address, key=lambda p: p.start) - 1
        if k >= 0 and address < self.parts[k].end and self.parts[k].small is None:
            self._insert(self.parts.pop(k)._replace(small=small))

    def segments(self) -> list[SegmentState]:
        """As a snapshot shows them. What nothing tells apart is taken to be the large pool's."""
        return [
            SegmentState(
                address=p.start,
                size_bytes=p.end - p.start,
                small=bool(p.small),
                stream=p.stream,
                expandable=True,
            )
            for p in self.parts
        ]

    def _insert(self, part: _Part) -> None:
        """Put a part in, merged with those that it touches; what one of them is, all are."""
        while True:
            k = bisect_right(self.parts, part.start, key=lambda p: p.start)
            near = [j for j in (k - 1, k) if 0 <= j < len(self.parts) and self._joins(self.parts[j], part)]
            if not near:
                self.parts.insert(k, part)
                return
            other = self.parts.pop(near[0])
            known = part.small if other.small is None else other.small
            ends = min(part.start, other.start), max(part.end, other.end)
            part = _Part(*ends, part.stream, known)

    @staticmethod
    def _joins(a: _Part, b: _Part) -> bool:
        return a.touches(b) and (a.small is None or b.small is None or a.small == b.small)


def is_small_map(size_bytes: int) -> bool:
    """Whether pages mapped at once are the small pool's."""
    return size_bytes == SMALL_SEGMENT_BYTES


def page_runs(
    start: Iterable[SegmentState], events: Iterable[Event], large_page_bytes: int
) -> list[tuple[int, bool, int]]:
    """The recorded maps that extend the ranges that were there at first: address, small pool or not, and stream.

    A range whose last page is unmapped is given up, and what its pool and stream map later is another one.
    """
    pages = Pages(start, large_page_bytes)
    there = {(p.small, p.stream) for p in pages.parts}
    out = []
    for e in events:
        if e.action == "segment_map":
            small = is_small_map(e.size_bytes)
            pages.put_in(e.address, e.size_bytes, e.stream, small)
            if (small, e.stream) in there:
                out.append((e.address, small, e.stream))
        elif e.action == "segment_unmap":
            owners = pages.take_out(e.address, e.size_bytes)
            there -= owners - {(p.small, p.stream) for p in pages.parts}
    return out
