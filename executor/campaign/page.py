"""Show what a campaign found, predicted beside measured: as tables for a terminal and a page, and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any, Final

from executor.campaign.run import NONE, Book, Result
from simulator.report.page import Page, Section, Text, write_page
from simulator.show.tables import Cell, Table, no, table, yes
from traces.files import to_json

SLOWDOWN: Final = "slow-down"
FIGURES: Final = ("allocated", "blocks", "reserved", "time", SLOWDOWN)  # of `headline`, and one more
MEANING: Final = (
    "Errors are 100·(predicted − measured)/measured, those of slow-downs (the plan's step beside the save-all step) in "
    "points: below 0 the prediction was too low, which is the dangerous side. Predictions know workspaces and times as "
    "they were measured on the device, op by op."
)


def error_rows(book: Book) -> list[dict[str, Any]]:
    """Every figure of every case that is both predicted and measured, and its error (see MEANING)."""
    return [
        {
            "model": r.case.model,
            "case": r.case.label,
            "figure": figure,
            "predicted": predicted,
            "measured": measured,
            "error": (predicted - measured) * (1 if figure == SLOWDOWN else 100.0 / measured),
        }
        for r in book.records
        for figure, (predicted, measured) in _pairs(r).items()
        if None not in (predicted, measured) and (measured or figure == SLOWDOWN)
    ]


def _pairs(r: Result) -> dict[str, tuple[Any, Any]]:
    """Figure -> predicted and measured."""
    if (m := r.measurement) is None:
        return {}
    both = zip(m.predicted.headline().values(), m.measured.headline().values(), strict=True)
    slow = (None, None) if r.case.budget == NONE else (m.predicted_slowdown_percent, m.slowdown_percent)
    return dict(zip(FIGURES, [*both, slow], strict=True))


def aggregates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The errors by figure: their mean, the median of their sizes, the lowest and the highest."""
    return [
        {
            "figure": figure,
            "rows": len(errors),
            "mean": statistics.fmean(errors),
            "median": statistics.median(map(abs, errors)),
            "worst_under": min((e for e in errors if e < 0), default=None),
            "worst_over": max((e for e in errors if e > 0), default=None),
        }
        for figure in FIGURES
        if (errors := [r["error"] for r in rows if r["figure"] == figure])
    ]


def answer(book: Book) -> dict[str, Any]:
    """The object that `execute campaign --json` prints."""
    rows = error_rows(book)
    return {
        "campaign": book.name,
        "asked": book.asked,
        "statuses": dict(Counter(r.status for r in book.records)),
        "errors": aggregates(rows),
        "rows": rows,
        "cases": [{"label": r.case.label, **to_json(r)} for r in book.records],
    }


def summary(book: Book) -> str:
    """The campaign to read: every case, then the errors in aggregate."""
    parts = ", ".join(f"{n} {status}" for status, n in Counter(r.status for r in book.records).items())
    told = f"{len(book.records)} of {book.asked} cases: {parts or 'none finished'}"
    return "\n".join([*cases(book).lines(), "", told, "", *errors(book).lines()])


def cases(book: Book) -> Table:
    """One row a case: its peak of allocated bytes and its slow-down, predicted beside measured, and what is wrong."""

    def verdict(r: Result) -> Cell:
        if r.measurement is None or r.message:
            return no(f"{r.status}: {r.message}")
        if r.measurement.verified is None:
            return Cell("not checked", tone="quiet")
        return yes("within noise" if any(r.measurement.max_abs_difference.values()) else "equal")

    def pair(figure: str, at: int) -> Any:
        return lambda r: _pairs(r).get(figure, (None, None))[at]

    return table(
        book.records,
        [
            ("case", "", lambda r: r.case.label),
            ("predicted", "count", pair("allocated", 0)),
            ("measured", "count", pair("allocated", 1)),
            ("eager", "count", lambda r: r.measurement and r.measurement.eager.peak_allocated_bytes),
            ("budget", "bytes", lambda r: r.measurement and r.measurement.budget_bytes),
            ("slow-down, predicted", "+percent", pair(SLOWDOWN, 0)),
            ("measured", "+percent", pair(SLOWDOWN, 1)),
            ("beside eager", "", verdict),
        ],
        caption="Peak of allocated bytes.",
    ).known()


def errors(book: Book) -> Table:
    """The errors of each figure, in percent, of slow-downs in points."""
    numbers = {"mean": "mean", "median size": "median", "lowest": "worst_under", "highest": "worst_over"}
    return table(
        aggregates(error_rows(book)),
        [
            ("figure", "", lambda a: a["figure"]),
            ("runs", "count", lambda a: a["rows"]),
            *((title, "points", lambda a, name=name: a[name]) for title, name in numbers.items()),
        ],
        caption="Errors in percent, of slow-downs in points.",
    )


def write_campaign(path: str | Path, book: Book) -> Path:
    """Write the page, whole or not at all. Raises EnvironmentProblem if a package that reports need is missing."""
    found = [r.measurement for r in book.records if r.measurement is not None]
    rows = [(k.replace("_", " "), str(v)) for k, v in to_json(book.method).items()]
    rows += [(k, v) for m in found[:1] for k, v in sorted(m.environment.items()) if v]
    sections = (
        Section("Errors", (Text(MEANING), errors(book))),
        Section("Every case", (cases(book),)),
        Section("Provenance", (Table(columns=("", "value"), rows=tuple(rows)),)),
    )
    title = f"Campaign {book.name}: how wrong the predictions were"
    where = f"measured on {found[0].place}" if found else "nothing was measured"
    return write_page(path, Page(title, f"{len(book.records)} of {book.asked} cases · {where}", sections))
