"""The charts of all pages as Vega-Lite specifications, plain data that is small enough to stand in a page.

Every category, way to run the step and action has one colour on all charts. What a point or bar says when the pointer
is over it comes ready as text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from simulator.allocator.requests import phases_of
from simulator.core.problem import Replay, by_category
from simulator.show.notebook import Points
from traces.records.trace import CATEGORIES, PHASES, Trace
from traces.units import GIB, bytes_unit, show_bytes, show_time

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
IS_SAVED, RECOMPUTED, REPLACED = "saved", "recomputed", "another value serves"
UNABLE = "saved: may not be recomputed"
ACTION_COLOURS: Final = {IS_SAVED: "#94a3b8", RECOMPUTED: "#d9614c", REPLACED: "#56a6a0", UNABLE: "#3f4657"}
# One hue for each way to run the step; the paler shade is always a prediction.
WAY_COLOURS: Final = {
    "save-all": ("#c3d3e6", "#4c78a8"),
    "plan": ("#f0c0b7", "#d9614c"),
    "eager": ("#d6d3d1", "#78716c"),
}
BUDGET_COLOUR, BOUND_COLOUR, MEASURED_COLOUR = "#b42318", "#3f4657", "#111827"
LEVELS: Final = {"budget": (BUDGET_COLOUR, (6, 4)), "reserved": ("#5b21b6", (1, 3))}  # hue and dashes
PLANNER_COLOUR, QUIET = "#d9614c", "#475467"
PHASE_COLOURS: Final = ("#eef4fb", "#fdf3e7", "#f1eef8")
MOST_POINTS: Final = 1400  # of a drawn line, at most: more than a page has pixels across


Spec = dict[str, Any]
TYPES: Final = {"N": "nominal", "Q": "quantitative"}


def on(field: str, **more: Any) -> Spec:
    """The channel of a field, `ms:Q`."""
    name, _, kind = field.partition(":")
    return {"field": name, "type": TYPES[kind], **more}


def drawn(fields: str, rows: Iterable[Sequence[object]], *layers: Spec) -> Spec:
    """Layers over rows with the named fields, `op:N ms:Q`; the rows are CSV, which is smaller than JSON."""
    kinds = dict(field.split(":") for field in fields.split())
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([kinds, *rows])
    parse = {name: "string" if kind == "N" else "number" for name, kind in kinds.items()}
    data = {"values": file.getvalue(), "format": {"type": "csv", "parse": parse}}
    return {"data": data, **_over(layers)}


def _over(layers: Sequence[Spec]) -> Spec:
    return layers[0] if len(layers) == 1 else {"layer": list(layers)}


def mark(kind: str, look: Spec | None = None, **channels: Any) -> Spec:
    """One layer; a tooltip is the names of its fields."""
    if isinstance(tips := channels.get("tooltip"), str):
        channels["tooltip"] = [on(tip) for tip in tips.split()]
    return {"mark": {"type": kind, **(look or {})}, "encoding": channels}


def finish(*layers: Spec, height: int) -> Spec:
    """The specification at the page's full width."""
    frame = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    return {**frame, "height": height, **_over(layers)}


def colour(field: str, colours: Mapping[str, str]) -> Spec:
    """The colour channel of a field whose values have these colours, in their order."""
    legend = {} if len(colours) > 1 else {"legend": None}
    return on(f"{field}:N", scale={"domain": [*colours], "range": [*colours.values()]}, title=None, **legend)


def time_unit(top_ns: float) -> tuple[int, str]:
    """The unit in which times up to `top_ns` read well: its length in ns, its name."""
    return next(((u, n) for u, n in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")) if top_ns >= u), (1, "ns"))


# Bars


def peak_by_category(parts: Mapping[str, Mapping[str, int]]) -> Spec:
    """A horizontal bar for each name, in the order given, stacked by category; its length is the peak."""
    unit, title = bytes_unit(max([1, *(sum(p.values()) for p in parts.values())]))
    there = [c for c in CATEGORIES if any(part.get(c) for part in parts.values())]
    rows = [
        (way, c, part[c] / unit, f"{show_bytes(part[c])} of {show_bytes(sum(part.values()))}", there.index(c))
        for way, part in parts.items()
        for c in there
        if part.get(c)
    ]
    axis = {"labelLimit": 320, "ticks": False, "domain": False, "labelFontSize": 12}
    bars = mark(
        "bar",
        {"height": {"band": 0.8}},
        x=on("value:Q", title=f"at the peak, {title}", axis={"tickCount": 10}, stack="zero"),
        y=on("name:N", sort=list(parts), title=None, axis=axis),
        color=colour("series", {c: COLOURS[c] for c in there}),
        order=on("rank:Q"),
        tooltip="name:N series:N note:N",
    )
    fields = "name:N series:N value:Q note:N rank:Q"
    return finish(drawn(fields, rows, bars), height=max(60, 22 * len(parts)))


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure of one way to run the step (a key of WAY_COLOURS) in one group, predicted or measured."""

    group: str
    way: str
    measured: bool
    value: float  # bytes or nanoseconds
    where: str = ""  # the device, for the legend

    @property
    def series(self) -> str:
        source = "measured" if self.measured else "predicted"
        return f"{self.way}, {source}{' on ' + self.where if self.where else ''}"


def grouped(
    bars: Sequence[Bar],
    title: str,
    *,
    group_title: str = "",
    is_bytes: bool,
    limits: Mapping[str, int] | None = None,
) -> Spec:
    """Grouped bars of bytes or times: predictions pale, measurements solid.

    `limits`: the budget in bytes of each group, drawn as a line across it.
    """
    top = max([1.0, *(b.value for b in bars), *((limits or {}).values())])
    unit, unit_name = bytes_unit(int(top)) if is_bytes else time_unit(top)
    look = {b.series: WAY_COLOURS[b.way][b.measured] for b in sorted(bars, key=lambda b: b.measured)}
    groups = list(dict.fromkeys(b.group for b in bars))
    # Where the groups are the ways themselves, their bars stand side by side; else each series has its own place.
    by_way = all(b.group == b.way for b in bars)
    show = show_bytes if is_bytes else show_time
    rows = [
        (b.group, b.series, int(b.measured) if by_way else b.series, b.value / unit, show(int(b.value)))
        for b in bars
    ]
    scale = {"domain": [0, top / unit * 1.12], "nice": False}
    at = {
        "x": on("group:N", sort=groups, title=group_title or None, axis={"labelAngle": 0}),
        "y": on("size:Q", title=f"{title}, {unit_name}", scale=scale),
    }
    beside = {**at, "xOffset": on("place:N", sort=["0", "1"] if by_way else list(look))}
    small = {"baseline": "bottom", "dy": -3, "fontSize": 9, "color": QUIET}
    layers = [
        drawn(
            "group:N series:N place:N size:Q note:N",
            rows,
            mark("bar", color=colour("series", look), tooltip="group:N series:N note:N", **beside),
            mark("text", small, text=on("size:Q", format=",.2~f"), **beside),
        )
    ]
    if limits:
        tick = {"color": BUDGET_COLOUR, "thickness": 2, "width": {"band": 1}, "strokeDash": [6, 3]}
        marks = [(group, v / unit, f"budget {show_bytes(v)}") for group, v in limits.items()]
        layers.append(drawn("group:N size:Q note:N", marks, mark("tick", tick, tooltip="note:N", **at)))
    return finish(*layers, height=290)


# Points and lines


def dots(x: Spec, y: Spec, colours: Mapping[str, str]) -> Spec:
    """A point for each row of name, series, x, y, and what the pointer shows."""
    look = {"filled": True, "size": 55, "opacity": 0.75}
    return mark("point", look, x=x, y=y, color=colour("series", colours), tooltip="name:N series:N note:N")


def idle_against_size(rows: Sequence[tuple[str, str, int, int]]) -> Spec:
    """Every activation as a point, idle time against size: rows are (op, action, idle ns, bytes)."""
    unit, name = bytes_unit(max([1, *(r[3] for r in rows)]))
    points = [(op, act, t / 1e6, b / unit, f"idle {show_time(t)}, {show_bytes(b)}") for op, act, t, b in rows]
    there = {r[1] for r in rows}
    x = on("x:Q", title="idle between forward and backward, ms", axis={"tickCount": 12})
    shown = {name: hue for name, hue in ACTION_COLOURS.items() if name in there}
    over = dots(x, on("y:Q", title=f"size, {name}"), shown)
    return finish(drawn("name:N series:N x:Q y:Q note:N", points, over), height=250)


def front(curves: Mapping[str, Points]) -> Spec:
    """Lines of added time in percent against budgets in GiB, by name."""
    colours = dict(zip(curves, (BOUND_COLOUR, PLANNER_COLOUR), strict=False))
    unit, name = bytes_unit(int(max(x for curve in curves.values() for x, _ in curve) * GIB))
    points = [
        (f"budget {show_bytes(round(x * GIB))}", line, x * GIB / unit, y, f"{y:+.2f} %")
        for line, curve in curves.items()
        for x, y in curve
    ]
    x = on("x:Q", title=f"budget, {name}", scale={"zero": False, "nice": False, "padding": 12})
    y = on("y:Q", title="added time, % of the step", scale={"zero": True})
    dash = on("series:N", scale={"domain": list(curves), "range": [[6, 4], [1, 0]]}, title=None)
    line = mark(
        "line",
        {"strokeWidth": 1.6},
        x=x,
        y=y,
        color=colour("series", colours),
        strokeDash=dash,
        order=on("x:Q"),
    )
    over = line, dots(x, y, colours)
    return finish(drawn("name:N series:N x:Q y:Q note:N", points, *over), height=320)


# Memory over the step


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
    top_bytes: int,
    end_ns: int,
    levels: Mapping[str, int | None],
    measured_curve: Sequence[tuple[int, int]] = (),
    name: str = "plan",
) -> Spec:
    """Stacked areas by category over one step, with its phases, its peak, and lines across.

    Each step is drawn at the most that is allocated while it runs; charts with equal `top_bytes` and `end_ns` can be
    compared. `levels`: keys of LEVELS, and bytes. `measured_curve`: (ns, allocated bytes) of a real run, drawn over the
    areas.
    """
    unit, unit_name = bytes_unit(top_bytes)
    axis = {"labelExpr": "datum.label + ' ms'", "tickCount": 10, "grid": False}
    x = on("ms:Q", axis=axis, title=None, scale={"domain": [0, end_ns / 1e6], "nice": False})
    scale = {"domain": [0, top_bytes / unit * 1.2], "nice": False}
    y = on("y:Q", title=f"allocated, {unit_name}", scale=scale)
    layers = [_phases(trace, run, x), _areas(trace, run, x, y, unit, name)]
    for what, nbytes in levels.items():
        if nbytes is not None:
            text = f"{what} {nbytes / unit:,.2f} {unit_name}"
            layers.append(_across(nbytes / unit, text, y, *LEVELS[what]))
    if measured_curve:
        at = thin([b for _, b in measured_curve], [t for t, _ in measured_curve])
        curve = [(measured_curve[k][0] / 1e6, measured_curve[k][1] / unit) for k in at]
        look = {"interpolate": "step-after", "strokeWidth": 1.2, "color": MEASURED_COLOUR, "clip": True}
        layers.append(drawn("ms:Q y:Q", curve, mark("line", look, x=x, y=y)))
    if len(run.schedule):
        k = run.timeline.peak_step
        peak = [(run.timeline.start_ns[k] / 1e6, run.timeline.peak_bytes[k] / unit)]
        dot = {"filled": True, "size": 45, "color": MEASURED_COLOUR, "opacity": 1}
        layers.append(drawn("ms:Q y:Q", peak, mark("point", dot, x=x, y=y)))
    return finish(*layers, height=270)


def _across(value: float, label: str, y: Spec, hue: str, dash: Sequence[int]) -> Spec:
    """A dashed line across at a value, with its name."""
    look = {"align": "right", "baseline": "bottom", "dx": -4, "dy": -3, "fontSize": 11, "color": hue}
    line = mark("rule", {"color": hue, "strokeDash": list(dash), "strokeWidth": 1.5}, y=y)
    text = mark("text", look, y=y, text=on("label:N"), x={"value": "width"})
    return drawn("y:Q label:N", [(value, label)], line, text)


def _areas(trace: Trace, run: Replay, x: Spec, y: Spec, unit: int, name: str) -> Spec:
    """The stacked areas, and a rule under the pointer that tells each of them."""
    schedule, timeline = run.schedule, run.timeline
    running = list(by_category(trace, schedule, timeline))
    cats = [c for c in CATEGORIES if any(now[c] for now in running)]

    def row(ns: int, k: int, total: int, op: str, now: Mapping[str, int]) -> tuple[object, ...]:
        return ns / 1e6, k, op, *(round(n / unit, 4) for n in (total, *(now[c] for c in cats)))

    rows = []
    for k in thin(timeline.peak_bytes, timeline.start_ns):
        op = trace.ops.name[schedule.op[k]] + (" (again)" if schedule.recompute[k] else "")
        rows.append(row(timeline.start_ns[k], k, timeline.peak_bytes[k], op, running[k]))
    if rows:
        ends = timeline.step_time_ns, len(schedule), timeline.live_bytes[-1], "end of the step"
        rows.append(row(*ends, running[-1]))
    # A category's name may hold a space, which the list of fields splits at.
    columns = {f"c{i}": c for i, c in enumerate(cats)}
    look, hues = {"interpolate": "step-after", "line": False, "clip": True}, {c: COLOURS[c] for c in cats}
    areas = mark("area", look, x=x, y=y, y2={"field": "above"}, color=colour("category", hues))
    areas["transform"] = [
        {"fold": list(columns), "as": ["column", "size"]},
        {"calculate": "toNumber(slice(datum.column, 1))", "as": "rank"},
        {"calculate": f"{cats!r}[datum.rank]", "as": "category"},
        {"stack": "size", "groupby": ["step"], "sort": [{"field": "rank"}], "as": ["y", "above"]},
    ]
    tips = [on("op:N"), on("step:Q"), on("ms:Q", format=",.3f")]
    for column, c in {"total": "total", **columns}.items():
        tips.append(on(f"{column}:Q", title=f"{c}, {bytes_unit(unit)[1]}", format=",.3f"))
    hover = f"hover_{name}"
    pointed = {
        "type": "point",
        "on": "pointerover",
        "nearest": True,
        "fields": ["step"],
        "clear": "pointerout",
    }
    opacity = {"condition": {"param": hover, "value": 0.6, "empty": False}, "value": 0}
    rule = mark("rule", {"color": "#1f2430"}, x=x, opacity=opacity, tooltip=tips)
    # With shift held, so that the page still scrolls under the pointer; a double click resets.
    zoom = {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"}
    areas["params"] = [{"name": f"zoom_{name}", "bind": "scales", "select": zoom}]
    rule["params"] = [{"name": hover, "select": pointed}]
    fields = " ".join(["ms:Q step:Q op:N total:Q", *(f"{column}:Q" for column in columns)])
    return drawn(fields, rows, areas, rule)


def _phases(trace: Trace, run: Replay, x: Spec) -> Spec:
    """Bands in the background, one a phase, with its name; the optimizer's begins behind backward's last step."""
    start_ns = [*run.timeline.start_ns, run.timeline.step_time_ns]
    last = {phase: step for step, phase in enumerate(phases_of(trace, run.schedule))}
    rows, begin = [], 0
    for phase in (p for p in PHASES if p in last):
        end = max(begin, last[phase] + 1)
        rows.append((phase, start_ns[begin] / 1e6, start_ns[end] / 1e6))
        begin = end
    fill = on("phase:N", scale={"domain": list(PHASES), "range": list(PHASE_COLOURS)}, legend=None)
    look = {
        "align": "left",
        "baseline": "top",
        "dx": 4,
        "dy": 3,
        "color": "#667085",
        "fontSize": 11,
        "clip": True,
    }
    wide = [  # a phase too narrow for its name goes without
        {"joinaggregate": [{"op": "max", "field": "ms2", "as": "end"}]},
        {"filter": "(datum.ms2 - datum.ms) / datum.end > 0.07"},
    ]
    bands = mark("rect", {"clip": True}, x=x, x2={"field": "ms2"}, fill=fill)
    names = {"transform": wide, **mark("text", look, x=x, y={"value": 0}, text=on("phase:N"))}
    return drawn("phase:N ms:Q ms2:Q", rows, bands, names)
