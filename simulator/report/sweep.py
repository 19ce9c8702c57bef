"""Turn a Sweep into a page: memory, time, peak breakdown and activations against the batch size."""

from __future__ import annotations

from pathlib import Path

from simulator.report import bars
from simulator.report.page import (
    Block,
    Cell,
    Chart,
    Figure,
    Figures,
    Page,
    Section,
    Table,
    Text,
    bytes_cell,
    count_cell,
    known_columns,
    paragraphs,
    percent_cell,
    time_cell,
)
from simulator.report.sections import activation_blocks
from simulator.studies.sweep import EAGER, KEEP_ALL, PLAN, Sweep, SweepRow
from traces.errors import LowtideError
from traces.measurement import RunFigures, signed_error_percent
from traces.trace import CATEGORIES
from traces.units import show_bytes, show_percent

WAYS = {EAGER: "eager", KEEP_ALL: "keep-all", PLAN: "plan"}


def sweep_page(sweep: Sweep, *, root: str | Path, analysis: str = "", measured_on: str = "") -> Page:
    """The page of a sweep.

    Args:
        sweep: the predictions, with measurements where something was run.
        root: the directory that the rows' `trace_path` and `plan_path` are relative to.
        analysis: the author's text, paragraphs set apart by empty lines.
        measured_on: the device behind the measured figures, for their labels ("CPU", "NVIDIA H200").
    """
    where = measured_on or "this sweep's device"
    sections: list[Section] = (
        [Section(title="Analysis", blocks=paragraphs(analysis))] if analysis.strip() else []
    )
    sections += [
        Section(title="Summary", blocks=_summary(sweep, where)),
        Section(
            title="Peak memory and iteration latency against batch size", blocks=_against_batch(sweep, where)
        ),
        Section(title="Peak memory breakdown", blocks=_breakdown(sweep)),
        Section(title="Computation and memory statistics", blocks=_statistics(sweep)),
        Section(title="Static analysis of activations", blocks=_activations(sweep, Path(root))),
    ]
    if any(r.measured for r in sweep.rows):
        sections.append(Section(title="Predicted beside measured", blocks=(_errors(sweep, where),)))
    options = ", ".join(f"{k} {v}" for k, v in sorted(sweep.options.items()) if v not in (None, ""))
    return Page(
        title=f"{sweep.model}: with and without checkpointing, by batch size",
        subtitle=f"batch sizes {', '.join(str(b) for b in _batches(sweep))} · {options}",
        sections=tuple(sections),
    )


def _batches(sweep: Sweep) -> tuple[int, ...]:
    return tuple(dict.fromkeys(r.batch_size for r in sweep.rows))


def _planners(sweep: Sweep) -> tuple[str, ...]:
    return tuple(dict.fromkeys(r.planner for r in sweep.rows))


def _group(sweep: Sweep, row: SweepRow) -> str:
    """The label of a row's bars: its batch size, and its planner where the sweep has several."""
    return str(row.batch_size) if len(_planners(sweep)) < 2 else f"{row.batch_size} · {row.planner}"


def _summary(sweep: Sweep, where: str) -> tuple[Block, ...]:
    fitting = [r for r in sweep.rows if r.feasible]
    figures = [
        Figure(
            label="Budgets met",
            value=f"{len(fitting)} of {len(sweep.rows)}",
            detail=f"planner {', '.join(_planners(sweep)) or 'none'}",
            tone="good" if len(fitting) == len(sweep.rows) else "bad",
        )
    ]
    if fitting:
        largest = max(fitting, key=lambda r: r.batch_size)
        figures += [
            Figure(
                label=f"Peak at batch {largest.batch_size}, predicted",
                value=show_bytes(largest.plan.peak_allocated_bytes),
                detail=f"{show_bytes(largest.baseline.peak_allocated_bytes)} with everything kept",
            ),
            Figure(
                label=f"Overhead at batch {largest.batch_size}, predicted",
                value=show_percent(largest.overhead_percent, signed=True),
                detail=f"{largest.recomputed_ops:,} ops run again",
            ),
        ]
    rows = tuple(
        (
            count_cell(r.batch_size),
            r.planner,
            bytes_cell(r.budget_bytes),
            bytes_cell(r.baseline.peak_allocated_bytes),
            bytes_cell(r.plan.peak_allocated_bytes),
            bytes_cell(r.baseline.peak_reserved_bytes),
            bytes_cell(r.plan.peak_reserved_bytes),
            time_cell(r.baseline.step_time_ns),
            time_cell(r.plan.step_time_ns),
            percent_cell(r.overhead_percent, signed=True),
            Cell(text="met", tone="good") if r.feasible else Cell(text=r.message or "not met", tone="bad"),
        )
        for r in sweep.rows
    )
    if any(r.measured for r in sweep.rows):
        note = f"Figures called measured were measured on {where}; all others are predicted."
    else:
        note = "Every figure on this page is predicted; nothing was run."
    source = f" Predicted times are for the target {sweep.target}." if sweep.target else ""
    return (
        Figures(figures=tuple(figures)),
        Text(text=note + source, tone="note"),
        *(Text(text=text, tone="warning") for text in sweep.warnings),
        known_columns(
            Table(
                columns=(
                    "batch",
                    "planner",
                    "budget",
                    "peak, all kept",
                    "peak, plan",
                    "reserved, all kept",
                    "reserved, plan",
                    "step, all kept",
                    "step, plan",
                    "overhead",
                    "verdict",
                ),
                rows=rows,
                numbers=frozenset({0, 2, 3, 4, 5, 6, 7, 8, 9}),
                caption="Predicted",
            )
        ),
    )


def _bars(sweep: Sweep, figure: str, *, predicted: bool, measured: bool, where: str) -> list[bars.Bar]:
    """Bars of one of RunFigures' figures; unknown figures have no bar."""
    out: list[bars.Bar] = []

    def put(row: SweepRow, way: str, run: RunFigures, real: bool) -> None:
        value = run.headline()[figure]
        if value is not None:
            place = where if real else ""
            out.append(bars.Bar(group=_group(sweep, row), way=way, measured=real, value=value, where=place))

    for row in sweep.rows:
        if predicted:
            put(row, "keep-all", row.baseline, False)
            if row.feasible:
                put(row, "plan", row.plan, False)
        if measured:
            for key, way in WAYS.items():
                if key in row.measured:
                    put(row, way, row.measured[key], True)
    return out


def _against_batch(sweep: Sweep, where: str) -> tuple[Block, ...]:
    peak, time = "peak_allocated_bytes", "step_time_ns"
    group = "mini-batch size"
    limits = {_group(sweep, r): r.budget_bytes for r in sweep.rows}
    blocks: list[Block] = [
        Chart(
            spec=bars.grouped(
                _bars(sweep, peak, predicted=True, measured=True, where=where),
                title="peak allocated",
                group_title=group,
                is_bytes=True,
                limits=limits,
            ),
            title="Peak memory",
            caption="keep-all is without checkpointing, plan is with it. Pale bars with a dashed edge are "
            "predicted, solid bars measured; the red line is the budget.",
        ),
        Chart(
            spec=bars.grouped(
                _bars(sweep, time, predicted=True, measured=False, where=where),
                title="step time, predicted",
                group_title=group,
                is_bytes=False,
            ),
            title="Iteration latency, predicted",
            caption=f"For the target {sweep.target}." if sweep.target else "",
        ),
    ]
    real = _bars(sweep, time, predicted=False, measured=True, where=where)
    if real:
        # A chart of its own: the target of the predictions is often another device than the one that ran.
        spec = bars.grouped(real, title="step time, measured", group_title=group, is_bytes=False)
        blocks.append(Chart(spec=spec, title=f"Iteration latency, measured on {where}"))
    return tuple(blocks)


def _breakdown(sweep: Sweep) -> tuple[Block, ...]:
    parts: list[tuple[str, str, dict[str, int]]] = []
    rows: list[tuple[Cell | str, ...]] = []
    for r in sweep.rows:
        for way, part in (("keep-all", r.breakdown_baseline), ("plan", r.breakdown_plan)):
            if part:
                parts.append((_group(sweep, r), way, part))
                cells = (bytes_cell(part.get(c, 0)) for c in CATEGORIES)
                rows.append((_group(sweep, r), way, *cells, bytes_cell(sum(part.values()))))
    return (
        Chart(
            spec=bars.peak_by_category_and_group(parts, group_title="mini-batch size"),
            caption="What is allocated at the predicted peak, without checkpointing (keep-all) and with it "
            "(plan). The parts sum to the peak.",
        ),
        Table(
            columns=("batch", "run", *CATEGORIES, "peak"),
            rows=tuple(rows),
            numbers=frozenset({0, *range(2, 3 + len(CATEGORIES))}),
        ),
    )


def _statistics(sweep: Sweep) -> tuple[Block, ...]:
    rows = tuple(
        (
            _group(sweep, r),
            count_cell(r.ops),
            count_cell(r.storages),
            Cell(text=f"{r.flops / 1e9:,.1f}", sort=r.flops),
            bytes_cell(r.parameter_bytes),
            bytes_cell(r.activation_bytes),
            count_cell(r.recomputed_ops) if r.feasible else "–",
            time_cell(r.baseline.step_time_ns),
        )
        for r in sweep.rows
    )
    return (
        Table(
            columns=(
                "batch",
                "ops",
                "storages",
                "GFLOP a step",
                "parameters",
                "activations kept",
                "ops run again",
                "step, all kept (predicted)",
            ),
            rows=rows,
            numbers=frozenset(range(8)),
            caption="One training step, forward, backward and optimizer; floating-point operations are those "
            "with everything kept.",
        ),
    )


def _activations(sweep: Sweep, root: Path) -> tuple[Block, ...]:
    """The analysis of the largest batch whose trace is still there, with its plan's actions."""
    from simulator.core.graph import analyse
    from traces.plan import Plan
    from traces.store import load

    for row in sorted(sweep.rows, key=lambda r: -r.batch_size):
        if not row.trace_path or not (root / row.trace_path).is_dir():
            continue
        try:
            trace = load(root / row.trace_path)
            plan = Plan(meta=trace.meta)
            if row.plan_path and (root / row.plan_path).is_file():
                plan = Plan.load(root / row.plan_path)
        except LowtideError as error:
            return (
                Text(text=f"The trace for batch {row.batch_size} cannot be shown: {error}", tone="warning"),
            )
        return (
            Text(text=f"At batch size {row.batch_size}, the largest whose trace is at hand.", tone="note"),
            *activation_blocks(trace, analyse(trace), plan),
        )
    return (
        Text(text="No trace of this sweep was kept, so its activations cannot be listed.", tone="warning"),
    )


def _errors(sweep: Sweep, where: str) -> Table:
    rows: list[tuple[Cell | str, ...]] = []
    for r in sweep.rows:
        for key, predicted in ((EAGER, r.baseline), (KEEP_ALL, r.baseline), (PLAN, r.plan)):
            if key not in r.measured:
                continue
            real = r.measured[key]
            error = signed_error_percent(predicted, real)
            rows.append(
                (
                    _group(sweep, r),
                    WAYS[key],
                    bytes_cell(predicted.peak_allocated_bytes),
                    bytes_cell(real.peak_allocated_bytes),
                    percent_cell(error["peak_allocated_bytes"], signed=True),
                    bytes_cell(predicted.peak_reserved_bytes),
                    bytes_cell(real.peak_reserved_bytes),
                    percent_cell(error["peak_reserved_bytes"], signed=True),
                    time_cell(predicted.step_time_ns),
                    time_cell(real.step_time_ns),
                )
            )
    return known_columns(
        Table(
            columns=(
                "batch",
                "run",
                "peak, predicted",
                "peak, measured",
                "error",
                "reserved, predicted",
                "reserved, measured",
                "error",
                f"step, predicted{f' ({sweep.target})' if sweep.target else ''}",
                f"step, measured on {where}",
            ),
            rows=tuple(rows),
            numbers=frozenset({0, 2, 3, 4, 5, 6, 7, 8, 9}),
            caption=f"Measured on {where}. Error is 100·(predicted − measured)/measured. Predicted times are for "
            "the target, so they compare with measured times only where both are the same device. Eager is set beside "
            "the prediction for everything kept.",
        )
    )
