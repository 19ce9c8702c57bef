"""The page of a Measurement: the predicted beside the measured, with signed errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simulator.allocator.device_fit import setting_of
from simulator.core.problem import Problem
from simulator.prediction.step import describe, predict
from simulator.report.charts import Bar, grouped
from simulator.report.measured import FIGURES, Run, beside
from simulator.report.page import Block, Chart, Page, Section, Text, warned, write_page
from simulator.report.step import simulation_sections
from simulator.show.tables import Cell, Table, no, yes
from traces.records.measurement import Measurement, RunFigures, signed_error_percent
from traces.records.plan import ALLOCATED, Plan
from traces.records.trace import Trace, TraceMeta
from traces.units import show_bytes, show_percent, show_time


def write_measurement(
    path: str | Path,
    measurement: Measurement,
    trace: Trace,
    plan: Plan,
    measured_curve: Sequence[tuple[int, int]] | None = None,
) -> Path:
    """Write the page for one measurement, whole or not at all.

    Args:
        trace, plan: what the prediction was made from, for the sections about it.
        measured_curve: (ns, live bytes) of one real step with the plan, drawn over the predicted memory.

    Raises:
        EnvironmentProblem: a package that reports need is not installed.
        PlanError: the plan does not fit the trace.
    """
    setting = setting_of(trace.meta, plan.meta.alloc_conf or None)
    c = predict(Problem(trace), setting, plan, measurement.budget_bytes)
    where = measurement.place
    page = Page(
        title=f"{measurement.model}: predicted beside measured on {where}",
        subtitle=f"{describe(trace.meta)} · planner {measurement.planner or 'none'}",
        sections=(
            Section("Headline", (_headline(measurement, where),)),
            Section("Predicted beside measured", _errors(measurement, plan.meta, where)),
            Section("Verification", _verification(measurement)),
            *simulation_sections(c, measured_curve),
            Section("Environment of the measurement", (_environment(measurement),)),
        ),
    )
    return write_page(path, page)


def _headline(m: Measurement, where: str) -> Table:
    error = signed_error_percent(m.predicted, m.measured)["peak_allocated_bytes"]
    peaks = [show_bytes(f.peak_allocated_bytes) for f in (m.measured, m.predicted)]
    times = [show_time(f.step_time_ns) for f in (m.measured, m.eager, m.keep_all)]
    off = show_percent(error, signed=True, digits=3)
    rows: list[tuple[Cell | str, ...]] = [
        (f"peak with the plan, measured on {where}", peaks[0], f"predicted {peaks[1]}"),
        ("error of the predicted peak", off, "100·(predicted − measured)/measured"),
        ("step with the plan, measured", times[0], f"eager {times[1]}, save-all {times[2]}"),
    ]
    if m.budget_bytes is not None:
        told, tone = {None: ("unknown", ""), True: ("within", "good"), False: ("above", "bad")}[
            m.within_budget
        ]
        label = "budget" if m.budget_of == ALLOCATED else "budget of reserved memory"
        budget = Cell(show_bytes(m.budget_bytes), m.budget_bytes, tone)
        rows.append((label, budget, f"the measured peak is {told}"))
    is_same: dict[bool | None, Cell] = {
        True: yes("verified"),
        False: no("NOT EQUAL"),
        None: Cell("not checked"),
    }
    over = f"over {m.steps} steps" if m.verified is not None else ""
    rows.append(("same training as the untouched model", is_same[m.verified], over))
    return Table(columns=("figure", "value", "beside it"), rows=tuple(rows))


def _errors(m: Measurement, meta: TraceMeta, where: str) -> tuple[Block, ...]:
    text = (
        f"Measured figures come from the {where}, each way of running the step in a process of its own. Eager is the "
        "untouched training loop; save-all is the rewritten graph with an empty plan; plan is the rewritten graph with "
        "the plan."
    )
    target, notes = meta.target or meta.device, [Text(text)]
    if m.predicted.step_time_ns is None:
        text = (
            f"The plan's times are for {target}, and the measurement ran on the {where}; they are left out."
        )
        notes.append(Text(text, "note"))
    elif meta.mode != "real":
        text = (
            f"The predicted times are those of a trace that was not run: a roofline's estimates for {target}, but for "
            "the ops that a device profile knows. Their error says nothing about the memory."
        )
        notes.append(Text(text, "warning"))
    known = [k for k, n in m.measured.headline().items() if n is not None and k != "peak_block_bytes"]
    charts = (Chart(_chart(m, key, where), title=FIGURES[key][0].capitalize()) for key in known)
    found = beside(_runs(m), where)
    return (*notes, found, *warned(f"Beside the prediction: {text}" for text in m.warnings), *charts)


def _runs(m: Measurement) -> tuple[Run, ...]:
    """The ways of running the step: what was predicted of each, of eager nothing, and what was measured."""
    return (
        ("eager", RunFigures(), m.eager),
        ("save-all", m.keep_all_predicted, m.keep_all),
        ("plan", m.predicted, m.measured),
    )


def _chart(m: Measurement, figure: str, where: str) -> dict[str, object]:
    bars = [
        Bar(way, way, real, value, where if real else "")
        for way, predicted, measured in _runs(m)
        for run, real in ((predicted, False), (measured, True))
        if (value := run.headline()[figure]) is not None
    ]
    limited = figure == f"peak_{m.budget_of}_bytes" and m.budget_bytes is not None
    title = figure.removesuffix("_bytes").removesuffix("_ns").replace("_", " ")
    limits = {"plan": m.budget_bytes or 0} if limited else None
    return grouped(bars, title, is_bytes=figure.endswith("_bytes"), limits=limits)


def _verification(m: Measurement) -> tuple[Block, ...]:
    if m.verified is None:
        return warned(["The plan's training was not compared with the untouched model's."])
    did = "trained" if m.verified else "did NOT train"
    rows = tuple(
        (key, Cell(f"{value:g}", value, "bad" if value else "good"))
        for key, value in sorted(m.max_abs_difference.items())
    )
    return (
        Text(
            f"Over {m.steps} steps from the same seed the plan {did} as the untouched model does.",
            "note" if m.verified else "warning",
        ),
        Table(columns=("compared", "largest absolute difference"), rows=rows, numbers=frozenset({1})),
    )


def _environment(m: Measurement) -> Table:
    rows = [("device", m.device), ("provenance", m.provenance), ("plan for", m.fingerprint)]
    rows += [(k, v) for k, v in sorted(m.environment.items()) if v]
    rows += [(f"option {k}", str(v)) for k, v in sorted(m.options.items())]
    return Table(columns=("", "value"), rows=tuple(rows))
