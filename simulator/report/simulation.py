"""Turn a Trace and a Plan into a page that shows where the memory goes and what saving it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.comparison import Comparison, compare
from simulator.report.page import (
    Block,
    Figure,
    Figures,
    Page,
    Section,
    Table,
    Text,
    bytes_cell,
    percent_cell,
    time_cell,
    write_page,
)
from simulator.report.sections import activation_blocks, memory_blocks, peak_blocks, recompute_blocks
from traces.people import show_bytes, show_percent, show_time
from traces.plan import Plan
from traces.trace import Trace, TraceMeta

if TYPE_CHECKING:
    from simulator.sweep import Sweep


def write_simulation(path: str | Path, trace: Trace, plan: Plan, budget_bytes: int | None) -> Path:
    """Write the page for one plan, whole or not at all.

    Raises:
        EnvironmentProblem: a package that reports need is not installed.
        PlanError: the plan does not fit the trace.
    """
    c = compare(trace, plan, budget_bytes)
    page = Page(
        title=f"{trace.meta.model}: memory of one training step",
        subtitle=describe(trace.meta) + f" · planner {plan.planner or 'none'}",
        sections=(Section(title="Headline", blocks=headline(c)), *simulation_sections(c)),
    )
    return write_page(path, page)


def write_sweep(
    path: str | Path,
    sweep: Sweep,
    *,
    analysis: str = "",
    root: str | Path | None = None,
    measured_on: str = "",
) -> Path:
    """Write the page for a sweep over batch sizes; see `simulator.report.sweep`."""
    from simulator.report.sweep import sweep_page

    return write_page(
        path, sweep_page(sweep, analysis=analysis, root=root or Path(path).parent, measured_on=measured_on)
    )


def simulation_sections(
    c: Comparison, measured_curve: Sequence[tuple[int, int]] | None = None
) -> tuple[Section, ...]:
    """Every section about the prediction but the headline."""
    return (
        Section(title="Memory over the step", blocks=memory_blocks(c, measured_curve)),
        Section(title="What holds the memory at the peak", blocks=peak_blocks(c)),
        Section(title="What is recomputed, and at what cost", blocks=recompute_blocks(c)),
        Section(title="Static analysis of activations", blocks=activation_blocks(c.trace, c.graph, c.plan)),
        Section(title="Model and trace", blocks=(metadata(c.trace),)),
    )


def describe(meta: TraceMeta) -> str:
    """Model, batch, dtype and optimizer in one line."""
    parts = [meta.model, f"batch {meta.batch_size}"]
    if meta.options.get("seq_len"):
        parts.append(f"sequence length {meta.options['seq_len']}")
    return " · ".join([*parts, meta.dtype, meta.optimizer or "no optimizer"])


def provenance(trace: Trace) -> str:
    """Where the times and sizes of a trace come from, in words."""
    meta = trace.meta
    target = meta.target or meta.device
    if any(trace.ops.events):
        inside = "The workspace of each op was measured."
    else:
        inside = "Workspace inside the ops was not measured and counts as nothing."
    if meta.mode == "real":
        kind = {"cpu": "the CPU", "cuda": "the GPU"}.get(meta.device, meta.device)
        return f"Op times were measured on {kind} ({target}). {inside}"
    return (
        f"Op times are estimates from a roofline model of {target}: nothing was run. Sizes are those of the "
        f"tensors in the captured graph. {inside}"
    )


def headline(c: Comparison) -> tuple[Block, ...]:
    """The figures to read first: peaks, times, budget."""
    before, after = c.kept_timeline, c.planned_timeline
    saved = before.peak_allocated_bytes - after.peak_allocated_bytes
    share = 100.0 * saved / before.peak_allocated_bytes if before.peak_allocated_bytes else 0.0
    figures = [
        Figure(
            label="Peak, everything kept",
            value=show_bytes(before.peak_allocated_bytes),
            detail=f"step time {show_time(before.step_time_ns)}",
        ),
        Figure(
            label="Peak with the plan",
            value=show_bytes(after.peak_allocated_bytes),
            detail=f"{show_percent(-share, signed=True, digits=1)}, step time {show_time(after.step_time_ns)}",
        ),
        Figure(
            label="Overhead in time",
            value=show_percent(c.overhead_percent, signed=True),
            detail=f"{after.recomputed_ops:,} ops run again for {len(c.plan.recomputed):,} storages",
        ),
    ]
    if c.budget_bytes is not None:
        fits = after.peak_allocated_bytes <= c.budget_bytes
        room = abs(c.budget_bytes - after.peak_allocated_bytes)
        figures.append(
            Figure(
                label="Budget",
                value=show_bytes(c.budget_bytes),
                detail=f"feasible: {show_bytes(room)} below"
                if fits
                else f"not met: {show_bytes(room)} too much",
                tone="good" if fits else "bad",
            )
        )
    rows = (
        (
            "everything kept",
            bytes_cell(before.peak_allocated_bytes),
            time_cell(before.step_time_ns),
            percent_cell(0.0),
        ),
        (
            f"plan ({c.plan.planner or 'no planner named'})",
            bytes_cell(after.peak_allocated_bytes),
            time_cell(after.step_time_ns),
            percent_cell(c.overhead_percent, signed=True),
        ),
    )
    return (
        Figures(figures=tuple(figures)),
        Text(text=provenance(c.trace) + " Every figure in this section is predicted.", tone="note"),
        Table(
            columns=("run", "peak allocated", "step time", "overhead"),
            rows=rows,
            numbers=frozenset({1, 2, 3}),
        ),
    )


def metadata(trace: Trace) -> Table:
    """What the trace records about itself."""
    meta = trace.meta
    counts = ", ".join(
        f"{sum(1 for q in trace.ops.phase if q == p):,} {p}" for p in dict.fromkeys(trace.ops.phase)
    )
    rows = [
        ("model", meta.model),
        ("options", ", ".join(f"{k}={v}" for k, v in sorted(meta.options.items()))),
        ("batch size", str(meta.batch_size)),
        ("dtype", meta.dtype),
        ("optimizer", meta.optimizer),
        ("seed", str(meta.seed)),
        ("mode", f"{meta.mode}: {provenance(trace)}"),
        ("graph of device", meta.device),
        ("target of the times", meta.target),
        ("torch", meta.torch_version),
        ("versions", ", ".join(f"{k} {v}" for k, v in sorted(meta.versions.items()))),
        ("allocator settings", meta.alloc_conf),
        ("ops", f"{len(trace.ops):,} ({counts})"),
        ("storages", f"{len(trace.storages):,}"),
        ("floating-point operations", f"{sum(trace.ops.flops):,}"),
        ("resident throughout", show_bytes(trace.resident_bytes)),
        ("fingerprint", meta.fingerprint),
    ]
    return Table(columns=("", "value"), rows=tuple((k, v) for k, v in rows if v))
