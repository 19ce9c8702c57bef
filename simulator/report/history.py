"""The pages of `simulate why` and `simulate diff`: one picture of the runs over their length, and tables."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

from simulator.history.diff import Diff
from simulator.history.run import History
from simulator.history.why import Why
from simulator.report import charts
from simulator.report.page import Block, Chart, Page, Section, Text, warned, write_page

MOST_ROWS = 150


def write_why(path: str | Path, found: Why) -> Path:
    """Write the page, whole or not at all; raises EnvironmentProblem if a package that reports need is missing."""
    h = found.history
    answer: tuple[Block, ...] = (*map(Text, found.sentences()), *warned(h.notes), _picture(h))
    parts = Section("What held it at the peak", tuple(found.tables(MOST_ROWS)))
    return write_page(
        path, Page(f"{h.name}: why it needs this memory", h.kind, (Section("Answer", answer), parts))
    )


def write_diff(path: str | Path, found: Diff) -> Path:
    """Write the page, like `write_why`."""
    a, b = found.before, found.after
    peaks, *parts = found.tables(MOST_ROWS)
    answer = Section("Both peaks", (*warned(found.notes()), _picture(a, b), peaks))
    sections = answer, Section("What changed", tuple(parts))
    return write_page(path, Page(f"{a.name} and {b.name}", f"{a.kind}, {b.kind}", sections))


def _picture(*runs: History) -> Chart:
    alone = len({h.name for h in runs}) == len(runs)
    curves = {
        h.name if alone else f"{k}. {h.name}": list(
            zip_longest(h.clock, h.held_bytes, h.reserved, fillvalue=0)
        )
        for k, h in enumerate(runs, 1)
    }
    return Chart(charts.over_each_other(curves), "Solid: in use. Dotted: reserved.")
