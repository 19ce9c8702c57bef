"""A model over batch sizes: predictions with and without a plan, as one table.

The records are shared: `simulate sweep` fills in what it predicts, `execute sweep` adds what it measured, and the
report shows both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from simulator.allocator.device_fit import setting_of
from simulator.core.budget import parse_budget
from simulator.core.problem import Problem
from simulator.core.replay import peak_by_category
from simulator.prediction.step import predict
from simulator.prediction.warnings import text, texts, warnings
from simulator.show.tables import UNKNOWN, Table, no, table, yes
from simulator.studies.tracing import ModelRequest
from traces.errors import BudgetError, TraceError
from traces.files.json_records import Form, JsonRecord
from traces.records.measurement import RunFigures
from traces.records.plan import ALLOCATED, PredictionWarning
from traces.records.trace import PARAMETER, Trace

EAGER, KEEP_ALL, PLAN = "eager", "keep_all", "plan"  # the keys of `SweepRow.measured`


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One batch size: what the step costs with everything saved, and with the plan.

    Where no plan fits, `feasible` is False, `message` says why, and the plan's figures are empty.
    """

    model: str
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
    measured: dict[str, RunFigures] = field(default_factory=dict)  # by EAGER, KEEP_ALL, PLAN, once measured
    plan_path: str = ""  # relative to the sweep's own file
    trace_path: str = ""
    message: str = ""
    budget_of: str = ALLOCATED  # what the budget limits
    warnings: tuple[str, ...] = ()  # what must be said beside the predicted figures, in words
    notices: tuple[PredictionWarning, ...] = ()  # the same as records


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
        """What must be said beside the predicted figures, with the batch sizes that it is about.

        Warnings that differ in their figures alone are one, with those of the largest batch size.
        """
        about: dict[object, dict[int, str]] = {}
        for row in self.rows:
            for w in row.notices:
                about.setdefault(w.kind, {})[row.batch_size] = text(w)
        out = []
        for said in about.values():
            largest = max(said)
            of = "" if len(set(said.values())) == 1 else f" (figures of {largest})"
            out.append(f"Batch {', '.join(map(str, said))}{of}: {said[largest]}")
        return tuple(out)

    def table(self) -> Table:
        """A row for each batch size: what is predicted."""
        return table(
            self.rows,
            (
                ("batch", "count", lambda r: r.batch_size),
                ("planner", "", lambda r: r.planner),
                ("budget", "bytes", lambda r: r.budget_bytes),
                ("peak, all saved", "bytes", lambda r: r.baseline.peak_allocated_bytes),
                ("peak, plan", "bytes", lambda r: r.plan.peak_allocated_bytes),
                ("reserved, all saved", "bytes", lambda r: r.baseline.peak_reserved_bytes),
                ("reserved, plan", "bytes", lambda r: r.plan.peak_reserved_bytes),
                ("step, all saved", "time", lambda r: r.baseline.step_time_ns),
                ("step, plan", "time", lambda r: r.plan.step_time_ns),
                ("overhead", "+percent", lambda r: r.overhead_percent),
                ("ops run again", "count", lambda r: r.recomputed_ops if r.feasible else None),
                ("verdict", "", lambda r: yes("met") if r.feasible else no("does not fit")),
                ("", "", lambda r: r.message or UNKNOWN),
            ),
            caption="Predicted",
        ).known()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest(ModelRequest):
    """What `simulate sweep` was asked for."""

    batch_sizes: tuple[int, ...]
    budget: str
    budget_of: str = ALLOCATED


def sweep(request: SweepRequest, progress: Callable[[str], None]) -> Sweep:
    """Trace every batch size that is not traced yet, plan it, and write traces, plans and `sweep.json`.

    Args:
        request: what to do.
        progress: told one line about each thing that is done.

    Raises:
        LowtideError: a batch size could not be traced. (One for which no plan fits is a row, not an error.)
    """
    rows, options, target = [], {}, ""
    for batch_size in request.batch_sizes:
        trace = request.trace(batch_size, progress)
        progress(f"batch {batch_size}: planning with {request.planner}")
        rows.append(_row(request, trace, batch_size))
        options = {k: v for k, v in trace.meta.options.items() if k != "batch_size"}
        target = trace.meta.target
    found = Sweep(model=request.model, options=options, target=target, rows=tuple(rows))
    found.save(request.directory / "sweep.json")
    return found


def _row(request: SweepRequest, trace: Trace, batch_size: int) -> SweepRow:
    setting = setting_of(trace.meta, request.alloc_conf)
    problem = Problem(trace, request.constraints)
    c, sts, of = predict(problem, setting), trace.storages, request.budget_of
    budget_bytes = parse_budget(request.budget, c.whole_bytes(of))
    plan_path = request.directory / f"plan-b{batch_size}.json"
    message = ""
    try:
        c = request.plan(problem, setting, budget_bytes, of)
        c.plan.save(plan_path)
    except BudgetError as error:
        message = str(error)
        plan_path.unlink(missing_ok=True)  # of an earlier sweep with another budget
    fits, saved = not message, problem.unconstrained.saved_by_default
    return SweepRow(
        model=request.model,
        batch_size=batch_size,
        planner=request.planner,
        budget_bytes=budget_bytes,
        feasible=fits,
        baseline=c.saved_figures,
        plan=c.planned_figures if fits else RunFigures(),
        overhead_percent=c.overhead_percent if fits else None,
        recomputed_ops=c.planned.timeline.recomputed_ops,
        breakdown_baseline=peak_by_category(trace, c.saved.schedule, c.saved.timeline),
        breakdown_plan=peak_by_category(c.step.trace, c.planned.schedule, c.planned.timeline) if fits else {},
        activation_bytes=sum(n for n, kept in zip(sts.nbytes, saved, strict=True) if kept),
        parameter_bytes=sum(n for n, c in zip(sts.nbytes, sts.category, strict=True) if c == PARAMETER),
        ops=len(trace.ops),
        storages=len(sts),
        flops=sum(trace.ops.flops),
        plan_path=plan_path.name if fits else "",
        trace_path=f"trace-b{batch_size}",
        message=message,
        budget_of=of,
        warnings=texts(c),
        notices=warnings(c),
    )
