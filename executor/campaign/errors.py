"""Prediction errors of a campaign: one row a figure and stage, and their aggregates.

An error of bytes and times is 100 * (predicted - measured) / measured, in percent: negative means that the prediction
was too low. A slow-down is the step's time with the plan over the keep-all step's, less one, in percent, measured as
the median over pairs of steps that ran in turns; its error is predicted minus measured, in points. Rows of different
provenance are never aggregated together.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from executor.campaign.cases import NONE
from executor.campaign.record import CALIBRATED, OUT_OF_MEMORY, RULES, STAGES, Predictions, Record
from traces.records.measurement import RunFigures, measured_slowdown_percent, slowdown_percent

# Allocated is what was asked for; blocks is the same as CUDA's allocator hands it out, rounded up.
ALLOCATED, BLOCKS, RESERVED, TIME, SLOWDOWN = "allocated", "blocks", "reserved", "time", "slow-down"
FIGURES: Final = (ALLOCATED, BLOCKS, RESERVED, TIME, SLOWDOWN)  # those of `RunFigures.headline`, and one more
MEMORY: Final = (ALLOCATED, BLOCKS, RESERVED)
KEEP_ALL, PLAN, EAGER = "keep-all", "plan", "eager"
WITHIN: Final = (1.0, 2.0, 5.0)
STAGE_LABELS: Final = {CALIBRATED: "calibrated", RULES: "uncalibrated"}
LARGE: Final = 2.0  # percent; an underestimate above it must have a warning beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """One figure of one run, predicted by one stage, beside what was measured."""

    model: str
    case: str  # the label
    run: str  # keep-all, plan, or eager (set beside the keep-all prediction)
    stage: str  # one of STAGES
    figure: str  # one of FIGURES
    predicted: float  # bytes, ns, or percent for a slow-down
    measured: float
    provenance: str  # of `measured`; `predicted` is simulated
    warned: bool = False  # by `simulate`, beyond what it says beside every such prediction

    @property
    def error(self) -> float:
        """Signed, in percent, or in points for a slow-down."""
        difference = self.predicted - self.measured
        return difference if self.figure == SLOWDOWN else 100.0 * difference / self.measured


def error_rows(records: Iterable[Record]) -> list[ErrorRow]:
    """All rows of all measured records.

    A step's eager and keep-all runs are shared by its cases; they are counted once, with its keep-all case or, if it
    has none, with the first of its cases.
    """
    out: list[ErrorRow] = []
    told: set[tuple[str, str, str]] = set()
    for r in sorted(records, key=lambda r: r.case.budget != NONE):  # stable: keep-all cases first
        step = (r.case.step.label, r.fingerprint, r.place)
        for stage in (s for s in STAGES if s in r.keep_all_predicted):
            kept, planned = r.keep_all_predicted[stage], r.predicted.get(stage)
            if step not in told:
                out += _rows(r, EAGER, stage, r.eager_predicted.get(stage, kept), r.eager)
                out += _rows(r, KEEP_ALL, stage, kept, r.keep_all)
            if r.case.budget != NONE and planned is not None:
                slow = slowdown_percent(planned, kept), measured_slowdown_percent(r.measured, r.keep_all)
                out += _rows(r, PLAN, stage, planned, r.measured, slow)
        if r.keep_all_predicted:
            told.add(step)
    return out


def _rows(
    r: Record,
    run: str,
    stage: str,
    predicted: RunFigures,
    measured: RunFigures,
    slowdown: tuple[float | None, float | None] = (None, None),
) -> Iterator[ErrorRow]:
    both = zip(predicted.headline().values(), measured.headline().values(), strict=True)
    warned = bool((r.warnings if run == PLAN else r.keep_all_warnings).get(stage))
    for figure, (p, m) in zip(FIGURES, (*both, slowdown), strict=True):
        if p is not None and m is not None and (m or figure == SLOWDOWN):
            yield ErrorRow(
                model=r.case.step.model,
                case=r.case.label if run == PLAN else f"{r.case.step.label} {run}",
                run=run,
                stage=stage,
                figure=figure,
                predicted=p,
                measured=m,
                provenance=r.provenance,
                warned=warned,
            )


def row_of(r: Record, stage: str, figure: str) -> ErrorRow | None:
    """The row of the run that a case is about: of its plan, or of keep-all where it has none; stage "": any."""
    run = KEEP_ALL if r.case.budget == NONE else PLAN
    found = (e for e in error_rows([r]) if (e.run, e.figure) == (run, figure) and stage in (e.stage, ""))
    return next(found, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """The errors of one group of rows; percent, or points for slow-downs."""

    provenance: str
    figure: str
    stage: str
    eager: bool  # of the untouched model beside the keep-all prediction, instead of keep-all and plans
    rows: int
    mean: float  # signed
    mape: float  # mean of the absolute errors
    median: float  # of the absolute errors
    worst_under: float | None  # the most negative; None: no row was too low
    worst_over: float | None
    within: tuple[float, ...]  # share of the rows within WITHIN, in percent, borders included
    under_share: float  # P(predicted < measured), in percent


def aggregates(rows: Iterable[ErrorRow]) -> list[Aggregate]:
    """Aggregates by provenance, figure and stage; those of eager stand behind the others."""
    groups: dict[tuple[str, str, str, bool], list[float]] = {}
    for r in rows:
        groups.setdefault((r.provenance, r.figure, r.stage, r.run == EAGER), []).append(r.error)
    made = [_aggregate(group, errors) for group, errors in groups.items()]
    return sorted(made, key=lambda a: (a.eager, a.provenance, FIGURES.index(a.figure), STAGES.index(a.stage)))


def _aggregate(group: tuple[str, str, str, bool], errors: Sequence[float]) -> Aggregate:
    provenance, figure, stage, eager = group
    sizes = [abs(e) for e in errors]
    n = len(errors)
    return Aggregate(
        provenance=provenance,
        figure=figure,
        stage=stage,
        eager=eager,
        rows=n,
        mean=statistics.fmean(errors),
        mape=statistics.fmean(sizes),
        median=statistics.median(sizes),
        worst_under=min((e for e in errors if e < 0), default=None),
        worst_over=max((e for e in errors if e > 0), default=None),
        within=tuple(100.0 * sum(s <= limit for s in sizes) / n for limit in WITHIN),
        under_share=100.0 * sum(e < 0 for e in errors) / n,
    )


def unwarned(rows: Iterable[ErrorRow]) -> list[ErrorRow]:
    """Memory that was predicted more than LARGE percent too low, by `simulate` and without a warning from it.

    What it says of every uncalibrated prediction (that rules may differ, that no GPU confirmed it) is no such warning.
    """
    return [r for r in rows if r.figure in MEMORY and r.error < -LARGE and not r.warned]


def ran_out_unforeseen(records: Iterable[Record]) -> list[Record]:
    """Cases that ran out of a GPU's memory although the best prediction of them fits it.

    They have no measured peak, so that no error tells of them; each is an underestimate all the same. Not for the CPU,
    where the predicted memory is a part of what the process takes.
    """
    out = []
    for r in records:
        room = int(r.environment.get("memory_bytes", 0))
        reserved_bytes = best(r.predicted).peak_reserved_bytes
        if r.status == OUT_OF_MEMORY and reserved_bytes is not None and reserved_bytes <= room:
            out.append(r)
    return out


def best(predicted: Predictions) -> RunFigures:
    """What the prediction that knows most says."""
    return predicted.get(CALIBRATED) or predicted.get(RULES) or RunFigures()
