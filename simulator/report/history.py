"""The pages of `simulate why` and `simulate diff`: one picture of the runs over their length, and tables."""

from __future__ import annotations

from pathlib import Path

from simulator.history.diff import Diff
from simulator.history.run import History
from simulator.history.why import Why
from simulator.report import charts
from simulator.report.page import Chart, Page, Section, Text, warned, write_page

MOST_ROWS = 150


def write_history(path: str | Path, title: str, found: Why | Diff, *runs: History) -> Path:
    """Write the page, whole or not at all; raises EnvironmentProblem if a package that reports need is missing."""
    sentences = found.sentences() if isinstance(found, Why) else ()
    notes = dict.fromkeys(note for h in runs for note in h.notes)
    curves = {f"{k}. {h.name}" * (len(runs) > 1) or h.name: h.curve for k, h in enumerate(runs, 1)}
    picture = Chart(charts.over_each_other(curves), "Solid: requested. Dotted: reserved, where known.")
    answer = Section("Answer", (*map(Text, sentences), *warned(notes), picture))
    figures = Section("In figures", tuple(found.tables(MOST_ROWS)))
    return write_page(path, Page(title, ", ".join(h.kind for h in runs), (answer, figures)))
