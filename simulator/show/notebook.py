"""How records show themselves in a notebook: a few figures and a small picture, as HTML without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from simulator.core.problem import Timeline
from simulator.show.picture import AREA, BLUE, LINE, RED, Axis, Line, plot
from simulator.show.tables import Table
from traces.units import bytes_unit

WIDTH, HEIGHT = 640, 200  # of a picture, in pixels
SAVED, PLANNED = BLUE, RED
Points = Sequence[tuple[float, float]]


def framed(head: str, table: Table, picture: str = "") -> str:
    """A heading over a picture and a table."""
    return f'<div style="max-width: {WIDTH}px"><b>{escape(head)}</b><br>{picture}{table.html()}</div>'


def curve(timeline: Timeline) -> list[tuple[float, float]]:
    """The most that is allocated in each pixel's width of the step: (ms, bytes)."""
    end = max(1, timeline.step_time_ns)
    highest: dict[int, int] = {}
    for start, peak in zip(timeline.start_ns, timeline.peak_bytes, strict=True):
        at = start * WIDTH // end
        highest[at] = max(highest.get(at, 0), peak)
    points = [(at * end / 1e6 / WIDTH, float(n)) for at, n in sorted(highest.items())]
    return [*points, (end / 1e6, points[-1][1])] if points else []


def picture(
    curves: Sequence[tuple[str, Points]], across: str, upward: str, limits: Sequence[float], *, area: bool
) -> str:
    """Curves over common axes; bytes upward if `area`, which begins at zero, and percent otherwise."""
    points = [p for _, of in curves for p in of]
    if not points:
        return ""
    top = max([1e-9, *limits, *(y for _, y in points)])
    unit, name = bytes_unit(int(top)) if area else (1, "%")
    x = Axis(title=across, low=0.0 if area else min(x for x, _ in points), high=max(x for x, _ in points))
    lines = [Line(name="", colour=colour, points=of, look=LINE) for colour, of in curves]
    if area:
        lines.insert(0, Line(name="", colour=f"{curves[-1][0]}44", points=curves[-1][1], look=AREA))
    levels = [(limit, "budget", RED, "6 4") for limit in limits]
    y = Axis(title=f"{upward}, {name}", high=top * 1.05, unit=unit)
    return plot(lines, x, y, width=WIDTH, height=HEIGHT, levels=levels)
