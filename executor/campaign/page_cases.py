"""Turn records into the tables of single cases: figures and errors, boundaries, and cases without a figure."""

from __future__ import annotations

from collections.abc import Sequence

from executor.campaign.cases import BOUNDARY, NONE
from executor.campaign.errors import LARGE, SLOWDOWN, error_rows, fragmentation_percent
from executor.campaign.record import CALIBRATED, FAILED, INFEASIBLE, NOT_EQUAL, OUT_OF_MEMORY, RULES, Record
from simulator.report.page import Block, Cell, Table, Text, bytes_cell, percent_cell, time_cell
from traces.measurement import RunFigures
from traces.units import show_bytes


def one_line(text: str) -> str:
    """The text with spaces and hyphens at which no line breaks, so that a wide table keeps a label in one line."""
    return text.replace(" ", "\u00a0").replace("-", "\u2011")


def case_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    """Every measured case: memory, reserved memory where there is any, time."""
    cases = [r for r in records if r.case.kind != BOUNDARY and r.measured.peak_allocated_bytes is not None]
    if not cases:
        return (Text(text="No case has been measured."),)
    blocks: list[Block] = [_memory(cases)]
    if any(r.measured.peak_reserved_bytes is not None for r in cases):
        blocks.append(_reserved(cases))
    blocks += [_times(cases), _iterations(cases)]
    return tuple(blocks)


def _errors(r: Record) -> dict[tuple[str, str], float]:
    """(stage, figure) -> signed error of the run that the case is about."""
    run = "keep-all" if r.case.budget == NONE else "plan"
    return {(e.stage, e.figure): e.error for e in error_rows([r]) if e.run == run}


def _error_cell(value: float | None, *, memory: bool = True) -> Cell:
    if value is None:
        return Cell(text="–")
    tone = "bad" if memory and value < -LARGE else "good" if abs(value) < 0.0005 else ""
    return Cell(text=f"{value:+.3f} %", sort=value, tone=tone)


def _memory(cases: Sequence[Record]) -> Table:
    rows = []
    for r in cases:
        errors = _errors(r)
        calibrated = r.predicted.get(CALIBRATED, RunFigures()).peak_allocated_bytes
        real = r.measured.peak_allocated_bytes
        assert real is not None
        difference = None if calibrated is None else calibrated - real
        over = r.budget_bytes is not None and real > r.budget_bytes
        rows.append(
            (
                one_line(r.case.label),
                one_line(r.provenance),
                bytes_cell(r.eager.peak_allocated_bytes),
                bytes_cell(r.keep_all.peak_allocated_bytes),
                bytes_cell(real),
                Cell(text=show_bytes(r.budget_bytes), sort=r.budget_bytes, tone="bad" if over else ""),
                Cell(text="–" if difference is None else f"{difference:+,} B", sort=difference),
                _error_cell(errors.get((CALIBRATED, "allocated"))),
                _error_cell(errors.get((RULES, "allocated"))),
                _verdict(r),
            )
        )
    return Table(
        columns=(
            "case",
            "measured",
            "eager",
            "keep-all",
            "this case",
            "budget",
            "predicted − measured",
            "error, calibrated",
            "error, uncalibrated",
            "verified",
        ),
        rows=tuple(rows),
        numbers=frozenset(range(2, 9)),
        caption=f"Peak allocated. Underestimates of more than {LARGE:g} % and budgets that were exceeded are red.",
    )


def _verdict(r: Record) -> Cell:
    if r.verified is None:
        return Cell(text="not checked", tone="quiet")
    if not r.verified:
        return Cell(text=f"NOT EQUAL: {r.first_difference}", tone="bad")
    return Cell(text="bit-equal" if r.bit_equal else "equal", tone="good")


def _reserved(cases: Sequence[Record]) -> Table:
    rows = []
    for r in cases:
        errors = _errors(r)
        predicted = r.predicted.get(CALIBRATED, RunFigures())
        rows.append(
            (
                one_line(r.case.label),
                one_line(r.provenance),
                bytes_cell(r.measured.peak_reserved_bytes),
                bytes_cell(predicted.peak_reserved_bytes),
                _error_cell(errors.get((CALIBRATED, "reserved"))),
                _error_cell(errors.get((RULES, "reserved"))),
                percent_cell(fragmentation_percent(predicted)),
                percent_cell(fragmentation_percent(r.measured)),
            )
        )
    return Table(
        columns=(
            "case",
            "measured on",
            "reserved",
            "predicted, calibrated",
            "error, calibrated",
            "error, uncalibrated",
            "fragmentation, predicted",
            "fragmentation",
        ),
        rows=tuple(rows),
        numbers=frozenset(range(2, 8)),
        caption="Peak reserved, and fragmentation: reserved over the peak in the allocator's blocks, less one",
    )


def _times(cases: Sequence[Record]) -> Table:
    rows = []
    for r in cases:
        errors = _errors(r)
        slow = {e.stage: e for e in error_rows([r]) if e.figure == SLOWDOWN}
        real = slow.get(CALIBRATED) or slow.get(RULES)
        rows.append(
            (
                one_line(r.case.label),
                one_line(r.provenance),
                time_cell(r.eager.step_time_ns),
                time_cell(r.keep_all.step_time_ns),
                time_cell(r.measured.step_time_ns),
                time_cell(r.predicted.get(CALIBRATED, RunFigures()).step_time_ns),
                _error_cell(errors.get((CALIBRATED, "time")), memory=False),
                _error_cell(errors.get((RULES, "time")), memory=False),
                percent_cell(None if real is None else real.measured, signed=True),
                percent_cell(slow[CALIBRATED].predicted if CALIBRATED in slow else None, signed=True),
                percent_cell(slow[RULES].predicted if RULES in slow else None, signed=True),
            )
        )
    return Table(
        columns=(
            "case",
            "measured",
            "eager",
            "keep-all",
            "this case",
            "predicted, calibrated",
            "error, calibrated",
            "error, uncalibrated",
            "slow-down",
            "predicted, calibrated",
            "predicted, uncalibrated",
        ),
        rows=tuple(rows),
        numbers=frozenset(range(2, 11)),
        caption="Step time, and the slow-down by the plan: its step over the keep-all step, less one",
    )


def _iterations(cases: Sequence[Record]) -> Table:
    rows = []
    for r in cases:
        for run, f in (("eager", r.eager), ("keep-all", r.keep_all), ("plan", r.measured)):
            if not f.peaks_bytes or (run == "plan" and r.case.budget == NONE):
                continue
            if run != "plan" and r.case.budget != NONE:
                continue  # shared by the cases of the step; told with its keep-all case
            steady = Cell(text="steady", tone="good") if f.steady else Cell(text="NOT STEADY", tone="bad")
            first = f.reserved_bytes[0] if f.reserved_bytes else None
            rows.append(
                (
                    one_line(r.case.label if run == "plan" else f"{r.case.step.label} {run}"),
                    one_line(r.provenance),
                    bytes_cell(f.peaks_bytes[0]),
                    bytes_cell(f.peak_allocated_bytes),
                    bytes_cell(first),
                    bytes_cell(f.peak_reserved_bytes),
                    steady,
                )
            )
    return Table(
        columns=(
            "run",
            "measured",
            "allocated, iteration 1",
            "allocated, steady",
            "reserved, iteration 1",
            "reserved, last iteration",
            "iterations from the third on",
        ),
        rows=tuple(rows),
        numbers=frozenset({2, 3, 4, 5}),
        caption="The first iteration and the steady ones",
        folded="The first iteration and the steady ones",
    )


def boundary_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    """Every batch size of every boundary: predicted, and whether it fitted."""
    rows = []
    for r in records:
        for t in r.trials:
            right = None if t.fits is None else t.fits == t.predicted_fits
            verdict = {
                None: Cell(text="not tried", tone="quiet"),
                True: Cell(text="as predicted", tone="good"),
                False: Cell(text="NOT as predicted", tone="bad"),
            }[right]
            rows.append(
                (
                    one_line(r.case.step.label),
                    {NONE: "untouched"}.get(r.case.planner, r.case.planner),
                    one_line(r.provenance),
                    bytes_cell(r.limit_bytes),
                    Cell(text=str(t.batch_size), sort=t.batch_size),
                    bytes_cell(t.predicted.peak_allocated_bytes),
                    bytes_cell(t.predicted.peak_reserved_bytes),
                    "fits" if t.predicted_fits else "does not fit",
                    bytes_cell(t.measured.peak_allocated_bytes),
                    {None: "–", True: "fits", False: "does not fit"}[t.fits],
                    verdict,
                )
            )
    return (
        Text(
            text="The largest batch size that is predicted to fit a limit, and the next larger one, tried. On CUDA the "
            "process may take no more than the limit from the device, and does not fit if it runs out of memory. On "
            "the CPU there is no such limit: there the measured peak is compared with it."
        ),
        Table(
            columns=(
                "step",
                "run",
                "measured",
                "limit",
                "batch",
                "allocated, predicted",
                "reserved, predicted",
                "predicted",
                "allocated, measured",
                "tried",
                "verdict",
            ),
            rows=tuple(rows),
            numbers=frozenset({3, 4, 5, 6, 8}),
        ),
    )


def other_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    """What ran out of memory, what no plan fits, what failed, and the notes of the others."""
    rows = []
    for r in records:
        predicted = r.predicted or r.keep_all_predicted
        best = predicted.get(CALIBRATED) or predicted.get(RULES) or RunFigures()
        if r.status in (OUT_OF_MEMORY, INFEASIBLE, FAILED, NOT_EQUAL):
            tone = "bad" if r.status in (FAILED, NOT_EQUAL) else ""
            rows.append(
                (
                    one_line(r.case.label),
                    one_line(r.provenance),
                    Cell(text=r.status, tone=tone),
                    bytes_cell(best.peak_allocated_bytes),
                    bytes_cell(best.peak_reserved_bytes),
                    r.message,
                )
            )
    notes = dict.fromkeys(f"{r.case.step.label}: {n}" for r in records for n in r.notes)
    told: list[Block] = [Text(text=n, tone="note") for n in notes]
    if not rows:
        return (Text(text="Every case has its figures."), *told)
    return (
        Table(
            columns=("case", "device", "status", "allocated, predicted", "reserved, predicted", "why"),
            rows=tuple(rows),
            numbers=frozenset({3, 4}),
            caption="Predicted figures are the plan's where there is one, else those of everything kept.",
        ),
        *told,
    )
