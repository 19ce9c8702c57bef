"""The page of a Measurement: the predicted beside the measured, with signed errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simulator.allocator.device import setting_of
from simulator.core.problem import Problem
from simulator.prediction.step import describe, predict
from simulator.report.page import Block, Page, Section, Text, warned, write_page
from simulator.report.step import memory, simulation_sections
from simulator.show.tables import Table, beside
from traces.records.measurement import Measurement, RunFigures
from traces.records.plan import ALLOCATED, Plan
from traces.records.trace import Trace, TraceMeta
from traces.units import show_bytes


def write_measurement(path: str | Path, measurement: Measurement, trace: Trace, plan: Plan) -> Path:
    """Write the page for one measurement, whole or not at all, with the trace and the plan that its prediction is of.
    Raises EnvironmentProblem if a package that reports need is missing, PlanError if the plan does not fit the trace.
    """
    m = measurement
    setting = setting_of(trace.meta, plan.meta.alloc_conf or None)
    c = predict(Problem(trace), setting, plan)
    runs = (
        ("eager", RunFigures(), m.eager),
        ("save-all", m.keep_all_predicted, m.keep_all),
        ("plan", m.predicted, m.measured),
    )
    rows = [("device", m.device), ("provenance", m.provenance), ("plan for", m.fingerprint)]
    rows += [(k, v) for k, v in sorted(m.environment.items()) if v]
    rows += [(f"option {k}", str(v)) for k, v in sorted(m.options.items())]
    answer: tuple[Block, ...] = *_texts(m, plan.meta), memory(c), beside(runs, m.place)
    page = Page(
        title=f"{m.model}: predicted beside measured on {m.place}",
        subtitle=f"{describe(trace.meta)} · planner {m.planner or 'none'}",
        sections=(
            Section("Predicted beside measured", answer),
            *simulation_sections(c),
            Section("Environment of the measurement", (Table(columns=("", "value"), rows=tuple(rows)),)),
        ),
    )
    return write_page(path, page)


def _texts(m: Measurement, meta: TraceMeta) -> Iterator[Text]:
    """What must be said beside the figures: the budget, the verification, and what the times are."""
    if m.budget_bytes is not None:
        told = {None: "unknown", True: "within", False: "ABOVE"}[m.within_budget]
        of = "" if m.budget_of == ALLOCATED else " of reserved memory"
        tone = "warning" if m.within_budget is False else "note"
        yield Text(f"Budget {show_bytes(m.budget_bytes)}{of}: the measured peak is {told}.", tone)
    did = {True: "trained as", False: "did NOT train as", None: "was not compared with"}[m.verified]
    yield Text(f"The plan {did} the untouched model ({m.steps} steps).", "note" if m.verified else "warning")
    yield Text("Save-all and plan are the rewritten graph with an empty plan and with the plan.")
    if m.predicted.step_time_ns is None:
        yield Text(f"The plan's times are for {meta.target or meta.device}, and are left out.", "note")
    elif meta.mode != "real":
        yield Text("The predicted times are a roofline's estimates.", "warning")
    yield from warned(f"Beside the prediction: {text}" for text in m.warnings)
