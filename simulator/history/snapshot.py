"""Read what torch recorded of a GPU's memory, also midway, from its end back to its beginning.

A snapshot says which blocks are there in the end; undoing its events one by one tells what was there before each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, convert

from simulator.allocator import replay
from simulator.allocator.caching import MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES
from simulator.allocator.replay import Event, Recording, Snapshot, reading
from simulator.history.run import OURS, Free, History, Refused, of_layers, parts_of
from traces.errors import TraceError
from traces.records.trace import ACTIVATION, OPTIMIZER_STATE, PARAMETER
from traces.units import show_bytes

BACKWARD, OTHER, EARLIER = "made in backward", "other", "from before the recording"


class Frame(Struct, frozen=True):
    """A line of a stack."""

    filename: str
    name: str
    line: int = 0


# Address -> requested bytes, and the stack that asked; where nobody knows it, what the block counts as.
Blocks = dict[int, tuple[int, Any]]
Area = tuple[int, int, bool]  # where a segment, or mapped pages, begin and end; whether they grow by pages


def history_of(data: Any, source: str) -> History:
    """The history of one device (`Snapshot.of_device`); `data` is what `torch.cuda.memory._dump_snapshot` writes.
    Raises TraceError: no snapshot, or one without events.
    """
    with reading(source):
        snapshot = convert(data, Snapshot)
        device, events, _ = snapshot.of_device()
        if not events:
            raise TraceError(f"{source}: no events were recorded; {replay.RECORD}.")
        had, requested, reserved = _totals(snapshot, device, events, source)
        refusals = [k for k, e in enumerate(events) if e.action == replay.OUT_OF_MEMORY]
        at = refusals[-1] if refusals else max(range(len(events)), key=requested.__getitem__)
        blocks, areas = _there(snapshot, device, events, at)
        place, held = line_of(stack(events[at].frames))[1], parts_of([_held(*b) for b in blocks.values()])
    notes = []
    if not any(e.frames for e in events):
        held = {}
        notes.append("It was recorded without stacks, so nobody knows who asked.")
    if had:
        notes.append(
            f"When the recording began, {show_bytes(had)} were in use; an earlier peak is not in it."
        )
    if (count := sum(map(bool, snapshot.device_traces))) > 1:
        which = "that ran out of memory" if refusals else "with most memory reserved"
        notes.append(f"{count} GPUs recorded events; this is GPU {device}, the one {which}.")
    e = events[at]
    return History(
        name=source,
        kind="snapshot",
        peak_bytes=requested[at],
        where=f"event {at + 1:,} of {len(events):,}" + f", in {place}" * bool(place),
        parts=held,
        reserved_bytes=reserved[at],
        most_reserved_bytes=max(reserved),
        free=_free(blocks, areas),
        refused=Refused(asked_bytes=e.size_bytes, free_bytes=e.free_bytes) if refusals else None,
        notes=tuple(notes),
        curve=tuple(zip(requested, reserved, strict=True)),
    )


def recording_of(data: Any, source: str) -> Recording:
    """What that device was asked for; what was there when the recording began, first and by address.
    Raises TraceError: no snapshot, or one without events, with private pools, or that lacks events.

    Ignores: where that lay which was there, and between which free pieces.
    """
    with reading(source):
        snapshot = convert(data, Snapshot)
        device, events, pools_named = snapshot.of_device()
    if private := {s.segment_pool_id for s in snapshot.segments if s.device == device} - {replay.POOL}:
        raise TraceError(
            f"{source}: {len(private)} private pools (of CUDA graphs, or a MemPool) are in use, and only torch's own "
            "pool is simulated; record without them."
        )
    blocks, areas = _there(snapshot, device, events, -1)
    before = (Event("alloc", address, size) for address, (size, _) in sorted(blocks.items()))
    asked = (*before, *(e for e in events if e.action != replay.OUT_OF_MEMORY))
    if not asked or not replay.in_order(asked):
        raise TraceError(f"{source}: the history lacks events or is damaged; {replay.RECORD}.")
    settings, notes = replay.settings_of(snapshot.allocator_settings, pools_named)
    return Recording(events=asked, settings=settings, midway=bool(areas), notes=notes)


def _totals(
    snapshot: Snapshot, device: int, events: Sequence[Event], source: str
) -> tuple[int, list[int], list[int]]:
    """Requested bytes before all events; requested and reserved bytes after each."""
    now = sum(_requested(b) for b in snapshot.in_use(device).values())
    there = sum(s.total_size for s in snapshot.segments if s.device == device)
    requested, reserved = [0] * len(events), [0] * len(events)
    for k in range(len(events) - 1, -1, -1):
        requested[k], reserved[k] = now, there
        action, size = events[k].action, events[k].size_bytes
        now += size * ((action == "free_completed") - (action == "alloc"))
        there += size * ((action in replay.GIVES_BACK) - (action in replay.GETS))
    if min(now, there, *requested, *reserved) < 0:
        raise TraceError(f"{source}: events are missing, or the file is damaged; {replay.RECORD}.")
    return now, requested, reserved


def _requested(block: Any) -> int:
    return int(block.size if block.requested_size is None else block.requested_size)


def _there(snapshot: Snapshot, device: int, events: Sequence[Event], at: int) -> tuple[Blocks, list[Area]]:
    """The blocks in use after event `at`, and where segments were."""
    blocks: Blocks = {a: (_requested(b), b.frames or EARLIER) for a, b in snapshot.in_use(device).items()}
    segments = [s for s in snapshot.segments if s.device == device]
    fixed = {s.address: s.total_size for s in segments if not s.is_expandable}
    edges: Counter[int] = Counter()  # of pages: +1 where some begin, -1 where they end

    def pages(address: int, size: int, sign: int) -> None:
        edges[address] += sign
        edges[address + size] -= sign

    for s in segments:
        if s.is_expandable:
            pages(s.address, s.total_size, 1)
    for e in reversed(events[at + 1 :]):
        if e.action == "alloc":
            blocks.pop(e.address, None)
        elif e.action == "free_completed":
            blocks[e.address] = e.size_bytes, EARLIER
        elif e.action == "segment_alloc":
            fixed.pop(e.address, None)
        elif e.action == "segment_free":
            fixed[e.address] = e.size_bytes
        elif e.action in ("segment_map", "segment_unmap"):
            pages(e.address, e.size_bytes, 1 if e.action in replay.GIVES_BACK else -1)
    for e in events[: at + 1]:
        if e.action == "alloc" and e.address in blocks:
            blocks[e.address] = e.size_bytes, OTHER if e.frames is None else e.frames
    turns = sorted((a, n) for a, n in edges.items() if n)
    grown = [(a, turns[k + 1][0], True) for k, (a, n) in enumerate(turns) if n > 0 and k + 1 < len(turns)]
    return blocks, sorted([(a, a + size, False) for a, size in fixed.items()] + grown)


def _free(blocks: Blocks, areas: Sequence[Area]) -> Free:
    """What of the areas no block holds."""
    order = sorted(blocks)
    rounding = rests = cached = 0
    pieces: list[int] = []
    k = 0
    for begin, end, grows in areas:
        here, first = begin, k
        while k < len(order) and order[k] < end:
            pieces.append(order[k] - here)
            size = blocks[order[k]][0]
            taken = max(1, -(-size // MIN_BLOCK_BYTES)) * MIN_BLOCK_BYTES
            rounding += taken - size
            here = order[k] + taken
            k += 1
            rest = (order[k] if k < len(order) and order[k] < end else end) - here
            if 0 < rest <= SMALL_BYTES and not grows and end - begin > SMALL_SEGMENT_BYTES:
                rests, here = rests + rest, here + rest
        if k == first:
            cached += end - begin
        else:
            pieces.append(end - here)
    left = [n for n in pieces if n > 0]
    return Free(
        rounding_bytes=rounding,
        rests_bytes=rests,
        pieces_bytes=sum(left),
        pieces=len(left),
        largest_bytes=max(left, default=0),
        cached_bytes=cached,
    )


def stack(frames: Any) -> list[Frame]:
    return convert(frames or [], list[Frame])


def _held(size: int, frames: Any) -> tuple[str, str, str, int]:
    """The category, module and line of a block, and its size."""
    if isinstance(frames, str):
        return frames, "", "", size
    told = stack(frames)
    if len(own := [f.name for f in told if f.filename == OURS]) > 2:
        op, module, category, *_ = own
        return category, module, of_layers(op, module), size
    return (_category(told), *line_of(told), size)


def _category(frames: Iterable[Frame]) -> str:
    """What a block is by who asked for it: the innermost frame that tells."""
    python = False
    for f in frames:
        python = python or f.filename.endswith(".py")
        if "/torch/optim/" in f.filename:
            return OPTIMIZER_STATE
        if f.name in ("_apply", "__init__", "from_pretrained", "load_state_dict"):
            return PARAMETER
        if f.name == "forward" or f.filename.endswith("/torch/nn/functional.py"):
            return ACTIVATION
        if "/torch/autograd/" in f.filename:
            return BACKWARD
    return OTHER if python else BACKWARD  # whose thread runs no Python


def line_of(frames: Iterable[Frame]) -> tuple[str, str]:
    """The file and the line that are innermost and not torch's: "train.py", "train.py:12 forward"; or nothing."""
    for f in frames:
        if f.filename.endswith(".py") and "/torch/" not in f.filename:
            name = Path(f.filename).name
            return name, f"{name}:{f.line} {f.name}"
    return "", ""
