"""The page of a sweep: memory, time, peak breakdown and activations against the batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.core.problem import Problem
from simulator.report import charts
from simulator.report.page import Block, Chart, Page, Section, Text, warned, write_page
from simulator.report.step import activation_blocks
from simulator.show.tables import Table, table
from simulator.studies.sweep import Sweep
from traces.records.plan import Plan
from traces.records.store import load

COLOURS = {"save-all": charts.BLUE, "plan": charts.RED}
BREAKDOWN = (
    "What is allocated at the predicted peak, without checkpointing (save-all) and with it (plan), by batch size. The "
    "parts sum to the peak."
)


def write_sweep(path: str | Path, sweep: Sweep, root: Path) -> Path:
    """Write the page for a sweep over batch sizes, whole or not at all. Raises EnvironmentProblem if a package that
    reports need is missing. `root`: the directory that the rows' `trace_path` and `plan_path` are relative to.
    """
    source = f" Predicted times are for the target {sweep.target}." if sweep.target else ""
    note = Text(f"Every figure on this page is predicted; nothing was run.{source}", "note")
    parts = {
        f"{r.batch_size}, {way}": part
        for r in sweep.rows
        for way, part in (("save-all", r.breakdown_baseline), ("plan", r.breakdown_plan))
        if part
    }
    row = max(sweep.rows, key=lambda r: r.batch_size)  # with its plan's actions
    trace = load(root / row.trace_path)
    plan = Plan.load(root / row.plan_path) if row.plan_path else Plan(meta=trace.meta)
    static = Text(f"At batch size {row.batch_size}.", "note"), *activation_blocks(Problem(trace), plan)
    sections = [
        Section("Summary", (note, *warned(sweep.warnings), sweep.table())),
        Section("Peak memory and iteration latency against batch size", _against_batch(sweep)),
        Section("Peak memory breakdown", (Chart(charts.peak_by_category(parts), BREAKDOWN),)),
        Section("Computation and memory statistics", (_statistics(sweep),)),
        Section("Static analysis of activations", static),
    ]
    options = ", ".join(f"{k} {v}" for k, v in sorted(sweep.options.items()) if v not in (None, ""))
    batches = ", ".join(dict.fromkeys(str(r.batch_size) for r in sweep.rows))
    title = f"{sweep.model}: with and without checkpointing, by batch size"
    return write_page(path, Page(title, f"batch sizes {batches} · {options}", sections))


def _against_batch(sweep: Sweep) -> tuple[Block, ...]:
    def bars(figure: str, title: str, **how: Any) -> dict[str, Any]:
        found = [
            (str(row.batch_size), way, value)
            for row in sweep.rows
            for way, run in zip(COLOURS, (row.baseline, row.plan), strict=True)
            if (value := run.headline()[figure]) is not None
        ]
        return charts.grouped(found, COLOURS, title, **how)

    limits = {str(r.batch_size): r.budget_bytes for r in sweep.rows}
    peaks = bars("peak_allocated_bytes", "peak allocated", is_bytes=True, limits=limits)
    text = "save-all is without checkpointing, plan is with it; the red line is the budget."
    times = bars("step_time_ns", "step time", is_bytes=False)
    return Chart(peaks, text, "Peak memory"), Chart(times, "", "Iteration latency")


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
