"""Turn breakdowns, costs and figures of runs into bar charts and scatter plots (Vega-Lite specifications)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from simulator.report.charts import BUDGET_COLOUR, altair, category_colour, finish, present, table
from traces.units import bytes_unit

KEPT, RECOMPUTED, UNABLE = "kept", "recomputed", "kept: may not be recomputed"
ACTION_COLOURS: Final = {KEPT: "#94a3b8", RECOMPUTED: "#d9614c", UNABLE: "#3f4657"}
# One hue for each way to run the step; the paler shade with a dashed edge is always a prediction.
WAY_COLOURS: Final = {
    "keep-all": ("#c3d3e6", "#4c78a8"),
    "plan": ("#f0c0b7", "#d9614c"),
    "eager": ("#d6d3d1", "#78716c"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One figure of one way to run the step (a key of WAY_COLOURS) in one group, predicted or measured."""

    group: str
    way: str
    measured: bool
    value: float  # bytes or nanoseconds
    where: str = ""  # the device, for the legend


def peak_by_category(
    parts: Mapping[str, Mapping[str, int]], budget_bytes: int | None = None
) -> dict[str, Any]:
    """One horizontal bar for each name (`keep-all`, `plan`), stacked by category; its length is the peak."""
    alt = altair()
    top = max([budget_bytes or 0, 1, *(sum(p.values()) for p in parts.values())])
    unit, unit_name = bytes_unit(top)
    cats = present(list(parts.values()))
    rows = [
        (name, c, part[c] / unit, rank)
        for name, part in parts.items()
        for rank, c in enumerate(cats)
        if part.get(c)
    ]
    y = alt.Y("bar:N").title(None).sort(list(parts)).axis(domain=False, ticks=False, labelFontSize=12)
    x_scale = alt.Scale(domain=[0, top / unit * 1.1], nice=False)
    bars = (
        alt.Chart(table(["bar", "category", "size", "rank"], rows, ["bar", "category"]))
        .mark_bar(height={"band": 0.72})
        .encode(
            alt.X("size:Q").title(f"at the peak, {unit_name}").scale(x_scale).axis(tickCount=10),
            y,
            category_colour(cats),
            alt.Order("rank:Q"),
            [alt.Tooltip("category:N"), alt.Tooltip("size:Q", format=",.3f", title=unit_name)],
        )
    )
    totals = [(name, sum(part.values()) / unit) for name, part in parts.items()]
    ends = (
        alt.Chart(table(["bar", "size"], totals, ["bar"]))
        .mark_text(align="left", dx=5, fontSize=12)
        .encode(alt.X("size:Q").scale(x_scale), y, text=alt.Text("size:Q", format=",.2f"))
    )
    layers = [bars, ends]
    if budget_bytes is not None:
        line = alt.Chart(table(["budget"], [(budget_bytes / unit,)]))
        layers.append(
            line.mark_rule(color=BUDGET_COLOUR, strokeDash=[6, 4], strokeWidth=1.5).encode(
                alt.X("budget:Q").scale(x_scale)
            )
        )
    return finish(alt.layer(*layers), height=46 * max(1, len(parts)))


def peak_by_category_and_group(
    rows: Sequence[tuple[str, str, Mapping[str, int]]], *, group_title: str
) -> dict[str, Any]:
    """Upright bars stacked by category: `rows` are (group, name within the group, bytes by category)."""
    alt = altair()
    top = max([1, *(sum(part.values()) for _, _, part in rows)])
    unit, unit_name = bytes_unit(top)
    cats = present([part for _, _, part in rows])
    data = table(
        ["group", "way", "category", "size", "rank"],
        [(g, w, c, part[c] / unit, k) for g, w, part in rows for k, c in enumerate(cats) if part.get(c)],
        ["group", "way", "category"],
    )
    groups, ways = (list(dict.fromkeys(r[k] for r in rows)) for k in (0, 1))
    x = alt.X("group:N").sort(groups).title(group_title).axis(labelAngle=0)
    offset = alt.XOffset("way:N").sort(ways)
    bars = (
        alt.Chart(data)
        .mark_bar()
        .encode(
            x,
            alt.Y("size:Q").title(f"at the peak, {unit_name}"),
            offset,
            category_colour(cats),
            alt.Order("rank:Q"),
            [
                alt.Tooltip("group:N", title=group_title),
                alt.Tooltip("way:N", title="run"),
                alt.Tooltip("category:N"),
                alt.Tooltip("size:Q", format=",.3f", title=unit_name),
            ],
        )
    )
    sums = [(g, w, sum(part.values()) / unit) for g, w, part in rows if part]
    names = (
        alt.Chart(table(["group", "way", "size"], sums, ["group", "way"]))
        .mark_text(baseline="bottom", dy=-3, fontSize=11, color="#475467")
        .encode(x, alt.Y("size:Q"), offset, text="way:N")
    )
    return finish(alt.layer(bars, names), height=300)


def grouped(
    bars: Sequence[Bar],
    *,
    title: str,
    group_title: str,
    is_bytes: bool,
    limits: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Grouped bars of bytes or times: predictions pale with a dashed edge, measurements solid.

    `limits`: the budget in bytes of each group, drawn as a line across it.
    """
    alt = altair()
    top = max([1.0, *(b.value for b in bars), *((limits or {}).values())])
    unit, unit_name = bytes_unit(int(top)) if is_bytes else time_unit(top)
    series = list(dict.fromkeys(_series(b) for b in sorted(bars, key=lambda b: b.measured)))
    look = {_series(b): (WAY_COLOURS[b.way], b.measured) for b in bars}
    fills = [look[s][0][1 if look[s][1] else 0] for s in series]
    edges = [look[s][0][1] for s in series]
    dashes = [[1, 0] if look[s][1] else [3, 2] for s in series]
    groups = list(dict.fromkeys(b.group for b in bars))
    # Where the groups are the ways themselves, their bars stand side by side; else each series has its own place.
    by_way = all(b.group == b.way for b in bars)
    data = table(
        ["group", "series", "place", "size"],
        [(b.group, _series(b), int(b.measured) if by_way else _series(b), b.value / unit) for b in bars],
        ["group", "series", "place"],
    )
    x = alt.X("group:N").sort(groups).title(group_title or None).axis(labelAngle=0)
    y = alt.Y("size:Q").title(f"{title}, {unit_name}").scale(domain=[0, top / unit * 1.12], nice=False)
    offset = alt.XOffset("place:N").sort(["0", "1"] if by_way else series)

    def scale(channel: Any, values: Sequence[Any]) -> Any:
        return channel.scale(domain=series, range=list(values)).title(None)

    drawn = (
        alt.Chart(data)
        .mark_bar(strokeWidth=1.2)
        .encode(
            x,
            y,
            offset,
            scale(alt.Fill("series:N"), fills).legend(columns=3),
            scale(alt.Stroke("series:N"), edges),
            scale(alt.StrokeDash("series:N"), dashes),
            [
                alt.Tooltip("group:N", title=group_title or "group"),
                alt.Tooltip("series:N"),
                alt.Tooltip("size:Q", format=",.3f", title=unit_name),
            ],
        )
    )
    many = len(bars) > 24
    values = (
        alt.Chart(data)
        .mark_text(baseline="bottom", dy=-3, fontSize=9 if many else 11, color="#475467")
        .encode(x, y, offset, text=alt.Text("size:Q", format=",.2~f" if many else ",.2f"))
    )
    layers = [drawn]
    if limits:
        marks = table(["group", "size"], [(g, v / unit) for g, v in limits.items()], ["group"])
        layers.append(
            alt.Chart(marks)
            .mark_tick(color=BUDGET_COLOUR, thickness=2, width={"band": 1}, strokeDash=[6, 3])
            .encode(x, y, tooltip=[alt.Tooltip("size:Q", format=",.3f", title=f"budget, {unit_name}")])
        )
    layers.append(values)
    return finish(alt.layer(*layers), height=290)


def _series(bar: Bar) -> str:
    source = "measured" if bar.measured else "predicted"
    return f"{bar.way}, {source}{' on ' + bar.where if bar.where else ''}"


def cost_by_module(costs: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Horizontal bars of the recompute time by module, in the order given: name -> (ns, bytes rebuilt)."""
    alt = altair()
    top = max([1, *(t for t, _ in costs.values())])
    unit, name = (1e6, "ms") if top >= 1e5 else (1e3, "µs")
    memory_unit, memory_name = bytes_unit(max([1, *(b for _, b in costs.values())]))
    rows = [(module, t / unit, b / memory_unit) for module, (t, b) in costs.items()]
    chart = (
        alt.Chart(table(["module", "time", "rebuilt"], rows, ["module"]))
        .mark_bar(color=ACTION_COLOURS[RECOMPUTED], height={"band": 0.75})
        .encode(
            alt.X("time:Q").title(f"recompute time, {name}").axis(tickCount=10),
            alt.Y("module:N").sort(list(costs)).title(None).axis(labelLimit=260, ticks=False, domain=False),
            tooltip=[
                alt.Tooltip("module:N"),
                alt.Tooltip("time:Q", format=",.3f", title=name),
                alt.Tooltip("rebuilt:Q", format=",.2f", title=f"rebuilt, {memory_name}"),
            ],
        )
    )
    return finish(chart, height=max(60, 18 * len(costs)))


def bytes_by_kind(rows: Sequence[tuple[str, str, int]]) -> dict[str, Any]:
    """Horizontal bars of activation bytes by kind of op, stacked by action: (kind, action, bytes) rows."""
    alt = altair()
    totals: dict[str, int] = {}
    for kind, _, nbytes in rows:
        totals[kind] = totals.get(kind, 0) + nbytes
    order = sorted(totals, key=lambda k: (-totals[k], k))
    unit, unit_name = bytes_unit(max([1, *totals.values()]))
    data = table(["kind", "action", "size"], [(k, a, b / unit) for k, a, b in rows], ["kind", "action"])
    chart = (
        alt.Chart(data)
        .mark_bar(height={"band": 0.75})
        .encode(
            alt.X("sum(size):Q").title(f"activations kept for backward, {unit_name}").axis(tickCount=10),
            alt.Y("kind:N").sort(order).title(None).axis(labelLimit=320, ticks=False, domain=False),
            _action_colour({a for _, a, _ in rows}),
            tooltip=["kind:N", "action:N", alt.Tooltip("sum(size):Q", format=",.3f", title=unit_name)],
        )
    )
    return finish(chart, height=max(60, 20 * len(order)))


def idle_against_size(rows: Sequence[tuple[str, str, int, int]]) -> dict[str, Any]:
    """Every activation as a point, idle time against size: rows are (op, action, idle ns, bytes)."""
    alt = altair()
    unit, unit_name = bytes_unit(max([1, *(r[3] for r in rows)]))
    data = table(
        ["op", "action", "idle", "size"], [(o, a, t / 1e6, b / unit) for o, a, t, b in rows], ["op", "action"]
    )
    chart = (
        alt.Chart(data)
        .mark_circle(opacity=0.65, size=38)
        .encode(
            alt.X("idle:Q").title("idle between forward and backward, ms").axis(tickCount=12),
            alt.Y("size:Q").title(f"size, {unit_name}"),
            _action_colour({r[1] for r in rows}),
            tooltip=[
                "op:N",
                "action:N",
                alt.Tooltip("idle:Q", format=",.3f", title="idle, ms"),
                alt.Tooltip("size:Q", format=",.3f", title=unit_name),
            ],
        )
    )
    return finish(chart, height=250)


def _action_colour(actions: set[str]) -> Any:
    names = [a for a in ACTION_COLOURS if a in actions]
    return (
        altair().Color("action:N").scale(domain=names, range=[ACTION_COLOURS[a] for a in names]).title(None)
    )


def spread(runs: Sequence[tuple[str, Sequence[int]]], *, title: str, is_bytes: bool) -> dict[str, Any]:
    """The value of every iteration of some ways to run the step, as lines with points."""
    alt = altair()
    top = max([1, *(v for _, values in runs for v in values)])
    unit, unit_name = bytes_unit(top) if is_bytes else time_unit(top)
    rows = [(way, k, v / unit) for way, values in runs for k, v in enumerate(values)]
    names = [way for way, _ in runs]
    longest = max([1, *(len(values) for _, values in runs)])
    chart = (
        alt.Chart(table(["way", "iteration", "size"], rows, ["way"]))
        .mark_line(point=True, strokeWidth=1.5)
        .encode(
            alt.X("iteration:Q")
            .title("iteration")
            .axis(values=list(range(0, longest, -(-longest // 20))), format="d"),
            alt.Y("size:Q").title(f"{title}, {unit_name}").scale(zero=True),
            alt.Color("way:N").scale(domain=names, range=[WAY_COLOURS[n][1] for n in names]).title(None),
            tooltip=["way:N", "iteration:Q", alt.Tooltip("size:Q", format=",.3f", title=unit_name)],
        )
    )
    return finish(chart, height=190)


def time_unit(top_ns: float) -> tuple[int, str]:
    """The unit in which times up to `top_ns` read well: its length in ns, its name."""
    return next(((u, n) for u, n in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")) if top_ns >= u), (1, "ns"))
