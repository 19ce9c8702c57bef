"""The Recording behind torch.cuda.memory._snapshot(), found by running its events backwards.

A snapshot shows the allocator as it is at the end, and what happened before. The state at the beginning follows:
blocks allocated meanwhile were not there, blocks freed meanwhile were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, get_args

from msgspec import Meta, ValidationError, convert

from simulator.allocator.caching import SMALL_BYTES, SMALL_SEGMENT_BYTES
from simulator.allocator.replay.pickles import load_plain
from simulator.allocator.replay.recording import (
    Action,
    BlockState,
    Event,
    Pages,
    Recording,
    SegmentState,
    is_small_map,
    own_remainders,
    place_blocks,
    running_reserved,
    with_ends,
)
from simulator.allocator.settings import (
    INTERVALS,
    LOWEST_ADDRESS,
    OLDER_BLOCK,
    OLDER_SEGMENT,
    AllocatorSettings,
    parse_alloc_conf,
    round_up,
)
from traces.errors import LowtideError, TraceError

PoolId = tuple[int, int]
Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
DEFAULT_POOL: Final = (0, 0)
MOST_BLOCKS: Final = 1 << 18  # in use at the end; training steps have some ten thousand


# What torch writes, as far as it is needed here.


@dataclass(frozen=True, slots=True)
class _Block:
    size: Natural
    address: Natural | None = None  # None: behind the block before
    requested_size: Natural | None = None
    state: str = ""


@dataclass(frozen=True, slots=True)
class _Segment:
    address: Natural
    total_size: Natural
    blocks: list[_Block]
    device: int = 0
    stream: Natural = 0
    segment_type: str = ""
    segment_pool_id: PoolId = DEFAULT_POOL
    is_expandable: bool = False


@dataclass(frozen=True, slots=True)
class _Row:
    action: Action
    size: Natural
    addr: Natural | None = None
    device_free: Natural = 0  # stands in place of the address where memory ran out
    stream: Natural = 0
    pool_id: PoolId | None = None  # None: torch before 2.12


@dataclass(frozen=True, slots=True)
class _Snapshot:
    segments: list[_Segment]
    device_traces: list[list[Any]]
    allocator_settings: Any = None


def read_recording(path: str | Path, device: int | None = None) -> Recording:
    """Read a snapshot that torch.cuda.memory._dump_snapshot() wrote after _record_memory_history().

    Args:
        device: which one (default: the first that recorded anything).

    Raises:
        TraceError: no such file, damaged, hostile, foreign, or without the events of that device.
    """
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"{path}: no such recording; name a file of torch.cuda.memory._dump_snapshot().")
    return recording_from_snapshot(load_plain(path), str(path), device)


def recording_from_snapshot(data: Any, source: str, device: int | None = None) -> Recording:
    """Build a recording. Raises TraceError: not a snapshot, no events of that device, or events that contradict the
    final state.
    """
    _check_size(data, source)
    try:
        snapshot = convert(data, _Snapshot)
        device, rows = _device_rows(snapshot.device_traces, source, device)
    except (ValidationError, UnicodeError) as error:
        raise TraceError(
            f"{source}: not a memory snapshot, or damaged ({error}); make one with "
            "torch.cuda.memory._dump_snapshot(path), in torch 2.1 or newer."
        ) from None
    notes: list[str] = []
    settings = _settings(snapshot.allocator_settings, notes)
    settings = replace(settings, ties=_ties(rows, snapshot.allocator_settings))
    segments = [s for s in snapshot.segments if s.device == device]
    if private := {s.segment_pool_id for s in segments} - {DEFAULT_POOL}:
        raise TraceError(
            f"{source}: {len(private)} private pools (of CUDA graphs, or a MemPool) are in use, and only torch's own "
            "pool is simulated; record without them."
        )
    final = _final_segments(segments, source)
    events = tuple(
        Event(row.action, row.device_free if row.addr is None else row.addr, row.size, row.stream)
        for row in rows
    )
    _check_order(events, source)
    start = _rewind(final, events, settings, source)
    # Blocks of the large pool whose size is not known, and behind which there is room.
    large = [s for s in start if not s.small and not s.expandable]
    if guessed := sum(not b.sure and b.address + b.size_bytes < e for s in large for b, e in with_ends(s)):
        notes.append(
            f"the history begins when blocks were in use already, and for {guessed} that were freed later it does not "
            "say how much of the up to 1 MiB behind them was their own: allocated bytes may be higher, by "
            f"{guessed} MiB at most; reserved memory is as recorded"
        )
    peak, end = running_reserved(start, events)
    return Recording(
        source=source,
        device=device,
        start=start,
        events=events,
        settings=settings,
        peak_reserved_bytes=peak,
        final_reserved_bytes=end,
        final_allocated_bytes=sum(b.size_bytes for s in final for b in s.blocks if not b.pending),
        notes=tuple(notes),
    )


def _check_size(data: Any, source: str) -> None:
    """Raise TraceError for more blocks than are worked through in a second or two."""
    segments = data.get("segments") if isinstance(data, dict) else None
    if isinstance(segments, list):
        held = (s.get("blocks") for s in segments if isinstance(s, dict))
        count = len(segments) + sum(len(blocks) for blocks in held if isinstance(blocks, list))
        if count > MOST_BLOCKS:
            raise TraceError(
                f"{source}: {count:,} segments and blocks are more than a step's snapshot holds ({MOST_BLOCKS:,} at "
                "most); it is damaged or foreign."
            )


def _device_rows(traces: Sequence[Sequence[Any]], source: str, device: int | None) -> tuple[int, list[_Row]]:
    """The device, by default the first that recorded anything, and the events of the kinds that matter here."""
    recorded = [k for k, t in enumerate(traces) if t]
    if device is None:
        device = recorded[0] if recorded else 0
    if device not in recorded:
        has = f"devices {', '.join(map(str, recorded))} have" if recorded else "no device has"
        raise TraceError(
            f"{source}: device {device} recorded no events ({has}); call torch.cuda.memory._record_memory_history() "
            "before the part of the program that matters."
        )
    # The others are markers such as "snapshot", and whatever comes later.
    known = [r for r in traces[device] if not isinstance(r, dict) or str(r.get("action")) in get_args(Action)]
    rows = convert(known, list[_Row])
    if not rows:
        raise TraceError(
            f"{source}: none of the {len(traces[device])} events is an allocation or a free; record again."
        )
    return device, rows


def _settings(data: Any, notes: list[str]) -> AllocatorSettings:
    """What the snapshot says that the allocator's settings were; torch's defaults where it says nothing."""
    if not isinstance(data, dict):
        notes.append("the snapshot does not say its allocator settings: torch's defaults are assumed")
        return AllocatorSettings()
    out = AllocatorSettings()
    text = data.get("PYTORCH_CUDA_ALLOC_CONF") or data.get("PYTORCH_ALLOC_CONF")
    if isinstance(text, str):
        try:
            out = parse_alloc_conf(text)
        except LowtideError as error:
            notes.append(f"the recorded PYTORCH_ALLOC_CONF is not understood: {error}")
    split = data.get("max_split_size")
    if isinstance(split, int) and 0 < split < 1 << 62:
        out = replace(out, max_split_bytes=split)
    if isinstance(data.get("expandable_segments"), bool):
        out = replace(out, expandable_segments=data["expandable_segments"])
    divisions = data.get("roundup_power2_divisions")
    if isinstance(divisions, dict):
        table = [divisions.get(str(1 << k), 0) for k in range(INTERVALS)]
        if all(isinstance(d, int) and 0 <= d < 1 << 32 for d in table):
            out = replace(out, roundup_divisions=tuple(table))
    return out


def _ties(rows: Sequence[_Row], settings: Any) -> str:
    """Which of equal blocks is taken, by what this version of torch writes into a snapshot."""
    if all(row.pool_id is None for row in rows):
        return LOWEST_ADDRESS  # the events name their pool from torch 2.12 on
    return OLDER_SEGMENT if isinstance(settings, dict) and "max_cached_size" in settings else OLDER_BLOCK


def _final_segments(rows: Sequence[_Segment], source: str) -> tuple[SegmentState, ...]:
    segments, held = [], []
    for row in rows:
        here = row.address
        for b in row.blocks:
            here = here if b.address is None else b.address
            if b.state != "inactive":
                requested = b.size if b.requested_size is None else b.requested_size
                waits = b.state != "active_allocated"
                held.append(
                    BlockState(address=here, size_bytes=b.size, requested_bytes=requested, pending=waits)
                )
            here += b.size
        if sum(b.size for b in row.blocks) != row.total_size:
            raise TraceError(
                f"{source}: the blocks of the segment at {row.address} do not fill its {row.total_size} bytes; the "
                "file is damaged or foreign."
            )
        segments.append(
            SegmentState(
                address=row.address,
                size_bytes=row.total_size,
                small=row.segment_type == "small",
                stream=row.stream,
                expandable=row.is_expandable,
            )
        )
    return place_blocks(segments, held, source)


def _check_order(events: Sequence[Event], source: str) -> None:
    """Every block must be freed before it is allocated again, and the other way round."""
    last: dict[int, str] = {}
    follows = {"alloc": "free_completed", "free_requested": "alloc", "free_completed": "free_requested"}
    for e in events:
        if e.action not in follows:
            continue
        if e.address in last and last[e.address] != follows[e.action]:
            raise TraceError(
                f"{source}: the block at {e.address} has the events {last[e.address]} and {e.action} with nothing "
                "between; events are missing. Record without skip_actions."
            )
        last[e.address] = e.action


def _rewind(
    final: Sequence[SegmentState], events: Sequence[Event], settings: AllocatorSettings, source: str
) -> tuple[SegmentState, ...]:
    """The state before the first event."""
    held = {b.address: b for s in final for b in s.blocks}
    segments = {s.address: replace(s, blocks=()) for s in final if not s.expandable}
    pages = Pages(final, settings.large_segment_bytes)
    for e in reversed(events):
        at, size = e.address, e.size_bytes
        if e.action == "alloc" or e.action.startswith("free"):  # it tells of the pages under the block
            pages.learn(at, size <= SMALL_BYTES)
        if e.action == "alloc":
            held.pop(at, None)
        elif e.action in ("free_completed", "free_requested"):
            # Of a block that was freed meanwhile the size follows from the rounding.
            known = None if e.action == "free_completed" else held.get(at)
            block = known or BlockState(
                address=at, size_bytes=round_up(size, settings), requested_bytes=size, sure=False
            )
            held[at] = replace(block, pending=e.action == "free_completed")
        elif e.action == "segment_alloc":
            segments.pop(at, None)
        elif e.action == "segment_free":
            small = size == SMALL_SEGMENT_BYTES
            segments[at] = SegmentState(address=at, size_bytes=size, small=small, stream=e.stream)
        elif e.action == "segment_map":
            pages.learn(at, is_small_map(size))
            pages.take_out(at, size)
        elif e.action == "segment_unmap":
            pages.put_in(at, size, e.stream)
    placed = place_blocks([*segments.values(), *pages.segments()], list(held.values()), source)
    return own_remainders(placed, events, settings.max_split_bytes)
