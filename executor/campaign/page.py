"""The page of a campaign: how wrong the predictions were, in aggregate, by model and by case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from executor.campaign.cases import BOUNDARY, NONE
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
    aggregates,
    error_rows,
    fragmentation_percent,
    ran_out_unforeseen,
    unwarned,
)
from executor.campaign.record import (
    CALIBRATED,
    FAILED,
    INFEASIBLE,
    NOT_EQUAL,
    OUT_OF_MEMORY,
    RULES,
    Book,
    Record,
    Trial,
)
from simulator.report.charts import Point, scatter, signed_errors
from simulator.report.page import Block, Chart, Figure, Figures, Page, Section, Text, paragraphs, write_page
from simulator.studies.tables import Cell, Table, bytes_cell, count_cell, percent_cell, time_cell
from traces.json_records import to_json
from traces.measurement import RunFigures
from traces.units import show_bytes, show_percent

COLOURS: Final = dict(zip(STAGE_LABELS.values(), ("#4c78a8", "#63a375", "#e39c45"), strict=True))
# Of each figure: its kind for charts, and its title.
KINDS: Final = {
    ALLOCATED: ("bytes", "peak allocated"),
    BLOCKS: ("bytes", "peak in the allocator's blocks"),
    RESERVED: ("bytes", "peak reserved"),
    TIME: ("time", "step time"),
    SLOWDOWN: ("percent", "slow-down by the plan"),
}
T = TypeVar("T")
Column = tuple[str, bool, Callable[[T], Cell | str]]  # title, whether it holds numbers, what stands in it


def write_campaign(path: str | Path, book: Book, *, analysis: str = "") -> Path:
    """Write the page, whole or not at all; from the records alone.

    Raises:
        EnvironmentProblem: a package that reports need is not installed.
    """
    return write_page(path, campaign_page(book, analysis=analysis))


def campaign_page(book: Book, *, analysis: str = "") -> Page:
    """The page of a campaign."""
    records = book.records
    rows = error_rows(records)
    boundaries = [r for r in records if r.case.kind == BOUNDARY]
    sections = {
        "Analysis": paragraphs(analysis) if analysis.strip() else (),
        "Headline": _headline(book, rows),
        "Errors in aggregate": _aggregates(rows) if rows else (),
        "Errors by model": _by_model(rows),
        "Predicted against measured": _scatters(rows),
        "Signed errors of each case": _bars(rows),
        "Every case": _cases(records),
        "Where memory ends": _boundaries(boundaries) if boundaries else (),
        "Cases without a figure": _others(records),
        "Provenance": _provenance(book),
    }
    return Page(
        title=f"Campaign {book.name}: how wrong the predictions were",
        subtitle=f"{len(records)} of {book.asked} cases · measured on {' and '.join(places(records)) or 'nothing yet'}",
        sections=tuple(Section(title=title, blocks=blocks) for title, blocks in sections.items() if blocks),
    )


def places(records: Sequence[Record]) -> list[str]:
    """What the records were measured on, each once: `CPU`, or `GPU (NVIDIA H200)`."""
    return list(
        dict.fromkeys("CPU" if r.provenance == "measured-cpu" else f"GPU ({r.place})" for r in records)
    )


def warning(records: Sequence[Record]) -> Text:
    """What the measured figures are, and above all what they are not."""
    where = " and ".join(places(records)) or "nothing"
    text = f"Predicted figures are simulated; measured figures were measured on: {where}. "
    if all(r.provenance != "measured-cuda" for r in records):
        return Text(
            text=text + "No figure on this page is a GPU's, and none was confirmed by one.", tone="warning"
        )
    return Text(text=text + "Figures of different devices are never aggregated together.", tone="note")


def one_line(text: str) -> str:
    """The text with spaces and hyphens at which no line breaks, so that a wide table keeps a label in one line."""
    return text.replace(" ", "\u00a0").replace("-", "\u2011")


def _table(rows: Iterable[T], columns: Sequence[Column[T]], caption: str = "", folded: str = "") -> Table:
    return Table(
        columns=tuple(title for title, _, _ in columns),
        rows=tuple(tuple(cell(row) for _, _, cell in columns) for row in rows),
        numbers=frozenset(k for k, (_, is_number, _) in enumerate(columns) if is_number),
        caption=caption,
        folded=folded,
    )


def _headline(book: Book, rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    records = book.records
    measured = [r for r in records if r.measured.peak_allocated_bytes is not None]
    verified = [r for r in measured if r.verified is not None]
    silent = unwarned(rows)
    told = sum(1 for r in rows if KINDS[r.figure][0] == "bytes")
    figures = [
        Figure(
            label="Cases measured",
            value=f"{len(measured)} of {book.asked}",
            detail="the others are listed below with their reason",
        ),
        Figure(
            label="Same training as the untouched model",
            value=f"{sum(1 for r in verified if r.verified)} of {len(verified)}",
            detail="verified, bit for bit or within eager's own noise",
            tone="bad" if any(r.status == NOT_EQUAL for r in records) else "good" if verified else "",
        ),
        Figure(
            label=f"Memory predicted more than {LARGE:g} % too low without a warning beside it",
            value=f"{len(silent)} of {told}",
            detail=silent[0].case if silent else "predicted figures, eager, keep-all and plans",
            tone="bad" if silent else "good",
        ),
    ]
    if any(r.status == OUT_OF_MEMORY and r.provenance == "measured-cuda" for r in records):
        unforeseen = ran_out_unforeseen(records)
        figures.append(
            Figure(
                label="Predicted to fit the GPU, and ran out of memory",
                value=str(len(unforeseen)),
                detail="in no table of errors, since nothing was measured" if unforeseen else "",
                tone="bad" if unforeseen else "good",
            )
        )
    for g, a in aggregates(rows).items():
        if g.figure in (ALLOCATED, RESERVED):
            worst = (
                "never too low" if a.worst_under is None else f"worst underestimate {a.worst_under:+.3f} %"
            )
            figures.append(
                Figure(
                    label=f"Median |error|, {KINDS[g.figure][1]}, {STAGE_LABELS[g.stage]}, {g.provenance}",
                    value=show_percent(a.median, digits=3),
                    detail=f"{worst}; {a.rows} runs",
                )
            )
    return (Figures(figures=tuple(figures)), warning(records))


def _aggregate_columns(unit: str) -> list[Column[Aggregate]]:
    def error(value: float | None, *, signed: bool = False) -> Cell:
        if value is None:
            return Cell(text="none", tone="quiet")
        return Cell(text=f"{value:{'+' if signed else ''}.3f} {unit}", sort=value)

    return [
        ("runs", True, lambda a: count_cell(a.rows)),
        ("mean", True, lambda a: error(a.mean, signed=True)),
        ("mean |e|", True, lambda a: error(a.mape)),
        ("median |e|", True, lambda a: error(a.median)),
        ("lowest", True, lambda a: error(a.worst_under, signed=True)),
        ("highest", True, lambda a: error(a.worst_over, signed=True)),
        (
            "within " + "/".join(f"{limit:g}" for limit in WITHIN),
            True,
            lambda a: Cell(text="/".join(f"{s:.0f}" for s in a.within) + " %", sort=a.within[0]),
        ),
        ("too low", True, lambda a: percent_cell(a.under_share, digits=0)),
    ]


def _aggregate_table(rows: Sequence[ErrorRow], figure: str, *, by_model: bool, eager: bool) -> Table | None:
    found = aggregates(rows, by_model=by_model, eager=eager)
    chosen = [(g, a) for g, a in found.items() if g.figure == figure]
    if not chosen:
        return None
    unit = "pt" if figure == SLOWDOWN else "%"
    model = [("model", False, lambda row: one_line(row[0].model))] if by_model else []
    return _table(
        chosen,
        [
            *model,
            ("measured", False, lambda row: one_line(row[0].provenance)),
            ("prediction", False, lambda row: STAGE_LABELS[row[0].stage]),
            *((t, n, lambda row, cell=cell: cell(row[1])) for t, n, cell in _aggregate_columns(unit)),
        ],
        caption=f"{KINDS[figure][1].capitalize()}{', the untouched model in eager' if eager else ''}",
    )


def _aggregates(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    text = Text(
        text="An error is 100·(predicted − measured)/measured: negative means that the prediction was too low, "
        "which is the dangerous side. A slow-down is the plan's step time over the keep-all step's; its error is "
        "in points. Calibrated predictions know workspaces and times as they were measured on the device, op by "
        "op, in a process of their own; uncalibrated ones know nothing of the device but a table; transferred ones "
        "what the step showed at half the batch size. |e|: the error without its sign. Lowest, highest: the worst "
        "under- and overestimate. Within: the share of the runs whose error is at most so many percent (points). "
        "Too low: the share that was predicted below what was measured."
    )
    tables = (
        _aggregate_table(rows, figure, by_model=False, eager=eager)
        for eager in (False, True)
        for figure in FIGURES
    )
    return (text, *(t for t in tables if t is not None))


def _by_model(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    tables = (_aggregate_table(rows, figure, by_model=True, eager=False) for figure in FIGURES)
    return tuple(t for t in tables if t is not None)


def _points(rows: Sequence[ErrorRow]) -> dict[tuple[str, str], list[Point]]:
    """By provenance and figure, what the charts show: keep-all and plans."""
    out: dict[tuple[str, str], list[Point]] = {}
    for provenance in sorted({r.provenance for r in rows}):
        for figure in FIGURES:
            out[provenance, figure] = [
                Point(
                    case=r.case,
                    model=r.model,
                    series=STAGE_LABELS[r.stage],
                    predicted=r.predicted,
                    measured=r.measured,
                    error=r.error,
                )
                for r in rows
                if (r.provenance, r.figure) == (provenance, figure) and r.run != EAGER
            ]
    return {key: points for key, points in out.items() if points}


def _scatters(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    caption = "On the dashed line the prediction is right; below it the prediction was too low."
    return tuple(
        Chart(
            spec=scatter(points, COLOURS, title=KINDS[figure][1], kind=KINDS[figure][0]),
            title=f"{KINDS[figure][1].capitalize()}, {provenance}",
            caption=caption,
        )
        for (provenance, figure), points in _points(rows).items()
    )


def _bars(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for (provenance, figure), points in _points(rows).items():
        if figure not in (ALLOCATED, RESERVED, SLOWDOWN):
            continue
        title = f"{KINDS[figure][1].capitalize()}, {provenance}"
        if any(p.error for p in points):
            unit = "points" if figure == SLOWDOWN else "%"
            errors = [(p.case, p.series, p.error) for p in points]
            blocks.append(Chart(spec=signed_errors(errors, COLOURS, unit=unit), title=title))
        else:
            blocks.append(Text(text=f"{title}: every one of the {len(points)} errors is exactly 0."))
    return tuple(blocks)


# ---------------------------------------------------------------------------------------------------------------------
# Single cases


def _error(stage: str, figure: str) -> Callable[[Record], Cell]:
    """The cell of one error of the run that a case is about; memory that was predicted too low is red."""

    def cell(r: Record) -> Cell:
        run = "keep-all" if r.case.budget == NONE else "plan"
        found = [e.error for e in error_rows([r]) if (e.run, e.stage, e.figure) == (run, stage, figure)]
        if not found:
            return Cell(text="–")
        memory = KINDS[figure][0] == "bytes"
        tone = "bad" if memory and found[0] < -LARGE else "good" if abs(found[0]) < 0.0005 else ""
        return Cell(text=f"{found[0]:+.3f} %", sort=found[0], tone=tone)

    return cell


def _slowdown(stage: str, *, measured: bool = False) -> Callable[[Record], Cell]:
    def cell(r: Record) -> Cell:
        found = [e for e in error_rows([r]) if e.figure == SLOWDOWN and stage in (e.stage, "")]
        value = None if not found else found[0].measured if measured else found[0].predicted
        return percent_cell(value, signed=True)

    return cell


def _best(r: Record) -> RunFigures:
    """What knows most of the case: with its plan where there is one."""
    predicted = r.predicted or r.keep_all_predicted
    return predicted.get(CALIBRATED) or predicted.get(RULES) or RunFigures()


def _calibrated(r: Record) -> RunFigures:
    return r.predicted.get(CALIBRATED, RunFigures())


def _difference(r: Record) -> Cell:
    predicted, real = _calibrated(r).peak_allocated_bytes, r.measured.peak_allocated_bytes
    if predicted is None or real is None:
        return Cell(text="–")
    return Cell(text=f"{predicted - real:+,} B", sort=predicted - real)


def _budget(r: Record) -> Cell:
    over = r.budget_bytes is not None and (r.measured.peak_allocated_bytes or 0) > r.budget_bytes
    return Cell(text=show_bytes(r.budget_bytes), sort=r.budget_bytes, tone="bad" if over else "")


def _verdict(r: Record) -> Cell:
    if r.verified is None:
        return Cell(text="not checked", tone="quiet")
    if not r.verified:
        return Cell(text=f"NOT EQUAL: {r.first_difference}", tone="bad")
    return Cell(text="bit-equal" if r.bit_equal else "equal", tone="good")


_ABOUT: Final[list[Column[Record]]] = [
    ("case", False, lambda r: one_line(r.case.label)),
    ("measured", False, lambda r: one_line(r.provenance)),
]


def _cases(records: Sequence[Record]) -> tuple[Block, ...]:
    """Every measured case: memory, reserved memory where there is any, time."""
    cases = [r for r in records if r.case.kind != BOUNDARY and r.measured.peak_allocated_bytes is not None]
    if not cases:
        return (Text(text="No case has been measured."),)
    memory = _table(
        cases,
        [
            *_ABOUT,
            ("eager", True, lambda r: bytes_cell(r.eager.peak_allocated_bytes)),
            ("keep-all", True, lambda r: bytes_cell(r.keep_all.peak_allocated_bytes)),
            ("this case", True, lambda r: bytes_cell(r.measured.peak_allocated_bytes)),
            ("budget", True, _budget),
            ("predicted − measured", True, _difference),
            ("error, calibrated", True, _error(CALIBRATED, ALLOCATED)),
            ("error, uncalibrated", True, _error(RULES, ALLOCATED)),
            ("verified", False, _verdict),
        ],
        caption=f"Peak allocated. Underestimates of more than {LARGE:g} % and budgets that were exceeded are red.",
    )
    reserved = _table(
        [r for r in cases if r.measured.peak_reserved_bytes is not None],
        [
            *_ABOUT,
            ("reserved", True, lambda r: bytes_cell(r.measured.peak_reserved_bytes)),
            ("predicted, calibrated", True, lambda r: bytes_cell(_calibrated(r).peak_reserved_bytes)),
            ("error, calibrated", True, _error(CALIBRATED, RESERVED)),
            ("error, uncalibrated", True, _error(RULES, RESERVED)),
            (
                "fragmentation, predicted",
                True,
                lambda r: percent_cell(fragmentation_percent(_calibrated(r))),
            ),
            ("fragmentation", True, lambda r: percent_cell(fragmentation_percent(r.measured))),
        ],
        caption="Peak reserved, and fragmentation: reserved over the peak in the allocator's blocks, less one",
    )
    times = _table(
        cases,
        [
            *_ABOUT,
            ("eager", True, lambda r: time_cell(r.eager.step_time_ns)),
            ("keep-all", True, lambda r: time_cell(r.keep_all.step_time_ns)),
            ("this case", True, lambda r: time_cell(r.measured.step_time_ns)),
            ("predicted, calibrated", True, lambda r: time_cell(_calibrated(r).step_time_ns)),
            ("error, calibrated", True, _error(CALIBRATED, TIME)),
            ("error, uncalibrated", True, _error(RULES, TIME)),
            ("slow-down", True, _slowdown("", measured=True)),
            ("predicted, calibrated", True, _slowdown(CALIBRATED)),
            ("predicted, uncalibrated", True, _slowdown(RULES)),
        ],
        caption="Step time, and the slow-down by the plan: its step over the keep-all step, less one",
    )
    return (memory, *([reserved] if reserved.rows else []), times, _iterations(cases))


def _iterations(cases: Sequence[Record]) -> Table:
    # Eager and keep-all are shared by the cases of a step, and told with its keep-all case.
    runs: list[tuple[str, Record, RunFigures]] = []
    for r in cases:
        if r.case.budget == NONE:
            runs += [
                (f"{r.case.step.label} {n}", r, f) for n, f in (("eager", r.eager), ("keep-all", r.keep_all))
            ]
        else:
            runs.append((r.case.label, r, r.measured))
    title = "The first iteration and the steady ones"
    steady, unsteady = Cell(text="steady", tone="good"), Cell(text="NOT STEADY", tone="bad")
    return _table(
        [run for run in runs if run[2].peaks_bytes],
        [
            ("run", False, lambda run: one_line(run[0])),
            ("measured", False, lambda run: one_line(run[1].provenance)),
            ("allocated, iteration 1", True, lambda run: bytes_cell(run[2].peaks_bytes[0])),
            ("allocated, steady", True, lambda run: bytes_cell(run[2].peak_allocated_bytes)),
            (
                "reserved, iteration 1",
                True,
                lambda run: bytes_cell(next(iter(run[2].reserved_bytes), None)),
            ),
            ("reserved, last iteration", True, lambda run: bytes_cell(run[2].peak_reserved_bytes)),
            ("iterations from the third on", False, lambda run: steady if run[2].steady else unsteady),
        ],
        caption=title,
        folded=title,
    )


def _boundaries(records: Sequence[Record]) -> tuple[Block, ...]:
    """Every batch size of every boundary: predicted, and whether it fitted."""

    def verdict(t: Trial) -> Cell:
        if t.fits is None:
            return Cell(text="not tried", tone="quiet")
        right = t.fits == t.predicted_fits
        return Cell(text="as predicted" if right else "NOT as predicted", tone="good" if right else "bad")

    fits = {None: "–", True: "fits", False: "does not fit"}
    return (
        Text(
            text="The largest batch size that is predicted to fit a limit, and the next larger one, tried. On CUDA the "
            "process may take no more than the limit from the device, and does not fit if it runs out of memory. On "
            "the CPU there is no such limit: there the measured peak is compared with it."
        ),
        _table(
            [(r, t) for r in records for t in r.trials],
            [
                ("step", False, lambda row: one_line(row[0].case.step.label)),
                ("run", False, lambda row: {NONE: "untouched"}.get(row[0].case.planner, row[0].case.planner)),
                ("measured", False, lambda row: one_line(row[0].provenance)),
                ("limit", True, lambda row: bytes_cell(row[0].limit_bytes)),
                ("batch", True, lambda row: count_cell(row[1].batch_size)),
                ("allocated, predicted", True, lambda row: bytes_cell(row[1].predicted.peak_allocated_bytes)),
                ("reserved, predicted", True, lambda row: bytes_cell(row[1].predicted.peak_reserved_bytes)),
                ("predicted", False, lambda row: fits[row[1].predicted_fits]),
                ("allocated, measured", True, lambda row: bytes_cell(row[1].measured.peak_allocated_bytes)),
                ("tried", False, lambda row: fits[row[1].fits]),
                ("verdict", False, lambda row: verdict(row[1])),
            ],
        ),
    )


def _others(records: Sequence[Record]) -> tuple[Block, ...]:
    """What ran out of memory, what no plan fits, what failed, and the notes of the others."""
    without = [r for r in records if r.status in (OUT_OF_MEMORY, INFEASIBLE, FAILED, NOT_EQUAL)]
    notes = dict.fromkeys(f"{r.case.step.label}: {n}" for r in records for n in r.notes)
    told = tuple(Text(text=n, tone="note") for n in notes)
    if not without:
        return (Text(text="Every case has its figures."), *told)
    columns: list[Column[Record]] = [
        *_ABOUT,
        (
            "status",
            False,
            lambda r: Cell(text=r.status, tone="bad" if r.status in (FAILED, NOT_EQUAL) else ""),
        ),
        ("allocated, predicted", True, lambda r: bytes_cell(_best(r).peak_allocated_bytes)),
        ("reserved, predicted", True, lambda r: bytes_cell(_best(r).peak_reserved_bytes)),
        ("why", False, lambda r: r.message),
    ]
    caption = "Predicted figures are the plan's where there is one, else those of everything kept."
    return (_table(without, columns, caption), *told)


def _provenance(book: Book) -> tuple[Block, ...]:
    seen: dict[tuple[tuple[str, str], ...], int] = {}
    for r in book.records:
        key = (("provenance", r.provenance), *sorted(r.environment.items()))
        seen[key] = seen.get(key, 0) + 1
    rows = [(f"{n} cases", k, v) for key, n in seen.items() for k, v in key if v]
    rows += [("method", k.replace("_", " "), str(v)) for k, v in to_json(book.method).items() if v != ""]
    return (
        Text(
            text="Each variant of a step ran in a process of its own. The peak is the highest of the iterations from "
            "the third on, by the allocator's own account; the time is the median of the timed iterations after them."
        ),
        Table(columns=("of", "", "value"), rows=tuple(rows)),
    )
