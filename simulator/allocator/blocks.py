"""Blocks, the pools that list the free ones, and segments as a snapshot shows them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from simulator.allocator.settings import LOWEST_ADDRESS, OLDER_SEGMENT

_SERIALS: Final = count()


class Pool:
    """The free blocks of one size class, by stream: sorted lists, so that best fit is one bisection.

    Of equally large blocks the settings say which comes first.
    """

    __slots__ = ("free", "small", "ties", "unmapped")

    def __init__(self, small: bool, ties: str) -> None:
        self.small = small
        self.ties = ties
        self.free: dict[int, list[tuple[int, int, int, Block]]] = {}  # stream -> (size, rank, block), sorted
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}  # stream -> (address, block), sorted

    def insert(self, block: Block) -> None:
        insort(self.free.setdefault(block.stream, []), (*self._rank(block), block))

    def remove(self, block: Block) -> None:
        blocks = self.free[block.stream]
        del blocks[bisect_left(blocks, self._rank(block))]

    def _rank(self, block: Block) -> tuple[int, int, int]:
        if self.ties == OLDER_SEGMENT:
            return block.size, block.segment_serial, block.address
        return block.size, block.address if self.ties == LOWEST_ADDRESS else block.serial, 0

    def insert_unmapped(self, block: Block) -> None:
        insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        blocks = self.unmapped[block.stream]
        del blocks[bisect_left(blocks, (block.address,))]

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

    def __lt__(self, other: Block) -> bool:
        """Any order that stays: two free blocks at one address, which only a recording that lies can bring about."""
        return self.serial < other.serial

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
