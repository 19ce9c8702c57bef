"""The tables of a campaign, for a terminal, a manual and its page alike, and its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from executor.campaign import errors
from executor.campaign.errors import ALLOCATED, BLOCKS, RESERVED, SLOWDOWN, TIME, Aggregate, ErrorRow, row_of
from executor.campaign.record import CALIBRATED, DONE, FAILED, NOT_EQUAL, RULES, Book, Record
from simulator.show.tables import NUMBER, SHOWN, UNKNOWN, Cell, Table, no, percent_cell, table, yes
from traces.files.json_records import to_json
from traces.records.measurement import RunFigures
from traces.units import show_bytes

# Of each figure: how it is shown, and its title.
KINDS: Final = {
    ALLOCATED: ("bytes", "peak allocated"),
    BLOCKS: ("bytes", "peak in the allocator's blocks"),
    RESERVED: ("bytes", "peak reserved"),
    TIME: ("time", "step time"),
    SLOWDOWN: ("percent", "slow-down by the plan"),
}
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


def figures(rows: Iterable[ErrorRow]) -> Table:
    """Every figure of every run, measured beside predicted."""
    groups: dict[tuple[str, str], dict[str, ErrorRow]] = {}
    for r in rows:
        groups.setdefault((r.case, r.figure), {})[r.stage] = r

    def shown(name: str, *stages: str) -> Callable[[dict[str, ErrorRow]], Cell]:
        def cell(group: dict[str, ErrorRow]) -> Cell:
            r = next((group[s] for s in stages if s in group), None)
            if r is None or name != "error":
                return Cell(UNKNOWN) if r is None else SHOWN[KINDS[r.figure][0]](getattr(r, name))
            tone = "bad" if r.figure in errors.MEMORY and r.error < -errors.LARGE else ""
            tone = "good" if abs(r.error) < 0.0005 else tone
            return Cell(f"{r.error:+.3f} {'points' if r.figure == SLOWDOWN else '%'}", r.error, tone)

        return cell

    return table(
        groups.values(),
        [
            ("run", "", lambda group: next(iter(group.values())).case),
            ("figure", "", lambda group: KINDS[next(iter(group.values())).figure][1]),
            ("measured", NUMBER, shown("measured", *errors.STAGES)),
            ("predicted, calibrated", NUMBER, shown("predicted", CALIBRATED)),
            ("error, calibrated", NUMBER, shown("error", CALIBRATED)),
            ("predicted, uncalibrated", NUMBER, shown("predicted", RULES)),
            ("error, uncalibrated", NUMBER, shown("error", RULES)),
        ],
        caption="Every figure of every run. The slow-down by a plan: its step over the keep-all step, less one.",
    )


def without_figures(records: Sequence[Record]) -> Table:
    """What ran out of memory, what no plan fits, and what failed."""

    def best(r: Record) -> RunFigures:
        return errors.best(r.predicted or r.keep_all_predicted)

    return table(
        [r for r in records if r.status != DONE],
        [
            CASE,
            ("status", "", lambda r: Cell(r.status, tone="bad" if r.status in (FAILED, NOT_EQUAL) else "")),
            ("allocated, predicted", "bytes", lambda r: best(r).peak_allocated_bytes),
            ("reserved, predicted", "bytes", lambda r: best(r).peak_reserved_bytes),
            ("why", "", lambda r: r.message),
        ],
        caption="Predicted figures are the plan's where there is one, else those of everything kept.",
    )


def _predicted(stage: str) -> Callable[[Record], Cell]:
    """The predicted peak, and in brackets what it is off."""

    def cell(r: Record) -> Cell:
        e = row_of(r, stage, ALLOCATED)
        if e is None:
            return Cell(UNKNOWN)
        tone = "bad" if e.error < -errors.LARGE else "" if e.error else "good"
        return Cell(f"{e.predicted:,} ({e.predicted - e.measured:+,})", e.predicted, tone)

    return cell


def _budget(r: Record) -> Cell:
    over = r.budget_bytes is not None and (r.peak or 0) > r.budget_bytes
    return Cell(show_bytes(r.budget_bytes), r.budget_bytes, "bad" if over else "")


def _verdict(r: Record) -> Cell:
    if r.verified is None:
        return Cell("not checked", tone="quiet")
    if not r.verified:
        return no(f"NOT EQUAL: {r.first_difference}")
    return yes("yes" if r.bit_equal else "equal")
