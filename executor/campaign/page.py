"""The page of a campaign: how wrong the predictions were, in aggregate and by case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from executor.campaign import errors, tables
from executor.campaign.errors import FIGURES, STAGE_LABELS, ErrorRow
from executor.campaign.record import Book
from simulator.report.charts import scatter
from simulator.report.page import Block, Chart, Page, Section, Text, paragraphs, warned, write_page
from simulator.show.tables import Table
from traces.errors import SpecError
from traces.files.json_records import to_json
from traces.provenance import MEASURED_CPU, MEASURED_CUDA, REHEARSED

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
    records, rows = book.records, errors.error_rows(book.records)
    where = dict.fromkeys("CPU" if r.provenance == MEASURED_CPU else f"GPU ({r.place})" for r in records)
    measured_on = " and ".join(where) or "nothing yet"
    found = errors.aggregates(rows)
    notes = dict.fromkeys(f"{r.case.step.label}: {n}" for r in records for n in r.notes)
    both = (False, "Keep-all and plans"), (True, "The untouched model in eager")
    parts = [tables.in_aggregate([a for a in found if a.eager == e], what) for e, what in both]
    aggregates: list[Block] = [Text(MEANING), *_shown(*parts)] if found else []
    cases = _shown(tables.memory(records), tables.figures(rows)) or [Text("No case has been measured.")]
    without = _shown(tables.without_figures(records)) or [Text("Every case has its figures.")]
    sections: dict[str, Sequence[Block]] = {
        "Analysis": paragraphs(analysis),
        "Headline": _headline(book, rows, measured_on),
        "Errors in aggregate": aggregates,
        "Predicted against measured": _scatters(rows),
        "Every case": cases,
        "Cases without a figure": [*without, *(Text(n, "note") for n in notes)],
        "Provenance": [Text(HOW), _provenance(book)],
    }
    return Page(
        title=f"Campaign {book.name}: how wrong the predictions were",
        subtitle=f"{len(records)} of {book.asked} cases · measured on {measured_on}",
        sections=tuple(Section(title, tuple(blocks)) for title, blocks in sections.items() if blocks),
    )


MEANING = (
    "An error is 100·(predicted − measured)/measured: negative means that the prediction was too low, which is the "
    "dangerous side. A slow-down is the plan's step time over the keep-all step's; its error is in points. Calibrated "
    "predictions know workspaces and times as they were measured on the device, op by op, in a process of their own; "
    "uncalibrated ones know nothing of the device but a table. Mean and median error: without the sign. Lowest, "
    "highest: the worst under- and overestimate. Within: the share of the runs whose error is at most so many percent "
    "(points). Too low: the share predicted below what was measured."
)
HOW = (
    "Each variant of a step ran in a process of its own. The peak is the highest of the iterations after the first, "
    "by the allocator's own account; the time is the median of the timed iterations after them."
)


def _shown(*found: Table) -> list[Block]:
    """The tables that have rows."""
    return [t for t in found if t.rows]


def _headline(book: Book, rows: Sequence[ErrorRow], measured_on: str) -> list[Block]:
    """How much was measured and verified, and above all what the figures are not."""
    records = book.records
    verified = [r.verified for r in records if r.peak is not None and r.verified is not None]
    told = (
        f"{sum(r.peak is not None for r in records)} of {book.asked} cases were measured, the others are listed below "
        f"with their reason. {sum(verified)} of {len(verified)} that were verified train as the untouched model does, "
        "bit for bit or within eager's own noise. Predicted figures are simulated; measured figures were measured on: "
        f"{measured_on}. Figures of different devices are never aggregated together."
    )
    silent = dict.fromkeys(r.case for r in errors.unwarned(rows))
    unforeseen = [r.case.label for r in errors.ran_out_unforeseen(records)]
    off: list[str] = []
    if all(r.provenance != MEASURED_CUDA for r in records):
        off.append("No figure on this page is a GPU's, and none was confirmed by one.")
    if silent:
        less = f"Memory was predicted more than {errors.LARGE:g} % too low, and no warning stood beside it"
        off.append(f"{less}: {'; '.join(silent)}.")
    if unforeseen:
        off.append(
            f"Predicted to fit the GPU, and ran out of memory, so in no table: {'; '.join(unforeseen)}."
        )
    return [Text(told, "note"), *warned(off)]


def _scatters(rows: Sequence[ErrorRow]) -> list[Block]:
    """A chart for each provenance and figure, of keep-all and plans."""
    points: dict[tuple[str, str], list[tuple[str, str, float, float, float]]] = {}
    for r in sorted(rows, key=lambda r: (r.provenance, FIGURES.index(r.figure))):
        if r.run != errors.EAGER:
            point = r.case, STAGE_LABELS[r.stage], r.predicted, r.measured, r.error
            points.setdefault((r.provenance, r.figure), []).append(point)
    return [
        Chart(
            scatter(of, COLOURS, title=tables.KINDS[figure][1], kind=tables.KINDS[figure][0]),
            "On the dashed line the prediction is right; below it the prediction was too low.",
            f"{tables.KINDS[figure][1].capitalize()}, {provenance}",
        )
        for (provenance, figure), of in points.items()
    ]


def _provenance(book: Book) -> Table:
    seen = Counter((("provenance", r.provenance), *sorted(r.environment.items())) for r in book.records)
    rows = [(f"{n} cases", k, v) for key, n in seen.items() for k, v in key if v]
    rows += [("method", k.replace("_", " "), str(v)) for k, v in to_json(book.method).items() if v != ""]
    return Table(columns=("of", "", "value"), rows=tuple(rows))
