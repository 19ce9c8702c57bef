"""Recordings of real GPUs' allocators, five of them in tests/data/allocator, each as three Parquet files.

`.events` (action, address, size_bytes, stream), and the state before the first event as `.start_segments` (address,
size_bytes, small_pool, stream) and `.start_blocks` (address, size_bytes: blocks in use). Of torch 2.11 and older. All
begin midway, with a state that is known, which snapshots do not tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from simulator.allocator.caching import Allocator, Block
from simulator.allocator.replay import GETS, GIVES_BACK, Event
from simulator.allocator.settings import LOWEST_ADDRESS, AllocatorSettings
from traces.units import MIB

DATA = Path(__file__).parent / "data" / "allocator"
NAMES = sorted(p.name.removesuffix(".events.parquet") for p in DATA.glob("*.events.parquet"))


def _rows(name: str, part: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.ParquetFile(DATA / f"{name}.{part}.parquet").read().to_pylist()
    return rows


@dataclass
class Recorded:
    """What happened to one GPU's allocator, and the simulated allocator that it is played to."""

    name: str
    events: list[Event] = field(init=False)
    allocator: Allocator = field(init=False)
    there: dict[int, Block] = field(default_factory=dict)
    allocations: int = 0
    same_addresses: int = 0

    def __post_init__(self) -> None:
        rows = _rows(self.name, "events")
        self.events = [Event(row["action"], row["address"], row["size_bytes"], row["stream"]) for row in rows]
        new = iter([e.address for e in self.events if e.action == "segment_alloc"])
        settings = AllocatorSettings(ties=LOWEST_ADDRESS)
        self.allocator = Allocator(settings, place=lambda *_: next(new))
        in_use = sorted((b["address"], b["size_bytes"]) for b in _rows(self.name, "start_blocks"))
        for s in _rows(self.name, "start_segments"):
            end = s["address"] + s["size_bytes"]
            self._begin(s, [b for b in in_use if s["address"] <= b[0] < end])
        self.start_bytes = self.allocator.reserved
        self.allocator.reset_peaks()

    def _begin(self, segment: dict[str, Any], in_use: list[tuple[int, int]]) -> None:
        """Take over a segment with its blocks; what none of them covers is free."""
        allocator = self.allocator
        allocator.reserved += segment["size_bytes"]
        pool = allocator.small if segment["small_pool"] else allocator.large
        rest = Block(segment["address"], segment["size_bytes"], segment["stream"], pool)
        for address, size in in_use:
            if address > rest.address:
                free, rest = rest, rest.cut(address - rest.address)
                pool.insert(free)
            block = rest
            # In the large pool nothing of up to 1 MiB stands alone: it belongs to the block before it.
            if rest.size - size > (0 if pool.small else MIB):
                rest = rest.cut(size)
            block.allocated, block.requested = True, size
            allocator.allocated += block.size
            allocator.requested += size
            self.there[address] = block
        if rest.usable:
            pool.insert(rest)

    def peaks(self) -> tuple[int, int]:
        """The highest reserved memory, and that at the end, as recorded."""
        changes = (e.size_bytes * ((e.action in GETS) - (e.action in GIVES_BACK)) for e in self.events)
        reserved = list(accumulate(changes, initial=self.start_bytes))
        return max(reserved), reserved[-1]

    def play(self) -> None:
        """Ask the simulated allocator for all that was asked for."""
        for e in self.events:
            if e.action == "alloc":
                self.there[e.address] = block = self.allocator.malloc(e.size_bytes, e.stream)
                self.allocations += 1
                self.same_addresses += block.address == e.address
            elif e.action == "free_requested":
                self.allocator.request_free(self.there[e.address])
            elif e.action == "free_completed":
                self.allocator.complete_free(self.there.pop(e.address))
            elif e.action == "segment_free":
                pools = (self.allocator.large, self.allocator.small)
                free = {b.address: b for pool in pools for b in pool.blocks() if b.size == e.size_bytes}
                self.allocator._release(free[e.address])
