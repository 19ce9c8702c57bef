"""The page of a campaign: how wrong the predictions were, in aggregate, by model and by case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from executor.campaign.errors import (
    ALLOCATED,
    BLOCKS,
    EAGER,
    FIGURES,
    LARGE,
    RESERVED,
    SLOWDOWN,
    STAGE_LABELS,
    TIME,
    WITHIN,
    Aggregate,
    ErrorRow,
    Group,
    aggregates,
    best,
    error_rows,
    fragmentation_percent,
    ran_out_unforeseen,
    row_of,
    unwarned,
)
from executor.campaign.record import (
    CALIBRATED,
    DONE,
    FAILED,
    NOT_EQUAL,
    OUT_OF_MEMORY,
    RULES,
    Book,
    Record,
)
from simulator.report.charts import Point, scatter
from simulator.report.page import Block, Chart, Figure, Figures, Page, Section, Text, paragraphs, write_page
from simulator.show.tables import NUMBER, UNKNOWN, Cell, Table, no, percent_cell, table, yes
from traces.errors import SpecError
from traces.files.json_records import to_json
from traces.provenance import REHEARSED
from traces.records.measurement import RunFigures
from traces.units import show_bytes, show_percent

COLOURS: Final = dict(zip(STAGE_LABELS.values(), ("#4c78a8", "#e39c45"), strict=True))
# Of each figure: its kind for charts, and its title.
KINDS: Final = {
    ALLOCATED: ("bytes", "peak allocated"),
    BLOCKS: ("bytes", "peak in the allocator's blocks"),
    RESERVED: ("bytes", "peak reserved"),
    TIME: ("time", "step time"),
    SLOWDOWN: ("percent", "slow-down by the plan"),
}
Column = tuple[str, str, Callable[[Any], Any]]  # title, kind, value: as `table` takes them


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
    rows = error_rows(records)
    where = places(records)
    sections = {
        "Analysis": paragraphs(analysis),
        "Headline": (_headline(book, rows), _warning(where, records)),
        "Errors in aggregate": _aggregates(rows),
        "Predicted against measured": _scatters(rows),
        "Every case": _cases([r for r in records if r.peak is not None]),
        "Cases without a figure": _others(records),
        "Provenance": _provenance(book),
    }
    return Page(
        title=f"Campaign {book.name}: how wrong the predictions were",
        subtitle=f"{len(records)} of {book.asked} cases · measured on {' and '.join(where) or 'nothing yet'}",
        sections=tuple(Section(title=title, blocks=blocks) for title, blocks in sections.items() if blocks),
    )


def places(records: Sequence[Record]) -> list[str]:
    """What the records were measured on, each once: `CPU`, or `GPU (NVIDIA H200)`."""
    cpu = "measured-cpu"
    return list(dict.fromkeys("CPU" if r.provenance == cpu else f"GPU ({r.place})" for r in records))


def _warning(where: Sequence[str], records: Sequence[Record]) -> Text:
    """What the measured figures are, and above all what they are not."""
    text = f"Predicted figures are simulated; measured figures were measured on: {' and '.join(where) or 'nothing'}. "
    if all(r.provenance != "measured-cuda" for r in records):
        return Text(text + "No figure on this page is a GPU's, and none was confirmed by one.", "warning")
    return Text(text + "Figures of different devices are never aggregated together.", "note")


def one_line(text: str) -> str:
    """The text with spaces and hyphens at which no line breaks, so that a wide table keeps a label in one line."""
    return text.replace(" ", "\u00a0").replace("-", "\u2011")


def _headline(book: Book, rows: Sequence[ErrorRow]) -> Figures:
    records = book.records
    verified = [r for r in records if r.peak is not None and r.verified is not None]
    silent, unforeseen = unwarned(rows), ran_out_unforeseen(records)
    measured, told = (
        sum(r.peak is not None for r in records),
        sum(KINDS[r.figure][0] == "bytes" for r in rows),
    )
    figures = [
        Figure(
            "Cases measured", f"{measured} of {book.asked}", "the others are listed below with their reason"
        ),
        Figure(
            "Same training as the untouched model",
            f"{sum(1 for r in verified if r.verified)} of {len(verified)}",
            "verified, bit for bit or within eager's own noise",
            "bad" if any(r.status == NOT_EQUAL for r in records) else "good" if verified else "",
        ),
        Figure(
            f"Memory predicted more than {LARGE:g} % too low without a warning beside it",
            f"{len(silent)} of {told}",
            silent[0].case if silent else "predicted figures, eager, keep-all and plans",
            "bad" if silent else "good",
        ),
    ]
    if any(r.status == OUT_OF_MEMORY and r.provenance == "measured-cuda" for r in records):
        detail = "in no table of errors, since nothing was measured" if unforeseen else ""
        tone = "bad" if unforeseen else "good"
        figures.append(
            Figure("Predicted to fit the GPU, and ran out of memory", str(len(unforeseen)), detail, tone)
        )
    for g, a in aggregates(rows).items():
        if g.figure in (ALLOCATED, RESERVED):
            label = f"Median |error|, {KINDS[g.figure][1]}, {STAGE_LABELS[g.stage]}, {g.provenance}"
            worst = (
                "never too low" if a.worst_under is None else f"worst underestimate {a.worst_under:+.3f} %"
            )
            figures.append(Figure(label, show_percent(a.median, digits=3), f"{worst}; {a.rows} runs"))
    return Figures(tuple(figures))


def _tables(found: dict[Group, Aggregate]) -> tuple[Block, ...]:
    """One table a figure that there is."""

    def made(figure: str) -> Table:
        unit = "pt" if figure == SLOWDOWN else "%"

        def error(name: str, sign: str = "") -> Callable[[tuple[Group, Aggregate]], Cell]:
            def cell(row: tuple[Group, Aggregate]) -> Cell:
                value = getattr(row[1], name)
                return (
                    Cell("none", tone="quiet") if value is None else Cell(f"{value:{sign}.3f} {unit}", value)
                )

            return cell

        chosen = [(g, a) for g, a in found.items() if g.figure == figure]
        limits = "/".join(f"{limit:g}" for limit in WITHIN)
        eager = ", the untouched model in eager" if any(g.eager for g in found) else ""
        return table(
            chosen,
            [
                ("measured", "", lambda row: one_line(row[0].provenance)),
                ("prediction", "", lambda row: STAGE_LABELS[row[0].stage]),
                ("runs", "count", lambda row: row[1].rows),
                ("mean", NUMBER, error("mean", "+")),
                ("mean |e|", NUMBER, error("mape")),
                ("median |e|", NUMBER, error("median")),
                ("lowest", NUMBER, error("worst_under", "+")),
                ("highest", NUMBER, error("worst_over", "+")),
                (f"within {limits}", NUMBER, lambda row: _within(row[1])),
                ("too low", NUMBER, lambda row: percent_cell(row[1].under_share, digits=0)),
            ],
            caption=f"{KINDS[figure][1].capitalize()}{eager}",
        )

    return tuple(made(figure) for figure in FIGURES if any(g.figure == figure for g in found))


def _within(a: Aggregate) -> Cell:
    return Cell("/".join(f"{s:.0f}" for s in a.within) + " %", a.within[0])


def _aggregates(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    if not rows:
        return ()
    text = Text(
        "An error is 100·(predicted − measured)/measured: negative means that the prediction was too low, "
        "which is the dangerous side. A slow-down is the plan's step time over the keep-all step's; its error is "
        "in points. Calibrated predictions know workspaces and times as they were measured on the device, op by "
        "op, in a process of their own; uncalibrated ones know nothing of the device but a table. |e|: the error "
        "without its sign. Lowest, highest: the worst under- and overestimate. Within: the share of the runs whose "
        "error is at most so many percent (points). Too low: the share that was predicted below what was measured."
    )
    return (text, *_tables(aggregates(rows)), *_tables(aggregates(rows, eager=True)))


def _points(rows: Sequence[ErrorRow]) -> dict[tuple[str, str], list[Point]]:
    """By provenance and figure, what the charts show: keep-all and plans."""
    out: dict[tuple[str, str], list[Point]] = {}
    chosen = (r for r in rows if r.run != EAGER)
    for r in sorted(chosen, key=lambda r: (r.provenance, FIGURES.index(r.figure))):
        point = Point(
            case=r.case,
            model=r.model,
            series=STAGE_LABELS[r.stage],
            predicted=r.predicted,
            measured=r.measured,
            error=r.error,
        )
        out.setdefault((r.provenance, r.figure), []).append(point)
    return out


def _scatters(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    caption = "On the dashed line the prediction is right; below it the prediction was too low."
    return tuple(
        Chart(
            scatter(points, COLOURS, title=KINDS[figure][1], kind=KINDS[figure][0]),
            caption,
            f"{KINDS[figure][1].capitalize()}, {provenance}",
        )
        for (provenance, figure), points in _points(rows).items()
    )


# ---------------------------------------------------------------------------------------------------------------------
# Single cases


def _error(stage: str, figure: str) -> Callable[[Record], Cell]:
    """The cell of one error of the run that a case is about; memory that was predicted too low is red."""

    def cell(r: Record) -> Cell:
        e = row_of(r, stage, figure)
        if e is None:
            return Cell(UNKNOWN)
        tone = "good" if abs(e.error) < 0.0005 else ""
        if KINDS[figure][0] == "bytes" and e.error < -LARGE:
            tone = "bad"
        return Cell(f"{e.error:+.3f} %", e.error, tone)

    return cell


def _slowdown(stage: str, which: str) -> Callable[[Record], float | None]:
    return lambda r: getattr(row_of(r, stage, SLOWDOWN), which, None)


def _calibrated(r: Record) -> RunFigures:
    return r.predicted.get(CALIBRATED, RunFigures())


def _difference(r: Record) -> Cell:
    predicted, real = _calibrated(r).peak_allocated_bytes, r.peak
    if predicted is None or real is None:
        return Cell(UNKNOWN)
    return Cell(f"{predicted - real:+,} B", predicted - real)


def _budget(r: Record) -> Cell:
    over = r.budget_bytes is not None and (r.peak or 0) > r.budget_bytes
    return Cell(show_bytes(r.budget_bytes), r.budget_bytes, "bad" if over else "")


def _verdict(r: Record) -> Cell:
    if r.verified is None:
        return Cell("not checked", tone="quiet")
    if not r.verified:
        return no(f"NOT EQUAL: {r.first_difference}")
    return yes("bit-equal" if r.bit_equal else "equal")


_ABOUT: Final[list[Column]] = [
    ("case", "", lambda r: one_line(r.case.label)),
    ("measured", "", lambda r: one_line(r.provenance)),
]


def _cases(cases: Sequence[Record]) -> tuple[Block, ...]:
    """Every measured case: memory, reserved memory where there is any, time."""
    if not cases:
        return (Text("No case has been measured."),)
    memory = table(
        cases,
        [
            *_ABOUT,
            ("eager", "bytes", lambda r: r.eager.peak_allocated_bytes),
            ("keep-all", "bytes", lambda r: r.keep_all.peak_allocated_bytes),
            ("this case", "bytes", lambda r: r.peak),
            ("budget", NUMBER, _budget),
            ("predicted − measured", NUMBER, _difference),
            ("error, calibrated", NUMBER, _error(CALIBRATED, ALLOCATED)),
            ("error, uncalibrated", NUMBER, _error(RULES, ALLOCATED)),
            ("verified", "", _verdict),
        ],
        caption=f"Peak allocated. Underestimates of more than {LARGE:g} % and budgets that were exceeded are red.",
    )
    reserved = table(
        [r for r in cases if r.measured.peak_reserved_bytes is not None],
        [
            *_ABOUT,
            ("reserved", "bytes", lambda r: r.measured.peak_reserved_bytes),
            ("predicted, calibrated", "bytes", lambda r: _calibrated(r).peak_reserved_bytes),
            ("error, calibrated", NUMBER, _error(CALIBRATED, RESERVED)),
            ("error, uncalibrated", NUMBER, _error(RULES, RESERVED)),
            ("fragmentation, predicted", "percent", lambda r: fragmentation_percent(_calibrated(r))),
            ("fragmentation", "percent", lambda r: fragmentation_percent(r.measured)),
        ],
        caption="Peak reserved, and fragmentation: reserved over the peak in the allocator's blocks, less one",
    )
    times = table(
        cases,
        [
            *_ABOUT,
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
    return (memory, *([reserved] if reserved.rows else []), times)


def _others(records: Sequence[Record]) -> tuple[Block, ...]:
    """What ran out of memory, what no plan fits, what failed, and the notes of the others."""
    without = [r for r in records if r.status != DONE]
    notes = dict.fromkeys(f"{r.case.step.label}: {n}" for r in records for n in r.notes)
    told = tuple(Text(n, "note") for n in notes)
    if not without:
        return (Text("Every case has its figures."), *told)

    columns: list[Column] = [
        *_ABOUT,
        ("status", "", lambda r: Cell(r.status, tone="bad" if r.status in (FAILED, NOT_EQUAL) else "")),
        (
            "allocated, predicted",
            "bytes",
            lambda r: best(r.predicted or r.keep_all_predicted).peak_allocated_bytes,
        ),
        (
            "reserved, predicted",
            "bytes",
            lambda r: best(r.predicted or r.keep_all_predicted).peak_reserved_bytes,
        ),
        ("why", "", lambda r: r.message),
    ]
    caption = "Predicted figures are the plan's where there is one, else those of everything kept."
    return (table(without, columns, caption=caption), *told)


def _provenance(book: Book) -> tuple[Block, ...]:
    seen: dict[tuple[tuple[str, str], ...], int] = {}
    for r in book.records:
        key = (("provenance", r.provenance), *sorted(r.environment.items()))
        seen[key] = seen.get(key, 0) + 1
    rows = [(f"{n} cases", k, v) for key, n in seen.items() for k, v in key if v]
    rows += [("method", k.replace("_", " "), str(v)) for k, v in to_json(book.method).items() if v != ""]
    return (
        Text(
            "Each variant of a step ran in a process of its own. The peak is the highest of the iterations from "
            "the third on, by the allocator's own account; the time is the median of the timed iterations after them."
        ),
        Table(columns=("of", "", "value"), rows=tuple(rows)),
    )
