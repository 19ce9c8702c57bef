"""What fits which GPU: batch sizes of one model over devices, and the largest on each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from simulator.show.tables import Cell, no, table, yes
from simulator.studies.max_batch import RANKS, MaxBatch, Probe, max_batch
from simulator.studies.rows import Study
from traces.model_spec import short_name
from traces.progress import Say, counted
from traces.records.plan import RESERVED
from traces.units import show_bytes, show_percent

FITS: Final = "fits"
PLANNED: Final = "fits with a plan"
NOT: Final = "does not fit"


def verdict(p: Probe) -> str:
    return FITS if p.fits else PLANNED if p.plan_fits else NOT


def in_words(p: Probe) -> str:
    """What a device has for a batch size, in a few characters."""
    if p.fits:
        return show_bytes(p.untouched.peak_bytes(RESERVED) or p.untouched.peak_allocated_bytes)
    return show_percent(p.overhead_percent, signed=True, digits=1) if p.plan_fits else ""


def _cell(batch_size: int, found: MaxBatch) -> Cell:
    p = found.probe(batch_size)
    return yes(in_words(p)) if p.fits else Cell(in_words(p)) if p.plan_fits else no()


def capacity(
    model: str,
    gpus: Sequence[str],
    batch_sizes: Sequence[int],
    *,
    ranks: Sequence[int] = (1,),
    directory: str | Path | None = None,
    progress: Say,
    **words: Any,
) -> Study[MaxBatch]:
    """What each of some batch sizes needs on each of some devices, and the largest of all, by the line through two
    traces of each device, or of one of several ranks through rehearsals, among them that of the largest. A row for each
    device and number of ranks; raises as `max_batch`, of which `words` are.
    """
    place = Path(directory or f"{short_name(model)}-capacity")

    def of(asked: tuple[str, int]) -> MaxBatch:
        gpu, count = asked

        def say(line: str) -> None:
            progress(f"{gpu}{f', {count} ranks' if count > 1 else ''}: {line}")

        return max_batch(
            model, gpu, ranks=count, batch_sizes=batch_sizes, directory=place / gpu, progress=say, **words
        )

    asked = [*product(gpus, ranks)]
    with ThreadPoolExecutor(len(asked) if words.get("dask") else 1) as pool:  # planning has one machine
        found = list(counted(pool.map(of, asked), lambda _: "answered", progress, len(asked)))
    first = found[0].data
    short = f"{first['model']}: what fits {', '.join(gpus)}"
    price = first["budget_overhead_percent"]
    data = {
        "record": "capacity",
        "model": model,
        "batch_sizes": list(batch_sizes),
        "budget_overhead_percent": price,
        "devices": [of.data for of in found],
        "warnings": list(dict.fromkeys(text for of in found for text in of.data["warnings"])),
    }
    return Study(
        problem=next((of.problem for of in found if of.problem), None),
        rows=tuple(found),
        data=data,
        words=f"{short}, untouched or with a plan of at most +{price:g} %",
        short=short,
        table=table(
            found,
            [
                ("device", "", lambda of: of.device),
                ("to use", "bytes", lambda of: of.data["device_memory"]["usable_bytes"]),
                *((f"batch {n}", "number", partial(_cell, n)) for n in batch_sizes),
                ("largest", "count", lambda of: of.without_plan),
                ("with a plan", "count", lambda of: of.with_plan if of.problem else None),
            ],
            caption="Bytes: the untouched model needs so much, and fits. Percent: a plan that adds so much time fits.",
        ).known(),
        notes=(*dict.fromkeys(str(of.data["provenance"]) for of in found), *[RANKS] * (max(ranks) > 1)),
    )
