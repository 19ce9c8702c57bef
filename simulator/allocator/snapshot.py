"""Turn the dictionary of torch.cuda.memory._snapshot() into a Recording by running its events backwards.

A snapshot shows the allocator as it is at the end, and what happened before. The state at the beginning follows:
blocks allocated meanwhile were not there, blocks freed meanwhile were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from simulator.allocator.blocks import BlockState, SegmentState
from simulator.allocator.caching import SMALL_BYTES
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
)
from simulator.allocator.segments import SMALL_SEGMENT_BYTES
from simulator.allocator.settings import INTERVALS, AllocatorSettings, parse_alloc_conf, round_up
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
    final = _final_segments(data["segments"], device, source, notes)
    events = _events(traces[device], source)
    start = _rewind(final, events, settings, source)
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
    pages = _Pages([s for s in final if s.expandable], events)
    for k in range(len(events) - 1, -1, -1):
        action, at, size = events.action[k], events.address[k], events.size_bytes[k]
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
            pages.remove(at, at + size)
        elif action == SEGMENT_UNMAP:
            pages.add(at, at + size, events.stream[k])
    blocks = [
        BlockState(
            address=at,
            size_bytes=round_up(h.requested_bytes, settings) if h.size_bytes is None else h.size_bytes,
            requested_bytes=h.requested_bytes,
            pending=h.pending,
        )
        for at, h in held.items()
    ]
    placed = place_blocks([*segments.values(), *pages.segments()], blocks, source)
    return own_remainders(placed, events, settings.max_split_bytes)


class _Pages:
    """The mapped parts of expandable ranges, as intervals that grow and shrink."""

    def __init__(self, final: list[SegmentState], events: Events) -> None:
        self.parts = [(s.address, s.address + s.size_bytes, s.stream, s.small) for s in final]
        # Addresses where a block of more than 1 MiB began tell the large pool's pages.
        self.large = [
            at
            for a, at, n in zip(events.action, events.address, events.size_bytes, strict=True)
            if a in (ALLOC, FREE_COMPLETED) and n > SMALL_BYTES
        ]

    def remove(self, start: int, end: int) -> None:
        out = []
        for a, b, stream, small in self.parts:
            if a < start:
                out.append((a, min(b, start), stream, small))
            if b > end:
                out.append((max(a, end), b, stream, small))
        self.parts = out

    def add(self, start: int, end: int, stream: int) -> None:
        nearest = min(self.parts, key=lambda p: abs(p[0] - start), default=None)
        if nearest is not None and nearest[2] == stream and abs(nearest[0] - start) < 1 << 36:
            small = nearest[3]
        else:
            small = not any(start <= at < end for at in self.large)
        self.parts.append((start, end, stream, small))

    def segments(self) -> list[SegmentState]:
        merged: list[tuple[int, int, int, bool]] = []
        for a, b, stream, small in sorted(self.parts):
            if merged and merged[-1][1] == a and merged[-1][2:] == (stream, small):
                merged[-1] = (merged[-1][0], b, stream, small)
            else:
                merged.append((a, b, stream, small))
        return [
            SegmentState(address=a, size_bytes=b - a, small=small, stream=stream, expandable=True)
            for a, b, stream, small in merged
        ]
