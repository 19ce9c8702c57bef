"""CUDA's caching allocator, block by block: what it hands out, splits, merges and keeps reserved.

The rules are those of torch's c10/cuda/CUDACachingAllocator.cpp, which have been the same from 2024 to 2026. Memory is
got from the driver in *segments* and handed out in *blocks*, which are split and merged again. Blocks of up to 1 MiB
live in the small pool, all others in the large one; a free block serves only the stream that it was made for. A segment
is got whole and goes back whole; an expandable segment is a long range of addresses that is mapped page by page where
blocks need it, and unmapped page by page where nothing is left.

Counts: rounding, best fit, splits and merges, segments, expandable segments, blocks that other streams still use,
retries when memory runs out. Ignores: the private pools of CUDA graphs and MemPool, callbacks that free memory,
memory that others hold on the device, and the granularity below 2 MiB at which drivers really allot.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from simulator.allocator.settings import LOWEST_ADDRESS, OLDER_SEGMENT, UNLIMITED, AllocatorSettings, round_up
from traces.errors import LowtideError
from traces.units import MIB

MIN_BLOCK_BYTES: Final = 512
SMALL_BYTES: Final = MIB  # requests up to this size come from the small pool
SMALL_SEGMENT_BYTES: Final = 2 * MIB
LARGE_REQUEST_BYTES: Final = 10 * MIB  # from here on a request gets a segment of its own size
LARGE_ROUNDING_BYTES: Final = 2 * MIB
DEFAULT_RANGE_BYTES: Final = 1 << 42  # of expandable segments, where the device's size is unknown

_SERIALS: Final = count()


class OutOfMemory(LowtideError):
    """The simulated device cannot serve a request, even with every cached block given back."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorFigures:
    """The figures of torch.cuda.memory_stats(); blocks are what it calls allocated."""

    reserved_bytes: int
    peak_block_bytes: int
    peak_requested_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int


class Pool:
    """The free blocks of one size class, by stream: sorted lists, so that best fit is one bisection.

    Of equally large blocks the settings say which comes first; those without pages lie by their addresses.
    """

    __slots__ = ("free", "small", "ties", "unmapped")

    def __init__(self, small: bool, ties: str) -> None:
        self.small = small
        self.ties = ties
        # By stream, each sorted. A block's number stands in its rank: recordings that lie have two at one address.
        self.free: dict[int, list[tuple[int, int, int, Block]]] = {}  # size, rank
        self.unmapped: dict[int, list[tuple[int, int, int, Block]]] = {}  # address, number

    def insert(self, block: Block) -> None:
        of = self.free if block.mapped else self.unmapped
        insort(of.setdefault(block.stream, []), (*self._rank(block), block))

    def remove(self, block: Block) -> None:
        blocks = (self.free if block.mapped else self.unmapped)[block.stream]
        del blocks[bisect_left(blocks, self._rank(block))]

    def _rank(self, block: Block) -> tuple[int, int, int]:
        if not block.mapped:
            return block.address, block.serial, 0
        if self.ties == OLDER_SEGMENT:
            return block.size, block.segment_serial, block.address
        if self.ties == LOWEST_ADDRESS:
            return block.size, block.address, block.serial
        return block.size, block.serial, 0

    def blocks(self) -> Iterator[Block]:
        """The free blocks by stream, size, rank."""
        for stream in sorted(self.free):
            for *_, block in self.free[stream]:
                yield block


class Block:
    """A piece of a segment. Changes hands and size; only the allocator changes it."""

    __slots__ = (
        "address", "allocated", "expandable", "mapped", "next", "origin", "pending", "pool", "prev",
        "requested", "segment_serial", "serial", "size", "stream",
    )  # fmt: skip

    def __init__(self, address: int, size: int, stream: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.serial = next(_SERIALS)  # of all blocks ever; one that takes in its neighbours keeps its own
        self.segment_serial = self.serial  # of all segments ever
        self.requested = 0
        self.allocated = False
        self.mapped = True
        self.expandable = False
        self.origin = address  # of the expandable range, whose pages are counted from there
        self.pending = False  # freed, but other streams still use it
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def usable(self) -> bool:
        return not self.allocated and not self.pending

    def cut(self, size: int, rest_is_older: bool = False) -> Block:
        """Make this block `size` bytes long; returns the rest, linked in behind it, as the newer block or the older."""
        rest = Block(self.address + size, self.size - size, self.stream, self.pool)
        rest.mapped, rest.expandable, rest.origin = self.mapped, self.expandable, self.origin
        rest.segment_serial = self.segment_serial
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        if rest_is_older:
            self.serial, rest.serial = rest.serial, self.serial
        return rest


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEvent:
    """The allocator asked the driver for memory, or gave some back."""

    action: str  # segment_alloc, segment_free, segment_map, segment_unmap
    address: int
    size_bytes: int


class Allocator:
    """One device's caching allocator.

    Args:
        settings: what PYTORCH_ALLOC_CONF says.
        device_memory_bytes: the driver refuses beyond this; None: it never refuses.
        place: gives the address of a new segment, or of an expandable range, from (size, stream, expandable).
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        device_memory_bytes: int | None = None,
        place: Callable[[int, int, bool], int] | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.device_memory_bytes = device_memory_bytes
        # An expandable range is longer than the device's memory, so that pages can be moved to its end.
        self.range_bytes = device_memory_bytes * 9 // 8 if device_memory_bytes else DEFAULT_RANGE_BYTES
        ties = self.settings.ties
        self.small, self.large = Pool(True, ties), Pool(False, ties)
        self.segment_events: list[SegmentEvent] = []
        self.reserved = self.peak_reserved = 0
        self._end = 0  # above all addresses given out so far
        self._place = place or (lambda size, stream, expandable: self._end)
        self._sizes: dict[int, int] = {}  # of a request -> of its block
        self._held: dict[int, Block] = {}  # address -> block between request_free and complete_free
        self.allocated = self.requested = self.peak_allocated = self.peak_requested = 0
        self.num_alloc_retries = 0

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """A block for a request. Raises OutOfMemory: the device has no room, even with all cached blocks given back."""
        size = self._sizes.get(size_bytes)
        if size is None:
            size = self._sizes[size_bytes] = round_up(size_bytes, self.settings)
        pool = self.small if size <= SMALL_BYTES else self.large
        block = self._find(pool, size, stream)
        if block is None:
            block = self._extend(pool, size, stream)
            if block is None and self._release_oversize(pool, size, stream):
                block = self._extend(pool, size, stream)
            if block is None:
                self.release_cached()
                self.num_alloc_retries += 1
                block = self._extend(pool, size, stream)
            if block is None:
                raise OutOfMemory(
                    f"out of memory: a request of {size_bytes:,} bytes does not fit; {self.allocated:,} bytes are "
                    f"allocated and {self.reserved:,} reserved of {self.device_memory_bytes or 0:,}. Allow more "
                    "memory, or need less."
                )
        rest = block.size - size
        if (
            rest >= MIN_BLOCK_BYTES
            if pool.small or self.settings.expandable_segments
            else size < self.settings.max_split_bytes and rest > SMALL_BYTES
        ):
            pool.insert(block.cut(size, rest_is_older=True))
        block.allocated, block.requested = True, size_bytes
        self.allocated += block.size
        self.requested += size_bytes
        if self.allocated > self.peak_allocated:  # not max(), in the innermost loop of what takes seconds
            self.peak_allocated = self.allocated
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it can be used again at once."""
        self._leave(block)
        self._free_block(block)

    def request_free(self, block: Block) -> None:
        """The first half of a free that waits for other streams, which still use the block."""
        self._leave(block)
        block.pending = True
        self._held[block.address] = block

    def complete_free(self, block: Block) -> None:
        """The second half; nothing happens if a retry has freed the block meanwhile."""
        if self._held.get(block.address) is block:
            del self._held[block.address]
            block.pending = False
            self._free_block(block)

    def release_cached(self) -> None:
        """torch.cuda.empty_cache(): wait for all streams, give every unsplit free block and whole free page back."""
        for block in list(self._held.values()):
            self.complete_free(block)
        for pool in (self.large, self.small):
            pages: list[Block] = []
            for block in list(pool.blocks()):
                if block.expandable:
                    pages.append(block)
                elif not block.is_split:
                    self._release(block)
            for block in pages:
                self._unmap(block)

    def reset_peaks(self) -> None:
        """torch.cuda.reset_peak_memory_stats()."""
        self.peak_allocated, self.peak_requested = self.allocated, self.requested
        self.peak_reserved = self.reserved

    def figures(self) -> AllocatorFigures:
        return AllocatorFigures(
            reserved_bytes=self.reserved,
            peak_block_bytes=self.peak_allocated,
            peak_requested_bytes=self.peak_requested,
            peak_reserved_bytes=self.peak_reserved,
            num_alloc_retries=self.num_alloc_retries,
        )

    def _find(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Take the best fitting free block of the stream from the pool."""
        blocks, settings = pool.free.get(stream, []), self.settings
        at = bisect_left(blocks, (size,))
        while at < len(blocks) and blocks[at][-1].expandable and not settings.expandable_segments:
            at += 1
        if at == len(blocks):
            return None
        block = blocks[at][-1]
        # A block that can grow counts with what it can grow to, so that it is taken last.
        while block.expandable and at + 1 < len(blocks) and _grown(blocks[at + 1][-1]) < _grown(block):
            at += 1
            block = blocks[at][-1]
        largest = settings.max_split_bytes
        if size < largest:
            if block.size >= largest:
                return None
        elif block.size >= size + settings.max_non_split_rounding_bytes:
            return None
        del blocks[at]
        return block

    def _leave(self, block: Block) -> None:
        if not block.allocated:
            raise ValueError(f"the block at {block.address} is freed twice")
        block.allocated = False
        self.allocated -= block.size

    def _free_block(self, block: Block) -> None:
        self.requested -= block.requested
        self._merge(block)
        block.pool.insert(block)

    def _release_oversize(self, pool: Pool, size: int, stream: int) -> bool:
        """With a max_split_size: give back blocks too large to be split, largest first, until the request fits."""
        largest = self.settings.max_split_bytes
        if largest == UNLIMITED:
            return False
        wanted = max(size, largest)
        blocks = pool.free.get(stream, [])
        at = bisect_left(blocks, (wanted,))
        if at < len(blocks) and not blocks[at][-1].expandable:
            # A split block cannot go back to the driver by itself.
            if blocks[at][-1].is_split:
                return False
            self._release(blocks[at][-1])
            return True
        released = 0
        for *_, block in reversed(blocks[:at]):
            if released >= wanted or block.size < largest:
                break
            if not block.expandable and not block.is_split:
                released += block.size
                self._release(block)
        return released >= wanted

    # The driver's side: segments and mapped pages

    def _extend(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A free block from new memory, outside the pool; None if the driver refuses."""
        if self.settings.expandable_segments:
            return self._grow(pool, size, stream)
        segment = self._page(pool)
        if size >= LARGE_REQUEST_BYTES:
            segment = -(-size // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES
        if not self._driver_has(segment):
            return None
        block = Block(self._place(segment, stream, False), segment, stream, pool)
        self._end = max(self._end, block.address + segment)
        self._ask("segment_alloc", block.address, segment)
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

    def _growable(self, pool: Pool, size: int, stream: int) -> Block:
        """An unmapped block, or the free block before it, with room for `size` bytes; a new range if there is none."""
        for *_, unmapped in pool.unmapped.get(stream, ()):
            start = unmapped.prev if unmapped.prev is not None and unmapped.prev.usable else unmapped
            room, block = 0, start
            while room < size:
                room += block.size
                if block.next is None or not block.next.usable:
                    break
                block = block.next
            if room >= size:
                return start
        # As one unmapped block, without any pages yet.
        page = self._page(pool)
        length = -(-max(self.range_bytes, size) // page) * page
        fresh = Block(self._place(length, stream, True), length, stream, pool)
        fresh.expandable, fresh.mapped = True, False
        self._end = max(self._end, fresh.address + length)
        pool.insert(fresh)
        return fresh

    def _map(self, block: Block, size: int) -> bool:
        """Map pages for the first `size` bytes of an unmapped block and put it, merged, into the pool."""
        page = self._page(block.pool)
        length = min(-(-size // page) * page, block.size)
        if not self._driver_has(length):
            return False
        pool, address = block.pool, block.address
        pool.remove(block)
        if length < block.size:
            pool.insert(block.cut(length))
        block.mapped = True
        self._merge(block)
        pool.insert(block)
        self._ask("segment_map", address, length)
        return True

    def _unmap(self, block: Block) -> None:
        """Give the whole pages inside a free block back."""
        page = self._page(block.pool)
        start = block.origin + -(-(block.address - block.origin) // page) * page
        end = block.origin + (block.address + block.size - block.origin) // page * page
        if start >= end:
            return
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
            pool.insert(block)
        self._ask("segment_unmap", start, start - end)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self._ask("segment_free", block.address, -block.size)

    def _merge(self, block: Block) -> None:
        """Take in the free neighbours of an unlisted block."""
        for other in (block.prev, block.next):
            if other is None or not other.usable or other.mapped != block.mapped:
                continue
            other.pool.remove(other)
            block.size += other.size
            if other is block.prev:
                block.address, block.prev = other.address, other.prev
                if block.prev is not None:
                    block.prev.next = block
            else:
                block.next = other.next
                if block.next is not None:
                    block.next.prev = block

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.small else self.settings.large_segment_bytes

    def _driver_has(self, size: int) -> bool:
        return self.device_memory_bytes is None or self.reserved + size <= self.device_memory_bytes

    def _ask(self, action: str, address: int, size: int) -> None:
        """Ask the driver for memory, or give some back (less than 0)."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.segment_events.append(SegmentEvent(action=action, address=address, size_bytes=abs(size)))


def _grown(block: Block) -> int:
    """Return what a block can grow to: its own size and the unmapped pages behind it."""
    if block.next is not None and not block.next.mapped:
        return block.size + block.next.size
    return block.size
