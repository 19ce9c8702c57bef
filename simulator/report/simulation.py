"""Turn a Trace and a Plan into a page that shows where the memory goes and what saving it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.allocator.question import ask
from simulator.report.page import (
    Block,
    Cell,
    Figure,
    Figures,
    Page,
    Section,
    Table,
    Text,
    bytes_cell,
    known_columns,
    percent_cell,
    time_cell,
    write_page,
)
from simulator.report.sections import activation_blocks, memory_blocks, peak_blocks, recompute_blocks
from simulator.studies import warnings as caveats
from simulator.studies.fit import Fit
from simulator.studies.prediction import Comparison, compare, with_reserved
from traces.measurement import RunFigures
from traces.plan import RESERVED, Plan
from traces.trace import Trace, TraceMeta
from traces.units import show_bytes, show_percent, show_time

if TYPE_CHECKING:
    from simulator.studies.sweep import Sweep


def write_comparison(path: str | Path, c: Comparison, fits: Fit | None = None) -> Path:
    """Write the page for a comparison, whole or not at all; `fits`: the answer about a device.

    Raises:
        EnvironmentProblem: a package that reports need is not installed.
    """
    page = Page(
        title=f"{c.trace.meta.model}: memory of one training step",
        subtitle=describe(c.trace.meta) + f" · planner {c.plan.planner or 'none'}",
        sections=(Section(title="Headline", blocks=headline(c, fits)), *simulation_sections(c)),
    )
    return write_page(path, page)


def write_simulation(path: str | Path, trace: Trace, plan: Plan, budget_bytes: int | None) -> Path:
    """Write the page for one plan, whole or not at all.

    Raises:
        EnvironmentProblem: a package that reports need is not installed.
        PlanError: the plan does not fit the trace.
    """
    return write_comparison(path, with_reserved(compare(trace, plan, budget_bytes), ask(trace.meta)))


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


# Where what an op allocates inside comes from, by the keys of `TraceMeta.workspace`.
TOLD: Final = {
    "measured": "measured for the same call",
    "interpolated": "interpolated from other sizes",
    "rules": "by rules",
    "none": "unknown, counted as nothing",
}


def provenance(trace: Trace) -> str:
    """Where the times and sizes of a trace come from, in words."""
    meta = trace.meta
    target = meta.target or meta.device
    if meta.mode == "real":
        inside = "The workspace of each op was measured."
    else:
        told = ", ".join(f"{n:,} {TOLD[k]}" for k, n in sorted(meta.workspace.items()) if n and k in TOLD)
        inside = f"Workspace inside the ops: {told or 'unknown, counted as nothing'}."
    if meta.mode == "real":
        kind = {"cpu": "the CPU", "cuda": "the GPU"}.get(meta.device, meta.device)
        return f"Op times were measured on {kind} ({target}). {inside}"
    known = meta.workspace.get("measured", 0) + meta.workspace.get("interpolated", 0)
    times = (
        f"Times of {known:,} of {sum(meta.workspace.values()):,} ops come from a device profile, the others are "
        f"estimates from a roofline model of {target}; the step itself was not run."
        if known
        else f"Op times are estimates from a roofline model of {target}: nothing was run."
    )
    return f"{times} Sizes are those of the tensors in the captured graph. {inside}"


def headline(c: Comparison, fits: Fit | None = None) -> tuple[Block, ...]:
    """The figures to read first: peaks, times, budget, and what must be said beside them."""
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
    if c.kept_reserved is not None and c.planned_reserved is not None:
        before_reserved, reserved = c.kept_reserved.figures, c.planned_reserved.figures
        figures.append(
            Figure(
                label="Reserved with the plan",
                value=show_bytes(reserved.peak_reserved_bytes),
                detail=f"{show_bytes(before_reserved.peak_reserved_bytes)} with everything kept; fragmentation "
                f"{show_percent(100 * reserved.fragmentation, digits=1)}",
            )
        )
    if c.budget_bytes is not None:
        of_reserved = c.plan.budget_of == RESERVED and c.planned_reserved is not None
        peak = c.planned_figures.peak_reserved_bytes if of_reserved else after.peak_allocated_bytes
        assert peak is not None
        within = peak <= c.budget_bytes
        room = abs(c.budget_bytes - peak)
        figures.append(
            Figure(
                label="Budget of reserved memory" if of_reserved else "Budget",
                value=show_bytes(c.budget_bytes),
                detail=f"feasible: {show_bytes(room)} below"
                if within
                else f"not met: {show_bytes(room)} too much",
                tone="good" if within else "bad",
            )
        )
    if fits is not None:
        figures.append(
            Figure(
                label=f"Fits {fits.device.name}",
                value="yes" if fits.plan_fits else "no",
                detail=f"{show_bytes(fits.left_bytes)} left" if fits.plan_fits else fits.message,
                tone="good" if fits.plan_fits else "bad",
            )
        )
    rows: tuple[tuple[Cell | str, ...], ...] = (
        (
            "everything kept",
            *_memory_cells(c.kept_figures),
            time_cell(before.step_time_ns),
            percent_cell(0.0),
        ),
        (
            f"plan ({c.plan.planner or 'no planner named'})",
            *_memory_cells(c.planned_figures),
            time_cell(after.step_time_ns),
            percent_cell(c.overhead_percent, signed=True),
        ),
    )
    return (
        Figures(figures=tuple(figures)),
        Text(text=provenance(c.trace) + " Every figure in this section is predicted.", tone="note"),
        *(Text(text=text, tone="warning") for text in caveats.warnings(c)),
        known_columns(
            Table(
                columns=("run", "peak allocated", "in blocks", "peak reserved", "step time", "overhead"),
                rows=rows,
                numbers=frozenset({1, 2, 3, 4, 5}),
            )
        ),
        *_what_if(c),
    )


def _memory_cells(run: RunFigures) -> tuple[Cell, ...]:
    return (
        bytes_cell(run.peak_allocated_bytes),
        bytes_cell(run.peak_block_bytes),
        bytes_cell(run.peak_reserved_bytes),
    )


def _what_if(c: Comparison) -> tuple[Block, ...]:
    """Reserved memory with and without the allocator settings that were asked about."""
    if c.question is None or not c.question.asked:
        return ()
    rows = []
    for way, reserved in (("everything kept", c.kept_reserved), ("with the plan", c.planned_reserved)):
        if reserved is not None and reserved.by_default is not None:
            with_it, without = reserved.figures.peak_reserved_bytes, reserved.by_default.peak_reserved_bytes
            change = percent_cell(100 * (with_it - without) / max(1, without), signed=True)
            rows.append((way, bytes_cell(without), bytes_cell(with_it), change))
    return (
        Table(
            columns=(
                "run",
                "reserved by default",
                f"with {c.question.alloc_conf or 'no settings'}",
                "change",
            ),
            rows=tuple(rows),
            numbers=frozenset({1, 2, 3}),
            caption="Would these settings of PYTORCH_ALLOC_CONF help?",
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
