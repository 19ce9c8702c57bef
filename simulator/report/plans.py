"""The pages of many plans: planners side by side, the front of budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from simulator.prediction.step import describe
from simulator.report import charts
from simulator.report.page import Block, Chart, Figure, Figures, Page, Section, write_page
from simulator.report.step import about, metadata, saved_figure
from simulator.studies.comparison import Comparison, ranked
from simulator.studies.pareto import Front
from traces.records.trace import Trace
from traces.units import show_bytes, show_percent

CERTIFIED: Final = "certified for plans that keep the order of the ops"
PREDICTED: Final = " Every figure on this page is predicted; nothing was run."


def write_comparison(path: str | Path, comparison: Comparison) -> Path:
    """Write the page of a comparison of planners, whole or not at all.

    Raises:
        EnvironmentProblem: a package that reports need is not installed.
    """
    title = f"planners within {show_bytes(comparison.budget_bytes)}"
    return _write(
        path, comparison.trace, title, "", Section("Planners side by side", _comparison_blocks(comparison))
    )


def write_front(path: str | Path, front: Front) -> Path:
    """Write the page of a front, whole or not at all; raises EnvironmentProblem like `write_comparison`."""
    section = Section("Overhead against budget", _front_blocks(front))
    return _write(path, front.trace, "what each GiB costs", f" · planner {front.planner}", section)


def _write(path: str | Path, trace: Trace, title: str, by: str, section: Section) -> Path:
    model = Section("Model and trace", (metadata(trace),))
    meta = trace.meta
    return write_page(path, Page(f"{meta.model}: {title}", describe(meta) + by, (section, model)))


def _comparison_blocks(comparison: Comparison) -> tuple[Block, ...]:
    bound, rows = comparison.bound, ranked(comparison.entrants)
    least = show_percent(bound.overhead_percent) if bound.feasible else "no plan fits"
    figures = [
        saved_figure(comparison.saved.timeline),
        Figure("Budget", show_bytes(comparison.budget_bytes)),
        Figure("No plan adds less than", least, CERTIFIED, "" if bound.feasible else "bad"),
    ]
    if best := next((e for e in rows if e.feasible), None):
        detail = f"{best.planner}, {show_bytes(best.peak_allocated_bytes)}"
        figures.append(
            Figure("Cheapest plan", show_percent(best.overhead_percent, signed=True), detail, "good")
        )
    blocks: list[Block] = [Figures(tuple(figures)), *about(comparison.problem, PREDICTED)]
    if places := [e for e in rows if e.peak_allocated_bytes is not None]:
        limit = bound.overhead_percent if bound.feasible else None
        caption = (
            "Every plan at the peak of its replay. Left of the red line the budget is met; below the grey line no "
            "plan for this budget can be."
        )
        spec = charts.plans_in_the_plane(places, comparison.budget_bytes, limit)
        blocks.append(Chart(spec, caption, "Peak against added time"))
    return (*blocks, comparison.table())


def _front_blocks(front: Front) -> tuple[Block, ...]:
    most, floor = front.points[-1].budget_bytes, front.floor_bytes
    of_it = show_percent(100 * floor / most, digits=1) + " of it" if most else ""
    figures = [saved_figure(front.saved.timeline), Figure("No plan can go below", show_bytes(floor), of_it)]
    if lowest := next((p for p in front.points if p.feasible), None):
        time = f"{show_percent(lowest.overhead_percent, signed=True)} time"
        figures.append(Figure("Smallest peak found", show_bytes(lowest.peak_allocated_bytes), time))
    figures.append(Figure("Budgets planned", str(len(front.points)), f"in {front.solve_seconds:.1f} s"))
    rows = [
        (p.budget_bytes, line, value, f"{value:+.2f} %{peak}")
        for p in front.points
        for line, value, peak in (
            ("plan", p.overhead_percent, f", peak {show_bytes(p.peak_allocated_bytes)}"),
            ("certified bound", p.bound_overhead_percent, ""),
        )
        if value is not None
    ]
    return (
        Figures(tuple(figures)),
        *about(front.problem, PREDICTED),
        Chart(
            charts.front(rows),
            "Red: the cheapest plan found for each budget. Dashed: no plan for that budget adds less, certified for "
            "plans that keep the order of the ops. What lies between is all that any planner could still gain. Only "
            "the points are worked out.",
            "What each GiB costs",
        ),
        front.table(),
    )
