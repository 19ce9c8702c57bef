"""What each op allocates and frees on CUDA, in order, from the caching allocator's own history.

The history is one list of events without a word about ops. So a marker is allocated and freed before and after every
op: a block of an odd size whose address is noted. What lies between an op's two markers is the op's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from tracer.costs.rows import LibraryWorkspace
from traces.errors import TraceError
from traces.records.trace import OwnEvents

Move = tuple[bool, int, int]
MARK_BYTES: Final = 257  # asked for; the allocator's smallest block serves it


class OpWindow(NamedTuple):
    """One op of a recorded round: the addresses of its two markers and of the storages that it returned."""

    target: str
    before: int
    after: int
    outputs: frozenset[int]


@contextmanager
def recording() -> Iterator[list[Any]]:
    """While the body runs, the allocator writes its history (without stack traces), which is in the list then."""
    import torch

    from tracer.torch_api import cuda_memory_snapshot, record_memory_history

    entries: list[Any] = []
    record_memory_history(enabled="all", context=None, clear_history=True)
    try:
        yield entries
        entries += cuda_memory_snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        record_memory_history(enabled=None)


def mark() -> int:
    """Make a marker; its address."""
    import torch

    return int(torch.empty(MARK_BYTES, dtype=torch.uint8, device="cuda").data_ptr())


def read_history(
    entries: Sequence[Mapping[str, Any]], windows: Sequence[OpWindow]
) -> tuple[list[tuple[int, ...]], tuple[LibraryWorkspace, ...]]:
    """Cut a device's list of allocator events, in order of time, into the ops that ran. "alloc" and "free_requested"
    change what is allocated, both with the size that was requested; segments and the completion of a free do not.

    Returns the events of each op, and what one of them allocated and none returned that is still there at the end.
    Raises TraceError: a marker is not there, as the history is cut off, or something else recorded at the same time.
    """
    names = [f"op {k} ({w.target})" for k, w in enumerate(windows) for _ in range(2)]
    parts = marked(entries, [address for w in windows for address in (w.before, w.after)], names)
    events: list[tuple[int, ...]] = []
    kept: dict[int, LibraryWorkspace] = {}  # by address, until it is given back
    for k, part in enumerate(parts):  # those of ops, and what lies behind each
        window, own = windows[k // 2], OwnEvents()
        for alloc, address, size in part:
            if not alloc:
                kept.pop(address, None)
            elif not k % 2 and size and address not in window.outputs:
                kept[address] = LibraryWorkspace(nbytes=size, op=window.target)
            if alloc:
                own.allocate(address, size)
            elif (address, size) in own.live:
                own.free(address)
            else:
                own.events.append(-size)
        if not k % 2:
            events.append(tuple(own.events))
    return events, tuple(kept.values())


def marked(
    entries: Sequence[Mapping[str, Any]], markers: Sequence[int], names: Sequence[str] = ()
) -> list[list[Move]]:
    """Return what was allocated (True, address, bytes) and freed (False, ...) behind each marker, by its address, up to
    the next. `names`: of what each belongs to, for the error."""
    moves = [
        (e["action"] == "alloc", int(e["addr"]), int(e["size"]))
        for e in entries
        if e["action"] in ("alloc", "free_requested")
    ]
    places = [0]  # behind the markers
    for k, address in enumerate(markers):
        wanted = [(True, address, MARK_BYTES), (False, address, MARK_BYTES)]
        there = (at + 2 for at in range(places[-1], len(moves) - 1) if moves[at : at + 2] == wanted)
        if (place := next(there, None)) is None:
            raise TraceError(
                f"the CUDA allocator's history does not show {names[k] if names else f'mark {k}'}: it was cut off, or "
                "another recording was running. Trace again in a fresh process, without `_record_memory_history` in "
                "your own code."
            )
        places.append(place)
    ends = [*(place - 2 for place in places[2:]), len(moves)]
    return [moves[first:last] for first, last in zip(places[1:], ends, strict=True)]
