"""Draw lines, areas, points and bars as SVG, which pages and notebooks show without scripts, in dark and light."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

# Okabe and Ito's, which the colour-blind tell apart, on white and on black.
BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PINK, SKY, SAND, GREY = "#cc79a7", "#56b4e9", "#b8a13a", "#8c8c8c"
INK: Final = "currentColor"  # of the text around
LINE, STEPS, AREA, DOTS = "line", "steps", "area", "dots"
WIDTH: Final = 1100
LEFT, RIGHT, TOP, BELOW = 64, 12, 26, 40  # room for labels, in pixels
LETTER: Final = 6.2  # pixels of a letter, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series of points from left to right."""

    name: str  # in the legend; "": not there
    colour: str
    points: Sequence[tuple[float, float]]
    look: str = LINE
    dash: str = ""
    below: Sequence[float] = ()  # of an area: its lower edge at each point (nothing: zero)
    notes: Sequence[str] = ()  # of dots: what the pointer shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What lies along one edge; values are shown in `unit`s."""

    title: str
    high: float
    low: float = 0.0
    unit: float = 1.0

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """At most so many round values with their labels."""
        span = (self.high - self.low) / self.unit or 1.0
        least = span / most
        power = 10.0 ** math.floor(math.log10(least))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= least * 0.999)
        first = math.ceil(self.low / self.unit / step - 1e-9)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        values = [
            k * step for k in range(first, first + most + 2) if k * step * self.unit <= self.high * (1 + 1e-9)
        ]
        return [(v * self.unit, f"{v:,.{digits}f}") for v in values]


class _Frame:
    """A picture that is being drawn, and where values lie in it."""

    def __init__(self, width: int, height: int, x: Axis | None, y: Axis, label: str) -> None:
        self.width, self.height, self.x, self.y, self.label = width, height, x, y, label
        self.parts: list[str] = []

    def at_x(self, value: float) -> float:
        assert self.x is not None
        share = (value - self.x.low) / ((self.x.high - self.x.low) or 1.0)
        return round(LEFT + min(1.0, max(0.0, share)) * (self.width - LEFT - RIGHT), 1)

    def at_y(self, value: float) -> float:
        share = (value - self.y.low) / ((self.y.high - self.y.low) or 1.0)
        return round(self.height - BELOW - share * (self.height - TOP - BELOW), 1)

    def text(self, x: float, y: float, words: str, anchor: str = "start", opacity: float = 0.75) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}" fill-opacity="{opacity}">'
            f"{escape(words)}</text>"
        )

    def rect(
        self, x: float, y: float, wide: float, high: float, colour: str, note: str = "", more: str = ""
    ) -> None:
        title = f"<title>{escape(note)}</title>" if note else ""
        size = f'width="{max(0.0, wide):.1f}" height="{max(0.0, high):.1f}"'
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"{more}>{title}</rect>')

    def stroke(self, points: str, colour: str, dash: str = "", more: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"{dashed}{more}/>')

    def axes(self) -> None:
        right, base = self.width - RIGHT, self.height - BELOW
        for value, label in self.y.ticks(max(2, (base - TOP) // 40)):
            y = self.at_y(value)
            self.stroke(f"{LEFT},{y} {right},{y}", INK, more=' stroke-opacity="0.15"')
            self.text(LEFT - 6, y + 4, label, "end")
        self.text(4, 12, self.y.title)
        if self.x is not None:
            for value, label in self.x.ticks(max(2, (right - LEFT) // 90)):
                self.text(self.at_x(value), base + 16, label, "middle")
            self.text((LEFT + right) / 2, self.height - 5, self.x.title, "middle")

    def legend(self, names: Iterable[tuple[str, str, str]]) -> None:
        """Names with their colours and dashes, from the right."""
        at = self.width - RIGHT
        for name, colour, dash in reversed(list(dict.fromkeys(names))):
            at -= round(len(name) * LETTER)
            self.text(at, 12, name, opacity=1)
            if dash:
                self.stroke(f"{at - 20},8 {at - 4},8", colour, dash, ' stroke-width="2"')
            else:
                self.rect(at - 14, 3, 10, 10, colour)
            at -= 32

    def svg(self) -> str:
        return (
            f'<svg class="picture" viewBox="0 0 {self.width} {self.height}" width="100%" role="img" '
            f'aria-label="{escape(self.label)}" font-size="12" font-family="sans-serif">{"".join(self.parts)}</svg>'
        )


def plot(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    height: int = 300,
    width: int = WIDTH,
    levels: Sequence[tuple[float, str, str, str]] = (),
    bands: Sequence[tuple[float, float, str]] = (),
    strips: Sequence[tuple[float, str]] = (),
) -> str:
    """Series over common axes, in the order given.

    Args:
        levels: lines across: value, name, colour, dashes.
        bands: named stretches along x, of which every second is shaded.
        strips: where along x a text begins to be what the pointer shows.
    """
    f = _Frame(width, height, x, y, f"{y.title} over {x.title}")
    base = height - BELOW
    for k, (begin, end, name) in enumerate(bands):
        left, wide = f.at_x(begin), f.at_x(end) - f.at_x(begin)
        f.rect(left, TOP, wide, base - TOP, INK, more=f' fill-opacity="{0.03 + 0.04 * (k % 2)}"')
        if wide > len(name) * LETTER + 8:
            f.text(left + 4, TOP + 12, name)
    f.axes()
    for line in lines:
        if line.look == DOTS:
            for (px, py), note in zip(line.points, line.notes or [""] * len(line.points), strict=True):
                title = f"<title>{escape(note)}</title>" if note else ""
                place = f'cx="{f.at_x(px)}" cy="{f.at_y(py)}"'
                f.parts.append(
                    f'<circle {place} r="4" fill="{line.colour}" fill-opacity="0.75">{title}</circle>'
                )
            continue
        upper = _edge(f, line.points, line.look)
        if line.look == AREA:
            floor = line.below or [y.low] * len(line.points)
            lower = _edge(f, [(px, b) for (px, _), b in zip(line.points, floor, strict=True)], AREA)
            f.parts.append(f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{line.colour}"/>')
        else:
            f.stroke(" ".join(upper), line.colour, line.dash, ' stroke-width="1.6"')
    for k, (value, name, colour, dash) in enumerate(sorted(levels)):
        at, below = f.at_y(value), 17 * (k + 1 < len(levels))  # names do not run into each other
        f.stroke(f"{LEFT},{at} {width - RIGHT},{at}", colour, dash, ' stroke-width="1.5"')
        f.text(width - RIGHT - 4, at - 4 + below, name, "end", opacity=1)
    edges = [f.at_x(begin) for begin, _ in strips] + [width - RIGHT]
    for k, (_, note) in enumerate(strips):
        if edges[k + 1] > edges[k]:
            f.rect(edges[k], TOP, edges[k + 1] - edges[k], base - TOP, "transparent", note, ' class="strip"')
    f.legend((line.name, line.colour, line.dash) for line in lines if line.name)
    return f.svg()


def _edge(f: _Frame, points: Sequence[tuple[float, float]], look: str) -> list[str]:
    """The points in place; of steps and areas each level goes on up to the next point."""
    out: list[str] = []
    for px, py in points:
        x, y = f.at_x(px), f.at_y(py)
        if look in (STEPS, AREA) and out:
            out.append(f"{x},{out[-1].partition(',')[2]}")
        out.append(f"{x},{y}")
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar, or one part of a stack."""

    series: str
    colour: str
    value: float
    note: str  # what stands over it and what the pointer shows


def bars(
    groups: Mapping[str, Sequence[Bar]], y: Axis, limits: Mapping[str, float], *, title: str = ""
) -> str:
    """Bars side by side in groups, and a line across each group that has a limit."""
    height = 300
    f = _Frame(WIDTH, height, None, y, y.title)
    f.axes()
    base, wide = height - BELOW, (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    for k, (group, of) in enumerate(groups.items()):
        slot = min(90.0, wide * 0.85 / max(1, len(of)))
        left = LEFT + k * wide + (wide - slot * len(of)) / 2
        for n, bar in enumerate(of):
            top = f.at_y(bar.value)
            f.rect(
                left + n * slot + 1,
                top,
                slot - 2,
                base - top,
                bar.colour,
                f"{group}, {bar.series}: {bar.note}",
            )
            if slot > len(bar.note) * LETTER:
                f.text(left + (n + 0.5) * slot, top - 4, bar.note, "middle")
        if group in limits:
            at = f.at_y(limits[group])
            f.stroke(f"{left - 6},{at} {left + slot * len(of) + 6},{at}", RED, "6 3", ' stroke-width="2"')
        f.text(LEFT + (k + 0.5) * wide, base + 16, group, "middle")
    f.text(WIDTH / 2, height - 5, title, "middle")
    f.legend((bar.series, bar.colour, "") for of in groups.values() for bar in of)
    return f.svg()


def stacks(rows: Mapping[str, Sequence[Bar]]) -> str:
    """A bar to the right for each name, of parts one after the other."""
    room = 40 + round(LETTER * max(map(len, rows), default=0))
    height = TOP + 26 * len(rows)
    f = _Frame(WIDTH, height, None, Axis(title="", high=1), "parts of each")
    longest = max([1.0, *(sum(bar.value for bar in of) for of in rows.values())])
    for k, (name, of) in enumerate(rows.items()):
        f.text(room - 8, TOP + 26 * k + 15, name, "end", opacity=1)
        left = float(room)
        for bar in of:
            wide = bar.value / longest * (WIDTH - room - RIGHT)
            f.rect(left, TOP + 26 * k, wide, 21, bar.colour, f"{name}, {bar.series}: {bar.note}")
            left += wide
    f.legend((bar.series, bar.colour, "") for of in rows.values() for bar in of)
    return f.svg()
