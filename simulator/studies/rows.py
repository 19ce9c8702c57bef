"""A study is rows of answers: what one answer comes to, under the names that terminal, page and JSON have for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from simulator.core.problem import Problem
from simulator.planners.outcome import Infeasible
from simulator.prediction.ask import Answer
from simulator.prediction.step import Prediction
from simulator.show import notebook
from simulator.show.tables import Table
from traces.records.plan import Plan
from traces.units import GIB, bytes_unit

# Of what a row knows: what stands over its column in a terminal and on a page, and how it is shown there. In JSON it
# has its own name.
COLUMNS: Final = {
    "planner": ("planner", ""),
    "batch_size": ("batch", "count"),
    "budget_bytes": ("budget", "bytes"),
    "peak_allocated_bytes": ("peak", "bytes"),
    "step_time_ns": ("step time", "time"),
    "overhead_percent": ("overhead", "+percent"),
    "bound_overhead_percent": ("bound", "percent"),
    "gap_points": ("gap, points", "points"),
    "recomputed_ops": ("ops run again", "count"),
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
    made_for_bytes: int | None = None  # the budget that the plan was made for: this one or a smaller
    bound_overhead_percent: float | None = None  # certified; None: no plan can fit
    price_ns_per_gib: int | None = None  # time that one GiB less costs, up to the next smaller budget


def row_of(a: Answer, **more: Any) -> Row:
    """The row of an answer."""
    refused = a.refusal
    known = {
        "planner": a.question.planner_name,
        "budget_bytes": a.budget_bytes,
        "solve_seconds": round(a.solve_seconds, 3),
        "feasible": a.found is not None,
        "message": "" if refused is None else str(refused),
    }
    if isinstance(refused, Infeasible):
        known["lowest_peak_bytes"] = refused.figures["lowest_peak_bytes"]
    if a.found is not None:
        c, figures = a.found, a.found.planned_figures
        known |= {
            "peak_allocated_bytes": figures.peak_allocated_bytes,
            "peak_reserved_bytes": figures.peak_reserved_bytes,
            "step_time_ns": figures.step_time_ns,
            "overhead_percent": round(c.overhead_percent, 4),
            "recomputed_ops": c.planned.timeline.recomputed_ops,
            "fits": c.planned_fit.fits,
            "gap_points": None if c.plan.rewrites else a.gap_points,
        }
    return Row(**{**known, **more})


def columns(*chosen: str | tuple[str, str, Any]) -> list[tuple[str, str, Any]]:
    """The columns of a table of rows: names of `COLUMNS`, and what is shown in this table alone."""
    return [(*COLUMNS[c], attrgetter(c)) if isinstance(c, str) else c for c in chosen]


R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Study(Generic[R]):
    """Many answers about one trace, as rows; in a notebook it shows them."""

    problem: Problem | None  # None: all was rehearsed
    rows: tuple[R, ...]
    data: dict[str, Any]  # what `--json` prints
    words: str  # what was asked, and what no plan can beat
    table: Table
    short: str = ""  # the same in a few words
    aside: tuple[str, ...] = ()  # titles of columns that a terminal does without
    notes: tuple[str, ...] = ()  # lines below the table
    # Added time in percent against GiB: what no plan can go below, and the plans.
    curves: Mapping[str, notebook.Points] = field(default_factory=dict)
    plans: tuple[Plan | None, ...] = ()  # by row

    def __repr__(self) -> str:
        return f"<{self.short}>"

    def _repr_html_(self) -> str:
        unit, name = bytes_unit(int(GIB * max((x for c in self.curves.values() for x, _ in c), default=1)))
        curves = ([(x * GIB / unit, y) for x, y in curve] for curve in self.curves.values())
        coloured = list(zip((notebook.SAVED, notebook.PLANNED), curves, strict=False))
        picture = notebook.picture(coloured, name, "% added", [], area=False)
        return notebook.framed(self.short, self.table, picture)

    def lines(self) -> list[str]:
        warned = (f"warning {text}" for text in self.data.get("warnings", ()))
        return [self.words, *self.table.without(*self.aside).lines(), *self.notes, *warned]


def asked(trace_name: str, saved: Prediction) -> dict[str, Any]:
    """Return what the JSON of a study begins with."""
    meta, device = saved.trace.meta, saved.setting.device
    return {
        "trace": trace_name,
        "model": meta.model,
        "batch_size": meta.batch_size,
        "target": meta.target,
        "fingerprint": meta.fingerprint,
        "alloc_conf": saved.setting.alloc_conf,
        "device": None if device is None else device.to_json(),
    }
