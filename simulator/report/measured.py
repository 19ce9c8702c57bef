"""Predicted beside measured: the table of runs that the pages of measurements and of measured sweeps share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from simulator.show.tables import NUMBER, SHOWN, Table, percent_cell, table
from traces.records.measurement import RunFigures, signed_error_percent

# Of each figure: what it is called, and how it is shown.
FIGURES: Final = {
    "peak_allocated_bytes": ("peak allocated", "bytes"),
    "peak_block_bytes": ("peak in the allocator's blocks", "bytes"),
    "peak_reserved_bytes": ("peak reserved", "bytes"),
    "step_time_ns": ("step time", "time"),
}
Run = tuple[str, RunFigures, RunFigures]  # its name, what was predicted, what was measured


def beside(runs: Iterable[Run], where: str) -> Table:
    """A row for each figure of each run that was predicted or measured."""
    rows = []
    for name, predicted, measured in runs:
        errors, before, after = (
            signed_error_percent(predicted, measured),
            predicted.headline(),
            measured.headline(),
        )
        rows += [
            (name, key, before[key], after[key], errors[key])
            for key in FIGURES
            if (before[key], after[key]) != (None, None)
        ]
    return table(
        rows,
        (
            ("run", "", lambda row: row[0]),
            ("figure", "", lambda row: FIGURES[row[1]][0]),
            ("predicted", NUMBER, lambda row: SHOWN[FIGURES[row[1]][1]](row[2])),
            (f"measured on {where}", NUMBER, lambda row: SHOWN[FIGURES[row[1]][1]](row[3])),
            ("error", NUMBER, lambda row: percent_cell(row[4], signed=True, digits=3)),
        ),
        caption="Error is 100·(predicted − measured)/measured; negative: the prediction was too low.",
    )
