"""Turn the plans of a sweep into measured rows of the same sweep, one after the other and saved after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from executor.measure import EAGER, KEEP_ALL, PLAN
from executor.plans import Settings, measure_plan
from simulator.sweep import Sweep
from traces.errors import TraceError
from traces.measurement import RunFigures


def measure_sweep(
    directory: Path, settings: Settings, progress: Callable[[str], None]
) -> tuple[Sweep, list[str]]:
    """Measure every row of a sweep that has a plan, and write the figures back after each.

    Returns the sweep, and a line for each row whose verification failed.
    """
    path = directory / "sweep.json" if directory.is_dir() else directory
    if not path.is_file():
        raise TraceError(
            f"{directory}: no sweep there; make one with `simulate sweep MODEL --batch-sizes 8,16 -o DIR`."
        )
    table = Sweep.load(path)
    failures = []
    for k, row in enumerate(table.rows):
        if not row.feasible or not row.plan_path or row.measured:
            continue
        progress(f"Batch size {row.batch_size} ({k + 1} of {len(table.rows)})")
        outcome = measure_plan(path.parent / row.plan_path, settings, progress)
        m = outcome.measurement
        m.save(path.parent / f"measurement-b{row.batch_size}.json")
        if m.verified is False:
            failures.append(f"batch size {row.batch_size}: {outcome.first_difference}")
        figures: dict[str, RunFigures] = {EAGER: m.eager, KEEP_ALL: m.keep_all, PLAN: m.measured}
        rows = (*table.rows[:k], replace(row, measured=figures), *table.rows[k + 1 :])
        table = replace(table, rows=rows)
        table.save(path)
    return table, failures
