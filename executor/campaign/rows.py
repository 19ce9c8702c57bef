"""A campaign as flat rows, one a case, and as the lines that are printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from executor.campaign.errors import (
    ALLOCATED,
    SLOWDOWN,
    STAGE_LABELS,
    WITHIN,
    Aggregate,
    aggregates,
    error_rows,
    fragmentation_percent,
    ran_out_unforeseen,
    row_of,
)
from executor.campaign.record import CALIBRATED, RULES, STAGES, Book, Record
from traces.records.measurement import RunFigures
from traces.units import show_bytes, show_percent

Row = dict[str, str | int | float | bool | None]


def flat_rows(records: Sequence[Record]) -> list[Row]:
    """One row a case; every row has the same columns."""
    rows = [_flat(r) for r in records]
    columns = list(dict.fromkeys(c for row in rows for c in row))
    return [{c: row.get(c) for c in columns} for row in rows]


def _flat(r: Record) -> Row:
    options = r.case.step.options
    keys = ("batch_size", "seq_len", "image_size", "dtype", "optimizer")
    rest = {k: v for k, v in options.items() if k not in keys}
    row: Row = {
        "case": r.case.label,
        "model": r.case.step.model,
        **{k: options.get(k) for k in keys},
        "other_options": " ".join(f"{k}={v}" for k, v in sorted(rest.items())),
        "budget": r.case.budget,
        "planner": r.case.planner,
        "status": r.status,
        "message": r.message,
        "prediction": "simulated",
        "provenance": r.provenance,
        "device": r.place,
        "torch": r.environment.get("torch"),
        "fingerprint": r.fingerprint,
        "budget_bytes": r.budget_bytes,
        "recomputed_ops": r.recomputed_ops,
        "verified": r.verified,
        "bit_equal": r.bit_equal,
    }
    for name, figures in (("eager", r.eager), ("keep_all", r.keep_all), ("measured", r.measured)):
        row |= {f"{name}_{k}": v for k, v in figures.headline().items()}
        row[f"{name}_first_iteration_bytes"] = figures.peaks_bytes[0] if figures.peaks_bytes else None
        row[f"{name}_steady"] = figures.steady if figures.peaks_bytes else None
        row[f"{name}_fragmentation_percent"] = fragmentation_percent(figures)
    for stage in STAGES:
        for name in ("eager_predicted", "keep_all_predicted", "predicted"):
            found = getattr(r, name)
            if stage in found:
                row |= {f"{name}_{stage}_{k}": v for k, v in found[stage].headline().items()}
                row[f"{name}_{stage}_fragmentation_percent"] = fragmentation_percent(found[stage])
    for e in error_rows([r]):
        unit = "points" if e.figure == SLOWDOWN else "percent"
        name = f"{e.run.replace('-', '_')}_{e.figure.replace('-', '_')}"
        row[f"error_{name}_{e.stage}_{unit}"] = e.error
    return row


# ---------------------------------------------------------------------------------------------------------------------
# What is printed


def counts(book: Book) -> dict[str, int]:
    """Records by status, in the order of their first appearance."""
    return dict(Counter(r.status for r in book.records))


def answer(book: Book) -> dict[str, Any]:
    """The object that `execute campaign --json` prints."""
    rows = error_rows(book.records)

    def listed(**groups: bool) -> list[dict[str, Any]]:
        return [
            {
                **{k: v for k, v in asdict(g).items() if k != "eager" and (k != "model" or v)},
                **{k: v for k, v in asdict(a).items() if k not in ("within", "under_share")},
                **{f"within_{limit:g}": share for limit, share in zip(WITHIN, a.within, strict=True)},
                "under_share": a.under_share,
            }
            for g, a in aggregates(rows, **groups).items()
        ]

    return {
        "campaign": book.name,
        "device": book.method.device,
        "asked": book.asked,
        "finished": len(book.records),
        "statuses": counts(book),
        "ran_out_unforeseen": [r.case.label for r in ran_out_unforeseen(book.records)],
        "errors": listed(),
        "errors_by_model": listed(by_model=True),
        "errors_eager": listed(eager=True),
        "cases": flat_rows(book.records),
    }


def summary(book: Book) -> str:
    """The campaign to read: a line a case, then the errors in aggregate."""
    width = max((len(r.case.label) for r in book.records), default=0)
    lines = [f"{r.case.label:<{width}}  {_line(r)}" for r in book.records]
    lines.append("")
    parts = ", ".join(f"{n} {status}" for status, n in counts(book).items())
    lines.append(f"{len(book.records)} of {book.asked} cases: {parts or 'none finished'}")
    if unforeseen := ran_out_unforeseen(book.records):
        names = "; ".join(r.case.label for r in unforeseen)
        lines.append(f"predicted to fit, and ran out of memory (no error below tells of it): {names}")
    provenance = ""
    for g, a in aggregates(error_rows(book.records)).items():
        if g.provenance != provenance:
            provenance = g.provenance
            lines.append(f"errors, predicted beside {provenance} (keep-all and plans):")
        lines.append(f"  {g.figure:10} {STAGE_LABELS[g.stage]:28} {_aggregate_line(a, g.figure)}")
    return "\n".join(lines)


def markdown(book: Book) -> str:
    """The campaign as two tables for a manual: every measured case, then the errors in aggregate."""
    lines = [
        "| case | predicted, calibrated | predicted, uncalibrated | measured | eager, measured | bit-equal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in book.records:
        peak = r.peak
        if peak is None:
            continue
        predicted = [
            f"{b:,} ({b - peak:+,})" if b is not None else "–"
            for b in (r.predicted.get(s, RunFigures()).peak_allocated_bytes for s in (CALIBRATED, RULES))
        ]
        eager = r.eager.peak_allocated_bytes
        verdict = {True: "yes", False: "no", None: "not checked"}[r.bit_equal]
        cells = (r.case.label, *predicted, f"{peak:,}", "–" if eager is None else f"{eager:,}", verdict)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| figure | prediction | runs | median error | worst underestimate | worst overestimate |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for g, a in aggregates(error_rows(book.records)).items():
        unit = "points" if g.figure == SLOWDOWN else "%"
        worst = ["none" if e is None else f"{e:+.2f} {unit}" for e in (a.worst_under, a.worst_over)]
        lines.append(
            f"| {g.figure} | {STAGE_LABELS[g.stage]} | {a.rows} | {a.median:.2f} {unit} | {' | '.join(worst)} |"
        )
    return "\n".join(lines)


def _line(r: Record) -> str:
    if r.peak is None:
        return f"{r.status}: {r.message}"
    parts = [show_bytes(r.peak)]
    for stage in (CALIBRATED, RULES):
        e = row_of(r, stage, ALLOCATED)
        parts += (
            [] if e is None else [f"{STAGE_LABELS[stage]} {show_percent(e.error, signed=True, digits=3)}"]
        )
    if r.status != "measured":
        parts.append(r.status)
    return ", ".join(parts)


def _aggregate_line(a: Aggregate, figure: str) -> str:
    unit = "points" if figure == SLOWDOWN else "%"
    worst = "none" if a.worst_under is None else f"{a.worst_under:+.3f}"
    shares = "/".join(f"{s:.0f}" for s in a.within)
    limits = "/".join(f"{limit:g}" for limit in WITHIN)
    return (
        f"{a.rows:3} rows, mean |error| {a.mape:.3f}, median {a.median:.3f}, worst underestimate {worst} {unit}; "
        f"within {limits}: {shares} %; too low: {a.under_share:.0f} %"
    )
