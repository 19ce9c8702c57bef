"""A Measurement in words, and as a page: the predicted beside the measured, with signed errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simulator.allocator.device import setting_of
from simulator.core.problem import Problem
from simulator.prediction.step import describe, predict
from simulator.report.page import Block, Page, Section, Text, warned, write_page
from simulator.report.step import memory, simulation_sections
from simulator.show.tables import Table, beside, figures_table
from traces.provenance import REHEARSED
from traces.records.measurement import Measurement, RunFigures, signed_error_percent
from traces.records.plan import ALLOCATED, Plan
from traces.records.trace import Trace
from traces.units import show_bytes


def write_measurement(path: str | Path, m: Measurement, trace: Trace, plan: Plan) -> Path:
    """Write the page for one measurement, whole or not at all, with the trace and the plan that its prediction is of.
    Raises EnvironmentProblem if a package that reports need is missing, PlanError if the plan does not fit the trace.
    """
    setting = setting_of(trace.meta, plan.meta.alloc_conf or None)
    c = predict(Problem(trace), setting, plan)
    runs = (
        ("eager", RunFigures(), m.eager),
        ("save-all", m.keep_all_predicted, m.keep_all),
        ("plan", m.predicted, m.measured),
    )
    rows = [("device", m.device), ("provenance", m.provenance), ("plan for", m.fingerprint)]
    rows += [(k, v) for k, v in sorted(m.environment.items()) if v]
    wrong = m.verified is not True or m.within_budget is False or m.warnings
    notes = [Text(note, "warning" if wrong else "note") for note in _notes(m)]
    if m.predicted.step_time_ns is not None and trace.meta.mode != "real":
        notes += warned(["The predicted times are a roofline's estimates."])
    answer: tuple[Block, ...] = *notes, memory(c), beside(runs, m.place)
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


def in_words(m: Measurement) -> str:
    """A measurement for people."""
    found = "rehearsed" if m.provenance == REHEARSED else "measured"
    runs = (
        (f"eager, {found}", m.eager),
        ("save-all, predicted", m.keep_all_predicted),
        (f"save-all, {found}", m.keep_all),
        ("plan, predicted", m.predicted),
        (f"plan, {found}", m.measured),
    )
    errors = signed_error_percent(m.predicted, m.measured).items()
    parts = [f"{k.removesuffix('_bytes').removesuffix('_ns')} {v:+.2f} %" for k, v in errors if v is not None]
    lines = [*figures_table(runs).lines(), f"error of the plan's prediction: {', '.join(parts)}", *_notes(m)]
    return "\n  ".join([f"{m.model} by {m.planner} on {m.device} ({m.provenance})", *lines])


def _notes(m: Measurement) -> Iterator[str]:
    """What must be said beside the figures: the slow-down, the budget, warnings and the verification."""
    if m.slowdown_percent is not None:
        said, real = m.predicted_slowdown_percent, m.slowdown_percent
        more = f", predicted {said:+.2f} % ({said - real:+.2f} points)" if said is not None else ""
        if count := len(m.measured.keep_all_times_ns):
            more = f" (median of {count} pairs of steps in turns){more}"
        yield f"slow-down by the plan: measured {real:+.2f} %{more}"
    if m.within_budget is not None:
        of = " of reserved memory" if m.budget_of != ALLOCATED else ""
        yield f"budget {show_bytes(m.budget_bytes)}{of}: {'kept' if m.within_budget else 'EXCEEDED'}"
    yield from (f"warning, beside the prediction: {text}" for text in m.warnings)
    if m.verified is None:
        rehearsed = m.provenance == REHEARSED
        yield f"not verified{', since nothing is computed on a GPU that is not there' * rehearsed}"
        return
    verdict = "verified: bit-equal with eager" if m.bit_equal else f"verified ({m.verification_note})"
    kinds = ", ".join(k.replace("_", " ") for k in m.max_abs_difference)
    yield f"{verdict if m.verified else 'NOT equal to eager'} over {m.steps} steps in {kinds}"
