"""The front of one trace: the cheapest plan found for each of many budgets, and what each further byte costs.

A plan for one budget keeps to every larger one, so each budget gets the cheapest of all plans that keep to it,
whichever budget it was made for. The front is therefore monotone: a larger budget never gives a slower plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Final

from simulator.bounds.bound import bound_curve, bounder_of
from simulator.core.problem import Problem
from simulator.core.replay import Replay
from simulator.planners.outcome import Infeasible
from simulator.prediction.ask import Answer, Say, ask
from simulator.prediction.question import Question
from simulator.show import notebook
from simulator.show.tables import NUMBER, UNKNOWN, Cell, Table, no, table, yes
from simulator.studies.rows import Row, Study, columns, row_of
from traces.errors import UnfinishedError
from traces.records.plan import ALLOCATED, Plan
from traces.units import show_bytes, show_percent, show_time

GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Front(Study):
    """A row for each budget, by rising budget; the last is the peak with everything saved."""

    KEYS: ClassVar = (
        *("budget_bytes", "feasible", "peak_allocated_bytes", "peak_reserved_bytes", "step_time_ns"),
        *("overhead_percent", "recomputed_ops", "fits", "made_for_bytes", "bound_overhead_percent", "gap_points"),
        *("price_ns_per_gib", "bound_price_ns_per_gib", "solve_seconds", "finished", "message"),
    )  # fmt: skip
    planner: str
    floor_bytes: int  # no plan can go below
    solve_seconds: float = 0.0
    plans: tuple[Plan | None, ...] = ()  # by row

    def __repr__(self) -> str:
        fitting = [row for row in self.rows if row.feasible]
        reach = f"down to {show_bytes(fitting[0].peak_allocated_bytes)}" if fitting else "no plan"
        meta = self.problem.trace.meta
        return (
            f"<{meta.model}, batch {meta.batch_size}: {len(self.rows)} budgets by {self.planner}, {reach}, floor "
            f"{show_bytes(self.floor_bytes)}>"
        )

    def _repr_html_(self) -> str:
        at = [(row.budget_bytes / GIB, row) for row in self.rows]
        plans = [(x, row.overhead_percent) for x, row in at if row.overhead_percent is not None]
        bounds = [(x, row.bound_overhead_percent) for x, row in at if row.bound_overhead_percent is not None]
        curves = [(notebook.SAVED, bounds), (notebook.PLANNED, plans)]
        picture = notebook.picture(curves, "GiB", "% added", [], area=False)
        model = self.problem.trace.meta.model
        head = f"{model}: what each GiB costs ({self.planner}); grey: the certified bound"
        return notebook.framed(head, self.table(), picture)

    @property
    def saved(self) -> Replay:
        """The step with everything saved, and what constraints save beside."""
        return self.problem.saved

    def in_words(self) -> str:
        """What was planned, and what no plan can beat."""
        return (
            f"{self.trace_name}: {self.planner}, {len(self.rows)} budgets in {self.solve_seconds:.2f} s; step "
            f"{show_time(self.saved.timeline.step_time_ns)} with everything saved; no plan can go below "
            f"{show_bytes(self.floor_bytes)}"
        )

    def table(self) -> Table:
        """A row for each budget, the largest first."""
        most, base_ns = self.rows[-1].budget_bytes, self.saved.timeline.step_time_ns
        device = self.setting.device
        fits = {None: UNKNOWN, True: yes("fits"), False: no("too large")}

        def bound(row: Row) -> float | str:
            return "infeasible" if row.bound_overhead_percent is None else row.bound_overhead_percent

        def price(row: Row) -> Cell:
            if row.price_ns_per_gib is None:
                return Cell(UNKNOWN)
            share = 100 * row.price_ns_per_gib / base_ns if base_ns else 0.0
            text = f"{show_time(row.price_ns_per_gib)} ({show_percent(share, signed=True)})"
            return Cell(text, row.price_ns_per_gib)

        def met(row: Row) -> Cell:
            if not row.finished:
                return no("not finished; another budget's plan" if row.feasible else "not finished")
            return yes("met") if row.feasible else no("no plan")

        return table(
            self.rows[::-1],
            columns(
                "budget_bytes",
                ("of the peak", "share", lambda row: 100 * row.budget_bytes / most if most else None),
                "peak_allocated_bytes",
                "overhead_percent",
                ("bound", "percent", bound),
                "gap_points",
                ("one GiB less costs", NUMBER, price),
                "bound_price_ns_per_gib",
                ("device" if device is None else device.name, "", lambda row: fits[row.fits]),
                ("", "", met),
            ),
            caption="One GiB less: the added time from this budget to the next smaller one in the table, for each GiB "
            "between them; by the bound: what the last byte costs at this budget at the instant that decides it.",
        ).known()

    def lines(self) -> list[str]:
        """The answer to read: a line for each budget."""
        late = [show_bytes(row.budget_bytes) for row in reversed(self.rows) if not row.finished]
        note = (
            f"{self.planner} did not finish {len(late)} of {len(self.rows)} budgets in their share of --seconds: "
            f"{', '.join(late)}; a plan that stands there was made for another one."
        )
        return self.text(self.table().without("by the bound"), *([note] if late else []))

    def to_json(self) -> dict[str, Any]:
        """What `simulate pareto --json` prints."""
        reached = [row.peak_allocated_bytes for row in self.rows if row.peak_allocated_bytes is not None]
        return {
            **self.asked(),
            "planner": self.planner,
            "solve_seconds": round(self.solve_seconds, 3),
            **self.told(),
            "floor_bytes": self.floor_bytes,
            "smallest_peak_bytes": min(reached, default=None),
            "points": self.rows_json(),
        }


def pareto(problem: Problem, trace_name: str, question: Question, points: int, say: Say) -> Front:
    """The front with so many budgets, evenly from the floor to the peak with everything saved.

    The question's seconds are for the whole front. Most budgets are easy, so each plan may take twice an equal share of
    them as long as there is time: the same for each, so that equal seeds make equal fronts.

    A budget for which the planner does not end in time is said to be so, and the others stand. Budgets that the time
    does not reach are left out, every second one first; the two ends are always there.

    Raises:
        SpecError: the planner cannot plan this trace at all.
    """
    start = time.perf_counter()
    least, most = bounder_of(problem).floor.peak_bytes, problem.saved.timeline.peak_allocated_bytes
    question = replace(question.of_planner(), budget=most, budget_of=ALLOCATED)
    budgets = sorted({least + (most - least) * k // (points - 1) for k in range(points)})
    limits = question.limits.together()
    clock = limits.clock()
    made: dict[int, Answer] = {}
    # The ends first, then ever finer between them: should the time run out, the front is coarse and not cut off.
    for k, budget in enumerate(_coarse_to_fine(budgets)):
        if k > 1 and clock.over:
            told = (
                f"{k} of {len(budgets)} budgets were planned in {limits.seconds:g} s; the others are left out"
            )
            say(told)
            break
        say(f"budget {k + 1} of {len(budgets)}: {budget} bytes")
        share = replace(limits, seconds=2 * limits.seconds / len(budgets))
        one = replace(question, budget=budget, limits=share)
        made[budget] = ask(problem, one, refusals=(Infeasible, UnfinishedError))
    budgets = sorted(made)
    rows: list[Row] = []
    plans: list[Plan | None] = []
    for budget, pick, bound in zip(budgets, cheapest(made), bound_curve(problem, budgets), strict=True):
        row, found = made[budget], None if pick is None else pick.planned
        plans.append(None if found is None else found.plan)
        late = isinstance(row.refusal, UnfinishedError)
        given: dict[str, Any] = {"message": ""} if found is not None and not late else {}
        if found is not None:
            given["made_for_bytes"] = pick and pick.budget_bytes
            times = found.planned.timeline.step_time_ns, problem.saved.timeline.step_time_ns
            given["gap_points"] = None if found.plan.rewrites else bound.gap_points(*times)
        if bound.feasible:
            given["bound_overhead_percent"] = bound.overhead_percent
            given["bound_price_ns_per_gib"] = round(bound.price_ns * GIB / bound.price_bytes)
        rows.append(row_of(row, pick, **given))
    return Front(
        problem=problem,
        trace_name=trace_name,
        setting=made[budgets[0]].asked.setting,
        planner=question.planner_name,
        floor_bytes=least,
        rows=_priced(rows),
        solve_seconds=time.perf_counter() - start,
        plans=tuple(plans),
    )


def _coarse_to_fine(budgets: Sequence[int]) -> list[int]:
    """The largest and the smallest, then the middle, the middles of the halves, and so on."""
    out, gaps = [budgets[-1], budgets[0]], [(0, len(budgets) - 1)]
    while gaps:
        middles = [(low, (low + high) // 2, high) for low, high in gaps if high - low > 1]
        out += [budgets[middle] for _, middle, _ in reversed(middles)]
        gaps = [gap for low, middle, high in middles for gap in ((low, middle), (middle, high))]
    return list(dict.fromkeys(out))


def cheapest(made: dict[int, Answer]) -> list[Answer | None]:
    """For each budget, by rising budget, the fastest of all plans that keep to it; of equally fast ones the one with
    the lowest peak."""

    def key(answer: Answer) -> tuple[int, int, int]:
        timeline = answer.planned.planned.timeline
        return timeline.step_time_ns, timeline.peak_allocated_bytes, answer.budget_bytes or 0

    plans = sorted((answer for answer in made.values() if answer.found is not None), key=key)
    return [next((p for p in plans if key(p)[1] <= budget), None) for budget in sorted(made)]


def _priced(rows: Sequence[Row]) -> tuple[Row, ...]:
    """With what one GiB less costs: the time between a row and the next smaller budget's, per byte between them."""
    out = [*rows[:1]]
    for below, row in pairwise(rows):
        price = None
        between = row.budget_bytes - below.budget_bytes
        if below.step_time_ns is not None and row.step_time_ns is not None:
            price = round((below.step_time_ns - row.step_time_ns) * GIB / between)
        out.append(replace(row, price_ns_per_gib=price))
    return tuple(out)
