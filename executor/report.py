"""The page of a Measurement: the predicted beside the measured, with signed errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simulator.allocator.device_fit import setting_of
from simulator.core.problem import Problem
from simulator.prediction.step import describe, predict
from simulator.report.charts import Bar, grouped
from simulator.report.page import Block, Chart, Figure, Figures, Page, Section, Text, warned, write_page
from simulator.report.step import simulation_sections
from simulator.show.tables import Cell, Table, bytes_cell, percent_cell, time_cell
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


def _headline(m: Measurement, where: str) -> Figures:
    error = signed_error_percent(m.predicted, m.measured)["peak_allocated_bytes"]
    peaks = [show_bytes(f.peak_allocated_bytes) for f in (m.measured, m.predicted)]
    times = [show_time(f.step_time_ns) for f in (m.measured, m.eager, m.keep_all)]
    off = show_percent(error, signed=True, digits=3)
    figures = [
        Figure(f"Peak with the plan, measured on {where}", peaks[0], f"predicted {peaks[1]}"),
        Figure("Error of the predicted peak", off, "100·(predicted − measured)/measured"),
        Figure("Step with the plan, measured", times[0], f"eager {times[1]}, keep-all {times[2]}"),
    ]
    if m.budget_bytes is not None:
        is_met = {None: ("unknown", ""), True: ("within", "good"), False: ("above", "bad")}
        told, tone = is_met[m.within_budget]
        label = "Budget" if m.budget_of == ALLOCATED else "Budget of reserved memory"
        figures.append(Figure(label, show_bytes(m.budget_bytes), f"the measured peak is {told}", tone))
    is_same = {True: ("verified", "good"), False: ("NOT EQUAL", "bad"), None: ("not checked", "")}
    verdict, tone = is_same[m.verified]
    over = f"over {m.steps} steps" if m.verified is not None else ""
    return Figures((*figures, Figure("Same training as the untouched model", verdict, over, tone)))


def _errors(m: Measurement, meta: TraceMeta, where: str) -> tuple[Block, ...]:
    rows: list[tuple[Cell | str, ...]] = []
    for way, predicted, measured in _runs(m):
        errors = signed_error_percent(predicted, measured)
        before, after = predicted.headline(), measured.headline()
        for key, label, cell in _FIGURES:
            if before[key] is not None or after[key] is not None:
                error = percent_cell(errors[key], signed=True, digits=3)
                rows.append((way, label, cell(before[key]), cell(after[key]), error))
    text = (
        f"Measured figures come from the {where}, each way of running the step in a process of its own. Eager is the "
        "untouched training loop; keep-all is the rewritten graph with an empty plan; plan is the rewritten graph with "
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
    found = Table(
        columns=("run", "figure", "predicted", f"measured on {where}", "error"),
        rows=tuple(rows),
        numbers=frozenset({2, 3, 4}),
        caption="Error is 100·(predicted − measured)/measured; negative: the prediction was too low.",
    )
    shown = [f for f in _FIGURES if f[0] != "peak_block_bytes" and m.measured.headline()[f[0]] is not None]
    charts = (Chart(_chart(m, key, where), title=label.capitalize()) for key, label, _ in shown)
    return (*notes, found, *warned(f"Beside the prediction: {text}" for text in m.warnings), *charts)


def _runs(m: Measurement) -> tuple[tuple[str, RunFigures, RunFigures], ...]:
    """The ways of running the step: what was predicted of each, of eager nothing, and what was measured."""
    return (
        ("eager", RunFigures(), m.eager),
        ("keep-all", m.keep_all_predicted, m.keep_all),
        ("plan", m.predicted, m.measured),
    )


_FIGURES = (
    ("peak_allocated_bytes", "peak allocated", bytes_cell),
    ("peak_block_bytes", "peak in the allocator's blocks", bytes_cell),
    ("peak_reserved_bytes", "peak reserved", bytes_cell),
    ("step_time_ns", "step time", time_cell),
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
