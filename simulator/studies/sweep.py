"""A model over batch sizes: predictions with and without a plan, as one table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from simulator.core.problem import Problem, peak_by_category
from simulator.prediction.ask import Question, ask
from simulator.prediction.step import texts
from simulator.show.tables import UNKNOWN, Table, no, table, yes
from simulator.studies.rows import columns
from simulator.studies.tracing import Traced
from traces.errors import TraceError
from traces.files import Form, JsonRecord
from traces.isolated import keeping
from traces.progress import Say, counted
from traces.records.measurement import RunFigures
from traces.records.plan import ALLOCATED
from traces.records.trace import PARAMETER, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One batch size: what the step costs with everything saved, and with the plan.

    Where no plan fits, `feasible` is False, `message` says why, and the plan's figures are empty.
    """

    batch_size: int
    planner: str
    budget_bytes: int
    feasible: bool
    baseline: RunFigures  # predicted, everything saved
    plan: RunFigures  # predicted, with the plan
    overhead_percent: float | None
    recomputed_ops: int
    breakdown_baseline: dict[str, int]  # category -> bytes at the peak; they sum to the peak
    breakdown_plan: dict[str, int]  # empty where no plan fits
    activation_bytes: int  # all that forward saves for backward
    parameter_bytes: int
    ops: int
    storages: int
    flops: int
    plan_path: str = ""  # relative to the sweep's own file
    trace_path: str = ""
    message: str = ""
    budget_of: str = ALLOCATED  # what the budget limits
    warnings: tuple[str, ...] = ()  # what must be said beside the predicted figures, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(JsonRecord):
    """One model over batch sizes, in the order asked for."""

    form: ClassVar = Form(
        name="sweep",
        version=1,
        advice="make one with `simulate sweep MODEL --batch-sizes 8,16`",
        error=TraceError,
    )
    model: str
    options: dict[str, Any]  # as the traces record them, the batch size left out
    target: str
    rows: tuple[SweepRow, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what must be said beside the predicted figures, with the batch sizes that it is about."""
        about: dict[str, list[str]] = {}
        for row in self.rows:
            for told in row.warnings:
                about.setdefault(told, []).append(str(row.batch_size))
        return tuple(f"Batch {', '.join(sizes)}: {told}" for told, sizes in about.items())

    def lines(self, directory: Path) -> list[str]:
        """The answer to read: a line for each batch size; what was written there stands in `directory`."""
        notes = [f"batch {row.batch_size}: {row.message}" for row in self.rows if not row.feasible]
        notes += [f"warning {text}" for text in self.warnings]
        plans = [r.plan_path for r in self.rows if r.plan_path]
        following = f" Next: execute {shlex.quote(str(directory / plans[0]))}" if plans else ""
        written = f"Written to {directory}: sweep.json, traces, plans.{following}"
        return [*self.table().without("planner", "budget", "").lines(), *notes, written]

    def table(self) -> Table:
        """A row for each batch size: what is predicted."""
        return table(
            self.rows,
            columns(
                *("batch_size", "planner", "budget_bytes"),
                ("peak, all saved", "bytes", lambda r: r.baseline.peak_allocated_bytes),
                ("peak, plan", "bytes", lambda r: r.plan.peak_allocated_bytes),
                ("reserved, all saved", "bytes", lambda r: r.baseline.peak_reserved_bytes),
                ("reserved, plan", "bytes", lambda r: r.plan.peak_reserved_bytes),
                ("step, all saved", "time", lambda r: r.baseline.step_time_ns),
                ("step, plan", "time", lambda r: r.plan.step_time_ns),
                "overhead_percent",
                ("ops run again", "count", lambda r: r.recomputed_ops if r.feasible else None),
                ("verdict", "", lambda r: yes("met") if r.feasible else no("does not fit")),
                ("", "", lambda r: r.message or UNKNOWN),
            ),
            caption="Predicted",
        ).known()


def sweep(traced: Traced, batch_sizes: Sequence[int], question: Question, say: Say) -> Sweep:
    """Trace every batch size that is not traced yet, plan it, and write traces, plans and `sweep.json`. Raises
    LowtideError: one could not be traced; where no plan fits there is a row."""
    with keeping(traced.key):
        traces = dict(zip(batch_sizes, traced.each(batch_sizes, say), strict=True))
    each = counted(traces.items(), lambda item: f"planning batch {item[0]}", say)
    rows = tuple(_row(traced, question, trace, batch_size) for batch_size, trace in each)
    *_, meta = (trace.meta for trace in traces.values())
    options = {k: v for k, v in meta.options.items() if k != "batch_size"}
    found = Sweep(model=traced.model, options=options, target=meta.target, rows=rows)
    found.save(traced.directory / "sweep.json")
    return found


def _row(traced: Traced, question: Question, trace: Trace, batch_size: int) -> SweepRow:
    answer, told = ask(Problem(trace), question), trace.summary()
    c, fits = answer.found or answer.asked, answer.found is not None
    plan_path = traced.directory / f"plan-b{batch_size}.json"
    if fits:
        c.plan.save(plan_path)
    else:
        plan_path.unlink(missing_ok=True)  # of an earlier sweep with another budget
    assert answer.budget_bytes is not None
    return SweepRow(
        batch_size=batch_size,
        planner=question.planner_name,
        budget_bytes=answer.budget_bytes,
        feasible=fits,
        baseline=c.saved_figures,
        plan=c.planned_figures if fits else RunFigures(),
        overhead_percent=c.overhead_percent if fits else None,
        recomputed_ops=c.planned.timeline.recomputed_ops,
        breakdown_baseline=peak_by_category(trace, c.saved.schedule, c.saved.timeline),
        breakdown_plan=peak_by_category(c.step.trace, c.planned.schedule, c.planned.timeline) if fits else {},
        activation_bytes=told["saved_bytes"],
        parameter_bytes=told["resident_bytes"].get(PARAMETER, 0),
        **{k: told[k] for k in ("ops", "storages", "flops")},
        plan_path=plan_path.name if fits else "",
        trace_path=str(traced.path(batch_size).relative_to(traced.directory)),
        message="" if answer.refusal is None else str(answer.refusal),
        budget_of=answer.budget_of,
        warnings=texts(c),
    )
