"""Planners side by side on one trace and budget: what each reaches, what it costs, how far it is from optimal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Unpack

from simulator.bounds import bounder_of
from simulator.planners import REGISTRY, find
from simulator.prediction.ask import Budget, Device, Source, Words, ask, problem_of, question
from simulator.prediction.step import predict, text, warnings_of
from simulator.show.tables import Cell, no, table, yes
from simulator.studies.rows import Row, Study, asked, columns, row_of
from traces.errors import LowtideError
from traces.files import to_json
from traces.progress import Say, counted, silent
from traces.records.plan import ALLOCATED
from traces.units import show_bytes, show_time


def compare(
    trace: Source,
    budget: Budget,
    planners: Sequence[str] | None = None,
    *,
    device: Device | None = None,
    name: str = "",
    progress: Say = silent,
    **words: Unpack[Words],
) -> Study[Row]:
    """Set planners (None: all) side by side on one trace and budget of allocated memory.

    Args:
        device: whether each plan fits it.
        name: of the trace, for the answer.
        words: as for `plan`, but none of levers; `seconds` is for each planner.

    Returns a row for each planner, as given: peak, added time, gap to the bound, or why it has no plan. Raises
    SpecError: no such budget, planner or device.
    """
    asks = replace(question(budget, device, **words).of_planner(), budget_of=ALLOCATED)
    problem = problem_of(trace)
    chosen = tuple(REGISTRY) if planners is None else planners
    for planner in chosen:
        find(planner)  # what it imports is not its solve time
    saved = predict(problem, asks.setting(problem.trace.meta))
    limit, _ = asks.limit(saved)
    assert limit is not None
    rows = [
        row_of(ask(problem, replace(asks, planner=planner), refusals=(LowtideError,)))
        for planner in counted(chosen, lambda planner: f"planning with {planner}", progress)
    ]
    bound, kept = bounder_of(problem).bound(limit), saved.saved
    told, best = bound.to_json(), next((row for row in ranked(rows) if row.feasible), None)
    found = "no plan" if best is None else f"{best.planner} {best.overhead_percent:+.2f} %"
    return Study(
        problem=problem,
        rows=tuple(rows),
        data={
            **asked(name, saved),
            "budget_bytes": limit,
            "feasible": best is not None,
            "baseline": saved.saved_figures.headline(),
            "bound": {k: told[k] for k in ("overhead_percent", "added_time_ns", "feasible", "reason")},
            "warnings": list(map(text, warnings_of(problem))),
            "planners": list(map(to_json, rows)),
        },
        words=f"{name}: budget {show_bytes(limit)} of {show_bytes(kept.timeline.peak_allocated_bytes)}, step "
        f"{show_time(kept.timeline.step_time_ns)}; bound: {bound.least() if bound.feasible else bound.reason}",
        short=f"{problem.trace.meta.model} within {show_bytes(limit)}: {found}, of {len(rows)} planners",
        table=table(
            ranked(rows),
            columns(
                *("planner", "peak_allocated_bytes", "step_time_ns", "overhead_percent", "gap_points"),
                ("solve time", "time", lambda row: 1e9 * row.solve_seconds),
                "recomputed_ops",
                ("", "", verdict),
            ),
            caption="The gap is the overhead less the certified bound: how far from optimal the plan can be at most. "
            "Solve times are of this machine.",
        ),
        aside=("step time", "ops run again"),
    )


def ranked(rows: Iterable[Row]) -> list[Row]:
    """The cheapest plan within the budget first, then refusals."""
    return sorted(rows, key=lambda row: (not row.feasible, row.step_time_ns or 0))


def verdict(row: Row) -> Cell:
    """Return whether there is a plan, and what else is to be said of it."""
    if not row.feasible:
        known = row.lowest_peak_bytes
        return no(row.message if known is None else f"no plan; lowest peak {show_bytes(known)}")
    return yes("met; does not fit the device" if row.fits is False else "met")
