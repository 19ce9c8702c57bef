"""The tables of a campaign, for a terminal, a manual and its page alike, and its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from executor.campaign import errors
from executor.campaign.errors import ALLOCATED, RESERVED, SLOWDOWN, TIME, Aggregate, row_of
from executor.campaign.record import CALIBRATED, DONE, FAILED, NOT_EQUAL, RULES, Book, Record
from simulator.show.tables import NUMBER, UNKNOWN, Cell, Table, no, percent_cell, table, yes
from traces.files.json_records import to_json
from traces.records.measurement import RunFigures
from traces.units import show_bytes

CASE: Final = ("case", "", lambda r: r.case.label)


def answer(book: Book) -> dict[str, Any]:
    """The object that `execute campaign --json` prints."""
    rows = errors.error_rows(book.records)
    return {
        "campaign": book.name,
        "device": book.method.device,
        "asked": book.asked,
        "finished": len(book.records),
        "statuses": counts(book),
        "ran_out_unforeseen": [r.case.label for r in errors.ran_out_unforeseen(book.records)],
        "errors": [asdict(a) for a in errors.aggregates(rows)],
        "rows": [{**asdict(r), "error": r.error} for r in rows],
        "cases": [{"label": r.case.label, **to_json(r)} for r in book.records],
    }


def counts(book: Book) -> dict[str, int]:
    """Records by status, in the order of their first appearance."""
    return dict(Counter(r.status for r in book.records))


def summary(book: Book) -> str:
    """The campaign to read: every case, then the errors in aggregate."""
    lines = memory(book.records).without("keep-all", "budget").lines()
    lines += [f"{r.case.label}: {r.status}: {r.message}" for r in book.records if r.status != DONE]
    parts = ", ".join(f"{n} {status}" for status, n in counts(book).items())
    lines += ["", f"{len(book.records)} of {book.asked} cases: {parts or 'none finished'}"]
    if unforeseen := errors.ran_out_unforeseen(book.records):
        names = "; ".join(r.case.label for r in unforeseen)
        lines.append(f"predicted to fit, and ran out of memory (no error below tells of it): {names}")
    rewritten = [a for a in errors.aggregates(errors.error_rows(book.records)) if not a.eager]
    return "\n".join([*lines, "", *in_aggregate(rewritten, "").lines()])


# ---------------------------------------------------------------------------------------------------------------------
# Errors in aggregate

LIMITS: Final = "/".join(f"{limit:g}" for limit in errors.WITHIN)


def in_aggregate(found: Iterable[Aggregate], caption: str) -> Table:
    """A row for each aggregate."""

    def error(name: str, sign: str = "") -> Callable[[Aggregate], Cell]:
        def cell(a: Aggregate) -> Cell:
            value, unit = getattr(a, name), "points" if a.figure == SLOWDOWN else "%"
            return Cell("none", tone="quiet") if value is None else Cell(f"{value:{sign}.3f} {unit}", value)

        return cell

    return table(
        found,
        [
            ("figure", "", lambda a: a.figure),
            ("prediction", "", lambda a: errors.STAGE_LABELS[a.stage]),
            ("measured", "", lambda a: a.provenance),
            ("runs", "count", lambda a: a.rows),
            ("mean, signed", NUMBER, error("mean", "+")),
            ("mean error", NUMBER, error("mape")),
            ("median error", NUMBER, error("median")),
            ("lowest", NUMBER, error("worst_under", "+")),
            ("highest", NUMBER, error("worst_over", "+")),
            (
                f"within {LIMITS}",
                NUMBER,
                lambda a: Cell("/".join(f"{s:.0f}" for s in a.within) + " %", a.within[0]),
            ),
            ("too low", NUMBER, lambda a: percent_cell(a.under_share, digits=0)),
        ],
        caption=caption,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Single cases


def memory(records: Sequence[Record]) -> Table:
    """Peak allocated of every measured case, in bytes."""
    return table(
        [r for r in records if r.peak is not None],
        [
            CASE,
            ("predicted, calibrated", NUMBER, _predicted(CALIBRATED)),
            ("predicted, uncalibrated", NUMBER, _predicted(RULES)),
            ("measured", "count", lambda r: r.peak),
            ("eager, measured", "count", lambda r: r.eager.peak_allocated_bytes),
            ("keep-all", "bytes", lambda r: r.keep_all.peak_allocated_bytes),
            ("budget", NUMBER, _budget),
            ("bit-equal", "", _verdict),
        ],
        caption=f"Peak allocated. Underestimates of more than {errors.LARGE:g} % and exceeded budgets are red.",
    )


def reserved(records: Sequence[Record]) -> Table:
    """Peak reserved of every case of which it was measured."""
    return table(
        [r for r in records if r.measured.peak_reserved_bytes is not None],
        [
            CASE,
            ("reserved", "bytes", lambda r: r.measured.peak_reserved_bytes),
            ("predicted, calibrated", "bytes", lambda r: _calibrated(r).peak_reserved_bytes),
            ("error, calibrated", NUMBER, _error(CALIBRATED, RESERVED)),
            ("error, uncalibrated", NUMBER, _error(RULES, RESERVED)),
            ("fragmentation, predicted", "percent", lambda r: fragmentation_percent(_calibrated(r))),
            ("fragmentation", "percent", lambda r: fragmentation_percent(r.measured)),
        ],
        caption="Peak reserved, and fragmentation: reserved over the peak in the allocator's blocks, less one",
    )


def times(records: Sequence[Record]) -> Table:
    """Step times of every measured case."""
    return table(
        [r for r in records if r.peak is not None],
        [
            CASE,
            ("eager", "time", lambda r: r.eager.step_time_ns),
            ("keep-all", "time", lambda r: r.keep_all.step_time_ns),
            ("this case", "time", lambda r: r.measured.step_time_ns),
            ("predicted, calibrated", "time", lambda r: _calibrated(r).step_time_ns),
            ("error, calibrated", NUMBER, _error(CALIBRATED, TIME)),
            ("error, uncalibrated", NUMBER, _error(RULES, TIME)),
            ("slow-down", "+percent", _slowdown("", "measured")),
            ("predicted, calibrated", "+percent", _slowdown(CALIBRATED, "predicted")),
            ("predicted, uncalibrated", "+percent", _slowdown(RULES, "predicted")),
        ],
        caption="Step time, and the slow-down by the plan: its step over the keep-all step, less one",
    )


def without_figures(records: Sequence[Record]) -> Table:
    """What ran out of memory, what no plan fits, and what failed."""
    return table(
        [r for r in records if r.status != DONE],
        [
            CASE,
            ("status", "", lambda r: Cell(r.status, tone="bad" if r.status in (FAILED, NOT_EQUAL) else "")),
            ("allocated, predicted", "bytes", lambda r: _best(r).peak_allocated_bytes),
            ("reserved, predicted", "bytes", lambda r: _best(r).peak_reserved_bytes),
            ("why", "", lambda r: r.message),
        ],
        caption="Predicted figures are the plan's where there is one, else those of everything kept.",
    )


def fragmentation_percent(figures: RunFigures) -> float | None:
    """Peak reserved over the peak in blocks, less one, in percent; None where a figure is unknown."""
    if not figures.peak_block_bytes or figures.peak_reserved_bytes is None:
        return None
    return 100.0 * (figures.peak_reserved_bytes / figures.peak_block_bytes - 1.0)


def _best(r: Record) -> RunFigures:
    return errors.best(r.predicted or r.keep_all_predicted)


def _calibrated(r: Record) -> RunFigures:
    return r.predicted.get(CALIBRATED, RunFigures())


def _predicted(stage: str) -> Callable[[Record], Cell]:
    """The predicted peak, and in brackets what it is off."""

    def cell(r: Record) -> Cell:
        e = row_of(r, stage, ALLOCATED)
        if e is None:
            return Cell(UNKNOWN)
        tone = "bad" if e.error < -errors.LARGE else "" if e.error else "good"
        return Cell(f"{e.predicted:,} ({e.predicted - e.measured:+,})", e.predicted, tone)

    return cell


def _error(stage: str, figure: str) -> Callable[[Record], Cell]:
    """The cell of one error of the run that a case is about; memory that was predicted too low is red."""

    def cell(r: Record) -> Cell:
        e = row_of(r, stage, figure)
        if e is None:
            return Cell(UNKNOWN)
        tone = "good" if abs(e.error) < 0.0005 else ""
        return Cell(
            f"{e.error:+.3f} %",
            e.error,
            "bad" if figure in errors.MEMORY and e.error < -errors.LARGE else tone,
        )

    return cell


def _slowdown(stage: str, which: str) -> Callable[[Record], float | None]:
    return lambda r: getattr(row_of(r, stage, SLOWDOWN), which, None)


def _budget(r: Record) -> Cell:
    over = r.budget_bytes is not None and (r.peak or 0) > r.budget_bytes
    return Cell(show_bytes(r.budget_bytes), r.budget_bytes, "bad" if over else "")


def _verdict(r: Record) -> Cell:
    if r.verified is None:
        return Cell("not checked", tone="quiet")
    if not r.verified:
        return no(f"NOT EQUAL: {r.first_difference}")
    return yes("yes" if r.bit_equal else "equal")
