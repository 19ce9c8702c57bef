"""How records show themselves in a notebook: a few figures and a small picture, as HTML without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from simulator.core.problem import Timeline
from simulator.show.tables import Table
from traces.units import bytes_unit

# Of a picture, and the room for the labels of its axes, in pixels.
WIDTH, HEIGHT, LEFT, BELOW = 640, 180, 52, 18
SAVED, PLANNED, BUDGET = "#94a3b8", "#d9614c", "#b42318"
Points = Sequence[tuple[float, float]]


def framed(head: str, table: Table, picture: str = "") -> str:
    """A heading over a picture and a table."""
    return f"<div><b>{escape(head)}</b><br>{picture}{table.html()}</div>"


def curve(timeline: Timeline) -> list[tuple[float, float]]:
    """The most that is allocated in each pixel's width of the step: (ms, bytes)."""
    end = max(1, timeline.step_time_ns)
    highest: dict[int, int] = {}
    for start, peak in zip(timeline.start_ns, timeline.peak_bytes, strict=True):
        at = start * (WIDTH - LEFT) // end
        highest[at] = max(highest.get(at, 0), peak)
    scale = end / 1e6 / (WIDTH - LEFT)
    points = [(at * scale, float(n)) for at, n in sorted(highest.items())]
    return [*points, (end / 1e6, points[-1][1])] if points else []


def picture(
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
