"""A recording of a real GPU's allocator, as torch.cuda.memory._dump_snapshot() writes it, and the state it began in.

A snapshot shows the allocator at the end, and what happened before. The state at the beginning follows by going back:
blocks allocated meanwhile were not there, blocks freed meanwhile were, as large as their requests rounded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import replace as with_fields

from simulator.allocator.caching import SMALL_SEGMENT_BYTES
from simulator.allocator.replay.pickles import load_plain
from simulator.allocator.settings import (
    INTERVALS,
    LOWEST_ADDRESS,
    MIB,
    OLDER_BLOCK,
    OLDER_SEGMENT,
    AllocatorSettings,
    parse_alloc_conf,
    round_up,
)
from traces.errors import LowtideError, TraceError

Action = Literal[
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"
]  # fmt: skip
GETS: Final = ("segment_alloc", "segment_map")  # from the driver
GIVES_BACK: Final = ("segment_free", "segment_unmap")
FOLLOWS: Final = {"alloc": "free_completed", "free_requested": "alloc", "free_completed": "free_requested"}
Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
POOL: Final = (0, 0)  # torch's own
MOST_BLOCKS: Final = 1 << 18  # in use at the end; training steps have some ten thousand


class BlockState(Struct, frozen=True, rename={"size_bytes": "size", "requested_bytes": "requested_size"}):
    """A block of a segment."""

    size_bytes: Natural
    address: Natural | None = None  # None: behind the block before
    requested_bytes: Natural | None = None
    state: str = "active_allocated"  # or "inactive", or freed while another stream still uses it


class SegmentState(Struct, frozen=True, rename={"size_bytes": "total_size", "expandable": "is_expandable"}):
    """A segment, or mapped pages that follow each other; what its blocks do not cover is free."""

    address: Natural
    size_bytes: Natural
    blocks: tuple[BlockState, ...] = ()
    segment_type: str = "large"  # or "small": its pool
    stream: Natural = 0
    expandable: bool = False
    device: int = 0
    segment_pool_id: tuple[int, int] = POOL


class Event(Struct, frozen=True, rename={"size_bytes": "size", "address": "addr"}):
    """One thing that happened; sizes as requested for blocks, as obtained for segments."""

    action: Action
    address: Natural
    size_bytes: Natural
    stream: Natural = 0


class _Snapshot(Struct, frozen=True):
    segments: list[SegmentState]
    device_traces: list[list[Any]]
    allocator_settings: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One device's allocator: its state at first, what happened then, and what it said of itself."""

    source: str
    device: int
    start: tuple[SegmentState, ...]
    events: tuple[Event, ...]
    settings: AllocatorSettings
    peak_reserved_bytes: int
    final_reserved_bytes: int
    final_allocated_bytes: int | None = None  # None: not recorded
    notes: tuple[str, ...] = ()  # what makes the recording less than complete, for people

    @property
    def segment_requests(self) -> tuple[int, ...]:
        """Bytes of each segment or run of pages that the allocator asked the driver for, in order."""
        return tuple(e.size_bytes for e in self.events if e.action in GETS)


def read_recording(path: str | Path, device: int | None = None) -> Recording:
    """Read a snapshot of a device, by default of the first that recorded anything. Raises TraceError: no such file,
    damaged, hostile, foreign, or without the events of that device.
    """
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"{path}: no such recording; name a file of torch.cuda.memory._dump_snapshot().")
    return recording_from_snapshot(load_plain(path), str(path), device)


def recording_from_snapshot(data: Any, source: str, device: int | None = None) -> Recording:
    """Build a recording. Raises TraceError: not a snapshot, no events of that device, or events that contradict the
    final state.
    """
    shown = data.get("segments") if isinstance(data, dict) else None
    held = [s.get("blocks") for s in shown if isinstance(s, dict)] if isinstance(shown, list) else []
    if (count := len(held) + sum(len(blocks) for blocks in held if isinstance(blocks, list))) > MOST_BLOCKS:
        raise TraceError(
            f"{source}: {count:,} segments and blocks are more than a step's snapshot holds ({MOST_BLOCKS:,} at "
            "most); it is damaged or foreign."
        )
    try:
        snapshot = convert(data, _Snapshot)
        device, rows = _rows(snapshot.device_traces, source, device)
        events = convert(rows, tuple[Event, ...])
    except (ValidationError, UnicodeError) as error:
        raise TraceError(
            f"{source}: not a memory snapshot, or damaged ({error}); make one with "
            "torch.cuda.memory._dump_snapshot(path), in torch 2.1 or newer."
        ) from None
    final = [s for s in snapshot.segments if s.device == device]
    if private := {s.segment_pool_id for s in final} - {POOL}:
        raise TraceError(
            f"{source}: {len(private)} private pools (of CUDA graphs, or a MemPool) are in use, and only torch's own "
            "pool is simulated; record without them."
        )
    settings, notes = _settings(snapshot.allocator_settings)
    newest = (
        isinstance(snapshot.allocator_settings, dict) and "max_cached_size" in snapshot.allocator_settings
    )
    older = OLDER_SEGMENT if newest else OLDER_BLOCK  # events name their pool from torch 2.12 on
    settings = replace(settings, ties=older if any("pool_id" in row for row in rows) else LOWEST_ADDRESS)
    in_use = {b.address or 0: b for s in final for b in _held(s, source)}
    start = _rewind(
        {s.address: with_fields(s, blocks=()) for s in final}, dict(in_use), events, settings, source
    )
    if any(s.blocks for s in start):
        notes.append(
            "the history begins when blocks were in use already; the sizes of those that were freed later follow from "
            "what was asked for, so the replay may differ. Record from before the first allocation to have it exact"
        )
    peak, end = running_reserved(start, events)
    allocated = sum(b.size_bytes for b in in_use.values() if b.state == "active_allocated")
    return Recording(
        source=source, device=device, start=start, events=events, settings=settings, peak_reserved_bytes=peak,
        final_reserved_bytes=end, final_allocated_bytes=allocated, notes=tuple(notes),
    )  # fmt: skip


def running_reserved(start: Sequence[SegmentState], events: Sequence[Event]) -> tuple[int, int]:
    """The peak and the last value of reserved bytes that the segment events spell out."""
    now = peak = sum(s.size_bytes for s in start)
    for e in events:
        now += e.size_bytes * ((e.action in GETS) - (e.action in GIVES_BACK))
        peak = max(peak, now)
    return peak, now


def place_blocks(
    segments: Sequence[SegmentState], blocks: Sequence[BlockState], source: str, max_split_bytes: int
) -> tuple[SegmentState, ...]:
    """Put blocks into the segments that hold their addresses. Raises TraceError if they do not fit or overlap.

    In the large pool nothing of up to 1 MiB stands alone, and blocks from `max_split_bytes` on are never split: there
    the rest behind a block is its own.
    """
    ordered = sorted(segments, key=lambda s: s.address)
    starts = [s.address for s in ordered]
    inside: list[list[BlockState]] = [[] for _ in ordered]
    ends = [min(s.address + s.size_bytes, *starts[k + 1 : k + 2], 1 << 64) for k, s in enumerate(ordered)]
    for b in sorted(blocks, key=lambda b: -(b.address or 0)):
        at = b.address or 0
        k = bisect_right(starts, at) - 1
        room = ends[k] - at if k >= 0 else 0
        if not 0 < b.size_bytes <= room:
            raise TraceError(
                f"{source}: the block of {b.size_bytes} bytes at {at} lies in no segment, or in another block; record "
                "again from before the first allocation."
            )
        s, ends[k] = ordered[k], at
        own = not s.expandable and s.segment_type != "small"
        own = own and (room - b.size_bytes <= MIB or b.size_bytes >= max_split_bytes)
        inside[k].append(with_fields(b, size_bytes=room) if own else b)
    return tuple(
        with_fields(s, blocks=tuple(reversed(held))) for s, held in zip(ordered, inside, strict=True)
    )


def _rows(traces: list[list[Any]], source: str, device: int | None) -> tuple[int, list[Any]]:
    """The device, and its events of the kinds that matter here; others are markers, and whatever comes later."""
    recorded = [k for k, t in enumerate(traces) if t]
    if device is None:
        device = recorded[0] if recorded else 0
    if device not in recorded:
        has = f"devices {', '.join(map(str, recorded))} have" if recorded else "no device has"
        raise TraceError(
            f"{source}: device {device} recorded no events ({has}); call torch.cuda.memory._record_memory_history() "
            "before the part of the program that matters."
        )
    rows = convert(traces[device], list[dict[str, Any]])
    if not (known := [row for row in rows if row.get("action") in get_args(Action)]):
        raise TraceError(
            f"{source}: none of the {len(rows)} events is an allocation or a free; record again."
        )
    return device, known


def _settings(data: Any) -> tuple[AllocatorSettings, list[str]]:
    """What the snapshot says that the allocator's settings were, torch's defaults where it says nothing; and notes."""
    out, notes = AllocatorSettings(), []
    if not isinstance(data, dict):
        return out, ["the snapshot does not say its allocator settings: torch's defaults are assumed"]
    text = data.get("PYTORCH_CUDA_ALLOC_CONF") or data.get("PYTORCH_ALLOC_CONF")
    try:
        out = parse_alloc_conf(text) if isinstance(text, str) else out
    except LowtideError as error:
        why = str(error).encode(errors="backslashreplace").decode()
        notes.append(f"the recorded PYTORCH_ALLOC_CONF is not understood: {why}")
    split, grows = data.get("max_split_size"), data.get("expandable_segments")
    if isinstance(split, int) and 0 < split < 1 << 62:
        out = replace(out, max_split_bytes=split)
    if isinstance(grows, bool):
        out = replace(out, expandable_segments=grows)
    divisions = data.get("roundup_power2_divisions")
    table = [divisions.get(str(1 << k), 0) for k in range(INTERVALS)] if isinstance(divisions, dict) else [-1]
    if all(isinstance(d, int) and 0 <= d < 1 << 32 for d in table):
        out = replace(out, roundup_divisions=tuple(table))
    return out, notes


def _held(segment: SegmentState, source: str) -> list[BlockState]:
    """The blocks in use, each with its address and what it asked for."""
    here, held = segment.address, []
    for b in segment.blocks:
        at = here if b.address is None else b.address
        here = at + b.size_bytes
        if b.state != "inactive":
            asked = b.size_bytes if b.requested_bytes is None else b.requested_bytes
            held.append(with_fields(b, address=at, requested_bytes=asked))
    if sum(b.size_bytes for b in segment.blocks) != segment.size_bytes:
        raise TraceError(
            f"{source}: the blocks of the segment at {segment.address} do not fill its {segment.size_bytes} bytes; "
            "the file is damaged or foreign."
        )
    return held


def _rewind(
    segments: dict[int, SegmentState],
    held: dict[int, BlockState],
    events: Sequence[Event],
    settings: AllocatorSettings,
    source: str,
) -> tuple[SegmentState, ...]:
    """The state before the first event."""
    later: dict[int, str] = {}
    for e in reversed(events):
        at, size = e.address, e.size_bytes
        if e.action in FOLLOWS:
            if at in later and FOLLOWS[later[at]] != e.action:
                raise TraceError(
                    f"{source}: the block at {at} has the events {e.action} and {later[at]} with nothing between; "
                    "events are missing. Record without skip_actions."
                )
            later[at] = e.action
        if e.action == "alloc":
            held.pop(at, None)
        elif e.action == "free_completed":
            held[at] = BlockState(round_up(size, settings), at, size, "active_pending_free")
        elif e.action == "free_requested":
            known = held.get(at) or BlockState(round_up(size, settings), at, size)
            held[at] = with_fields(known, state="active_allocated")
        elif e.action in GIVES_BACK:
            pool = "small" if size == SMALL_SEGMENT_BYTES else "large"
            grows = e.action == "segment_unmap"
            segments[at] = SegmentState(at, size, segment_type=pool, stream=e.stream, expandable=grows)
        else:
            for s in [
                s for s in segments.values() if s.address < at + size and at < s.address + s.size_bytes
            ]:
                del segments[s.address]
                for a, b in ((s.address, at), (at + size, s.address + s.size_bytes)):
                    if a < b:
                        segments[a] = with_fields(s, address=a, size_bytes=b - a)
    if any(s.expandable for s in segments.values()) and any(e.action == "segment_unmap" for e in events):
        raise TraceError(
            f"{source}: the history begins when segments that grow were there, and pages of them go back later, which "
            "does not say whose they were; record from before the first allocation."
        )
    return place_blocks(list(segments.values()), list(held.values()), source, settings.max_split_bytes)
