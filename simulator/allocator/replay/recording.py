"""A recording of a real GPU's allocator, read from a snapshot pickle or from three Parquet files.

The pickle is what torch.cuda.memory._dump_snapshot() writes after _record_memory_history(). The Parquet form has one
prefix and three files: `.events` (action, address, size_bytes, stream), and the state before the first event as
`.start_segments` (address, size_bytes, small_pool, stream) and `.start_blocks` (address, size_bytes: blocks in use).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from simulator.allocator.blocks import BlockState, SegmentState
from simulator.allocator.settings import LOWEST_ADDRESS, MIB, AllocatorSettings
from traces.errors import TraceError

ALLOC: Final = "alloc"
FREE_REQUESTED: Final = "free_requested"
FREE_COMPLETED: Final = "free_completed"
SEGMENT_ALLOC: Final = "segment_alloc"
SEGMENT_FREE: Final = "segment_free"
SEGMENT_MAP: Final = "segment_map"
SEGMENT_UNMAP: Final = "segment_unmap"
OOM: Final = "oom"
ACTIONS: Final = frozenset(
    (ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM)
)
PARQUET_PARTS: Final = (".events.parquet", ".start_segments.parquet", ".start_blocks.parquet")
MAX_ADDRESS: Final = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What happened, in order, as columns."""

    action: tuple[str, ...]
    address: tuple[int, ...]
    size_bytes: tuple[int, ...]  # as requested for blocks, as obtained for segments
    stream: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One device's allocator: its state at first, what happened then, and what it said of itself."""

    source: str
    device: int
    start: tuple[SegmentState, ...]
    events: Events
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    peak_reserved_bytes: int
    final_reserved_bytes: int
    final_allocated_bytes: int | None = None  # None: not recorded
    notes: tuple[str, ...] = ()  # what makes the recording less than complete, for people

    @property
    def segment_requests(self) -> tuple[int, ...]:
        """Bytes of each segment or run of pages that the allocator asked the driver for, in order."""
        e = self.events
        wanted = (SEGMENT_ALLOC, SEGMENT_MAP)
        return tuple(n for a, n in zip(e.action, e.size_bytes, strict=True) if a in wanted)


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
        return _read_parquet(prefix)
    if not path.is_file():
        raise TraceError(
            f"{path}: no such recording; name a snapshot.pickle, or the prefix of "
            "PREFIX.events.parquet and its two companions."
        )
    from simulator.allocator.replay.pickles import load_plain
    from simulator.allocator.replay.snapshot import recording_from_snapshot

    return recording_from_snapshot(load_plain(path), str(path), device)


def running_reserved(start_bytes: int, events: Events) -> tuple[int, int]:
    """The peak and the last value of reserved bytes that the segment events spell out."""
    now = peak = start_bytes
    for action, size in zip(events.action, events.size_bytes, strict=True):
        if action in (SEGMENT_ALLOC, SEGMENT_MAP):
            now += size
            peak = max(peak, now)
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            now -= size
    return peak, now


def own_remainders(
    segments: Sequence[SegmentState], events: Events, max_split_bytes: int
) -> tuple[SegmentState, ...]:
    """Give each block the rest behind it that the allocator did not split off.

    In the large pool nothing of up to 1 MiB stands alone, and blocks from `max_split_bytes` on are never split. Where
    more than 1 MiB is free behind a block, part of it may still be the block's own: whoever is first to get memory
    there gets the beginning of the free block, and so shows where that is.
    """
    first_touch = _first_touches(segments, events)
    out = []
    for s in segments:
        if s.small or s.expandable:
            out.append(s)
            continue
        blocks = []
        for b, end in with_ends(s):
            own = first_touch.get(b.address, b.address + b.size_bytes)
            if end - (b.address + b.size_bytes) <= MIB or b.size_bytes >= max_split_bytes:
                own = end
            blocks.append(replace(b, size_bytes=own - b.address))
        out.append(replace(s, blocks=tuple(blocks)))
    return tuple(out)


def with_ends(segment: SegmentState) -> list[tuple[BlockState, int]]:
    """Each block with where the next one, or the segment's end, begins."""
    after = [*(b.address for b in segment.blocks), segment.address + segment.size_bytes][1:]
    return list(zip(segment.blocks, after, strict=True))


def _first_touches(segments: Sequence[SegmentState], events: Events) -> dict[int, int]:
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
    for action, address in zip(events.action, events.address, strict=True):
        if action == FREE_REQUESTED:
            open_blocks.discard(address)
        elif action == ALLOC:
            k = bisect_right(starts, address) - 1
            if k >= 0 and address < spaces[k][1] and spaces[k][2] in open_blocks:
                out[spaces[k][2]] = address
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


def whole_number(value: Any, what: str, source: str) -> int:
    """The value if it is an int that can be an address or a size; else a TraceError that says where."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_ADDRESS:
        raise TraceError(
            f"{source}: {what} is {value!r:.80}, not a number of bytes; the file is damaged or foreign."
        )
    return value


def _parquet_prefix(path: Path) -> Path | None:
    for part in PARQUET_PARTS:
        if path.name.endswith(part):
            return path.with_name(path.name[: -len(part)])
    if path.is_dir():
        found = sorted(p.name[: -len(PARQUET_PARTS[0])] for p in path.glob("*" + PARQUET_PARTS[0]))
        if len(found) == 1:
            return path / found[0]
        names = f"one of {', '.join(found)}" if found else "a snapshot.pickle"
        raise TraceError(f"{path}: is a directory with {len(found)} recordings; name {names}.")
    if not path.exists() and Path(str(path) + PARQUET_PARTS[0]).is_file():
        return path
    return None


def _read_parquet(prefix: Path) -> Recording:
    source = str(prefix)
    try:
        import pyarrow.parquet as pq

        events, segments, blocks = (pq.ParquetFile(source + part).read() for part in PARQUET_PARTS)
        columns = {
            name: events.column(name).to_pylist() for name in ("action", "address", "size_bytes", "stream")
        }
        rows, held = segments.to_pylist(), blocks.to_pylist()
        meta = {k.decode(): v.decode() for k, v in (events.schema.metadata or {}).items()}
    # What a damaged file makes the reader raise is not documented.
    except Exception as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(
            f"{source}: not a recording in Parquet ({detail}); copy all three files again."
        ) from None
    unknown = sorted({str(a) for a in columns["action"]} - ACTIONS)
    if unknown:
        raise TraceError(f"{source}: the events have the unknown actions {', '.join(unknown[:5])}.")
    table = Events(
        action=tuple(columns["action"]),
        address=tuple(whole_number(a, "an event's address", source) for a in columns["address"]),
        size_bytes=tuple(whole_number(n, "an event's size", source) for n in columns["size_bytes"]),
        stream=tuple(whole_number(s, "an event's stream", source) for s in columns["stream"]),
    )
    try:
        states = [
            SegmentState(
                address=whole_number(r["address"], "a segment's address", source),
                size_bytes=whole_number(r["size_bytes"], "a segment's size", source),
                small=bool(r["small_pool"]),
                stream=whole_number(r["stream"], "a segment's stream", source),
            )
            for r in rows
        ]
        in_use = [
            BlockState(
                address=whole_number(r["address"], "a block's address", source),
                size_bytes=whole_number(r["size_bytes"], "a block's size", source),
                requested_bytes=r["size_bytes"],
                sure=False,
            )
            for r in held
        ]
        start_bytes = sum(s.size_bytes for s in states)
        peak, final = running_reserved(start_bytes, table)
        peak = int(meta.get("peak_reserved_bytes", peak))
        final = int(meta.get("final_reserved_bytes", final))
    except (KeyError, ValueError) as error:
        raise TraceError(
            f"{source}: the start state is incomplete ({error}); copy all three files again."
        ) from None
    settings = AllocatorSettings(ties=LOWEST_ADDRESS)  # recorded with torch 2.11 and older
    start = own_remainders(place_blocks(states, in_use, source), table, settings.max_split_bytes)
    return Recording(
        source=source,
        device=0,
        start=start,
        events=table,
        settings=settings,
        peak_reserved_bytes=peak,
        final_reserved_bytes=final,
    )
