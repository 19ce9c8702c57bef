"""Recordings of real GPUs' allocators, five of them in tests/data/allocator, each as three Parquet files.

`.events` (action, address, size_bytes, stream), and the state before the first event as `.start_segments` (address,
size_bytes, small_pool, stream) and `.start_blocks` (address, size_bytes: blocks in use). Of torch 2.11 and older.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from simulator.allocator.replay.recording import (
    BlockState,
    Event,
    Recording,
    SegmentState,
    place_blocks,
    running_reserved,
)
from simulator.allocator.settings import LOWEST_ADDRESS, AllocatorSettings

DATA = Path(__file__).parent / "data" / "allocator"
NAMES = sorted(p.name.removesuffix(".events.parquet") for p in DATA.glob("*.events.parquet"))


def read(name: str) -> Recording:
    """One of NAMES."""
    tables = [
        pq.ParquetFile(DATA / f"{name}.{part}.parquet").read()
        for part in ("events", "start_segments", "start_blocks")
    ]
    rows, segments, blocks = (table.to_pylist() for table in tables)
    meta = {k.decode(): v.decode() for k, v in (tables[0].schema.metadata or {}).items()}
    events = tuple(Event(row["action"], row["address"], row["size_bytes"], row["stream"]) for row in rows)
    pools = {True: "small", False: "large"}
    states = [SegmentState(segment_type=pools[row.pop("small_pool")], **row) for row in segments]
    in_use = [BlockState(**row, requested_bytes=row["size_bytes"]) for row in blocks]
    settings = AllocatorSettings(ties=LOWEST_ADDRESS)
    peak, final = running_reserved(states, events)
    return Recording(
        source=name,
        device=0,
        start=place_blocks(states, in_use, name, settings.max_split_bytes),
        events=events,
        settings=settings,
        peak_reserved_bytes=int(meta.get("peak_reserved_bytes", peak)),
        final_reserved_bytes=int(meta.get("final_reserved_bytes", final)),
    )
