"""The page of a campaign: how wrong the predictions were, in aggregate, by model and by case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from executor.campaign import errors, tables
from executor.campaign.errors import ALLOCATED, FIGURES, MEMORY, RESERVED, STAGE_LABELS, Aggregate, ErrorRow
from executor.campaign.record import NOT_EQUAL, OUT_OF_MEMORY, Book, Record
from simulator.report.charts import scatter
from simulator.report.page import Block, Chart, Figure, Figures, Page, Section, Text, paragraphs, write_page
from simulator.show.tables import Cell, Table
from traces.errors import SpecError
from traces.files.json_records import to_json
from traces.provenance import MEASURED_CPU, MEASURED_CUDA, REHEARSED
from traces.units import show_percent

COLOURS: Final = dict(zip(STAGE_LABELS.values(), ("#4c78a8", "#e39c45"), strict=True))


def write_campaign(path: str | Path, book: Book, *, analysis: str = "") -> Path:
    """Write the page, whole or not at all; from the records alone.

    Raises:
        EnvironmentProblem: a package that reports need is not installed.
        SpecError: they were rehearsed.
    """
    if any(r.provenance == REHEARSED for r in book.records):
        raise SpecError(
            "a page shows what was measured, and this campaign was rehearsed; print it, or --json."
        )
    return write_page(path, campaign_page(book, analysis=analysis))


def campaign_page(book: Book, *, analysis: str = "") -> Page:
    """The page of a campaign."""
    records = book.records
    rows = errors.error_rows(records)
    found = errors.aggregates(rows)
    where = list(
        dict.fromkeys("CPU" if r.provenance == MEASURED_CPU else f"GPU ({r.place})" for r in records)
    )
    notes = dict.fromkeys(f"{r.case.step.label}: {n}" for r in records for n in r.notes)
    cases = tables.memory(records), tables.figures(rows)
    sections: dict[str, tuple[Block, ...]] = {
        "Analysis": paragraphs(analysis),
        "Headline": (_headline(book, rows, found), _warning(where, records)),
        "Errors in aggregate": _aggregates(found),
        "Predicted against measured": _scatters(rows),
        "Every case": _rows_of(*cases) or (Text("No case has been measured."),),
        "Cases without a figure": (
            *(_rows_of(tables.without_figures(records)) or (Text("Every case has its figures."),)),
            *(Text(n, "note") for n in notes),
        ),
        "Provenance": _provenance(book),
    }
    return Page(
        title=f"Campaign {book.name}: how wrong the predictions were",
        subtitle=f"{len(records)} of {book.asked} cases · measured on {' and '.join(where) or 'nothing yet'}",
        sections=tuple(Section(title=title, blocks=blocks) for title, blocks in sections.items() if blocks),
    )


def _rows_of(*found: Table) -> tuple[Table, ...]:
    """The tables that have rows; labels, in the first columns, stay in one line."""
    return tuple(
        replace(t, rows=tuple((*map(_one_line, r[:3]), *r[3:]) for r in t.rows)) for t in found if t.rows
    )


def _one_line(cell: Cell | str) -> Cell | str:
    return cell.replace(" ", "\u00a0").replace("-", "\u2011") if isinstance(cell, str) else cell


def _warning(where: Sequence[str], records: Sequence[Record]) -> Text:
    """What the measured figures are, and above all what they are not."""
    text = f"Predicted figures are simulated; measured figures were measured on: {' and '.join(where) or 'nothing'}. "
    if all(r.provenance != MEASURED_CUDA for r in records):
        return Text(text + "No figure on this page is a GPU's, and none was confirmed by one.", "warning")
    return Text(text + "Figures of different devices are never aggregated together.", "note")


def _headline(book: Book, rows: Sequence[ErrorRow], found: Sequence[Aggregate]) -> Figures:
    records = book.records
    measured = [r for r in records if r.peak is not None]
    verified = [r for r in measured if r.verified is not None]
    silent, unforeseen = errors.unwarned(rows), errors.ran_out_unforeseen(records)
    figures = [
        Figure(
            "Cases measured",
            f"{len(measured)} of {book.asked}",
            "the others are listed below with their reason",
        ),
        Figure(
            "Same training as the untouched model",
            f"{sum(bool(r.verified) for r in verified)} of {len(verified)}",
            "verified, bit for bit or within eager's own noise",
            "bad" if any(r.status == NOT_EQUAL for r in records) else "good" if verified else "",
        ),
        Figure(
            f"Memory predicted more than {errors.LARGE:g} % too low without a warning beside it",
            f"{len(silent)} of {sum(r.figure in MEMORY for r in rows)}",
            silent[0].case if silent else "predicted figures, eager, keep-all and plans",
            "bad" if silent else "good",
        ),
    ]
    if any(r.status == OUT_OF_MEMORY and r.provenance == MEASURED_CUDA for r in records):
        detail = "in no table of errors, since nothing was measured" if unforeseen else ""
        label, tone = "Predicted to fit the GPU, and ran out of memory", "bad" if unforeseen else "good"
        figures.append(Figure(label, str(len(unforeseen)), detail, tone))
    for a in found:
        if a.figure in (ALLOCATED, RESERVED) and not a.eager:
            label = f"Median |error|, {tables.KINDS[a.figure][1]}, {STAGE_LABELS[a.stage]}, {a.provenance}"
            low = a.worst_under
            worst = "never too low" if low is None else f"worst underestimate {low:+.3f} %"
            figures.append(Figure(label, show_percent(a.median, digits=3), f"{worst}; {a.rows} runs"))
    return Figures(tuple(figures))


def _aggregates(found: Sequence[Aggregate]) -> tuple[Block, ...]:
    if not found:
        return ()
    text = Text(
        "An error is 100·(predicted − measured)/measured: negative means that the prediction was too low, "
        "which is the dangerous side. A slow-down is the plan's step time over the keep-all step's; its error is "
        "in points. Calibrated predictions know workspaces and times as they were measured on the device, op by "
        "op, in a process of their own; uncalibrated ones know nothing of the device but a table. Mean and median "
        "error: without the sign. Lowest, highest: the worst under- and overestimate. Within: the share of the runs "
        "whose error is at most so many percent (points). Too low: the share predicted below what was measured."
    )
    both = (False, "Keep-all and plans"), (True, "The untouched model in eager")
    return text, *_rows_of(
        *(tables.in_aggregate([a for a in found if a.eager == e], what) for e, what in both)
    )


def _scatters(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    """A chart for each provenance and figure, of keep-all and plans."""
    points: dict[tuple[str, str], list[tuple[str, str, float, float, float]]] = {}
    for r in sorted(rows, key=lambda r: (r.provenance, FIGURES.index(r.figure))):
        if r.run != errors.EAGER:
            point = r.case, STAGE_LABELS[r.stage], r.predicted, r.measured, r.error
            points.setdefault((r.provenance, r.figure), []).append(point)
    return tuple(
        Chart(
            scatter(of, COLOURS, title=tables.KINDS[figure][1], kind=tables.KINDS[figure][0]),
            "On the dashed line the prediction is right; below it the prediction was too low.",
            f"{tables.KINDS[figure][1].capitalize()}, {provenance}",
        )
        for (provenance, figure), of in points.items()
    )


def _provenance(book: Book) -> tuple[Block, ...]:
    seen = Counter((("provenance", r.provenance), *sorted(r.environment.items())) for r in book.records)
    rows = [(f"{n} cases", k, v) for key, n in seen.items() for k, v in key if v]
    rows += [("method", k.replace("_", " "), str(v)) for k, v in to_json(book.method).items() if v != ""]
    return (
        Text(
            "Each variant of a step ran in a process of its own. The peak is the highest of the iterations from "
            "the third on, by the allocator's own account; the time is the median of the timed iterations after them."
        ),
        Table(columns=("of", "", "value"), rows=tuple(rows)),
    )
