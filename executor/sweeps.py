"""Measure the plans of a sweep, one after the other, and write the figures back after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from executor.measuring import EAGER, KEEP_ALL, PLAN
from executor.plans import Settings, measure_plan
from simulator.studies.sweep import Sweep
from traces.errors import SpecError, TraceError
from traces.provenance import REHEARSED, provenance_of
from traces.records.measurement import Measurement, RunFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSweep:
    """A sweep with its measured rows, what they were measured on ("": nothing was), and what did not verify."""

    sweep: Sweep
    place: str = ""
    failures: tuple[str, ...] = ()


def measure_sweep(directory: Path, settings: Settings, progress: Callable[[str], None]) -> MeasuredSweep:
    """Measure every row of a sweep that has a plan, and write the figures back after each.

    A row that is measured already stays as it is. One whose verification failed is saved as a measurement of its own
    and not written back, so that the same command tries it again.

    Raises:
        SpecError: this is a rehearsal.
        TraceError: there is no sweep, or rows of it were measured on another device.
    """
    provenance = provenance_of(settings.device)
    if provenance == REHEARSED:
        raise SpecError(
            "a sweep holds what was measured, and on a GPU that is not there nothing is; execute its plans."
        )
    path = directory / "sweep.json" if directory.is_dir() else directory
    if not path.is_file():
        raise TraceError(
            f"{directory}: no sweep there; make one with `simulate sweep MODEL --batch-sizes 8,16 -o DIR`."
        )
    table = Sweep.load(path)
    places: set[str] = set()
    for row in table.rows:
        if row.measured:
            done = Measurement.load(_file(path, row.batch_size))
            if done.provenance != provenance:
                raise TraceError(
                    f"{path}: batch size {row.batch_size} was measured on {done.place}; measure on "
                    f"{settings.device} in another directory (`simulate sweep ... -o OTHER`), so that the figures of "
                    "two devices do not get into one table."
                )
            places.add(done.place)
    failures = []
    for k, row in enumerate(table.rows):
        if not row.feasible or not row.plan_path or row.measured:
            continue
        progress(f"Batch size {row.batch_size} ({k + 1} of {len(table.rows)})")
        outcome = measure_plan(path.parent / row.plan_path, settings, progress)
        m = outcome.measurement
        if places and m.place not in places:
            raise TraceError(
                f"{path}: other batch sizes were measured on {' and '.join(sorted(places))}, and this is {m.place}; "
                "measure here in another directory (`simulate sweep ... -o OTHER`)."
            )
        m.save(_file(path, row.batch_size))
        if m.verified is False:
            failures.append(f"batch size {row.batch_size}: {outcome.first_difference}")
            continue
        places.add(m.place)
        figures: dict[str, RunFigures] = {EAGER: m.eager, KEEP_ALL: m.keep_all, PLAN: m.measured}
        rows = (*table.rows[:k], replace(row, measured=figures), *table.rows[k + 1 :])
        table = replace(table, rows=rows)
        table.save(path)
    return MeasuredSweep(sweep=table, place=" and ".join(sorted(places)), failures=tuple(failures))


def _file(sweep: Path, batch_size: int) -> Path:
    return sweep.parent / f"measurement-b{batch_size}.json"
