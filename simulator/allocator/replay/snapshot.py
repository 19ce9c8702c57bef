"""The Recording behind torch.cuda.memory._snapshot(), found by running its events backwards.

A snapshot shows the allocator as it is at the end, and what happened before. The state at the beginning follows:
blocks allocated meanwhile were not there, blocks freed meanwhile were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from simulator.allocator.blocks import BlockState, SegmentState
from simulator.allocator.replay.pages import Pages, is_small_map, learn_from
from simulator.allocator.replay.recording import (
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

DEFAULT_POOL: Final = (0, 0)


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
    lanes = _Lanes(data["segments"])
    final = _final_segments(data["segments"], device, lanes, source)
    if lanes.private:
        notes.append(
            f"{lanes.private} private pools (of CUDA graphs, or a MemPool) are simulated as pools of their own, but "
            "not what decides when their memory may go back"
            + (
                "; torch before 2.12 does not say whose an event is"
                if settings.ties == LOWEST_ADDRESS
                else ""
            )
        )
    pending = {b.address for s in final for b in s.blocks if b.pending}
    events = _events(traces[device], lanes, pending, source)
    _check_order(events, source)
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


def _final_segments(rows: list[Any], device: int, lanes: _Lanes, source: str) -> tuple[SegmentState, ...]:
    segments: list[SegmentState] = []
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("blocks"), list):
            raise TraceError(f"{source}: a segment is {row!r:.80}; the file is damaged or foreign.")
        if row.get("device", 0) != device:
            continue
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
                stream=lanes.of(
                    row.get("segment_pool_id"), row.get("stream", 0), "a segment's stream", source
                ),
                expandable=row.get("is_expandable") is True,
                blocks=tuple(blocks),
            )
        )
    held = [b for s in segments for b in s.blocks]
    return place_blocks([replace(s, blocks=()) for s in segments], held, source)


def _events(rows: list[Any], lanes: _Lanes, pending: set[int], source: str) -> Events:
    action, address, sizes, streams = [], [], [], []
    for row in rows:
        if not isinstance(row, dict):
            raise TraceError(f"{source}: an event is {row!r:.80}; the file is damaged or foreign.")
        if str(row.get("action")) not in ACTIONS:  # markers such as "snapshot", and whatever comes later
            continue
        action.append(str(row["action"]))
        address.append(whole_number(row.get("addr", row.get("device_free", 0)), "an event's address", source))
        sizes.append(whole_number(row.get("size"), "an event's size", source))
        pool = row["pool_id"] if "pool_id" in row else lanes.pool_at(address[-1])
        streams.append(lanes.of(pool, row.get("stream", 0), "an event's stream", source))
    if not action:
        raise TraceError(
            f"{source}: none of the {len(rows)} events is an allocation or a free; record again."
        )
    # Either half of a free can be left out of a history. Then the two are taken to be at once, but for what still waits
    # for its second half in the end.
    whole: tuple[str, ...] = ()
    waits: set[int] = set()
    if FREE_COMPLETED not in action and FREE_REQUESTED in action:
        last = {at: k for k, at in enumerate(address)}
        whole = (FREE_REQUESTED, FREE_COMPLETED)
        waits = {k for at, k in last.items() if at in pending and action[k] == FREE_REQUESTED}
    elif FREE_REQUESTED not in action and FREE_COMPLETED in action:
        whole = (FREE_REQUESTED, FREE_COMPLETED)
    steps = [
        (k, half)
        for k in range(len(action))
        for half in (whole if action[k] in whole and k not in waits else (action[k],))
    ]
    return Events(
        action=tuple(half for _, half in steps),
        address=tuple(address[k] for k, _ in steps),
        size_bytes=tuple(sizes[k] for k, _ in steps),
        stream=tuple(streams[k] for k, _ in steps),
    )


class _Lanes:
    """One number for each stream of each pool: like streams, pools do not share free blocks."""

    def __init__(self, segments: list[Any]) -> None:
        self.numbers: dict[tuple[tuple[int, int], int], int] = {}
        # Before torch 2.12 events do not name their pool; what lies in a private segment is of its pool.
        self.ranges = [
            (s["address"], s["address"] + s["total_size"], pool)
            for s in segments
            if isinstance(s, Mapping)
            and isinstance(s.get("address"), int)
            and isinstance(s.get("total_size"), int)
            and (pool := _pool(s.get("segment_pool_id"))) != DEFAULT_POOL
        ]

    @property
    def private(self) -> int:
        return len({pool for pool, _ in self.numbers})

    def pool_at(self, address: int) -> tuple[int, int]:
        return next((pool for a, b, pool in self.ranges if a <= address < b), DEFAULT_POOL)

    def of(self, pool: Any, stream: Any, what: str, source: str) -> int:
        """The stream itself in the default pool, and negative numbers for all others."""
        number = whole_number(stream, what, source)
        key = (_pool(pool), number)
        if key[0] == DEFAULT_POOL:
            return number
        return self.numbers.setdefault(key, -1 - len(self.numbers))


def _pool(value: Any) -> tuple[int, int]:
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(v, int) for v in value):
        return value[0], value[1]
    return DEFAULT_POOL


def _check_order(events: Events, source: str) -> None:
    """Every block must be freed before it is allocated again, and the other way round."""
    last: dict[int, str] = {}
    follows = {ALLOC: (FREE_COMPLETED,), FREE_REQUESTED: (ALLOC,), FREE_COMPLETED: (FREE_REQUESTED, ALLOC)}
    for action, at in zip(events.action, events.address, strict=True):
        if action not in follows:
            continue
        if at in last and last[at] not in follows[action]:
            raise TraceError(
                f"{source}: the block at {at} has the events {last[at]} and {action} with nothing between; events are "
                "missing. Record without skip_actions."
            )
        last[at] = action


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
