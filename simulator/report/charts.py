"""Turn timelines, breakdowns and figures into Vega-Lite specifications, small enough to stand in a page.

Every category has one colour on all charts. Every function returns a specification as plain data and raises
EnvironmentProblem if altair is missing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from simulator.core.schedule import Schedule
from simulator.core.timeline import Timeline
from simulator.report.page import INSTALL
from traces.errors import EnvironmentProblem
from traces.trace import BACKWARD, CATEGORIES, PHASES, WORKSPACE, Trace
from traces.units import bytes_unit

COLOURS: Final = {
    "parameter": "#4c78a8",
    "optimizer state": "#8a6fb5",
    "buffer": "#a8a29e",
    "input": "#56a6a0",
    "gradient": "#e9a23b",
    "activation": "#d9614c",
    "other": "#c9b79c",
    "workspace": "#3f4657",
}
BUDGET_COLOUR: Final = "#b42318"
RESERVED_COLOUR: Final = "#5b21b6"
MEASURED_COLOUR: Final = "#111827"
PHASE_COLOURS: Final = ("#eef4fb", "#fdf3e7", "#f1eef8")
POINTS: Final = 1400  # of a drawn line, at most: more than a page has pixels across


def altair() -> Any:
    """The altair package; raises EnvironmentProblem if it is not installed."""
    try:
        import altair
    except ImportError:
        raise EnvironmentProblem(f"a report needs the package altair; {INSTALL}.") from None
    return altair


def thin(totals: Sequence[int], clock: Sequence[int], points: int = POINTS) -> tuple[int, ...]:
    """Indices of at most `points` entries that keep a line's shape, and its highest and lowest entry exactly.

    A quarter of the points each goes to the highest and the lowest entry of equal stretches of `clock`
    (ascending), and to those of equal numbers of entries, so that the line may be drawn over either. The
    first and the last entry stay.
    """
    n = len(totals)
    if n <= points:
        return tuple(range(n))
    buckets = max(1, (points - 2) // 4)
    span = max(1, clock[-1] - clock[0] + 1)
    kept = {0, n - 1}
    for bucket_of in (lambda k: (clock[k] - clock[0]) * buckets // span, lambda k: k * buckets // n):
        best: dict[int, tuple[int, int]] = {}
        for k in range(n):
            low, high = best.setdefault(bucket_of(k), (k, k))
            if totals[k] < totals[low]:
                low = k
            if totals[k] > totals[high]:
                high = k
            best[bucket_of(k)] = (low, high)
        for pair in best.values():
            kept.update(pair)
    return tuple(sorted(kept))


def while_running(trace: Trace, schedule: Schedule, timeline: Timeline) -> dict[str, tuple[int, ...]]:
    """Bytes by category while each step runs; the parts of step k sum to `timeline.peak_bytes[k]` exactly.

    Workspace is what the running op uses beyond its outputs.
    """
    sts = trace.storages
    live = dict.fromkeys(CATEGORIES, 0)
    for s, p in enumerate(sts.producer):
        if p < 0:
            live[sts.category[s]] += sts.nbytes[s]
    columns: dict[str, list[int]] = {c: [] for c in CATEGORIES}
    for step, op in enumerate(schedule.op):
        now = dict(live)
        for s in trace.ops.writes[op]:
            if sts.producer[s] == op:
                now[sts.category[s]] += sts.nbytes[s]
        if schedule.takes[step] >= 0:
            now[sts.category[schedule.takes[step]]] -= sts.nbytes[schedule.takes[step]]
        now[WORKSPACE] += timeline.peak_bytes[step] - sum(now.values())
        for c in CATEGORIES:
            columns[c].append(now[c])
        for s in schedule.binds[step]:
            live[sts.category[s]] += sts.nbytes[s]
        for s in schedule.frees[step]:
            live[sts.category[s]] -= sts.nbytes[s]
    return {c: tuple(v) for c, v in columns.items()}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], texts: Sequence[str] = ()) -> Any:
    """Rows as CSV inside the specification, smaller than JSON rows; columns not in `texts` are numbers."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    alt = altair()
    parse = {c: "string" if c in texts else "number" for c in columns}
    return alt.InlineData(values=file.getvalue(), format=alt.CsvDataFormat(type="csv", parse=parse))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The common scales of charts that are compared with each other."""

    top_bytes: int
    end_ns: int
    steps: int


def memory_over_step(
    trace: Trace,
    schedule: Schedule,
    timeline: Timeline,
    extent: Extent,
    *,
    budget_bytes: int | None = None,
    reserved_bytes: int | None = None,
    measured_curve: Sequence[tuple[int, int]] | None = None,
    name: str = "plan",
) -> dict[str, Any]:
    """Stacked areas by category over one step, with its phases, its peak, and the budget as a line.

    The horizontal axis is time or the step's number, as the parameter `clock` says (`time` or `steps`). Each
    step is drawn at the most that is allocated while it runs. `measured_curve`: (time in ns, allocated bytes)
    of a real run, drawn over the areas when the axis is time. `reserved_bytes`: a dotted line.
    """
    alt = altair()
    ops = trace.ops
    unit, unit_name = bytes_unit(extent.top_bytes)
    columns = {c: v for c, v in while_running(trace, schedule, timeline).items() if any(v)}
    end_ns, n = timeline.step_time_ns, len(schedule)
    kept = thin(timeline.peak_bytes, timeline.start_ns)
    cats = list(columns)
    rows = [
        (
            timeline.start_ns[k] / 1e6,
            k,
            timeline.peak_bytes[k],
            ops.name[schedule.op[k]] + (" (again)" if schedule.recompute[k] else ""),
            *(columns[c][k] for c in cats),
        )
        for k in kept
    ]
    if rows:
        rows.append(
            (end_ns / 1e6, n, timeline.live_bytes[-1], "end of the step", *(columns[c][-1] for c in cats))
        )
    data = table(["ms", "step", "total", "op", *cats], rows, ["op"])

    x = alt.X("x:Q").axis(
        labelExpr="clock == 'time' ? datum.label + ' ms' : datum.label", tickCount=10, grid=False
    )
    end = f"clock == 'time' ? {extent.end_ns / 1e6} : {extent.steps}"
    x = x.title(None).scale(domainMin=0, domainMax=alt.ExprRef(end), nice=False)
    y_scale = alt.Scale(domain=[0, extent.top_bytes / unit * 1.2], nice=False)
    at = "clock == 'time' ? datum.ms : datum.step"

    def y(column: str) -> Any:
        return alt.Y(f"{column}:Q").title(f"allocated, {unit_name}").scale(y_scale)

    base = alt.Chart(data).transform_calculate(x=at)
    areas = (
        base.transform_fold(cats, as_=["category", "bytes"])
        .transform_calculate(rank=f"indexof({cats!r}, datum.category)")
        .transform_stack(
            stack="bytes", as_=["below", "above"], groupby=["step"], sort=[alt.SortField("rank")]
        )
        .transform_calculate(low=f"datum.below / {unit}", high=f"datum.above / {unit}")
        .mark_area(interpolate="step-after", line=False, clip=True)
        .encode(x, y("low"), alt.Y2("high:Q"), category_colour(cats))
    )
    marks = [*_phases(trace, schedule, timeline, x), areas]
    if budget_bytes is not None:
        marks += _level(
            budget_bytes / unit,
            f"budget {budget_bytes / unit:,.2f} {unit_name}",
            y_scale,
            BUDGET_COLOUR,
            [6, 4],
        )
    if reserved_bytes is not None:
        label = f"reserved {reserved_bytes / unit:,.2f} {unit_name}"
        marks += _level(reserved_bytes / unit, label, y_scale, RESERVED_COLOUR, [1, 3])
    if measured_curve:
        curve = [
            measured_curve[k] for k in thin([b for _, b in measured_curve], [t for t, _ in measured_curve])
        ]
        drawn = alt.Chart(table(["ms", "bytes"], [(t / 1e6, b) for t, b in curve]))
        marks.append(
            drawn.transform_filter("clock == 'time'")
            .transform_calculate(x="datum.ms", y=f"datum.bytes / {unit}")
            .mark_line(interpolate="step-after", strokeWidth=1.2, color=MEASURED_COLOUR, clip=True)
            .encode(x, y("y"))
        )
    hover = alt.selection_point(
        name=f"hover_{name}", on="pointerover", nearest=True, fields=["step"], empty=False, clear="pointerout"
    )
    tips = [alt.Tooltip("op:N", title="op"), alt.Tooltip("step:Q"), alt.Tooltip("ms:Q", format=",.3f")]
    tips += [
        alt.Tooltip(f"u{i}:Q", title=f"{c}, {unit_name}", format=",.3f")
        for i, c in enumerate(["total", *cats])
    ]
    scaled = {f"u{i}": f"datum['{c}'] / {unit}" for i, c in enumerate(["total", *cats])}
    marks.append(
        base.transform_calculate(**scaled)
        .mark_rule(color="#1f2430", strokeWidth=1)
        .encode(x, opacity=alt.condition(hover, alt.value(0.6), alt.value(0)), tooltip=tips)
        .add_params(hover)
    )
    if rows:
        marks += _peak(trace, schedule, timeline, x, y, unit, unit_name)
    clock = alt.param(name="clock", value="time")
    # With shift held, so that the page still scrolls under the pointer; a double click resets.
    zoom = alt.selection_interval(
        name=f"zoom_{name}", bind="scales", encodings=["x"], zoom="wheel![event.shiftKey]"
    )
    marks[0] = marks[0].add_params(zoom)
    return finish(alt.layer(*marks).add_params(clock), height=270)


def _phases(trace: Trace, schedule: Schedule, timeline: Timeline, x: Any) -> list[Any]:
    """Bands in the background, one a phase, with its name."""
    alt = altair()
    first: dict[str, int] = {}
    for step, op in enumerate(schedule.op):
        # A recompute step belongs to backward, though its op stands in forward.
        phase = BACKWARD if schedule.recompute[step] else trace.ops.phase[op]
        first.setdefault(phase, step)
    present = [p for p in PHASES if p in first]
    rows = []
    for k, p in enumerate(present):
        end = first[present[k + 1]] if k + 1 < len(present) else len(schedule)
        stop_ns = timeline.start_ns[end] if end < len(schedule) else timeline.step_time_ns
        rows.append((p, timeline.start_ns[first[p]] / 1e6, stop_ns / 1e6, first[p], end, PHASES.index(p)))
    base = alt.Chart(
        table(["phase", "ms", "ms2", "step", "step2", "rank"], rows, ["phase"])
    ).transform_calculate(
        x="clock == 'time' ? datum.ms : datum.step", x2="clock == 'time' ? datum.ms2 : datum.step2"
    )
    bands = base.mark_rect(clip=True).encode(
        x,
        alt.X2("x2:Q"),
        fill=alt.Fill("phase:N").scale(domain=list(PHASES), range=list(PHASE_COLOURS)).legend(None),
    )
    # A phase too narrow for its name goes without.
    names = (
        base.transform_joinaggregate(end="max(x2)")
        .transform_filter("(datum.x2 - datum.x) / datum.end > 0.07")
        .mark_text(align="left", baseline="top", dx=4, dy=3, color="#667085", fontSize=11, clip=True)
        .encode(x, y=alt.value(0), text="phase:N")
    )
    return [bands, names]


def _peak(
    trace: Trace, schedule: Schedule, timeline: Timeline, x: Any, y: Any, unit: int, unit_name: str
) -> list[Any]:
    alt = altair()
    k = timeline.peak_step
    peak = timeline.peak_allocated_bytes
    label = f"peak {peak / unit:,.2f} {unit_name} at {trace.ops.name[schedule.op[k]]}"
    row = (timeline.start_ns[k] / 1e6, k, peak / unit, label)
    base = alt.Chart(table(["ms", "step", "y", "label"], [row], ["label"]))
    base = base.transform_calculate(x="clock == 'time' ? datum.ms : datum.step")
    right = timeline.start_ns[k] > 0.6 * timeline.step_time_ns
    text = base.mark_text(
        align="right" if right else "left", dx=-7 if right else 7, dy=-8, fontSize=11, fontWeight=600
    )
    halo = text.copy()
    halo.mark.stroke, halo.mark.strokeWidth, halo.mark.opacity = "white", 3, 0.8
    return [
        base.mark_point(filled=True, size=45, color="#111827", opacity=1).encode(x, y("y")),
        halo.encode(x, y("y"), text="label:N"),
        text.encode(x, y("y"), text="label:N"),
    ]


def _level(value: float, label: str, scale: Any, colour: str, dash: list[int]) -> list[Any]:
    """A horizontal line with its label."""
    alt = altair()
    base = alt.Chart(table(["level", "label"], [(value, label)], ["label"]))
    look = {"align": "right", "baseline": "bottom", "dx": -4, "dy": -3, "fontSize": 11}
    where = {"y": alt.Y("level:Q").scale(scale), "x": alt.value("width"), "text": "label:N"}
    return [
        base.mark_rule(color=colour, strokeDash=dash, strokeWidth=1.5).encode(alt.Y("level:Q").scale(scale)),
        base.mark_text(**look, stroke="white", strokeWidth=3, opacity=0.8).encode(**where),
        base.mark_text(**look, color=colour).encode(**where),
    ]


def category_colour(categories: Sequence[str]) -> Any:
    """The colour channel of a chart by category."""
    return (
        altair()
        .Color("category:N")
        .scale(domain=list(categories), range=[COLOURS[c] for c in categories])
        .title(None)
    )


def finish(chart: Any, *, height: int) -> dict[str, Any]:
    """The specification at the page's full width, without the address of its schema."""
    spec: dict[str, Any] = chart.properties(width="container", height=height).to_dict()
    spec.pop("$schema", None)
    spec.pop("config", None)
    return {**spec, "autosize": {"type": "fit-x", "contains": "padding"}}


def present(parts: Sequence[Mapping[str, int]]) -> list[str]:
    """The categories that hold anything in any of the breakdowns, in the common order."""
    return [c for c in CATEGORIES if any(p.get(c) for p in parts)]
