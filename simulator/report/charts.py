"""The charts of all pages: every category, way to run the step and action has one colour on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from simulator.allocator.requests import phases_of
from simulator.core.problem import Replay, by_category
from simulator.show import picture
from simulator.show.notebook import Points
from simulator.show.picture import Axis, Bar, Line
from traces.records.trace import CATEGORIES, PHASES, Trace
from traces.units import GIB, bytes_unit, show_bytes, show_time

COLOURS: Final = {
    "parameter": picture.BLUE, "optimizer state": picture.PINK, "buffer": picture.GREY, "input": picture.GREEN,
    "gradient": picture.ORANGE, "activation": picture.SKY, "other": picture.SAND, "workspace": "#5a4fcf",
}  # fmt: skip
IS_SAVED, RECOMPUTED, REPLACED = "saved", "recomputed", "another value serves"
UNABLE = "saved: may not be recomputed"
ACTION_COLOURS: Final = {
    IS_SAVED: picture.SKY,
    RECOMPUTED: picture.RED,
    REPLACED: picture.GREEN,
    UNABLE: picture.GREY,
}
# One hue for each way to run the step; the paler shade is always a prediction.
WAY_COLOURS: Final = {
    "save-all": ("#9cc4e4", picture.BLUE),
    "plan": ("#f3b183", picture.RED),
    "eager": ("#c9c9c9", picture.GREY),
}
BUDGET, RESERVED = ("budget", picture.RED, "6 4"), ("reserved", picture.PINK, "1 3")
MOST_POINTS: Final = 1000  # of a drawn line: about as many as a page has pixels across
ROOM: Final = 1.15  # above the highest, for names


def bytes_axis(title: str, top: int) -> Axis:
    unit, name = bytes_unit(top)
    return Axis(title=f"{title}, {name}", high=max(1, top) * ROOM, unit=unit)


def time_axis(title: str, top_ns: float) -> Axis:
    """An axis of nanoseconds, in the unit in which times up to that read well."""
    units = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"))
    unit, name = next(((u, n) for u, n in units if top_ns >= u), (1, "ns"))
    return Axis(title=f"{title}, {name}", high=max(1.0, top_ns), unit=unit)


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


def peak_by_category(parts: Mapping[str, Mapping[str, int]]) -> str:
    """A bar for each name, in the order given, of the categories at its peak."""

    def bar(category: str, nbytes: int) -> Bar:
        return Bar(series=category, colour=COLOURS[category], value=nbytes, note=show_bytes(nbytes))

    return picture.stacks({w: [bar(c, of[c]) for c in CATEGORIES if of.get(c)] for w, of in parts.items()})


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one way to run the step (a key of WAY_COLOURS) in one group, predicted or measured."""

    group: str
    way: str
    measured: bool
    value: float  # bytes or nanoseconds
    where: str = ""  # the device, for the legend


def grouped(
    figures: Sequence[Figure],
    title: str,
    *,
    group_title: str = "",
    is_bytes: bool,
    limits: Mapping[str, int] | None = None,
) -> str:
    """Bars of bytes or times by group: predictions pale, measurements solid; a budget is a line across its group."""
    limits = limits or {}
    top = max([1, *(int(b.value) for b in figures), *limits.values()])
    axis = bytes_axis(title, top) if is_bytes else time_axis(title, top * ROOM)
    show = show_bytes if is_bytes else show_time
    groups: dict[str, list[Bar]] = {}
    for b in figures:
        source = ("measured" if b.measured else "predicted") + f" on {b.where}" * bool(b.where)
        bar = Bar(
            series=f"{b.way}, {source}",
            colour=WAY_COLOURS[b.way][b.measured],
            value=b.value,
            note=show(int(b.value)),
        )
        groups.setdefault(b.group, []).append(bar)
    return picture.bars(groups, axis, limits, title=group_title)


def idle_against_size(rows: Sequence[tuple[str, str, int, int]]) -> str:
    """Every activation as a point, idle time against size: rows are (op, action, idle ns, bytes)."""
    lines = []
    for action, colour in ACTION_COLOURS.items():
        of = [(op, t, n) for op, act, t, n in rows if act == action]
        notes = [f"{op}: idle {show_time(t)}, {show_bytes(n)}" for op, t, n in of]
        points = [(float(t), float(n)) for _, t, n in of]
        lines += (
            [Line(name=action, colour=colour, points=points, look=picture.DOTS, notes=notes)] if of else []
        )
    x = time_axis("idle between forward and backward", max([1, *(t for *_, t, _ in rows)]))
    return picture.plot(lines, x, bytes_axis("size", max([1, *(n for *_, n in rows)])), height=280)


def front(curves: Mapping[str, Points]) -> str:
    """Lines of added time in percent against budgets in GiB, by name."""
    lines = []
    for (name, points), colour, dash in zip(
        curves.items(), (picture.GREY, picture.RED), ("6 4", ""), strict=False
    ):
        notes = [f"budget {show_bytes(round(x * GIB))}: {y:+.2f} %" for x, y in points]
        lines.append(Line(name=name, colour=colour, points=points, dash=dash))
        lines.append(Line(name="", colour=colour, points=points, look=picture.DOTS, notes=notes))
    all_x, all_y = zip(*(p for points in curves.values() for p in points), strict=True)
    x = Axis(title="budget, GiB", low=min(all_x), high=max(all_x))
    return picture.plot(
        lines, x, Axis(title="added time, % of the step", low=min(0, *all_y), high=max(1.0, *all_y) * ROOM)
    )


def over_each_other(runs: Mapping[str, Sequence[tuple[float, int, int]]]) -> str:
    """What runs held over their length: of each point how much is over in percent, bytes in use and reserved."""
    lines = []
    for (name, points), colour in zip(runs.items(), (picture.BLUE, picture.RED), strict=False):
        clock, *columns = zip(*points, strict=True)
        for kind, column, dash in zip(("in use", "reserved"), columns, ("", "1 3"), strict=True):
            at = thin(column, range(len(points))) if any(column) else ()
            drawn = [(clock[k], float(column[k])) for k in at]
            lines += (
                [Line(name=f"{name}, {kind}", colour=colour, points=drawn, look=picture.STEPS, dash=dash)]
                if drawn
                else []
            )
    top = max([1, *(n for points in runs.values() for p in points for n in p[1:])])
    return picture.plot(
        lines, Axis(title="share of the run's events, %", high=100), bytes_axis("memory", top), height=320
    )


def memory_over_step(
    trace: Trace,
    run: Replay,
    beside: Replay | None,
    levels: Mapping[tuple[str, str, str], int | None],
    measured_curve: Sequence[tuple[int, int]] = (),
) -> str:
    """Stacked areas by category over one step, with its phases and lines across.

    Each step is drawn at the most that is allocated while it runs. `beside`: the same step otherwise, as a line.
    `levels`: names with their looks, and bytes. `measured_curve`: (ns, allocated bytes) of a real run.
    """
    schedule, timeline = run.schedule, run.timeline
    running = list(by_category(trace, schedule, timeline))
    at = thin(timeline.peak_bytes, timeline.start_ns)
    clock = [*(timeline.start_ns[k] for k in at), timeline.step_time_ns]
    there = [c for c in CATEGORIES if any(now[c] for now in running)]
    floor, lines = [0.0] * len(clock), list[Line]()
    for c in there:
        upper = [b + n for b, n in zip(floor, [*(running[k][c] for k in at), running[-1][c]], strict=True)]
        points = list(zip(clock, upper, strict=True))
        lines.append(Line(name=c, colour=COLOURS[c], points=points, look=picture.AREA, below=floor))
        floor = upper
    others = [("measured", picture.INK, "", [*measured_curve])] if measured_curve else []
    if beside is not None:
        saved = zip(beside.timeline.start_ns, beside.timeline.peak_bytes, strict=True)
        others.append(("everything saved", picture.INK, "4 3", [*saved]))
    for name, colour, dash, curve in others:
        kept = thin([n for _, n in curve], [t for t, _ in curve]) if curve else ()
        drawn = [(float(curve[k][0]), float(curve[k][1])) for k in kept]
        lines.append(Line(name=name, colour=colour, points=drawn, look=picture.STEPS, dash=dash))
    known = {look: n for look, n in levels.items() if n is not None}
    most = max([1, timeline.peak_allocated_bytes, *known.values(), *(n for *_, of in others for _, n in of)])
    end = max([timeline.step_time_ns, *(of[-1][0] for *_, of in others if of)])
    return picture.plot(
        lines, time_axis("time", end), bytes_axis("allocated", most), height=340, bands=_phases(trace, run),
        levels=[(n, f"{name} {show_bytes(n)}", colour, dash) for (name, colour, dash), n in known.items()],
        strips=[(timeline.start_ns[k], _told(trace, run, k, running[k])) for k in at],
    )  # fmt: skip


def _told(trace: Trace, run: Replay, step: int, now: Mapping[str, int]) -> str:
    """What a step holds, in words."""
    again = " (again)" if run.schedule.recompute[step] else ""
    parts = ", ".join(f"{show_bytes(n)} {c}" for c, n in now.items() if n)
    held = show_bytes(run.timeline.peak_bytes[step])
    return f"{trace.ops.name[run.schedule.op[step]]}{again}, {show_time(run.timeline.start_ns[step])}: {held} ({parts})"


def _phases(trace: Trace, run: Replay) -> list[tuple[float, float, str]]:
    """Where each phase begins and ends; the optimizer's begins behind backward's last step."""
    start_ns = [*run.timeline.start_ns, run.timeline.step_time_ns]
    last = {phase: step for step, phase in enumerate(phases_of(trace, run.schedule))}
    found, begin = list[tuple[float, float, str]](), 0
    for phase in (p for p in PHASES if p in last):
        end = max(begin, last[phase] + 1)
        found.append((start_ns[begin], start_ns[end], phase))
        begin = end
    return found
