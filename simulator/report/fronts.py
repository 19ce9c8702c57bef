"""Turn a contest of planners, or a front of budgets, into a page with its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from simulator.report.charts import BUDGET_COLOUR, altair, finish, table
from simulator.report.page import (
    Block,
    Cell,
    Chart,
    Figure,
    Figures,
    Page,
    Section,
    Table,
    Text,
    bytes_cell,
    count_cell,
    percent_cell,
    time_cell,
    write_page,
)
from simulator.report.simulation import describe, metadata, provenance
from simulator.studies.comparison import Contest, Entrant, ranked
from simulator.studies.pareto import Front, Point
from simulator.studies.warnings import warnings_of
from traces.units import bytes_unit, show_bytes, show_percent, show_time

PLANNER_COLOUR, PEER_COLOUR, BOUND_COLOUR = "#d9614c", "#4c78a8", "#3f4657"
KINDS: Final = {"Lowtide's planner": PLANNER_COLOUR, "another system's plan": PEER_COLOUR}
PREDICTED: Final = " Every figure on this page is predicted; nothing was run."


def write_contest(path: str | Path, contest: Contest) -> Path:
    """Write the page of a contest, whole or not at all.

    Raises:
        EnvironmentProblem: a package that reports need is not installed.
    """
    meta = contest.trace.meta
    page = Page(
        title=f"{meta.model}: planners within {show_bytes(contest.budget_bytes)}",
        subtitle=describe(meta),
        sections=(
            Section(title="Planners side by side", blocks=_contest_blocks(contest)),
            Section(title="Model and trace", blocks=(metadata(contest.trace),)),
        ),
    )
    return write_page(path, page)


def write_front(path: str | Path, front: Front) -> Path:
    """Write the page of a front, whole or not at all; raises EnvironmentProblem like `write_contest`."""
    meta = front.trace.meta
    page = Page(
        title=f"{meta.model}: what each GiB costs",
        subtitle=f"{describe(meta)} · planner {front.planner}",
        sections=(
            Section(title="Overhead against budget", blocks=_front_blocks(front)),
            Section(title="Model and trace", blocks=(metadata(front.trace),)),
        ),
    )
    return write_page(path, page)


def _contest_blocks(contest: Contest) -> tuple[Block, ...]:
    kept, bound = contest.kept, contest.bound
    rows = ranked(contest.entrants)
    fitting = [e for e in rows if e.feasible]
    figures = [
        Figure(
            label="Peak, everything kept",
            value=show_bytes(kept.peak_allocated_bytes),
            detail=f"step time {show_time(kept.step_time_ns)}",
        ),
        Figure(label="Budget", value=show_bytes(contest.budget_bytes)),
        Figure(
            label="No plan adds less than",
            value=show_percent(bound.overhead_percent) if bound.feasible else "no plan fits",
            detail="certified for plans that keep the order of the ops",
            tone="" if bound.feasible else "bad",
        ),
    ]
    if fitting:
        best = fitting[0]
        figures.append(
            Figure(
                label="Cheapest plan",
                value=show_percent(best.overhead_percent, signed=True),
                detail=f"{best.planner}, {show_bytes(best.peak_allocated_bytes)}",
                tone="good",
            )
        )
    blocks: list[Block] = [
        Figures(figures=tuple(figures)),
        Text(text=provenance(contest.trace) + PREDICTED, tone="note"),
        *(Text(text=text, tone="warning") for text in warnings_of(contest.trace)),
    ]
    if any(e.peak_allocated_bytes is not None for e in rows):
        blocks.append(
            Chart(
                spec=contest_chart(contest),
                title="Peak against added time",
                caption="Every plan at the peak of its replay. Left of the red line the budget is kept; below the "
                "grey line no plan for this budget can be.",
            )
        )
    blocks.append(
        Table(
            columns=(
                "planner",
                "peak",
                "step time",
                "overhead",
                "gap, points",
                "solve time",
                "ops run again",
                "",
            ),
            rows=tuple(
                (
                    e.planner,
                    bytes_cell(e.peak_allocated_bytes),
                    time_cell(e.step_time_ns),
                    percent_cell(e.overhead_percent, signed=True),
                    Cell(text="–" if e.gap_points is None else f"{e.gap_points:.2f}", sort=e.gap_points),
                    time_cell(None if e.solve_seconds is None else e.solve_seconds * 1e9),
                    count_cell(e.recomputed_ops),
                    _verdict(e, contest.budget_bytes),
                )
                for e in rows
            ),
            numbers=frozenset(range(1, 7)),
            caption="The gap is the overhead less the certified bound: how far from optimal the plan can be at most. "
            "Solve times are of this machine.",
        )
    )
    return tuple(blocks)


def _verdict(e: Entrant, budget_bytes: int) -> Cell:
    if e.feasible:
        return Cell(text=f"met{'; ' + e.message if e.message else ''}", tone="good")
    if e.peak_allocated_bytes is not None:
        over = "over the budget" if e.peak_allocated_bytes > budget_bytes else ""
        return Cell(text="; ".join(part for part in (over, e.message) if part), tone="bad")
    if e.lowest_peak_bytes is not None:
        return Cell(text=f"no plan; lowest peak {show_bytes(e.lowest_peak_bytes)}", tone="bad")
    return Cell(text=e.message, tone="bad")


def contest_chart(contest: Contest) -> dict[str, Any]:
    """Every plan as a point: peak across, overhead upward; the budget and the bound as lines."""
    alt = altair()
    drawn = [e for e in ranked(contest.entrants) if e.peak_allocated_bytes is not None]
    most = max([contest.budget_bytes, *(e.peak_allocated_bytes or 0 for e in drawn)])
    unit, unit_name = bytes_unit(most)
    least = min([contest.budget_bytes, *(e.peak_allocated_bytes or 0 for e in drawn)]) / unit
    room = max((most / unit - least) * 0.12, most / unit * 0.01)
    x = alt.X("peak:Q").title(f"peak allocated, {unit_name}")
    x = x.scale(domain=[max(0.0, least - room), most / unit + room], nice=False)
    top = max([0.1, contest.bound.overhead_percent, *(e.overhead_percent or 0.0 for e in drawn)])
    y = alt.Y("overhead:Q").title("added time, % of the step").scale(domain=[0, top * 1.2], nice=False)
    kinds = list(KINDS)
    rows = [
        (e.planner, kinds[e.peer], (e.peak_allocated_bytes or 0) / unit, e.overhead_percent or 0.0)
        for e in drawn
    ]
    wide, high = most / unit - least + 2 * room, top * 1.2
    heights = _label_heights([(peak / wide, overhead / high) for _, _, peak, overhead in rows])
    data = table(
        ["planner", "kind", "peak", "overhead", "dy"],
        [(*row, dy) for row, dy in zip(rows, heights, strict=True)],
        ["planner", "kind"],
    )
    present = [k for k in kinds if any(r[1] == k for r in rows)]
    colour = alt.Color("kind:N").scale(domain=present, range=[KINDS[k] for k in present]).title(None)
    if len(present) < 2:
        colour = colour.legend(None)
    base = alt.Chart(data)
    points = base.mark_point(filled=True, size=70, opacity=1).encode(
        x,
        y,
        colour,
        tooltip=[
            "planner:N",
            alt.Tooltip("peak:Q", format=",.3f", title=f"peak, {unit_name}"),
            alt.Tooltip("overhead:Q", format="+.2f", title="overhead, %"),
        ],
    )
    names = [
        base.transform_filter(f"datum.dy == {dy}")
        .mark_text(align="center", dy=dy, fontSize=11, color="#475467")
        .encode(x, y, text="planner:N")
        for dy in sorted(set(heights))
    ]
    lines = [_rule("peak", contest.budget_bytes / unit, "budget", x, BUDGET_COLOUR, across=False)]
    if contest.bound.feasible:
        least_percent = contest.bound.overhead_percent
        lines.append(_rule("overhead", least_percent, "bound", y, BOUND_COLOUR, across=True))
    return finish(alt.layer(*lines, points, *names), height=340)


def _label_heights(places: list[tuple[float, float]]) -> list[int]:
    """How far above its point each label stands: points that nearly coincide stack theirs.

    Places are in shares of the axes' lengths.
    """
    out: list[int] = []
    for k, (x, y) in enumerate(places):
        near = sum(1 for a, b in places[:k] if abs(a - x) < 0.08 and abs(b - y) < 0.08)
        out.append(-10 - 12 * near)
    return out


def _rule(field: str, value: float, label: str, channel: Any, colour: str, *, across: bool) -> Any:
    """A dashed line at a value, with its name."""
    alt = altair()
    base = alt.Chart(table([field, "label"], [(value, label)], ["label"]))
    line = base.mark_rule(color=colour, strokeDash=[6, 4], strokeWidth=1.5).encode(channel)
    if across:
        look = {"align": "right", "baseline": "bottom", "dx": -4, "dy": -3}
        text = base.mark_text(**look, color=colour, fontSize=11).encode(
            channel, x=alt.value("width"), text="label:N"
        )
    else:
        look = {"align": "left", "baseline": "top", "dx": 5, "dy": 3}
        text = base.mark_text(**look, color=colour, fontSize=11).encode(
            channel, y=alt.value(0), text="label:N"
        )
    return alt.layer(line, text)


def _met(point: Point) -> Cell:
    if not point.finished:
        text = "not finished; another budget's plan" if point.feasible else "not finished"
        return Cell(text=text, tone="bad")
    return Cell(text="met", tone="good") if point.feasible else Cell(text="no plan", tone="bad")


def _front_blocks(front: Front) -> tuple[Block, ...]:
    fitting = [p for p in front.points if p.feasible]
    most = front.points[-1].budget_bytes
    figures = [
        Figure(
            label="Peak, everything kept",
            value=show_bytes(front.kept.peak_allocated_bytes),
            detail=f"step time {show_time(front.kept.step_time_ns)}",
        ),
        Figure(
            label="No plan can go below",
            value=show_bytes(front.floor_bytes),
            detail=show_percent(100 * front.floor_bytes / most, digits=1) + " of it" if most else "",
        ),
    ]
    if fitting:
        lowest = fitting[0]
        figures.append(
            Figure(
                label="Smallest peak found",
                value=show_bytes(lowest.peak_allocated_bytes),
                detail=f"{show_percent(lowest.overhead_percent, signed=True)} time",
            )
        )
    figures.append(
        Figure(
            label="Budgets planned", value=str(len(front.points)), detail=f"in {front.solve_seconds:.1f} s"
        )
    )
    rows = tuple(
        (
            bytes_cell(p.budget_bytes),
            percent_cell(100 * p.budget_bytes / most if most else None, digits=1),
            bytes_cell(p.peak_allocated_bytes),
            percent_cell(p.overhead_percent, signed=True),
            percent_cell(p.bound_overhead_percent),
            Cell(text="–" if p.gap_points is None else f"{p.gap_points:.2f}", sort=p.gap_points),
            time_cell(p.price_ns_per_gib),
            time_cell(p.bound_price_ns_per_gib),
            _met(p),
        )
        for p in reversed(front.points)
    )
    return (
        Figures(figures=tuple(figures)),
        Text(text=provenance(front.trace) + PREDICTED, tone="note"),
        *(Text(text=text, tone="warning") for text in warnings_of(front.trace)),
        Chart(
            spec=front_chart(front),
            title="What each GiB costs",
            caption="Red: the cheapest plan found for each budget. Dashed: no plan for that budget adds less, "
            "certified for plans that keep the order of the ops. What lies between is all that any planner could "
            "still gain. Only the points are worked out.",
        ),
        Table(
            columns=(
                "budget",
                "of the peak",
                "peak, plan",
                "overhead",
                "bound",
                "gap, points",
                "one GiB less costs",
                "by the bound",
                "",
            ),
            rows=rows,
            numbers=frozenset(range(8)),
            caption="One GiB less: the added time from this budget to the next smaller one in the table, for each GiB "
            "between them; by the bound: what the last byte costs at this budget at the instant that decides it.",
        ),
    )


def front_chart(front: Front) -> dict[str, Any]:
    """Overhead against budget: the plans as steps with points, the bound as a line."""
    alt = altair()
    unit, unit_name = bytes_unit(front.points[-1].budget_bytes)
    lines = {"plan": PLANNER_COLOUR, "certified bound": BOUND_COLOUR}
    rows = [
        (p.budget_bytes / unit, name, value, made)
        for p in front.points
        for name, value, made in (
            ("plan", p.overhead_percent, (p.peak_allocated_bytes or 0) / unit),
            ("certified bound", p.bound_overhead_percent, p.budget_bytes / unit),
        )
        if value is not None
    ]
    data = table(["budget", "line", "overhead", "peak"], rows, ["line"])
    x = alt.X("budget:Q").title(f"budget, {unit_name}").scale(zero=False, nice=False, padding=12)
    y = alt.Y("overhead:Q").title("added time, % of the step").scale(zero=True)
    colour = alt.Color("line:N").scale(domain=list(lines), range=list(lines.values())).title(None)
    tips = [
        alt.Tooltip("line:N"),
        alt.Tooltip("budget:Q", format=",.3f", title=f"budget, {unit_name}"),
        alt.Tooltip("peak:Q", format=",.3f", title=f"peak, {unit_name}"),
        alt.Tooltip("overhead:Q", format="+.2f", title="overhead, %"),
    ]
    base = alt.Chart(data)
    bound = (
        base.transform_filter("datum.line == 'certified bound'")
        .mark_line(strokeWidth=1.5, strokeDash=[6, 4])
        .encode(x, y, colour, order="budget:Q")
    )
    plans = base.transform_filter("datum.line == 'plan'")
    drawn = plans.mark_line(strokeWidth=1.8).encode(x, y, colour)
    points = plans.mark_point(filled=True, size=40, opacity=1).encode(x, y, colour)
    hover = base.mark_point(size=120, opacity=0).encode(x, y, tooltip=tips)
    return finish(alt.layer(drawn, points, bound, hover), height=320)
