"""A recording of a real GPU's allocator, as torch.cuda.memory._dump_snapshot() writes it: all that was asked, in order.

A history must begin before the first allocation: of what was there before it, a snapshot tells neither sizes nor order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta, Struct, ValidationError, convert

from simulator.allocator.replay.pickles import SNAPSHOT, load_plain
from simulator.allocator.settings import AllocatorSettings, as_in, parse_alloc_conf
from traces.errors import LowtideError, TraceError

Action = Literal[
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"
]  # fmt: skip
GETS: Final = ("segment_alloc", "segment_map")  # from the driver
GIVES_BACK: Final = ("segment_free", "segment_unmap")
# What must have happened before to a block at that address; where nothing has, it is free.
GOES_BEFORE: Final = {
    "alloc": "free_completed",
    "free_requested": "alloc",
    "free_completed": "free_requested",
}
Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
POOL: Final = (0, 0)  # torch's own
RECORD: Final = "call torch.cuda.memory._record_memory_history() before the first allocation"


class _Block(Struct, frozen=True):
    """A piece of a segment, behind the one before."""

    size: Natural
    state: str = "active_allocated"  # or "inactive", or freed while another stream still uses it


class _Segment(Struct, frozen=True):
    """A segment, or mapped pages that follow each other."""

    address: Natural
    total_size: Natural
    blocks: tuple[_Block, ...] = ()
    device: int = 0
    segment_pool_id: tuple[int, int] = POOL


class Event(Struct, frozen=True, rename={"size_bytes": "size", "address": "addr"}):
    """One thing that happened; sizes as requested for blocks, as obtained for segments."""

    action: Action
    address: Natural
    size_bytes: Natural
    stream: Natural = 0


class _Snapshot(Struct, frozen=True):
    segments: list[_Segment]
    device_traces: list[list[Any]]
    allocator_settings: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One device's allocator: what happened from its first request on, and what it said of itself."""

    source: str
    device: int
    events: tuple[Event, ...]
    settings: AllocatorSettings
    peak_reserved_bytes: int
    final_reserved_bytes: int
    final_allocated_bytes: int  # in blocks
    notes: tuple[str, ...] = ()  # what had to be assumed, for people

    @property
    def segment_requests(self) -> tuple[int, ...]:
        """Bytes of each segment or run of pages that the allocator asked the driver for, in order."""
        return tuple(e.size_bytes for e in self.events if e.action in GETS)


def read_recording(path: str | Path, device: int | None = None) -> Recording:
    """Read a snapshot of a device, by default of the first that recorded anything; raises TraceError."""
    return recording_from_snapshot(load_plain(Path(path)), str(path), device)


def recording_from_snapshot(data: Any, source: str, device: int | None = None) -> Recording:
    """Build a recording. Raises TraceError: not a snapshot, no events of that device, private pools, or events that do
    not lead from an empty allocator to the final state.
    """
    try:
        snapshot = convert(data, _Snapshot)
        recorded = [k for k, t in enumerate(snapshot.device_traces) if t]
        device = (recorded or [0])[0] if device is None else device
        rows = convert(snapshot.device_traces[device], list[dict[str, Any]]) if device in recorded else []
        # Others are markers, and whatever comes later.
        events = convert([row for row in rows if row.get("action") in get_args(Action)], tuple[Event, ...])
    except (ValidationError, UnicodeError) as error:
        raise TraceError(
            f"{source}: not a memory snapshot, or damaged ({error}); make one with {SNAPSHOT}."
        ) from None
    if not events:
        raise TraceError(
            f"{source}: device {device} recorded no events (devices with some: {recorded}); {RECORD}."
        )
    segments = [s for s in snapshot.segments if s.device == device]
    if private := {s.segment_pool_id for s in segments} - {POOL}:
        raise TraceError(
            f"{source}: {len(private)} private pools (of CUDA graphs, or a MemPool) are in use, and only torch's own "
            "pool is simulated; record without them."
        )
    peak, final = running_reserved(events)
    if final != (there := sum(s.total_size for s in segments)):
        raise _midway(source, f"it asked for {final:,} bytes of what is reserved at the end, {there:,}")
    in_use: dict[int, _Block] = {}
    for s in segments:
        here = s.address
        for b in s.blocks:
            if b.state != "inactive":
                in_use[here] = b
            here += b.size
    if _left(events, source) != in_use.keys():
        raise _midway(source, "the blocks that are in use at the end are not those that it asked for")
    settings, notes = _settings(snapshot.allocator_settings, any("pool_id" in row for row in rows))
    in_blocks = sum(b.size for b in in_use.values() if b.state == "active_allocated")
    return Recording(
        source=source, device=device, events=events, settings=settings, peak_reserved_bytes=peak,
        final_reserved_bytes=final, final_allocated_bytes=in_blocks, notes=notes,
    )  # fmt: skip


def running_reserved(events: Sequence[Event], start_bytes: int = 0) -> tuple[int, int]:
    """The peak and the last value of reserved bytes that the segment events spell out."""
    now = peak = start_bytes
    for e in events:
        now += e.size_bytes * ((e.action in GETS) - (e.action in GIVES_BACK))
        peak = max(peak, now)
    return peak, now


def _left(events: Sequence[Event], source: str) -> set[int]:
    """The addresses of the blocks that are in use at the end."""
    last: dict[int, str] = {}
    for e in events:
        if e.action in GOES_BEFORE:
            if last.get(e.address, "free_completed") != GOES_BEFORE[e.action]:
                raise _midway(source, f"nothing goes before the event {e.action} of the block at {e.address}")
            last[e.address] = e.action
    return {at for at, action in last.items() if action != "free_completed"}


def _midway(source: str, why: str) -> TraceError:
    return TraceError(
        f"{source}: the history begins midway, lacks events or is damaged: {why}; {RECORD}, without skip_actions and "
        "with enough max_entries."
    )


def _settings(data: Any, pools_named: bool) -> tuple[AllocatorSettings, tuple[str, ...]]:
    """The allocator's settings by the snapshot, torch's defaults where it says nothing; and notes.

    Args:
        pools_named: events name their pool, as they do from torch 2.12 on.
    """
    told = data if isinstance(data, dict) else {}
    text = told.get("PYTORCH_CUDA_ALLOC_CONF") or told.get("PYTORCH_ALLOC_CONF") or ""
    out, notes = AllocatorSettings(), tuple[str, ...]()
    try:
        out = parse_alloc_conf(str(text))
    except LowtideError as error:
        why = str(error).encode(errors="backslashreplace").decode()
        notes = (f"the recorded PYTORCH_ALLOC_CONF is not understood, torch's defaults are assumed: {why}",)
    newest = "2.13" if "max_cached_size" in told else "2.12"
    return as_in(out, newest if pools_named else "2.11"), notes
