"""The pages of many plans: planners side by side, the front of budgets, what levers reach."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from simulator.core.problem import Problem
from simulator.prediction.step import describe
from simulator.report import charts
from simulator.report.page import Block, Chart, Page, Section, Text, write_page
from simulator.report.step import about, metadata
from simulator.studies.comparison import ranked
from simulator.studies.levers import Reach
from simulator.studies.rows import Row, Study
from traces.units import bytes_unit, show_bytes

PREDICTED: Final = " Every figure on this page is predicted; nothing was run."


def write_comparison(path: str | Path, found: Study[Row]) -> Path:
    """Write the page of a comparison of planners, whole or not at all. Raises EnvironmentProblem if a package that
    reports need is not installed.
    """
    blocks: list[Block] = [found.table]
    budget_bytes = found.data["budget_bytes"]
    if places := [e for e in ranked(found.rows) if e.peak_allocated_bytes is not None]:
        caption = (
            "Every plan at the peak of its replay. Left of the red line the budget is met; below the grey line no "
            "plan for this budget can be."
        )
        spec = charts.plans_in_the_plane(places, budget_bytes, found.data["bound"]["overhead_percent"])
        blocks.insert(0, Chart(spec, caption, "Peak against added time"))
    title = f"planners within {show_bytes(budget_bytes)}"
    return _write(path, found.problem, title, found.words, *blocks)


def write_front(path: str | Path, found: Study[Row]) -> Path:
    """Write the page of a front, whole or not at all; raises EnvironmentProblem like `write_comparison`."""
    rows = [
        (p.budget_bytes, line, value, f"{value:+.2f} %{peak}")
        for p in found.rows
        for line, value, peak in (
            ("plan", p.overhead_percent, f", peak {show_bytes(p.peak_allocated_bytes)}"),
            ("certified bound", p.bound_overhead_percent, ""),
        )
        if value is not None
    ]
    caption = (
        "Red: the cheapest plan found for each budget. Dashed: no plan for that budget adds less, certified for plans "
        "that keep the order of the ops. What lies between is all that any planner could still gain. Only the points "
        "are worked out."
    )
    chart = Chart(charts.front(rows), caption, "What each GiB costs")
    return _write(path, found.problem, "what each GiB costs", found.words, chart, found.table)


def write_levers(path: str | Path, found: Study[Reach]) -> Path:
    """Write the page of a study of levers, whole or not at all; raises EnvironmentProblem like `write_comparison`."""
    unit, unit_name = bytes_unit(found.rows[0].peak_allocated_bytes)
    below, above = "no plan below", "everything saved"
    bars = [
        (row.lever, series, length / unit, show_bytes(end))
        for row in found.rows
        for series, length, end in (
            (below, row.floor_bytes, row.floor_bytes),
            (above, row.peak_allocated_bytes - row.floor_bytes, row.peak_allocated_bytes),
        )
    ]
    colours = {below: charts.BOUND_COLOUR, above: charts.WAY_COLOURS["save-all"][0]}
    limit = found.data["budget_bytes"] and found.data["budget_bytes"] / unit
    caption = (
        "Each bar ends at the peak with everything saved. Plans can bring it down to the end of its dark part, and no "
        "further."
    )
    spec = charts.by_name(bars, colours, f"peak allocated, {unit_name}", limit=limit)
    return _write(path, found.problem, "levers", found.words, Chart(spec, caption), found.table)


def _write(path: str | Path, problem: Problem, title: str, words: str, *blocks: Block) -> Path:
    meta = problem.trace.meta
    answer = Section("Answer", (Text(words), *about(problem, PREDICTED), *blocks))
    model = Section("Model and trace", (metadata(problem.trace),))
    return write_page(path, Page(f"{meta.model}: {title}", describe(meta), (answer, model)))
