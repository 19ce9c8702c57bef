"""Read what torch.cuda.memory._dump_snapshot() recorded of a real GPU's allocator, and ask the simulated one the same.

A pickle is a program, and its one way to do harm is to name something to import and call. Here no name is resolved, so
nothing is called; what remains is the size of what it builds, which is bounded while it loads.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, get_args

from msgspec import Meta, Struct, ValidationError, convert

from simulator.allocator.caching import Allocator, Block
from simulator.allocator.settings import AllocatorSettings, as_in, parse_alloc_conf
from traces.errors import LowtideError, TraceError

MAX_FILE_BYTES: Final = 4 << 30
# What a pickle may take while it loads. The stacks of a snapshot are shared objects and expand about tenfold.
SPARE_BYTES: Final = 2 << 30
BYTES_PER_FILE_BYTE: Final = 24
SNAPSHOT: Final = "torch.cuda.memory._dump_snapshot(path), in torch 2.1 or newer"


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a snapshot holds plain data only")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside the file")


def load_plain(path: Path) -> Any:
    """Return what the file holds, in plain containers. Raises TraceError: no pickle, cut off, too large, or hostile."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise MemoryError
        with path.open("rb") as file, _bounded_memory(SPARE_BYTES + BYTES_PER_FILE_BYTE * size):
            return _PlainUnpickler(file).load()
    except OSError as error:
        why = f"cannot be read ({error.strerror or error}); name another file."
    except MemoryError:
        why = "damaged, or too large to be read; record with _record_memory_history(context=None)."
    # A damaged pickle can make the unpickler raise almost anything; no code of the file's own can have run.
    except Exception as error:
        why = f"not a memory snapshot ({str(error) or type(error).__name__}); make one with {SNAPSHOT}."
    raise TraceError(f"{path}: {why}")


@contextlib.contextmanager
def _bounded_memory(more_bytes: int) -> Iterator[None]:
    """Let the process grow by so much and no more, where the system can do that (Linux)."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError, ValueError):
        yield
        return
    bound = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound if soft < 0 else min(bound, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


OUT_OF_MEMORY: Final = "oom"
Action = Literal[
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"
]  # fmt: skip
ACTIONS: Final = get_args(Action)
GETS: Final = ("segment_alloc", "segment_map")  # from the driver
GIVES_BACK: Final = ("segment_free", "segment_unmap")
# What must have happened before to a block at that address; where nothing has, it is free.
BEFORE: Final = {"alloc": "free_completed", "free_requested": "alloc", "free_completed": "free_requested"}
Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
POOL: Final = (0, 0)  # torch's own
RECORD: Final = "call torch.cuda.memory._record_memory_history() before the first allocation"


class _Block(Struct, frozen=True):
    """A piece of a segment, behind the one before."""

    size: Natural
    state: str = "active_allocated"  # or "inactive", or freed while another stream still uses it
    requested_size: Natural | None = None  # None: older torch
    frames: Any = None


class _Segment(Struct, frozen=True):
    """A segment, or mapped pages that follow each other."""

    address: Natural
    total_size: Natural
    blocks: tuple[_Block, ...] = ()
    device: int = 0
    segment_pool_id: tuple[int, int] = POOL
    is_expandable: bool = False


class Event(
    Struct, frozen=True, rename={"size_bytes": "size", "address": "addr", "free_bytes": "device_free"}
):
    """One thing that happened; sizes as requested for blocks, as obtained for segments."""

    action: Action
    address: Natural = 0
    size_bytes: Natural = 0
    stream: Natural = 0
    frames: Any = None  # the stack, the innermost first, unless it was not recorded
    free_bytes: Natural = 0  # of OUT_OF_MEMORY: what the device had left


class Snapshot(Struct, frozen=True):
    """What `torch.cuda.memory._dump_snapshot` writes, as far as it is read here."""

    segments: list[_Segment]
    device_traces: list[list[Any]]
    allocator_settings: Any = None

    def of_device(self) -> tuple[int, tuple[Event, ...], bool]:
        """Of the devices that recorded anything that which was refused memory, or has most reserved in the end: its
        number, its events, and whether these name their pools."""

        def full(device: int) -> tuple[bool, int]:
            refused = any(row.get("action") == OUT_OF_MEMORY for row in self.device_traces[device])
            return refused, sum(s.total_size for s in self.segments if s.device == device)

        if not all(isinstance(row, dict) for rows in self.device_traces for row in rows):
            raise ValidationError("an event is not an object")
        device = max((k for k, rows in enumerate(self.device_traces) if rows), key=full, default=0)
        rows = self.device_traces[device] if self.device_traces else []
        # Others are markers, and whatever comes later.
        events = convert([row for row in rows if row.get("action") in ACTIONS], tuple[Event, ...])
        return device, events, any("pool_id" in row for row in rows)

    def in_use(self, device: int) -> dict[int, _Block]:
        """The blocks by address that are in use at the end."""
        found: dict[int, _Block] = {}
        for s in (s for s in self.segments if s.device == device):
            here = s.address
            for b in s.blocks:
                if b.state != "inactive":
                    found[here] = b
                here += b.size
        return found


@contextlib.contextmanager
def reading(source: str) -> Iterator[None]:
    """Raise TraceError for whatever in the file is not what torch writes."""
    try:
        yield
    except (ValidationError, UnicodeError) as error:
        raise TraceError(
            f"{source}: not a memory snapshot, or damaged ({error}); make one with {SNAPSHOT}."
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one device's allocator was asked for, from its first request on."""

    events: tuple[Event, ...]
    settings: AllocatorSettings
    midway: bool  # some of it was there when the recording began: it is asked for first
    notes: tuple[str, ...] = ()  # what had to be assumed, for people


def in_order(events: Iterable[Event]) -> bool:
    """Return whether before each event of a block there is what must have happened before."""
    last: dict[int, str] = {}
    for e in events:
        if e.action in BEFORE:
            if last.get(e.address, "free_completed") != BEFORE[e.action]:
                return False
            last[e.address] = e.action
    return True


def settings_of(data: Any, pools_named: bool) -> tuple[AllocatorSettings, tuple[str, ...]]:
    """The allocator's settings by the snapshot, torch's defaults where it says nothing; and notes. `pools_named`:
    events name their pool, as they do from torch 2.12 on."""
    told = data if isinstance(data, dict) else {}
    text = told.get("PYTORCH_CUDA_ALLOC_CONF") or told.get("PYTORCH_ALLOC_CONF") or ""
    try:
        out, notes = parse_alloc_conf(str(text)), tuple[str, ...]()
    except LowtideError as error:
        out = AllocatorSettings()
        why = str(error).encode(errors="backslashreplace").decode()
        notes = (f"the recorded PYTORCH_ALLOC_CONF is not understood, torch's defaults are assumed: {why}",)
    newest = "2.13" if "max_cached_size" in told else "2.12"
    return as_in(out, newest if pools_named else "2.11"), notes


def peak_reserved(recording: Recording, settings: AllocatorSettings) -> int:
    """The peak of reserved memory if every request of the recording is sent to a simulated allocator under these
    settings, in the recorded order.

    Ignores: what the program would have done otherwise with other settings.
    """
    allocator = Allocator(settings)
    there: dict[int, Block] = {}
    giving_back = False  # in the middle of one call of empty_cache()
    for e in recording.events:
        if e.action == "alloc":
            there[e.address] = allocator.malloc(e.size_bytes, e.stream)
        elif e.action == "free_requested":
            allocator.request_free(there[e.address])
        elif e.action == "free_completed":
            allocator.complete_free(there.pop(e.address))
        elif e.action in GIVES_BACK and not giving_back:
            allocator.release_cached()
        giving_back = e.action in GIVES_BACK or (giving_back and e.action == "free_completed")
    return allocator.peak_reserved
