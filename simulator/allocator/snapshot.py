"""Turn the dictionary of torch.cuda.memory._snapshot() into a Recording by running its events backwards.

A snapshot shows the allocator as it is at the end, and what happened before. The state at the beginning follows:
blocks allocated meanwhile were not there, blocks freed meanwhile were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from simulator.allocator.blocks import BlockState, SegmentState
from simulator.allocator.pages import Pages, is_small_map, learn_from
from simulator.allocator.recording import (
    ACTIONS,
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Events,
    Recording,
    own_remainders,
    place_blocks,
    running_reserved,
    whole_number,
    with_ends,
)
from simulator.allocator.segments import SMALL_SEGMENT_BYTES
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    requested_bytes: int
    size_bytes: int | None  # None: freed during the recording, so its size follows from the rounding
    pending: bool


def recording_from_snapshot(data: Any, source: str, device: int | None = None) -> Recording:
    """Build a recording.

    Raises:
        TraceError: not a snapshot, no events of that device, or events that contradict the final state.
    """
    if not isinstance(data, dict) or not isinstance(data.get("segments"), list):
        raise TraceError(
            f"{source}: not a memory snapshot; make one with torch.cuda.memory._dump_snapshot(path)."
        )
    traces = data.get("device_traces")
    if not isinstance(traces, list) or not all(isinstance(t, list) for t in traces):
        raise TraceError(f"{source}: the snapshot has no device_traces; make it with torch 2.1 or newer.")
    recorded = [k for k, t in enumerate(traces) if t]
    if device is None:
        device = recorded[0] if recorded else 0
    if device not in recorded:
        has = f"devices {', '.join(map(str, recorded))} have" if recorded else "no device has"
        raise TraceError(
            f"{source}: device {device} recorded no events ({has}); call torch.cuda.memory._record_memory_history() "
            "before the part of the program that matters."
        )
    notes: list[str] = []
    settings = _settings(data.get("allocator_settings"), source, notes)
    settings = replace(settings, ties=_ties(traces[device], data.get("allocator_settings")))
    final = _final_segments(data["segments"], device, source, notes)
    events = _events(traces[device], source)
    start = _rewind(final, events, settings, source)
    if guessed := _guessed(start):
        notes.append(
            f"the history begins when blocks were in use already, and for {guessed} that were freed later it does not "
            "say how much of the up to 1 MiB behind them was their own: allocated bytes may be higher, by "
            f"{guessed} MiB "
            "at most; reserved memory is as recorded"
        )
    peak, end = running_reserved(sum(s.size_bytes for s in start), events)
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


def _settings(data: Any, source: str, notes: list[str]) -> AllocatorSettings:
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
    threshold = data.get("garbage_collection_threshold")
    if isinstance(threshold, float) and 0 <= threshold < 1:
        out = replace(out, garbage_collection_threshold=threshold)
    divisions = data.get("roundup_power2_divisions")
    if isinstance(divisions, dict):
        table = [divisions.get(str(1 << k), 0) for k in range(INTERVALS)]
        if all(isinstance(d, int) and d >= 0 for d in table):
            out = replace(out, roundup_divisions=tuple(table))
    return out


def _guessed(start: tuple[SegmentState, ...]) -> int:
    """Blocks of the large pool whose size is not known, and behind which there is room."""
    large = [s for s in start if not s.small and not s.expandable]
    return sum(not b.sure and b.address + b.size_bytes < end for s in large for b, end in with_ends(s))


def _ties(rows: list[Any], settings: Any) -> str:
    """Which of equal blocks is taken, by what this version of torch writes into a snapshot."""
    if not any(isinstance(row, dict) and "pool_id" in row for row in rows):
        return LOWEST_ADDRESS  # the events name their pool from torch 2.12 on
    return OLDER_SEGMENT if isinstance(settings, dict) and "max_cached_size" in settings else OLDER_BLOCK


def _final_segments(rows: list[Any], device: int, source: str, notes: list[str]) -> tuple[SegmentState, ...]:
    segments: list[SegmentState] = []
    private = 0
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("blocks"), list):
            raise TraceError(f"{source}: a segment is {row!r:.80}; the file is damaged or foreign.")
        if row.get("device", 0) != device:
            continue
        private += row.get("segment_pool_id", (0, 0)) not in ((0, 0), [0, 0], None)
        address = whole_number(row.get("address"), "a segment's address", source)
        here = address
        blocks = []
        for b in row["blocks"]:
            if not isinstance(b, Mapping):
                raise TraceError(f"{source}: a block is {b!r:.80}; the file is damaged or foreign.")
            size = whole_number(b.get("size"), "a block's size", source)
            here = whole_number(b.get("address", here), "a block's address", source)
            state = b.get("state")
            if state != "inactive":
                blocks.append(
                    BlockState(
                        address=here,
                        size_bytes=size,
                        requested_bytes=whole_number(
                            b.get("requested_size", size), "a block's request", source
                        ),
                        pending=state != "active_allocated",
                    )
                )
            here += size
        segments.append(
            SegmentState(
                address=address,
                size_bytes=whole_number(row.get("total_size"), "a segment's size", source),
                small=row.get("segment_type") == "small",
                stream=whole_number(row.get("stream", 0), "a segment's stream", source),
                expandable=row.get("is_expandable") is True,
                blocks=tuple(blocks),
            )
        )
    if private:
        notes.append(
            f"{private} segments belong to CUDA graphs or other private pools, which are simulated as one pool with "
            "all others"
        )
    held = [b for s in segments for b in s.blocks]
    return place_blocks([replace(s, blocks=()) for s in segments], held, source)


def _events(rows: list[Any], source: str) -> Events:
    action, address, sizes, streams = [], [], [], []
    for row in rows:
        if not isinstance(row, dict):
            raise TraceError(f"{source}: an event is {row!r:.80}; the file is damaged or foreign.")
        if str(row.get("action")) not in ACTIONS:  # markers such as "snapshot", and whatever comes later
            continue
        action.append(str(row["action"]))
        address.append(whole_number(row.get("addr", row.get("device_free", 0)), "an event's address", source))
        sizes.append(whole_number(row.get("size"), "an event's size", source))
        streams.append(whole_number(row.get("stream", 0), "an event's stream", source))
    if not action:
        raise TraceError(
            f"{source}: none of the {len(rows)} events is an allocation or a free; record again."
        )
    if FREE_COMPLETED not in action and FREE_REQUESTED in action:
        # Such events can be left out of the history: then every free is taken to complete at once.
        pairs = [(FREE_COMPLETED, k) for k, a in enumerate(action) if a == FREE_REQUESTED]
        order = sorted([(k, 0, a) for k, a in enumerate(action)] + [(k, 1, a) for a, k in pairs])
        return Events(
            action=tuple(a for _, _, a in order),
            address=tuple(address[k] for k, _, _ in order),
            size_bytes=tuple(sizes[k] for k, _, _ in order),
            stream=tuple(streams[k] for k, _, _ in order),
        )
    return Events(
        action=tuple(action), address=tuple(address), size_bytes=tuple(sizes), stream=tuple(streams)
    )


def _rewind(
    final: tuple[SegmentState, ...], events: Events, settings: AllocatorSettings, source: str
) -> tuple[SegmentState, ...]:
    """The state before the first event."""
    held = {
        b.address: _Held(requested_bytes=b.requested_bytes, size_bytes=b.size_bytes, pending=b.pending)
        for s in final
        for b in s.blocks
    }
    segments = {s.address: replace(s, blocks=()) for s in final if not s.expandable}
    pages = Pages(final, settings.large_segment_bytes)
    for k in range(len(events) - 1, -1, -1):
        action, at, size = events.action[k], events.address[k], events.size_bytes[k]
        learn_from(pages, action, at, size)
        if action == ALLOC:
            held.pop(at, None)
        elif action == FREE_COMPLETED:
            held[at] = _Held(requested_bytes=size, size_bytes=None, pending=True)
        elif action == FREE_REQUESTED:
            known = held.get(at) or _Held(requested_bytes=size, size_bytes=None, pending=False)
            held[at] = replace(known, pending=False)
        elif action == SEGMENT_ALLOC:
            segments.pop(at, None)
        elif action == SEGMENT_FREE:
            small = size == SMALL_SEGMENT_BYTES
            segments[at] = SegmentState(address=at, size_bytes=size, small=small, stream=events.stream[k])
        elif action == SEGMENT_MAP:
            pages.learn(at, is_small_map(size))
            pages.take_out(at, size)
        elif action == SEGMENT_UNMAP:
            pages.put_in(at, size, events.stream[k])
    blocks = [
        BlockState(
            address=at,
            size_bytes=round_up(h.requested_bytes, settings) if h.size_bytes is None else h.size_bytes,
            requested_bytes=h.requested_bytes,
            pending=h.pending,
            sure=h.size_bytes is not None,
        )
        for at, h in held.items()
    ]
    placed = place_blocks([*segments.values(), *pages.segments()], blocks, source)
    return own_remainders(placed, events, settings.max_split_bytes)
