"""The driver's side of the allocator: segments and mapped pages, made on request and given back.

Two kinds of memory: a segment is got whole and goes back whole; an expandable segment is a long range of addresses that
is mapped page by page where blocks need it, and unmapped page by page where nothing is left.

Counts: bytes of segments and mapped pages. Ignores: the granularity below 2 MiB at which drivers really allot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from simulator.allocator.blocks import Block, Pool, SegmentEvent
from simulator.allocator.settings import MIB, AllocatorSettings

SMALL_SEGMENT_BYTES: Final = 2 * MIB
LARGE_REQUEST_BYTES: Final = 10 * MIB  # from here on a request gets a segment of its own size
LARGE_ROUNDING_BYTES: Final = 2 * MIB
DEFAULT_RANGE_BYTES: Final = 1 << 42  # of expandable segments, where the device's size is unknown


class Segments:
    """The memory that one device has handed out, and the pools of what is free in it.

    Args:
        settings: what PYTORCH_ALLOC_CONF says.
        device_memory_bytes: the driver refuses beyond this; None: it never refuses.
        place: gives the address of a new segment, or of an expandable range, from (size, stream, expandable).
        total_memory_bytes: of the whole device, which torch's own limits are counted from; None: the same.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        device_memory_bytes: int | None = None,
        place: Callable[[int, int, bool], int] | None = None,
        total_memory_bytes: int | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.device_memory_bytes = device_memory_bytes
        total = device_memory_bytes if total_memory_bytes is None else total_memory_bytes
        # An expandable range is longer than the device's memory, so that pages can be moved to its end.
        self.range_bytes = DEFAULT_RANGE_BYTES if total is None else total * 9 // 8
        fraction = self.settings.memory_fraction
        self.limit_bytes: int | None = None  # torch's own limit, below the driver's
        self.rejects_above_bytes: int | None = None  # beyond this a request is turned down with no second try
        if total is not None and fraction is not None and fraction < 1:
            self.limit_bytes = int(fraction * total)
        elif self.settings.throw_on_oom:
            self.rejects_above_bytes = total
        ties = self.settings.ties
        self.small, self.large = Pool(True, ties), Pool(False, ties)
        self.segment_events: list[SegmentEvent] = []
        self.reserved = self.peak_reserved = 0
        self._place = place or self._next_address
        self._end = 0  # above all addresses given out so far

    def reach(self, address: int) -> None:
        """Give out no addresses below this one."""
        self._end = max(self._end, address)

    def adopt_segment(self, address: int, size_bytes: int) -> None:
        """Count a segment, or mapped pages, that existed before."""
        self.reserved += size_bytes
        self.reach(address + size_bytes)

    def segment_bytes(self, size: int, small: bool) -> int:
        """Of the segment that a block of this size would need if it got one of its own."""
        if small:
            return SMALL_SEGMENT_BYTES
        if size < LARGE_REQUEST_BYTES:
            return self.settings.large_segment_bytes
        return -(-size // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES

    def _extend(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A free block from new memory, outside the pool; None if the driver refuses."""
        segment = self.segment_bytes(size, pool.small)
        if self.limit_bytes is not None and self.reserved + segment > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._grow(pool, size, stream)
        if not self._driver_has(segment):
            return None
        block = Block(self._place(segment, stream, False), segment, stream, pool)
        self._end = max(self._end, block.address + segment)
        self._reserve("segment_alloc", block.address, segment)
        return block

    def _grow(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A free block of at least `size` bytes made by mapping pages of an expandable range."""
        block = self._growable(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            more = block.next
            assert more is not None
            if not self._map(more, min(size - block.size, more.size)):
                return None
            block = more
        pool.remove(block)
        return block

    def map_at(self, address: int, size: int, stream: int, small: bool) -> None:
        """Map pages for a request that the driver then refused, so that they stay as free blocks."""
        pool = self.small if small else self.large
        for start, unmapped in pool.unmapped.get(stream, ()):
            if start == address and unmapped.size >= size:
                self._map(unmapped, size)
                return
        self._map(self._new_range(pool, size, stream), size)

    def _growable(self, pool: Pool, size: int, stream: int) -> Block:
        """An unmapped block, or the free block before it, with room for `size` bytes; a new range if there is none."""
        for _, unmapped in pool.unmapped.get(stream, ()):
            start = unmapped.prev if unmapped.prev is not None and unmapped.prev.usable else unmapped
            room, block = 0, start
            while room < size:
                room += block.size
                if block.next is None or not block.next.usable:
                    break
                block = block.next
            if room >= size:
                return start
        return self._new_range(pool, size, stream)

    def _new_range(self, pool: Pool, size: int, stream: int) -> Block:
        """An expandable range without any pages yet, as one unmapped block."""
        page = self._page(pool)
        length = -(-max(self.range_bytes, size) // page) * page
        fresh = Block(self._place(length, stream, True), length, stream, pool)
        fresh.expandable, fresh.mapped = True, False
        self._end = max(self._end, fresh.address + length)
        pool.insert_unmapped(fresh)
        return fresh

    def _map(self, block: Block, size: int) -> bool:
        """Map pages for the first `size` bytes of an unmapped block and put it, merged, into the pool."""
        page = self._page(block.pool)
        length = min(-(-size // page) * page, block.size)
        if not self._driver_has(length):
            return False
        pool, address = block.pool, block.address
        pool.remove_unmapped(block)
        if length < block.size:
            pool.insert_unmapped(block.cut(length))
        block.mapped = True
        self._merge(block)
        pool.insert(block)
        self._reserve("segment_map", address, length)
        return True

    def _unmap(self, block: Block) -> bool:
        """Give the whole pages inside a free block back; False if it holds none."""
        page = self._page(block.pool)
        start = block.origin + -(-(block.address - block.origin) // page) * page
        end = block.origin + (block.address + block.size - block.origin) // page * page
        if start >= end:
            return False
        pool = block.pool
        pool.remove(block)
        if start > block.address:
            before, block = block, block.cut(start - block.address, rest_is_older=True)
            pool.insert(before)
        if end < block.address + block.size:
            pool.insert(block.cut(end - block.address))
        block.mapped = False
        self._merge(block)
        if block.is_split:  # otherwise the range is empty, and its addresses go back as well
            pool.insert_unmapped(block)
        self._give_back("segment_unmap", start, end - start)
        return True

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self._give_back("segment_free", block.address, block.size)

    def _merge(self, block: Block) -> None:
        """Take in the free neighbours of an unlisted block."""
        before, after = block.prev, block.next
        if before is not None and before.usable and before.mapped == block.mapped:
            self._unlist(before)
            block.address = before.address
            block.size += before.size
            block.prev = before.prev
            if block.prev is not None:
                block.prev.next = block
        if after is not None and after.usable and after.mapped == block.mapped:
            self._unlist(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.prev = block

    def _unlist(self, block: Block) -> None:
        if block.mapped:
            block.pool.remove(block)
        else:
            block.pool.remove_unmapped(block)

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.small else self.settings.large_segment_bytes

    def _driver_has(self, size: int) -> bool:
        return self.device_memory_bytes is None or self.reserved + size <= self.device_memory_bytes

    def _next_address(self, size: int, stream: int, expandable: bool) -> int:
        return self._end

    def _reserve(self, action: str, address: int, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.segment_events.append(SegmentEvent(action=action, address=address, size_bytes=size))

    def _give_back(self, action: str, address: int, size: int) -> None:
        self.reserved -= size
        self.segment_events.append(SegmentEvent(action=action, address=address, size_bytes=size))
