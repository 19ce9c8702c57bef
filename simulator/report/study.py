"""The page of a study: what was asked of one trace, the rows of answers, and the front of budgets as a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.prediction.step import describe
from simulator.report import charts
from simulator.report.page import Block, Chart, Page, Section, Text, write_page
from simulator.report.step import about, metadata
from simulator.studies.rows import Study


def write_study(path: str | Path, found: Study[Any]) -> Path:
    """Write the page, whole or not at all; raises EnvironmentProblem if a package that reports need is not
    installed.
    """
    problem, blocks = found.problem, list[Block]()
    if any(found.curves.values()):
        caption = (
            "Red: the cheapest plan found for each budget. Dashed: no plan for that budget adds less, certified for "
            "plans that keep the order of the ops. What lies between is all that any planner could still gain. Only "
            "the points are worked out."
        )
        blocks.append(Chart(charts.front(found.curves), caption))
    note = " Every figure on this page is predicted; nothing was run."
    answer = Section("Answer", (Text(found.words), *about(problem, note), *blocks, found.table))
    model = Section("Model and trace", (metadata(problem.trace),))
    return write_page(path, Page(found.short, describe(problem.trace.meta), (answer, model)))
