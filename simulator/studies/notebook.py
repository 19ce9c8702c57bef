"""How records show themselves in a notebook: a few figures and a small picture, as HTML without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from simulator.core.timeline import Timeline
from traces.units import bytes_unit, show_bytes, show_percent, show_time

if TYPE_CHECKING:
    from simulator.studies.comparison import Comparison
    from simulator.studies.max_batch import MaxBatch
    from simulator.studies.pareto import Front
    from simulator.studies.prediction import Prediction

WIDTH, HEIGHT, LEFT, BELOW = (
    640,
    180,
    52,
    18,
)  # of a picture, and the room for the labels of its axes, in pixels
SAVED, PLANNED, BUDGET = "#94a3b8", "#d9614c", "#b42318"
Points = Sequence[tuple[float, float]]


def prediction_html(c: Prediction) -> str:
    """The memory timeline of a step, and its figures with everything saved and with the plan."""
    runs = [("everything saved", c.saved_figures, 0.0)]
    curves = [(SAVED, _curve(c.saved.timeline))]
    if c.plan.actions:
        runs.append((f"plan ({c.plan.planner})", c.planned_figures, c.overhead_percent))
        curves.append((PLANNED, _curve(c.planned.timeline)))
    rows = [
        (
            name,
            show_bytes(f.peak_allocated_bytes),
            show_bytes(f.peak_reserved_bytes),
            show_time(f.step_time_ns),
            show_percent(added, signed=True),
        )
        for name, f, added in runs
    ]
    meta = c.trace.meta
    head = f"{meta.model}, batch {meta.batch_size}, {meta.dtype}, times for {meta.target or meta.device}"
    limits = [] if c.budget_bytes is None else [c.budget_bytes]
    return _page(
        head,
        _picture(curves, "ms", "allocated", limits, area=True),
        ("run", "peak allocated", "reserved", "step", "overhead"),
        rows,
    )


def front_html(front: Front) -> str:
    """Added time against budget, and the points."""
    plans = [
        (p.budget_bytes / 2**30, p.overhead_percent) for p in front.points if p.overhead_percent is not None
    ]
    bounds = [
        (p.budget_bytes / 2**30, p.bound_overhead_percent)
        for p in front.points
        if p.bound_overhead_percent is not None
    ]
    rows = [
        (
            show_bytes(p.budget_bytes),
            show_bytes(p.peak_allocated_bytes),
            show_percent(p.overhead_percent, signed=True),
            show_percent(p.bound_overhead_percent),
        )
        for p in reversed(front.points)
    ]
    picture = _picture([(SAVED, bounds), (PLANNED, plans)], "GiB", "% added", [], area=False)
    head = f"{front.trace.meta.model}: what each GiB costs ({front.planner}); grey: the certified bound"
    return _page(head, picture, ("budget", "peak", "overhead", "bound"), rows)


def comparison_html(found: Comparison) -> str:
    """One line a planner, the cheapest first."""
    from simulator.studies.comparison import ranked

    rows = [
        (
            e.planner,
            show_bytes(e.peak_allocated_bytes),
            show_percent(e.overhead_percent, signed=True),
            "–" if e.gap_points is None else f"{e.gap_points:.2f}",
            e.message,
        )
        for e in ranked(found.entrants)
    ]
    return _page(repr(found).strip("<>"), "", ("planner", "peak", "overhead", "gap, points", ""), rows)


def max_batch_html(found: MaxBatch) -> str:
    """Every batch size that was tried."""
    fits = {None: "", True: "yes", False: "no"}
    rows = [
        (str(p.batch_size), fits[p.fits], fits[p.plan_fits], show_percent(p.overhead_percent, signed=True))
        for p in found.probes
    ]
    return _page(repr(found).strip("<>"), "", ("batch", "fits", "fits with a plan", "overhead"), rows)


def _curve(timeline: Timeline) -> list[tuple[float, float]]:
    """The most that is allocated in each pixel's width of the step: (ms, bytes)."""
    end = max(1, timeline.step_time_ns)
    highest: dict[int, int] = {}
    for start, peak in zip(timeline.start_ns, timeline.peak_bytes, strict=True):
        at = start * (WIDTH - LEFT) // end
        highest[at] = max(highest.get(at, 0), peak)
    scale = end / 1e6 / (WIDTH - LEFT)
    points = [(at * scale, float(n)) for at, n in sorted(highest.items())]
    return [*points, (end / 1e6, points[-1][1])] if points else []


def _picture(
    curves: Sequence[tuple[str, Points]], across: str, upward: str, limits: Sequence[float], *, area: bool
) -> str:
    """Curves over common axes as SVG; bytes upward if `area`, which begins at zero and is filled."""
    points = [p for _, curve in curves for p in curve]
    if not points:
        return ""
    left, right = (0.0 if area else min(x for x, _ in points)), max(x for x, _ in points)
    top = max([1e-9, *limits, *(y for _, y in points)]) * 1.05
    wide, high = (right - left) or 1.0, HEIGHT - BELOW

    def place(x: float, y: float) -> str:
        return f"{LEFT + (x - left) / wide * (WIDTH - LEFT):.1f},{high - y / top * high:.1f}"

    parts = []
    for colour, curve in curves:
        line = " ".join(place(x, y) for x, y in curve)
        closed = f"{place(curve[0][0], 0)} {line} {place(curve[-1][0], 0)}" if area and curve else line
        fill = f'fill="{colour}" fill-opacity="0.45"' if area else 'fill="none"'
        parts.append(f'<polyline points="{closed}" {fill} stroke="{colour}"/>')
    for limit in limits:
        ends = f"{place(left, limit)} {place(right, limit)}"
        parts.append(f'<polyline points="{ends}" stroke="{BUDGET}" stroke-dasharray="6 4" fill="none"/>')
    unit, name = bytes_unit(int(top)) if area else (1, "%")
    texts = (
        (0, 11, f"{top / unit:,.1f} {name}"),
        (0, high, "0"),
        (LEFT, HEIGHT - 4, f"{left:,.1f} {across}"),
        (WIDTH - 60, HEIGHT - 4, f"{right:,.1f} {across}"),
    )
    parts += [f'<text x="{x}" y="{y}">{escape(label)}</text>' for x, y, label in texts]
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="11" '
        f'role="img" aria-label="{escape(upward)}">{"".join(parts)}</svg>'
    )


def _page(head: str, picture: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<div><b>{escape(head)}</b><br>{picture}<table>{line('th', titles)}{body}</table></div>"
