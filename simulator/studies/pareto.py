"""The front of one trace: the cheapest plan found for each of many budgets, and what each further byte costs.

A plan for one budget keeps to every larger one, so each budget gets the cheapest of all plans that keep to it,
whichever budget it was made for. The front is therefore monotone: a larger budget never gives a slower plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Unpack

from simulator.bounds import bounder_of
from simulator.planners.outcome import Infeasible
from simulator.prediction.ask import Answer, Device, Source, Words, ask, problem_of, question
from simulator.prediction.step import predict, text, warnings_of
from simulator.show.tables import NUMBER, UNKNOWN, Cell, Table, no, table, yes
from simulator.studies.rows import Row, Study, asked, columns, row_of
from traces.errors import SpecError
from traces.files import to_json
from traces.progress import Say, counted, silent
from traces.records.plan import ALLOCATED
from traces.units import GIB, show_bytes, show_percent, show_time


def pareto(
    trace: Source,
    points: int = 20,
    *,
    device: Device | None = None,
    name: str = "",
    progress: Say = silent,
    **words: Unpack[Words],
) -> Study[Row]:
    """The whole front of one trace: what each GiB costs.

    Args:
        points: number of budgets (at least 2), evenly from the floor to the peak with everything saved.
        device, name, words: as for `compare`; `seconds` is for the whole front, about.

    Returns a row for each budget with the cheapest plan, the certified bound and the price of a GiB; and the `plans`.
    Most budgets are easy, so each plan may take twice an equal share of the time: the same for each, so that equal
    seeds make equal fronts. Raises SpecError: no such planner or device, or it cannot plan this trace at all.
    """
    if points < 2:
        raise SpecError(f"{points} points: a front has two at least.")
    asks = question(None, device, **words).of_planner()
    problem = problem_of(trace)
    start = time.perf_counter()
    least, most = bounder_of(problem).floor.peak_bytes, problem.saved.timeline.peak_allocated_bytes
    asks = replace(asks, budget=most, budget_of=ALLOCATED)
    budgets = sorted({least + (most - least) * k // (points - 1) for k in range(points)})
    share = replace(asks.limits, seconds=2 * asks.limits.seconds / len(budgets))
    made: dict[int, Answer] = {}
    for budget in counted(budgets, lambda budget: f"a budget of {show_bytes(budget)}", progress):
        made[budget] = ask(problem, replace(asks, budget=budget, limits=share), refusals=(Infeasible,))
    picks = cheapest(made)
    rows = []
    for budget, pick in zip(sorted(made), picks, strict=True):
        bound, given = bounder_of(problem).bound(budget), dict[str, Any]()
        if pick is not None:
            given = {"message": "", "made_for_bytes": pick.budget_bytes}
        if bound.feasible:
            given["bound_overhead_percent"] = bound.overhead_percent
        found = None if pick is None else pick.found
        rows.append(row_of(replace(made[budget], found=found), **given))
    for k, (low, high) in enumerate(pairwise(rows), 1):
        if low.step_time_ns is not None and high.step_time_ns is not None:
            ns, nbytes = low.step_time_ns - high.step_time_ns, high.budget_bytes - low.budget_bytes
            rows[k] = replace(high, price_ns_per_gib=round(ns * GIB / nbytes))
    meta, saved = problem.trace.meta, predict(problem, asks.setting(problem.trace.meta))
    step_ns, device = saved.saved.timeline.step_time_ns, saved.setting.device
    seconds, planner = time.perf_counter() - start, asks.planner_name
    reached = [row.peak_allocated_bytes for row in rows if row.peak_allocated_bytes is not None]
    reach = f"down to {show_bytes(reached[0])}" if reached else "no plan"
    bounds = [
        (r.budget_bytes / GIB, r.bound_overhead_percent) for r in rows if r.bound_overhead_percent is not None
    ]
    added = [(r.budget_bytes / GIB, r.overhead_percent) for r in rows if r.overhead_percent is not None]
    return Study(
        problem=problem,
        rows=tuple(rows),
        data={
            **asked(name, saved),
            "planner": planner,
            "solve_seconds": round(seconds, 3),
            "baseline": saved.saved_figures.headline(),
            "warnings": list(map(text, warnings_of(problem))),
            "floor_bytes": least,
            "smallest_peak_bytes": min(reached, default=None),
            "points": list(map(to_json, rows)),
        },
        words=f"{name}: {planner}, {len(rows)} budgets in {seconds:.2f} s; step "
        f"{show_time(step_ns)} with everything saved; no plan can go below "
        f"{show_bytes(least)}",
        short=f"{meta.model}, batch {meta.batch_size}: {len(rows)} budgets by {planner}, {reach}, floor "
        f"{show_bytes(least)}; grey: the certified bound",
        table=_table(rows, step_ns, device.name if device else "device"),
        curves={"certified bound": bounds, "plan": added},
        plans=tuple(None if pick is None else pick.planned.plan for pick in picks),
    )


def _table(rows: Sequence[Row], base_ns: int, device: str) -> Table:
    """A row for each budget, the largest first."""
    most = rows[-1].budget_bytes
    fits = {None: UNKNOWN, True: yes("fits"), False: no("too large")}

    def price(row: Row) -> Cell:
        if row.price_ns_per_gib is None:
            return Cell(UNKNOWN)
        share = 100 * row.price_ns_per_gib / base_ns if base_ns else 0.0
        text = f"{show_time(row.price_ns_per_gib)} ({show_percent(share, signed=True)})"
        return Cell(text, row.price_ns_per_gib)

    return table(
        rows[::-1],
        columns(
            "budget_bytes",
            ("of the peak", "share", lambda row: 100 * row.budget_bytes / most if most else None),
            *("peak_allocated_bytes", "overhead_percent", "bound_overhead_percent", "gap_points"),
            ("one GiB less costs", NUMBER, price),
            (device, "", lambda row: fits[row.fits]),
            ("", "", lambda row: yes("met") if row.feasible else no("no plan")),
        ),
        caption="One GiB less: the added time from this budget to the next smaller one in the table, for each GiB "
        "between them. Without a bound no plan can fit.",
    ).known()


def cheapest(made: dict[int, Answer]) -> list[Answer | None]:
    """For each budget, by rising budget, the fastest of all plans that keep to it; of equally fast ones the one with
    the lowest peak."""

    def key(answer: Answer) -> tuple[int, int, int]:
        timeline = answer.planned.planned.timeline
        return timeline.step_time_ns, timeline.peak_allocated_bytes, answer.budget_bytes or 0

    plans = sorted((answer for answer in made.values() if answer.found is not None), key=key)
    return [next((p for p in plans if key(p)[1] <= budget), None) for budget in sorted(made)]
