"""What fits which GPU: batch sizes of one model over devices, and the largest on each.

A loop over `max_batch`, which says how its rows are found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.prediction.ask import Say
from simulator.show.tables import Cell, Table, no, table, yes
from simulator.studies.max_batch import MaxBatch, Probe, max_batch
from simulator.studies.rows import Study
from traces.model_spec import short_name
from traces.records.plan import RESERVED
from traces.units import show_bytes, show_percent

FITS, PLANNED, NOT = "fits", "fits with a plan", "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Capacity(Study[Probe]):
    """The answer; its rows are those of all devices."""

    found: dict[str, MaxBatch]  # by device
    batch_sizes: tuple[int, ...]

    @property
    def price_percent(self) -> float:
        return float(self.data["budget_overhead_percent"])


def verdict(p: Probe) -> str:
    return FITS if p.fits else PLANNED if p.plan_fits else NOT


def in_words(p: Probe) -> str:
    """What a device has for a batch size, in a few characters."""
    if p.fits:
        return show_bytes(p.untouched.peak_bytes(RESERVED) or p.untouched.peak_allocated_bytes)
    least = show_percent(p.overhead_percent, signed=True, digits=1)
    return least if p.plan_fits or p.overhead_percent is None else f">= {least}" if p.plan is None else least


def _cell(batch_size: int) -> Callable[[MaxBatch], Cell]:
    def shown(found: MaxBatch) -> Cell:
        p = found.probe(batch_size)
        assert p is not None
        return yes(in_words(p)) if p.fits else Cell(in_words(p)) if p.plan_fits else no()

    return shown


def capacity(
    model: str,
    gpus: Sequence[str],
    batch_sizes: Sequence[int],
    *,
    directory: str | Path | None = None,
    progress: Say = lambda line: None,
    **words: Any,
) -> Capacity:
    """What each of some batch sizes needs on each of some devices, and the largest of all.

    Args:
        model, words: as for `max_batch`.
        gpus: names of the device table, as "h100".
        batch_sizes: to answer for.
        directory: of traces and plans by device, which are used again; None: `MODEL-capacity`.

    Raises:
        as `max_batch`.
    """
    place = Path(directory or f"{short_name(model)}-capacity")
    found = dict[str, MaxBatch]()
    for gpu in gpus:
        progress(f"{gpu}:")
        found[gpu] = max_batch(
            model, gpu, batch_sizes=batch_sizes, directory=place / gpu, progress=progress, **words
        )
    first = next(iter(found.values()))
    rows = tuple(p for of in found.values() for p in of.rows if p.batch_size in batch_sizes)
    warnings = dict.fromkeys(text for of in found.values() for text in of.data["warnings"])
    price = first.data["budget_overhead_percent"]
    data = {
        "record": "capacity",
        "model": model,
        "batch_sizes": list(batch_sizes),
        "budget_overhead_percent": price,
        "devices": [of.data for of in found.values()],
        "warnings": list(warnings),
    }
    short = f"{first.data['model']}: what fits {', '.join(found)}"
    return Capacity(
        problem=first.problem,
        rows=rows,
        data=data,
        words=f"{short}, untouched or with a plan of at most +{price:g} %",
        short=short,
        table=_table(found, batch_sizes),
        notes=(str(first.data["provenance"]),),
        found=found,
        batch_sizes=tuple(batch_sizes),
    )


def _table(found: dict[str, MaxBatch], batch_sizes: Sequence[int]) -> Table:
    names = {id(of): name for name, of in found.items()}
    return table(
        list(found.values()),
        [
            ("device", "", lambda of: names[id(of)]),
            ("to use", "bytes", lambda of: of.data["device_memory"]["usable_bytes"]),
            *((f"batch {n}", "number", _cell(n)) for n in batch_sizes),
            ("largest", "count", lambda of: of.without_plan),
            ("with a plan", "count", lambda of: of.with_plan),
        ],
        caption="Bytes: the untouched model needs so much, and fits. Percent: a plan that adds so much time fits.",
    )
