"""Rehearse a planned step in one pool whose addresses were planned offline: torch asks the null driver's allocator."""

from __future__ import annotations

import ctypes
import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from executor.rehearsal.record import Task
from executor.rehearsal.run import LARGE_BYTES, run_on_null_driver
from simulator.allocator.device import CUDA
from simulator.allocator.device_fit import kind_of
from simulator.allocator.placement import Lifetimes, Placement, lifetimes, place, rounded
from simulator.allocator.requests import Requests, requests_of
from traces.devices import device
from traces.errors import SpecError
from traces.files.json_records import from_json

if TYPE_CHECKING:
    from simulator.prediction.step import Prediction

STAYS: Final = -1  # the offset of what is never given back: it lies below all that has a place
SLACK_BYTES: Final = 2**16  # there, for what is in no plan
Rows = tuple[tuple[int, int], ...]  # by request: bytes and offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where every request of the first and of a later iteration lies in the pool."""

    pool_bytes: int
    resident_bytes: int  # for what stays, below
    first: Rows
    later: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What a placed step took. Bytes are as torch rounds blocks; counts are of requests, of all iterations."""

    pool_bytes: int
    peak_bytes: int  # the most that was there at once
    peak_aside_bytes: int  # for which there was no room in the pool
    placed: int  # where the table says
    staying: int  # in the part of the pool for what stays: in the table, but for good
    unlisted: int  # there too: in no row of the table; all that was asked for before the first iteration
    taken: int  # there too: another block was in their place
    unasked: int  # rows of the table that nobody asked for

    @property
    def reserved_bytes(self) -> int:
        """The pool and what did not go into it."""
        return self.pool_bytes + self.peak_aside_bytes

    @property
    def fragmentation(self) -> float:
        """What was reserved over the most that was there at once, less one."""
        return self.reserved_bytes / self.peak_bytes - 1 if self.peak_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """As `execute PLAN --rehearse GPU --placed --json` prints it."""
        share = round(100 * self.fragmentation, 4)
        return {**asdict(self), "reserved_bytes": self.reserved_bytes, "fragmentation_percent": share}


def places_of(found: Prediction) -> Places:
    """The table of a prediction's plan.

    Raises:
        SpecError: the plan is for a CPU's graph.
    """
    if kind_of(found.trace.meta) != CUDA:
        raise SpecError(
            "addresses are planned of what a GPU's step asks for, and the plan is for a CPU's: trace it with --target."
        )
    requests = requests_of(found.step, found.planned.schedule)
    later = found.placed
    first, pool_bytes = later, later.pool_bytes
    if requests.first is not None:
        first = _placed_first(requests.first, later.blocks.resident_bytes)
        pool_bytes = max(pool_bytes, first.pool_bytes)
    return Places(
        pool_bytes=pool_bytes + SLACK_BYTES,
        resident_bytes=later.blocks.resident_bytes + SLACK_BYTES,
        first=_rows(first, (requests.first or requests).once),
        later=_rows(later, ()),
    )


def _placed_first(requests: Requests, resident_bytes: int) -> Placement:
    """The first iteration where gradients stay: these lie below, what goes again above."""
    of = lifetimes(requests)
    goes = [k for k, end in enumerate(of.ends) if end < len(requests.blocks)]
    above = Lifetimes(
        sizes=tuple(of.sizes[k] for k in goes),
        begins=tuple(of.begins[k] for k in goes),
        ends=tuple(of.ends[k] for k in goes),
        resident_bytes=resident_bytes,
    )
    offsets = dict(zip(goes, place(above).offsets, strict=True))
    return Placement(blocks=of, offsets=tuple(offsets.get(k, STAYS) for k in range(len(of.sizes))))


def _rows(of: Placement, once: tuple[tuple[int, int], ...]) -> Rows:
    """The rows of an iteration, and among them what is asked for in the first alone."""
    shifted = (o if o == STAYS else o + SLACK_BYTES for o in of.offsets)
    rows = [(b, 1, n, o) for b, n, o in zip(of.blocks.begins, of.blocks.sizes, shifted, strict=True)]
    rows += [(before, 0, rounded(n), STAYS) for before, n in once]
    return tuple((n, o) for _, _, n, o in sorted(rows, key=lambda row: row[:2]))


def rehearse_placed(found: Prediction, gpu: str, model: str = "") -> Placed:
    """Run a prediction's planned step on the null driver, every request at its place.

    Counts: every request of torch's and of its libraries, from building the model on. Ignores: that a driver maps
    memory in pages; side streams.

    Args:
        found: of the plan, by a GPU's trace.
        gpu: of the device table, as "h100".
        model: build this instead of what the plan names.
    """
    meta = found.plan.meta
    with tempfile.TemporaryDirectory() as folder:
        # Nothing is to lie in what a plan asks for ahead.
        path = replace(found.plan, ahead_bytes=0).save(Path(folder) / "plan.json")
        task = Task(model=model or meta.model, options=meta.options, seed=meta.seed, plan=str(path))
        answer = run_on_null_driver(
            "executor.rehearsal.placed:do",
            {"task": asdict(task), "places": asdict(places_of(found))},
            replace(device(gpu), memory_bytes=LARGE_BYTES),
            what=f"rehearsed {task.model}, placed",
        )
    return from_json(Placed, answer)


def do(task: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, Any]:
    """Run a task with its places, for a fresh process (`executor.isolated`)."""
    from torch.cuda.memory import CUDAPluggableAllocator, change_current_allocator

    from executor.rehearsal.perform import initialisers_without_values, run_task
    from executor.rehearsal.watch import driver_library, null_driver

    # Before anything of CUDA is asked for.
    change_current_allocator(CUDAPluggableAllocator(driver_library(), "placed_malloc", "placed_free"))
    pool = Pool(null_driver(), from_json(Places, dict(places)))
    with initialisers_without_values():
        run_task(from_json(Task, dict(task)), pool.begin, pool.begin)
    return asdict(pool.figures())


class Pool:
    """The null driver's pool."""

    def __init__(self, driver: Any, places: Places) -> None:
        driver.placed_figures.restype = ctypes.POINTER(ctypes.c_ulonglong)
        driver.placed_arena.argtypes = [ctypes.c_ulonglong] * 2
        self._driver, self._places = driver, places
        self._tables = itertools.chain([places.first], itertools.repeat(places.later))
        assert driver.placed_arena(places.pool_bytes, places.resident_bytes)

    def begin(self) -> None:
        """An iteration begins, by the next table."""
        rows = next(self._tables)
        sizes = (ctypes.c_ulonglong * len(rows))(*(n for n, _ in rows))
        offsets = (ctypes.c_longlong * len(rows))(*(o for _, o in rows))
        self._driver.placed_begin(ctypes.c_size_t(len(rows)), sizes, offsets)

    def figures(self) -> Placed:
        """What it took so far."""
        names = [f.name for f in fields(Placed)][1:]
        found = self._driver.placed_figures()[: len(names)]
        return Placed(pool_bytes=self._places.pool_bytes, **dict(zip(names, found, strict=True)))
