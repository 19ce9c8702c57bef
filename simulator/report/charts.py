"""The charts of all pages as Vega-Lite specifications, small enough to stand in a page.

Every category and action has one colour on all charts. What a point or bar says when the pointer
is over it comes ready as text. Every function returns a specification as plain data and raises EnvironmentProblem if
altair is missing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from simulator.allocator.requests import phases_of
from simulator.core.problem import Replay, by_category
from simulator.report.page import needed
from simulator.show.notebook import Points
from traces.records.trace import CATEGORIES, PHASES, Trace
from traces.units import GIB, bytes_unit, show_bytes, show_time, time_unit

# Okabe and Ito's colours, which the colour-blind tell apart, on white and on black.
BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PINK, SKY, SAND, GREY = "#cc79a7", "#56b4e9", "#b8a13a", "#8c8c8c"
INK, QUIET = "#111827", "#475467"  # which the page's style sheet turns over where it is dark
COLOURS: Final = {
    "parameter": BLUE, "optimizer state": PINK, "buffer": GREY, "input": GREEN, "gradient": ORANGE,
    "gathered and reduced": RED, "activation": SKY, "other": SAND, "workspace": "#5a4fcf",
}  # fmt: skip
IS_SAVED, RECOMPUTED = "saved", "recomputed"
UNABLE = "saved: may not be recomputed"
ACTION_COLOURS: Final = {IS_SAVED: SKY, RECOMPUTED: RED, UNABLE: GREY}
LEVELS: Final = {"budget": (RED, (6, 4)), "reserved": (PINK, (1, 3))}  # hue and dashes
MOST_POINTS: Final = 1400  # of a drawn line, at most: more than a page has pixels across


def drawn(fields: str, rows: Iterable[Sequence[object]]) -> Any:
    """A chart of rows with the named fields, `op:N ms:Q`; the rows are CSV inside it, smaller than JSON."""
    alt = needed("altair")
    kinds = dict(field.split(":") for field in fields.split())
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(kinds)
    writer.writerows(rows)
    read = {name: "string" if kind == "N" else "number" for name, kind in kinds.items()}
    return alt.Chart(alt.InlineData(values=file.getvalue(), format=alt.CsvDataFormat(type="csv", parse=read)))


def finish(chart: Any, *, height: int) -> dict[str, Any]:
    """The specification at the page's full width, without the address of its schema."""
    spec: dict[str, Any] = chart.properties(width="container", height=height).to_dict()
    kept = {k: v for k, v in spec.items() if k not in ("$schema", "config")}
    return {**kept, "autosize": {"type": "fit-x", "contains": "padding"}}


def colour(field: str, colours: Mapping[str, str]) -> Any:
    """The colour channel of a field whose values have these colours, in their order."""
    scale = {"domain": list(colours), "range": list(colours.values())}
    channel = needed("altair").Color(f"{field}:N").scale(**scale).title(None)
    return channel if len(colours) > 1 else channel.legend(None)


def _present(colours: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    there = set(names)
    return {name: value for name, value in colours.items() if name in there}


# Bars


def peak_by_category(parts: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """A horizontal bar for each name, in the order given, stacked by category; its length is the peak."""
    alt = needed("altair")
    unit, title = bytes_unit(max([1, *(sum(p.values()) for p in parts.values())]))
    there = [c for c in CATEGORIES if any(part.get(c) for part in parts.values())]
    rows = [
        (way, c, part[c] / unit, f"{show_bytes(part[c])} of {show_bytes(sum(part.values()))}", there.index(c))
        for way, part in parts.items()
        for c in there
        if part.get(c)
    ]
    axis = {"labelLimit": 320, "ticks": False, "domain": False, "labelFontSize": 12}
    chart = (
        drawn("name:N series:N value:Q note:N rank:Q", rows)
        .mark_bar(height={"band": 0.8})
        .encode(
            alt.X("value:Q").title(f"at the peak, {title}").axis(tickCount=10).stack("zero"),
            alt.Y("name:N").sort(list(parts)).title(None).axis(**axis),
            colour("series", {c: COLOURS[c] for c in there}),
            alt.Order("rank:Q"),
            tooltip=["name:N", "series:N", "note:N"],
        )
    )
    return finish(chart, height=max(60, 22 * len(parts)))


def grouped(
    bars: Sequence[tuple[str, str, float]],
    colours: Mapping[str, str],
    title: str,
    *,
    is_bytes: bool,
    limits: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """A bar of bytes or times for each (batch size, series, value), beside each other by batch size.

    `limits`: the budget in bytes of each batch size, drawn as a line across it.
    """
    alt = needed("altair")
    top = max([1.0, *(b[2] for b in bars), *((limits or {}).values())])
    unit, unit_name = bytes_unit(int(top)) if is_bytes else time_unit(top)
    look = _present(colours, (b[1] for b in bars))
    groups = list(dict.fromkeys(b[0] for b in bars))
    show = show_bytes if is_bytes else show_time
    rows = [(group, series, value / unit, show(int(value))) for group, series, value in bars]
    base = drawn("group:N series:N size:Q note:N", rows)
    x = alt.X("group:N").sort(groups).title("mini-batch size").axis(labelAngle=0)
    y = alt.Y("size:Q").title(f"{title}, {unit_name}").scale(domain=[0, top / unit * 1.12], nice=False)
    offset = alt.XOffset("series:N").sort(list(look))
    tooltip = ["group:N", "series:N", "note:N"]
    layers = [base.mark_bar().encode(x, y, offset, colour("series", look), tooltip=tooltip)]
    if limits:
        budgets = [(group, n / unit, f"budget {show_bytes(n)}") for group, n in limits.items()]
        marks = drawn("group:N size:Q note:N", budgets)
        tick = {"color": RED, "thickness": 2, "width": {"band": 1}, "strokeDash": [6, 3]}
        layers.append(marks.mark_tick(**tick).encode(x, y, tooltip=["note:N"]))
    values = base.mark_text(baseline="bottom", dy=-3, fontSize=9, color=QUIET)
    text = values.encode(x, y, offset, text=alt.Text("size:Q", format=",.2~f"))
    return finish(alt.layer(*layers, text), height=290)


# Points and lines


def dots(
    rows: Sequence[tuple[str, str, float, float, str]],
    colours: Mapping[str, str],
    x: Any,
    y: Any,
    *,
    under: Sequence[Any] = (),
    height: int = 320,
) -> dict[str, Any]:
    """A point for each (name, series, x, y, what the pointer shows) row, over other layers."""
    shown = _present(colours, (r[1] for r in rows))
    points = (
        drawn("name:N series:N x:Q y:Q note:N", rows)
        .mark_point(filled=True, size=55, opacity=0.75)
        .encode(x, y, colour("series", shown), tooltip=["name:N", "series:N", "note:N"])
    )
    return finish(needed("altair").layer(*under, points), height=height)


def idle_against_size(rows: Sequence[tuple[str, str, int, int]]) -> dict[str, Any]:
    """Every activation as a point, idle time against size: rows are (op, action, idle ns, bytes)."""
    alt = needed("altair")
    unit, name = bytes_unit(max([1, *(r[3] for r in rows)]))
    points = [(op, act, t / 1e6, b / unit, f"idle {show_time(t)}, {show_bytes(b)}") for op, act, t, b in rows]
    x = alt.X("x:Q").title("idle between forward and backward, ms").axis(tickCount=12)
    return dots(points, ACTION_COLOURS, x, alt.Y("y:Q").title(f"size, {name}"), height=250)


def front(curves: Mapping[str, Points]) -> dict[str, Any]:
    """Lines of added time in percent against budgets in GiB, by name."""
    alt = needed("altair")
    colours = dict(zip(curves, (GREY, RED), strict=False))
    unit, name = bytes_unit(int(max(x for curve in curves.values() for x, _ in curve) * GIB))
    points = [
        (f"budget {show_bytes(round(x * GIB))}", line, x * GIB / unit, y, f"{y:+.2f} %")
        for line, curve in curves.items()
        for x, y in curve
    ]
    x = alt.X("x:Q").title(f"budget, {name}").scale(zero=False, nice=False, padding=12)
    y = alt.Y("y:Q").title("added time, % of the step").scale(zero=True)
    dash = alt.StrokeDash("series:N").scale(domain=list(curves), range=[[6, 4], [1, 0]]).title(None)
    lines = (
        drawn("name:N series:N x:Q y:Q note:N", points)
        .mark_line(strokeWidth=1.6)
        .encode(x, y, colour("series", colours), dash, order="x:Q")
    )
    return dots(points, colours, x, y, under=[lines])


# Memory over the step


def over_each_other(runs: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, Any]:
    """What runs held over their length: bytes requested and reserved, point by point."""
    alt = needed("altair")
    unit, unit_name = bytes_unit(max([1, *(n for points in runs.values() for p in points for n in p)]))
    rows = []
    for name, points in runs.items():
        for kind, column in zip(("requested", "reserved"), zip(*points, strict=True), strict=True):
            for k in thin(column, range(len(points))) if any(column) else ():
                note = f"{name}, {kind}: {show_bytes(column[k])}"
                rows.append((100 * k / max(1, len(points) - 1), column[k] / unit, name, kind, note))
    kinds = list(dict.fromkeys(kind for *_, kind, _ in rows))
    dash = alt.StrokeDash("kind:N").scale(domain=kinds, range=[[1, 0], [2, 3]][: len(kinds)]).title(None)
    x = alt.X("x:Q").title("share of the run, %").scale(domain=[0, 100], nice=False)
    y = alt.Y("y:Q").title(unit_name).scale(zero=True)
    base = drawn("x:Q y:Q run:N kind:N note:N", rows).mark_line(interpolate="step-after", strokeWidth=1.5)
    colours = dict(zip(runs, (BLUE, RED), strict=False))
    return finish(base.encode(x, y, colour("run", colours), dash, tooltip=["note:N"]), height=320)


def thin(totals: Sequence[int], clock: Sequence[int]) -> tuple[int, ...]:
    """At most MOST_POINTS indices that keep a line's shape, and its highest and lowest entry exactly: half of them
    each are the highest and the lowest of equal stretches of `clock` (ascending)."""
    n = len(totals)
    if n <= MOST_POINTS:
        return tuple(range(n))
    buckets = (MOST_POINTS - 2) // 2
    values, passed = np.array(totals), np.array(clock) - clock[0]
    there = {0, n - 1}
    borders = np.flatnonzero(np.diff(passed * buckets // (passed[-1] + 1))) + 1
    for stretch in np.split(np.arange(n), borders):
        there |= {int(stretch[values[stretch].argmin()]), int(stretch[values[stretch].argmax()])}
    return tuple(sorted(there))


def memory_over_step(
    trace: Trace,
    run: Replay,
    beside: Replay | None,
    levels: Mapping[str, int | None],
) -> dict[str, Any]:
    """Stacked areas by category over one step, with its phases, its peak, and lines across.

    Each step is drawn at the most that is allocated while it runs. `beside`: the same step otherwise, as a dashed line.
    `levels`: keys of LEVELS, and bytes.
    """
    alt, timeline = needed("altair"), run.timeline
    other = (
        [] if beside is None else [*zip(beside.timeline.start_ns, beside.timeline.peak_bytes, strict=True)]
    )
    known = {name: n for name, n in levels.items() if n is not None}
    highest = (timeline.peak_allocated_bytes, *known.values(), *(n for _, n in other))
    unit, unit_name = bytes_unit(max(1, *highest))
    end_ns = max([1, timeline.step_time_ns, *(t for t, _ in other)])
    x = alt.X("ms:Q").axis(labelExpr="datum.label + ' ms'", tickCount=10, grid=False).title(None)
    x = x.scale(domain=[0, end_ns / 1e6], nice=False)
    scale = alt.Scale(domain=[0, max(1, *highest) / unit * 1.2], nice=False)
    y = alt.Y("y:Q").title(f"allocated, {unit_name}").scale(scale)
    marks = [*_phases(trace, run, x), *_areas(trace, run, x, y, unit)]
    # Dashed lines, whose names must not run into each other: the highest has its name above it.
    for name, nbytes in known.items():
        under = nbytes < max(known.values())
        hue, dash = LEVELS[name]
        base = drawn("y:Q label:N", [(nbytes / unit, f"{name} {nbytes / unit:,.2f} {unit_name}")])
        side, dy = ("top", 4) if under else ("bottom", -3)
        look = {"align": "right", "baseline": side, "dx": -4, "dy": dy, "color": hue}
        marks.append(base.mark_rule(color=hue, strokeDash=list(dash), strokeWidth=1.5).encode(y))
        marks.append(base.mark_text(**look).encode(y, text="label:N", x=alt.value("width")))
    if other:
        at = thin([n for _, n in other], [t for t, _ in other])
        line = drawn("ms:Q y:Q", [(other[k][0] / 1e6, other[k][1] / unit) for k in at])
        look = {"strokeWidth": 1.2, "color": INK, "clip": True, "strokeDash": [4, 3]}
        marks.append(line.mark_line(interpolate="step-after", **look).encode(x, y))
    if len(run.schedule):
        k = timeline.peak_step
        peak = drawn("ms:Q y:Q", [(timeline.start_ns[k] / 1e6, timeline.peak_bytes[k] / unit)])
        marks.append(peak.mark_point(filled=True, size=45, color=INK, opacity=1).encode(x, y))
    # With shift held, so that the page still scrolls under the pointer; a double click resets.
    zoom = alt.selection_interval(name="zoom", bind="scales", encodings=["x"], zoom="wheel![event.shiftKey]")
    marks[0] = marks[0].add_params(zoom)
    return finish(alt.layer(*marks), height=300)


def _areas(trace: Trace, run: Replay, x: Any, y: Any, unit: int) -> list[Any]:
    """The stacked areas, and a rule under the pointer that tells each of them."""
    alt, schedule, timeline = needed("altair"), run.schedule, run.timeline
    running = list(by_category(trace, schedule, timeline))
    cats = [c for c in CATEGORIES if any(now.get(c) for now in running)]

    def row(ms: float, k: int, total: int, op: str, now: Mapping[str, int]) -> tuple[object, ...]:
        return ms, k, op, *(round(n / unit, 4) for n in (total, *(now[c] for c in cats)))

    rows = [
        row(
            timeline.start_ns[k] / 1e6,
            k,
            timeline.peak_bytes[k],
            trace.ops.name[schedule.op[k]] + (" (again)" if schedule.recompute[k] else ""),
            running[k],
        )
        for k in thin(timeline.peak_bytes, timeline.start_ns)
    ]
    if rows:
        ends = timeline.step_time_ns / 1e6, len(schedule), timeline.live_bytes[-1], "end of the step"
        rows.append(row(*ends, running[-1]))
    # A category's name may hold a space, which the list of fields splits at.
    columns = {f"c{i}": c for i, c in enumerate(cats)}
    base = drawn("ms:Q step:Q op:N total:Q " + " ".join(f"{column}:Q" for column in columns), rows)
    areas = (
        base.transform_fold(list(columns), as_=["column", "size"])
        .transform_calculate(rank="toNumber(slice(datum.column, 1))")
        .transform_calculate(category=f"{cats!r}[datum.rank]")
        .transform_stack(stack="size", as_=["y", "above"], groupby=["step"], sort=[alt.SortField("rank")])
        .mark_area(interpolate="step-after", line=False, clip=True)
        .encode(x, y, alt.Y2("above:Q"), colour("category", {c: COLOURS[c] for c in cats}))
    )
    hover = alt.selection_point(
        name="hover", on="pointerover", nearest=True, fields=["step"], empty=False, clear="pointerout"
    )
    tips = [alt.Tooltip("op:N"), alt.Tooltip("step:Q"), alt.Tooltip("ms:Q", format=",.3f")]
    for column, c in {"total": "total", **columns}.items():
        tips.append(alt.Tooltip(f"{column}:Q", title=f"{c}, {bytes_unit(unit)[1]}", format=",.3f"))
    opacity = alt.condition(hover, alt.value(0.6), alt.value(0))
    rule = base.mark_rule(color=INK).encode(x, opacity=opacity, tooltip=tips).add_params(hover)
    return [areas, rule]


def _phases(trace: Trace, run: Replay, x: Any) -> list[Any]:
    """Bands in the background, one a phase, with its name; the optimizer's begins behind backward's last step."""
    alt, start_ns = needed("altair"), [*run.timeline.start_ns, run.timeline.step_time_ns]
    last = {phase: step for step, phase in enumerate(phases_of(trace, run.schedule))}
    rows, begin = list[tuple[str, float, float, float]](), 0
    for phase in (p for p in PHASES if p in last):
        end = max(begin, last[phase] + 1)
        rows.append((phase, start_ns[begin] / 1e6, start_ns[end] / 1e6, 0.02 + 0.05 * (len(rows) % 2)))
        begin = end
    base = drawn("phase:N ms:Q ms2:Q shade:Q", rows)
    shade = alt.FillOpacity("shade:Q").scale(None).legend(None)
    bands = base.mark_rect(clip=True, fill=INK).encode(x, alt.X2("ms2:Q"), fillOpacity=shade)
    # A phase too narrow for its name goes without.
    names = (
        base.transform_joinaggregate(end="max(ms2)")
        .transform_filter("(datum.ms2 - datum.ms) / datum.end > 0.07")
        .mark_text(align="left", baseline="top", dx=4, dy=3, color=QUIET, fontSize=11, clip=True)
        .encode(x, y=alt.value(0), text="phase:N")
    )
    return [bands, names]
