"""The pages of `simulate why` and `simulate diff`: one picture of the runs over their length, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from simulator.history.run import History
from simulator.report import charts
from simulator.report.page import Chart, Page, Section, Text, warned, write_page
from simulator.show.tables import Table

MOST_ROWS = 150


def write_history(
    path: str | Path, title: str, sentences: Iterable[str], runs: Sequence[History], tables: Iterable[Table]
) -> Path:
    """Write the page, whole or not at all; raises EnvironmentProblem if a package that reports need is missing."""
    notes = dict.fromkeys(note for h in runs for note in h.notes)
    curves = {f"{k}. {h.name}" * (len(runs) > 1) or h.name: h.curve for k, h in enumerate(runs, 1)}
    picture = Chart(
        charts.over_each_other(curves), "Solid: requested. Dotted: reserved, where that is known."
    )
    answer = Section("Answer", (*map(Text, sentences), *warned(notes), picture))
    kinds = ", ".join(h.kind for h in runs)
    return write_page(path, Page(title, kinds, (answer, Section("In figures", tuple(tables)))))
