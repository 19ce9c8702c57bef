"""Planners side by side on one trace and budget: what each reaches, what it costs, how far it is from optimal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from simulator.bounds.bound import Bound, lower_bound
from simulator.core.problem import Problem
from simulator.planners import REGISTRY, find
from simulator.prediction.ask import Say, ask
from simulator.prediction.question import Question
from simulator.prediction.step import predict
from simulator.show.tables import Cell, Table, no, table, yes
from simulator.studies.rows import Row, Study, columns, row_of
from traces.errors import LowtideError
from traces.records.plan import ALLOCATED
from traces.units import show_bytes, show_time


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Study):
    """One trace and one budget under several planners."""

    KEYS: ClassVar = (
        *("planner", "feasible", "solve_seconds", "peak_allocated_bytes", "peak_reserved_bytes", "step_time_ns"),
        *("overhead_percent", "gap_points", "recomputed_ops", "fits", "lowest_peak_bytes", "message", "peer"),
    )  # fmt: skip
    budget_bytes: int
    bound: Bound  # of the constrained problem

    @property
    def feasible(self) -> bool:
        """True if a planner has a plan."""
        return any(row.feasible for row in self.rows)

    def __repr__(self) -> str:
        best = next((row for row in ranked(self.rows) if row.feasible), None)
        told = "no plan" if best is None else f"{best.planner} {best.overhead_percent:+.2f} %"
        within = f"{self.problem.trace.meta.model} within {show_bytes(self.budget_bytes)}"
        return f"<{within}: {told}, of {len(self.rows)} planners>"

    def in_words(self) -> str:
        """The question, and what no plan can beat."""
        saved, bound = self.saved.timeline, self.bound
        least = bound.least() if bound.feasible else bound.reason
        return (
            f"{self.trace_name}: budget {show_bytes(self.budget_bytes)} of "
            f"{show_bytes(saved.peak_allocated_bytes)}, step {show_time(saved.step_time_ns)}; bound: {least}"
        )

    def table(self) -> Table:
        """A row for each planner, the cheapest first, those without a plan last."""
        figures = ("peak_allocated_bytes", "step_time_ns", "overhead_percent", "gap_points")
        return table(
            ranked(self.rows),
            columns(
                "planner",
                *figures,
                ("solve time", "time", lambda row: 1e9 * row.solve_seconds),
                "recomputed_ops",
                ("", "", verdict),
            ),
            caption="The gap is the overhead less the certified bound: how far from optimal the plan can be at most. "
            "Solve times are of this machine.",
        )

    def lines(self) -> list[str]:
        """The answer to read: a line for each planner."""
        return self.text(self.table().without("step time", "ops run again"))

    def to_json(self) -> dict[str, Any]:
        """What `simulate compare --json` prints."""
        bound, told = self.bound.to_json(), self.told()
        return {
            **self.asked(),
            "budget_bytes": self.budget_bytes,
            "feasible": self.feasible,
            "baseline": told["baseline"],
            "bound": {k: bound[k] for k in ("overhead_percent", "added_time_ns", "feasible", "reason")},
            "warnings": told["warnings"],
            "planners": self.rows_json(),
        }


def compare(
    problem: Problem, trace_name: str, question: Question, planners: Sequence[str] | None, say: Say
) -> Comparison:
    """A row for each planner (None: all), in the order given; the bound is that of the constrained problem.

    Each planner has the question's seconds for itself. One that cannot plan this trace or budget has a row that says
    why. Raises SpecError if there is no such planner, or no such budget for this trace.
    """
    question = replace(question.of_planner(), budget_of=ALLOCATED)
    chosen = tuple(REGISTRY) if planners is None else planners
    for planner in chosen:
        find(planner)  # what it imports is not its solve time
    asked = predict(problem, question.setting(problem.trace.meta))
    limit, _ = question.limit(asked)
    assert limit is not None
    rows = []
    for planner in chosen:
        one = replace(question, planner=planner)
        rows.append(row_of(ask(problem, one, say=say, refusals=(LowtideError,))))
    return Comparison(
        problem=problem,
        trace_name=trace_name,
        setting=asked.setting,
        rows=tuple(rows),
        budget_bytes=limit,
        bound=lower_bound(problem, limit),
    )


def ranked(rows: Iterable[Row]) -> list[Row]:
    """The cheapest plan within the budget first, then refusals."""
    return sorted(rows, key=lambda row: (not row.feasible, row.step_time_ns or 0))


def verdict(row: Row) -> Cell:
    """Whether there is a plan, and what else is to be said of it."""
    if not row.feasible:
        known = row.lowest_peak_bytes
        return no(row.message if known is None else f"no plan; lowest peak {show_bytes(known)}")
    return yes("met; does not fit the device" if row.fits is False else "met")
