"""The page of a sweep: memory, time, peak breakdown and activations against the batch size."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from simulator.core.problem import Problem
from simulator.report import charts
from simulator.report.page import Block, Chart, Page, Section, Text, warned, write_page
from simulator.report.step import activation_blocks
from simulator.show.tables import Table, beside, table
from simulator.studies.sweep import EAGER, KEEP_ALL, PLAN, Sweep
from traces.errors import LowtideError
from traces.records.plan import Plan
from traces.records.store import load

WAYS = {EAGER: "eager", KEEP_ALL: "save-all", PLAN: "plan"}
PEAK_KEY, TIME_KEY = "peak_allocated_bytes", "step_time_ns"


def write_sweep(
    path: str | Path, sweep: Sweep, *, root: str | Path | None = None, measured_on: str = ""
) -> Path:
    """Write the page for a sweep over batch sizes, whole or not at all.

    Args:
        path: where.
        sweep: the predictions, with measurements where something was run.
        root: the directory that the rows' `trace_path` and `plan_path` are relative to (default: that of `path`).
        measured_on: the device behind the measured figures, for their labels ("CPU", "NVIDIA H200").

    Raises:
        EnvironmentProblem: a package that reports need is not installed.
    """
    where = measured_on or "this sweep's device"
    sections = [
        Section("Summary", _summary(sweep, where)),
        Section("Peak memory and iteration latency against batch size", _against_batch(sweep, where)),
        Section("Peak memory breakdown", (_breakdown(sweep),)),
        Section("Computation and memory statistics", (_statistics(sweep),)),
        Section("Static analysis of activations", _activations(sweep, Path(root or Path(path).parent))),
    ]
    if any(r.measured for r in sweep.rows):
        sections.append(Section("Predicted beside measured", _errors(sweep, where)))
    options = ", ".join(f"{k} {v}" for k, v in sorted(sweep.options.items()) if v not in (None, ""))
    batches = ", ".join(dict.fromkeys(str(r.batch_size) for r in sweep.rows))
    title = f"{sweep.model}: with and without checkpointing, by batch size"
    return write_page(path, Page(title, f"batch sizes {batches} · {options}", sections))


def _summary(sweep: Sweep, where: str) -> tuple[Block, ...]:
    note = "Every figure on this page is predicted; nothing was run."
    if any(r.measured for r in sweep.rows):
        note = f"Figures called measured were measured on {where}; all others are predicted."
    source = f" Predicted times are for the target {sweep.target}." if sweep.target else ""
    return (Text(note + source, "note"), *warned(sweep.warnings), sweep.table())


def _bars(sweep: Sweep, figure: str, where: str) -> list[charts.Bar]:
    """Bars of one of RunFigures' figures, predicted and measured; unknown figures have no bar."""
    bars = []
    for row in sweep.rows:
        measured = [(way, row.measured[key], True) for key, way in WAYS.items() if key in row.measured]
        for way, run, real in (("save-all", row.baseline, False), ("plan", row.plan, False), *measured):
            if (value := run.headline()[figure]) is not None:
                bars.append(charts.Bar(str(row.batch_size), way, real, value, where if real else ""))
    return bars


def _against_batch(sweep: Sweep, where: str) -> tuple[Block, ...]:
    limits = {str(r.batch_size): r.budget_bytes for r in sweep.rows}
    grouped = partial(charts.grouped, group_title="mini-batch size")
    peaks = grouped(_bars(sweep, PEAK_KEY, where), "peak allocated", is_bytes=True, limits=limits)
    text = (
        "save-all is without checkpointing, plan is with it. Pale bars are predicted, solid "
        "bars measured; the red line is the budget."
    )
    blocks = [Chart(peaks, text, "Peak memory")]
    # Charts of their own: the target of the predictions is often another device than the one that ran.
    bars, target = _bars(sweep, TIME_KEY, where), f"For the target {sweep.target}." if sweep.target else ""
    for real, of, text in ((False, "predicted", target), (True, f"measured on {where}", "")):
        if some := [b for b in bars if b.measured == real]:
            spec = grouped(some, f"step time, {of.split()[0]}", is_bytes=False)
            blocks.append(Chart(spec, text, f"Iteration latency, {of}"))
    return tuple(blocks)


def _breakdown(sweep: Sweep) -> Chart:
    parts = {
        f"{r.batch_size}, {way}": part
        for r in sweep.rows
        for way, part in (("save-all", r.breakdown_baseline), ("plan", r.breakdown_plan))
        if part
    }
    text = (
        "What is allocated at the predicted peak, without checkpointing (save-all) and with it (plan), by batch size. "
        "The parts sum to the peak."
    )
    return Chart(charts.peak_by_category(parts), text)


def _statistics(sweep: Sweep) -> Table:
    return table(
        sweep.rows,
        (
            ("batch", "count", lambda r: r.batch_size),
            ("ops", "count", lambda r: r.ops),
            ("storages", "count", lambda r: r.storages),
            ("GFLOP a step", "count", lambda r: round(r.flops / 1e9, 1)),
            ("parameters", "bytes", lambda r: r.parameter_bytes),
            ("activations saved", "bytes", lambda r: r.activation_bytes),
        ),
        caption="One training step, forward, backward and optimizer; floating-point operations are those with "
        "everything saved.",
    )


def _activations(sweep: Sweep, root: Path) -> tuple[Block, ...]:
    """The analysis of the largest batch whose trace is still there, with its plan's actions."""
    for row in sorted(sweep.rows, key=lambda r: -r.batch_size):
        if not row.trace_path or not (root / row.trace_path).is_dir():
            continue
        try:
            trace = load(root / row.trace_path)
            plan = Plan(meta=trace.meta)
            if row.plan_path and (root / row.plan_path).is_file():
                plan = Plan.load(root / row.plan_path)
        except LowtideError as error:
            return warned([f"The trace for batch {row.batch_size} cannot be shown: {error}"])
        return (
            Text(f"At batch size {row.batch_size}, the largest whose trace is at hand.", "note"),
            *activation_blocks(Problem(trace), plan),
        )
    return warned(["No trace of this sweep is at hand, so its activations cannot be listed."])


def _errors(sweep: Sweep, where: str) -> tuple[Block, ...]:
    runs = [
        (f"{r.batch_size}, {WAYS[key]}", predicted, r.measured[key])
        for r in sweep.rows
        for key, predicted in ((EAGER, r.baseline), (KEEP_ALL, r.baseline), (PLAN, r.plan))
        if key in r.measured
    ]
    text = (
        "By batch size. Predicted times are for the target, so they compare with measured times only where both are "
        "the same device. Eager is set beside the prediction for everything saved."
    )
    return Text(text), beside(runs, where)
