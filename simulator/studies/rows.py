"""A study is rows of answers: what one answer comes to, under the names that terminal, page and JSON have for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, Final

from simulator.allocator.device_fit import Setting, device_fit
from simulator.core.problem import Problem
from simulator.core.replay import Replay
from simulator.planners.outcome import Infeasible
from simulator.prediction.ask import Answer
from simulator.prediction.warnings import texts_of
from simulator.show.notebook import framed
from simulator.show.tables import Table
from traces.errors import UnfinishedError

# Of what a row knows: what stands over its column in a terminal and on a page, and how it is shown there. In JSON it
# has its own name.
COLUMNS: Final = {
    "planner": ("planner", ""),
    "batch_size": ("batch", "count"),
    "budget_bytes": ("budget", "bytes"),
    "peak_allocated_bytes": ("peak", "bytes"),
    "step_time_ns": ("step time", "time"),
    "overhead_percent": ("overhead", "+percent"),
    "gap_points": ("gap, points", "points"),
    "recomputed_ops": ("ops run again", "count"),
    "bound_price_ns_per_gib": ("by the bound", "time"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One answer of a study. What does not apply, or is not known, is None."""

    planner: str
    budget_bytes: int
    feasible: bool  # there is a plan
    solve_seconds: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_time_ns: int | None = None
    overhead_percent: float | None = None
    gap_points: float | None = None  # over the certified bound
    recomputed_ops: int | None = None
    fits: bool | None = None  # into the device that was named
    lowest_peak_bytes: int | None = None  # of a refusal: the lowest peak that the planner reached
    message: str = ""  # why there is no plan
    peer: bool = False  # another system's plan; always False
    finished: bool = True  # the planner came to an end; if not, a plan here was made for another budget
    made_for_bytes: int | None = None  # the budget that the plan was made for: this one or a smaller
    bound_overhead_percent: float | None = None  # certified; None: no plan can fit
    # Time that one GiB less costs here: by the plans up to the next smaller budget, and by the bound at this one.
    price_ns_per_gib: int | None = None
    bound_price_ns_per_gib: int | None = None


def row_of(a: Answer, plan: Answer | None = None, **more: Any) -> Row:
    """The row of an answer; `plan`: the one whose plan stands there, if it is another's."""
    plan, refused = plan or a, a.refusal
    known = {
        "planner": a.question.planner_name,
        "budget_bytes": a.budget_bytes,
        "solve_seconds": round(a.solve_seconds, 3),
        "finished": not isinstance(refused, UnfinishedError),
        "feasible": plan.found is not None,
        "lowest_peak_bytes": refused.figures["lowest_peak_bytes"]
        if isinstance(refused, Infeasible)
        else None,
        "message": "" if refused is None else str(refused),
    }
    if plan.found is not None:
        c, figures = plan.found, plan.found.planned_figures
        known |= {
            "peak_allocated_bytes": figures.peak_allocated_bytes,
            "peak_reserved_bytes": figures.peak_reserved_bytes,
            "step_time_ns": figures.step_time_ns,
            "overhead_percent": round(c.overhead_percent, 4),
            "recomputed_ops": c.planned.timeline.recomputed_ops,
            "fits": c.planned_fit.fits,
            "gap_points": None if c.plan.rewrites else plan.gap_points,
        }
    return Row(**{**known, **more})


def columns(*chosen: str | tuple[str, str, Any]) -> list[tuple[str, str, Any]]:
    """The columns of a table of rows: names of `COLUMNS`, and what is shown in this table alone."""
    return [(*COLUMNS[c], attrgetter(c)) if isinstance(c, str) else c for c in chosen]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Study:
    """What answers about many plans of one trace have in common: the step, and what each plan is judged under."""

    KEYS: ClassVar[tuple[str, ...]]  # of a row's values, those that JSON has
    problem: Problem  # with the constraints of the plans
    trace_name: str
    setting: Setting
    rows: tuple[Row, ...] = ()

    @property
    def saved(self) -> Replay:
        """The step with everything saved."""
        return self.problem.unconstrained.saved

    def in_words(self) -> str:
        """What was asked, and what no plan can beat."""
        raise NotImplementedError

    def table(self) -> Table:
        """The rows, for a terminal, a notebook and a page."""
        raise NotImplementedError

    def text(self, rows: Table, *notes: str) -> list[str]:
        """Rows for a terminal, below what they are about and above what must be said beside them."""
        return [
            self.in_words(),
            *rows.lines(),
            *notes,
            *(f"warning {text}" for text in texts_of(self.problem)),
        ]

    def _repr_html_(self) -> str:
        return framed(repr(self).strip("<>"), self.table())

    def asked(self) -> dict[str, Any]:
        """What the JSON begins with."""
        meta, device = self.problem.trace.meta, self.setting.device
        return {
            "trace": self.trace_name,
            "model": meta.model,
            "batch_size": meta.batch_size,
            "target": meta.target,
            "fingerprint": meta.fingerprint,
            "alloc_conf": self.setting.alloc_conf,
            "device": None if device is None else device.to_json(),
        }

    def told(self) -> dict[str, Any]:
        """The step with everything saved, and what must be said beside every figure."""
        fit = device_fit(self.problem, self.saved, replace(self.setting, asked=False))
        figures = fit.figures(self.saved.timeline.step_time_ns)
        return {"baseline": figures.headline(), "warnings": texts_of(self.problem)}

    def rows_json(self) -> list[dict[str, Any]]:
        return [{key: getattr(row, key) for key in self.KEYS} for row in self.rows]
