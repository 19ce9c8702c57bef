"""Turn the records of a campaign into a page: how wrong the predictions were, in aggregate, by model and by case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from executor.campaign.cases import BOUNDARY
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
    ran_out_unforeseen,
    unwarned,
)
from executor.campaign.page_cases import boundary_blocks, case_blocks, one_line, other_blocks
from executor.campaign.record import CALIBRATED, NOT_EQUAL, OUT_OF_MEMORY, RULES, STAGES, Book, Record
from simulator.report.errors import Point, errors_by_stage, scatter, signed_errors
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
    count_cell,
    paragraphs,
    percent_cell,
    write_page,
)
from traces.json_records import to_json
from traces.units import show_percent

# The two that most charts show, and all stages for the ablation.
NAMES = {CALIBRATED: "calibrated", RULES: "uncalibrated"}
COLOURS = {"calibrated": "#4c78a8", "uncalibrated": "#e39c45"}
STAGE_COLOURS = dict(
    zip(
        (STAGE_LABELS[s] for s in STAGES),
        ("#94a3b8", "#6b7f99", "#e39c45", "#63a375", "#4c78a8"),
        strict=True,
    )
)
MEMORY = (ALLOCATED, BLOCKS, RESERVED)
KINDS = {ALLOCATED: "bytes", BLOCKS: "bytes", RESERVED: "bytes", TIME: "time", SLOWDOWN: "percent"}
TITLES = {
    ALLOCATED: "peak allocated",
    BLOCKS: "peak in the allocator's blocks",
    RESERVED: "peak reserved",
    TIME: "step time",
    SLOWDOWN: "slow-down by the plan",
}


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
    sections = [Section(title="Analysis", blocks=paragraphs(analysis))] if analysis.strip() else []
    sections.append(Section(title="Headline", blocks=_headline(book, rows)))
    if rows:
        sections += [
            Section(title="Errors in aggregate", blocks=_aggregates(rows)),
            Section(title="Errors by model", blocks=_by_model(rows)),
            Section(title="Predicted against measured", blocks=_scatters(rows)),
            Section(title="Signed errors of each case", blocks=_bars(rows)),
            Section(title="What each stage of the prediction buys", blocks=_ablation(rows)),
        ]
    sections.append(Section(title="Every case", blocks=case_blocks(records)))
    boundaries = [r for r in records if r.case.kind == BOUNDARY]
    if boundaries:
        sections.append(Section(title="Where memory ends", blocks=boundary_blocks(boundaries)))
    sections += [
        Section(title="Cases without a figure", blocks=other_blocks(records)),
        Section(title="Provenance", blocks=_provenance(book)),
    ]
    return Page(
        title=f"Campaign {book.name}: how wrong the predictions were",
        subtitle=f"{len(records)} of {book.asked} cases · measured on {' and '.join(places(records)) or 'nothing yet'}",
        sections=tuple(sections),
    )


def places(records: Sequence[Record]) -> list[str]:
    """What the records were measured on, each once: `CPU`, or `GPU (NVIDIA H200)`."""
    return list(
        dict.fromkeys("CPU" if r.provenance == "measured-cpu" else f"GPU ({r.place})" for r in records)
    )


def warning(records: Sequence[Record]) -> Text:
    """What the measured figures are, and above all what they are not."""
    kinds = {r.provenance for r in records}
    where = " and ".join(places(records)) or "nothing"
    text = f"Predicted figures are simulated; measured figures were measured on: {where}. "
    if "measured-cuda" not in kinds:
        return Text(
            text=text + "No figure on this page is a GPU's, and none was confirmed by one.", tone="warning"
        )
    return Text(text=text + "Figures of different devices are never aggregated together.", tone="note")


def _headline(book: Book, rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    records = book.records
    measured = [r for r in records if r.measured.peak_allocated_bytes is not None]
    verified = [r for r in measured if r.verified is not None]
    equal = sum(1 for r in verified if r.verified)
    figures = [
        Figure(
            label="Cases measured",
            value=f"{len(measured)} of {book.asked}",
            detail="the others are listed below with their reason",
        ),
        Figure(
            label="Same training as the untouched model",
            value=f"{equal} of {len(verified)}",
            detail="verified, bit for bit or within eager's own noise",
            tone="bad" if any(r.status == NOT_EQUAL for r in records) else "good" if verified else "",
        ),
    ]
    silent = unwarned(rows)
    figures.append(
        Figure(
            label=f"Memory predicted more than {LARGE:g} % too low without a warning beside it",
            value=f"{len(silent)} of {sum(1 for r in rows if r.stage in NAMES and r.figure in MEMORY)}",
            detail=silent[0].case if silent else "predicted figures, eager, keep-all and plans",
            tone="bad" if silent else "good",
        )
    )
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
        if g.stage in NAMES and g.figure in (ALLOCATED, RESERVED):
            worst = (
                "never too low" if a.worst_under is None else f"worst underestimate {a.worst_under:+.3f} %"
            )
            figures.append(
                Figure(
                    label=f"Median |error|, {TITLES[g.figure]}, {NAMES[g.stage]}, {g.provenance}",
                    value=show_percent(a.median, digits=3),
                    detail=f"{worst}; {a.rows} runs",
                )
            )
    return (Figures(figures=tuple(figures)), warning(records))


_AGGREGATE_COLUMNS = (
    "runs",
    "mean",
    "mean |e|",
    "median |e|",
    "lowest",
    "highest",
    "within " + "/".join(f"{limit:g}" for limit in WITHIN),
    "too low",
)


def _aggregate_cells(a: Aggregate, figure: str) -> tuple[Cell | str, ...]:
    def error(value: float | None, *, signed: bool = False) -> Cell:
        if value is None:
            return Cell(text="none", tone="quiet")
        text = f"{value:{'+' if signed else ''}.3f} {'pt' if figure == SLOWDOWN else '%'}"
        return Cell(text=text, sort=value)

    return (
        count_cell(a.rows),
        error(a.mean, signed=True),
        error(a.mape),
        error(a.median),
        error(a.worst_under, signed=True),
        error(a.worst_over, signed=True),
        Cell(text="/".join(f"{s:.0f}" for s in a.within) + " %", sort=a.within[0]),
        percent_cell(a.under_share, digits=0),
    )


def _aggregates(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    return (
        Text(
            text="An error is 100·(predicted − measured)/measured: negative means that the prediction was too low, "
            "which is the dangerous side. A slow-down is the plan's step time over the keep-all step's; its error is "
            "in points. Calibrated predictions know workspaces and times as they were measured on the device, op by "
            "op, in a process of their own; uncalibrated ones know nothing of the device but a table. |e|: the error "
            "without its sign. Lowest, highest: the worst under- and overestimate. Within: the share of the runs "
            "whose error is at most so many percent (points). Too low: the share that was predicted "
            "below what was measured."
        ),
        _aggregate_table(
            rows, eager=False, caption="The rewritten step with everything kept, and with plans"
        ),
        _aggregate_table(
            rows,
            eager=True,
            caption="The untouched model's eager step beside the same prediction for everything kept",
        ),
    )


def _aggregate_table(rows: Sequence[ErrorRow], *, eager: bool, caption: str) -> Table:
    found = aggregates(rows, eager=eager)
    made = tuple(
        (one_line(g.provenance), one_line(TITLES[g.figure]), NAMES[g.stage], *_aggregate_cells(a, g.figure))
        for g, a in found.items()
        if g.stage in NAMES
    )
    return Table(
        columns=("measured", "figure", "prediction", *_AGGREGATE_COLUMNS),
        rows=made,
        numbers=frozenset(range(3, 3 + len(_AGGREGATE_COLUMNS))),
        caption=caption,
    )


def _by_model(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    found = aggregates(rows, by_model=True)
    blocks: list[Block] = []
    for figure in FIGURES:
        made = tuple(
            (one_line(g.model), one_line(g.provenance), NAMES[g.stage], *_aggregate_cells(a, figure))
            for g, a in found.items()
            if g.figure == figure and g.stage in NAMES
        )
        if made:
            blocks.append(
                Table(
                    columns=("model", "measured", "prediction", *_AGGREGATE_COLUMNS),
                    rows=made,
                    numbers=frozenset(range(3, 3 + len(_AGGREGATE_COLUMNS))),
                    caption=TITLES[figure].capitalize(),
                )
            )
    return tuple(blocks)


def _points(rows: Sequence[ErrorRow], figure: str, provenance: str) -> list[Point]:
    return [
        Point(
            case=r.case,
            model=r.model,
            series=NAMES[r.stage],
            predicted=r.predicted,
            measured=r.measured,
            error=r.error,
        )
        for r in rows
        if r.figure == figure and r.provenance == provenance and r.stage in NAMES and r.run != EAGER
    ]


def _provenances(rows: Sequence[ErrorRow]) -> list[str]:
    return sorted({r.provenance for r in rows})


def _scatters(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for provenance in _provenances(rows):
        for figure in FIGURES:
            points = _points(rows, figure, provenance)
            if points:
                spec = scatter(points, COLOURS, title=TITLES[figure], kind=KINDS[figure])
                title = f"{TITLES[figure].capitalize()}, {provenance}"
                caption = "On the dashed line the prediction is right; below it the prediction was too low."
                blocks.append(Chart(spec=spec, title=title, caption=caption))
    return tuple(blocks)


def _bars(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for provenance in _provenances(rows):
        for figure in (ALLOCATED, RESERVED, SLOWDOWN):
            found = [(p.case, p.series, p.error) for p in _points(rows, figure, provenance)]
            title = f"{TITLES[figure].capitalize()}, {provenance}"
            if any(error for _, _, error in found):
                unit = "points" if figure == SLOWDOWN else "%"
                blocks.append(Chart(spec=signed_errors(found, COLOURS, unit=unit), title=title))
            elif found:
                blocks.append(Text(text=f"{title}: every one of the {len(found)} errors is exactly 0."))
    return tuple(blocks)


def _ablation(rows: Sequence[ErrorRow]) -> tuple[Block, ...]:
    """Only runs that every stage of their device predicts, so that the stages compare."""
    blocks: list[Block] = [
        Text(
            text="The same runs, predicted with less and with more: the sizes and lifetimes of tensors alone; with the "
            "caching allocator's rounding and reserving (CUDA only); with workspaces by the table of rules; with "
            "what the same step showed on the device at half the batch size; with what it showed itself. "
            "Runs that lack one of the stages are left out."
        )
    ]
    for provenance in _provenances(rows):
        own = [r for r in rows if r.provenance == provenance and r.run != EAGER]
        wanted = [s for s in STAGES if any(r.stage == s for r in own)]
        for figure in (ALLOCATED, BLOCKS, RESERVED):
            by_case: dict[str, dict[str, ErrorRow]] = {}
            for r in own:
                if r.figure == figure:
                    by_case.setdefault(r.case, {})[r.stage] = r
            full = [r for found in by_case.values() if set(found) >= set(wanted) for r in found.values()]
            if not full:
                continue
            made = tuple(
                (one_line(STAGE_LABELS[g.stage]), *_aggregate_cells(a, figure))
                for g, a in aggregates(full).items()
            )
            blocks += [
                Table(
                    columns=("prediction from", *_AGGREGATE_COLUMNS),
                    rows=made,
                    numbers=frozenset(range(1, 1 + len(_AGGREGATE_COLUMNS))),
                    caption=f"{TITLES[figure].capitalize()}, {provenance}",
                ),
                Chart(
                    spec=errors_by_stage(
                        [(r.case, STAGE_LABELS[r.stage], r.error) for r in full], STAGE_COLOURS, unit="%"
                    ),
                    caption="A point is a run, the black mark the median.",
                ),
            ]
    return tuple(blocks)


def _provenance(book: Book) -> tuple[Block, ...]:
    rows: list[tuple[Cell | str, ...]] = []
    seen: dict[tuple[tuple[str, str], ...], int] = {}
    for r in book.records:
        key = (("provenance", r.provenance), *sorted(r.environment.items()))
        seen[key] = seen.get(key, 0) + 1
    for key, n in seen.items():
        rows += [(f"{n} cases", k, v) for k, v in key if v]
    method = [("method", k.replace("_", " "), str(v)) for k, v in to_json(book.method).items() if v != ""]
    return (
        Text(
            text="Each variant of a step ran in a process of its own. The peak is the highest of the iterations from "
            "the third on, by the allocator's own account; the time is the median of the timed iterations after them."
        ),
        Table(columns=("of", "", "value"), rows=(*rows, *method)),
    )
