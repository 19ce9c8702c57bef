"""The pages of many plans for one trace: planners side by side (`compare`), and the front of budgets (`pareto`)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from simulator.report import charts
from simulator.report.page import (
    Block,
    Cell,
    Chart,
    Figure,
    Figures,
    Page,
    Section,
    no,
    table,
    write_page,
    yes,
)
from simulator.report.step import about, describe, metadata, saved_figure
from simulator.studies.comparison import Comparison, Entrant, ranked
from simulator.studies.pareto import Front, Point
from traces.trace import Trace
from traces.units import show_bytes, show_percent

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
        Figure(
            "No plan adds less than",
            least,
            "certified for plans that keep the order of the ops",
            "" if bound.feasible else "bad",
        ),
    ]
    if best := next((e for e in rows if e.feasible), None):
        detail = f"{best.planner}, {show_bytes(best.peak_allocated_bytes)}"
        figures.append(
            Figure("Cheapest plan", show_percent(best.overhead_percent, signed=True), detail, "good")
        )
    places = [
        charts.Place(e.planner, e.peer, e.peak_allocated_bytes, e.overhead_percent or 0.0)
        for e in rows
        if e.peak_allocated_bytes is not None
    ]
    drawn: tuple[Chart, ...] = ()
    if places:
        limit = bound.overhead_percent if bound.feasible else None
        drawn = (
            Chart(
                charts.plans_in_the_plane(places, comparison.budget_bytes, limit),
                "Every plan at the peak of its replay. Left of the red line the budget is met; below the grey line no "
                "plan for this budget can be.",
                "Peak against added time",
            ),
        )
    return (
        Figures(tuple(figures)),
        *about(comparison.problem, PREDICTED),
        *drawn,
        table(
            rows,
            (
                ("planner", "", lambda e: e.planner),
                ("peak", "bytes", lambda e: e.peak_allocated_bytes),
                ("step time", "time", lambda e: e.step_time_ns),
                ("overhead", "+percent", lambda e: e.overhead_percent),
                ("gap, points", "points", lambda e: e.gap_points),
                ("solve time", "time", lambda e: None if e.solve_seconds is None else e.solve_seconds * 1e9),
                ("ops run again", "count", lambda e: e.recomputed_ops),
                ("", "", lambda e: verdict(e, comparison.budget_bytes)),
            ),
            caption="The gap is the overhead less the certified bound: how far from optimal the plan can be at most. "
            "Solve times are of this machine.",
        ),
    )


def verdict(e: Entrant, budget_bytes: int) -> Cell:
    """Whether a plan meets the budget, and what else is to be said of it."""
    if e.feasible:
        return yes(f"met{'; ' + e.message if e.message else ''}")
    if e.peak_allocated_bytes is not None:
        over = "over the budget" if e.peak_allocated_bytes > budget_bytes else ""
        return no("; ".join(part for part in (over, e.message) if part))
    if e.lowest_peak_bytes is not None:
        return no(f"no plan; lowest peak {show_bytes(e.lowest_peak_bytes)}")
    return no(e.message)


def _met(point: Point) -> Cell:
    if not point.finished:
        return no("not finished; another budget's plan" if point.feasible else "not finished")
    return yes("met") if point.feasible else no("no plan")


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
        table(
            front.points[::-1],
            (
                ("budget", "bytes", lambda p: p.budget_bytes),
                ("of the peak", "share", lambda p: 100 * p.budget_bytes / most if most else None),
                ("peak, plan", "bytes", lambda p: p.peak_allocated_bytes),
                ("overhead", "+percent", lambda p: p.overhead_percent),
                ("bound", "percent", lambda p: p.bound_overhead_percent),
                ("gap, points", "points", lambda p: p.gap_points),
                ("one GiB less costs", "time", lambda p: p.price_ns_per_gib),
                ("by the bound", "time", lambda p: p.bound_price_ns_per_gib),
                ("", "", _met),
            ),
            caption="One GiB less: the added time from this budget to the next smaller one in the table, for each GiB "
            "between them; by the bound: what the last byte costs at this budget at the instant that decides it.",
        ),
    )
