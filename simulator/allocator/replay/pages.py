"""Whose the pages of a recording's expandable segments are: which stream's, which pool's.

An unmap names its stream and not its pool. What tells the pool: the small pool maps one page of 2 MiB at a time, the
large one whole pages of `large_segment_size_mb`, which are longer; and no block of up to 1 MiB is in the large pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from simulator.allocator.blocks import SegmentState
from simulator.allocator.caching import SMALL_BYTES, SMALL_SEGMENT_BYTES
from simulator.allocator.replay.recording import Event


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

    def learn_from(self, event: Event) -> None:
        """What an event that is about a block tells of the pages under it."""
        if event.action == "alloc" or event.action.startswith("free"):
            self.learn(event.address, event.size_bytes <= SMALL_BYTES)

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
