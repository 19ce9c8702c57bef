"""Recordings from files: a snapshot pickle, or three Parquet files.

The pickle is what torch.cuda.memory._dump_snapshot() writes after _record_memory_history(). The Parquet form has one
prefix and three files: `.events` (action, address, size_bytes, stream), and the state before the first event as
`.start_segments` (address, size_bytes, small_pool, stream) and `.start_blocks` (address, size_bytes: blocks in use).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from msgspec import convert

from simulator.allocator.blocks import BlockState, SegmentState
from simulator.allocator.replay.pickles import load_plain
from simulator.allocator.replay.recording import (
    Event,
    Recording,
    own_remainders,
    place_blocks,
    running_reserved,
)
from simulator.allocator.replay.snapshot import recording_from_snapshot
from simulator.allocator.settings import LOWEST_ADDRESS, AllocatorSettings
from traces.errors import TraceError

PARTS: Final = (".events.parquet", ".start_segments.parquet", ".start_blocks.parquet")


def read_recording(path: str | Path, device: int | None = None) -> Recording:
    """Read a recording in either form.

    Args:
        path: a pickle; or the common prefix, one of the three files, or the directory of a Parquet recording.
        device: which device of a pickle (default: the first one that recorded anything).

    Raises:
        TraceError: no such file, damaged, hostile, foreign, or without the events of that device.
    """
    path = Path(path)
    prefix = _parquet_prefix(path)
    if prefix is not None:
        if device not in (None, 0):
            raise TraceError(f"{path}: a Parquet recording holds one device; leave --device out.")
        return _read_parquet(str(prefix))
    if not path.is_file():
        raise TraceError(
            f"{path}: no such recording; name a snapshot.pickle, or the prefix of PREFIX{PARTS[0]} and its companions."
        )
    return recording_from_snapshot(load_plain(path), str(path), device)


def _parquet_prefix(path: Path) -> Path | None:
    for part in PARTS:
        if path.name.endswith(part):
            return path.with_name(path.name.removesuffix(part))
    if path.is_dir():
        found = sorted(p.name.removesuffix(PARTS[0]) for p in path.glob("*" + PARTS[0]))
        if len(found) == 1:
            return path / found[0]
        names = f"one of {', '.join(found)}" if found else "a snapshot.pickle"
        raise TraceError(f"{path}: is a directory with {len(found)} recordings; name {names}.")
    return path if not path.exists() and Path(f"{path}{PARTS[0]}").is_file() else None


def _read_parquet(source: str) -> Recording:
    import pyarrow.parquet as pq

    try:
        tables = [pq.ParquetFile(source + part).read() for part in PARTS]
        rows, segments, blocks = (table.to_pylist() for table in tables)
        meta = {k.decode(): v.decode() for k, v in (tables[0].schema.metadata or {}).items()}
        events = convert(rows, tuple[Event, ...])
        states = [convert({**row, "small": row["small_pool"]}, SegmentState) for row in segments]
        in_use = [
            convert({**row, "requested_bytes": row["size_bytes"], "sure": False}, BlockState)
            for row in blocks
        ]
        peak, final = running_reserved(states, events)
        peak = int(meta.get("peak_reserved_bytes", peak))
        final = int(meta.get("final_reserved_bytes", final))
    # What a damaged file makes the reader raise is not documented.
    except Exception as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(
            f"{source}: not a recording in Parquet ({detail}); copy all three files again."
        ) from None
    settings = AllocatorSettings(ties=LOWEST_ADDRESS)  # recorded with torch 2.11 and older
    start = own_remainders(place_blocks(states, in_use, source), events, settings.max_split_bytes)
    return Recording(
        source=source,
        device=0,
        start=start,
        events=events,
        settings=settings,
        peak_reserved_bytes=peak,
        final_reserved_bytes=final,
    )
