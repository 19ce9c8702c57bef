"""`simulate pareto`: what each GiB costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from simulator.cli.options import (
    Asked,
    Output,
    Planning,
    columns,
    dash,
    device_options,
    output_options,
    planning_options,
)

if TYPE_CHECKING:
    from simulator.studies.pareto import Front, Point


@click.command("pareto")
@click.argument("trace_name", metavar="TRACE")
@click.option(
    "--points", type=click.IntRange(min=2), default=20, show_default=True, help="Number of budgets."
)
@planning_options
@device_options
@output_options
def pareto_command(
    trace_name: str, points: int, planner: str | None, planning: Planning, asked: Asked, out: Output
) -> None:
    """The whole front of one trace: what each GiB costs.

    Budgets lie evenly between the floor, below which no plan can go, and the peak with everything saved. A larger
    budget never has a slower plan. --seconds is for the whole front.
    """
    from simulator import api

    problem = api.problem_of(trace_name, planning.never, planning.always_keep)
    found = api.pareto(
        problem,
        points,
        planner=planner,
        progress=out.say,
        name=trace_name,
        **planning.search(),
        **asked.words(problem.trace.meta),
    )
    if out.report is not None:
        from simulator.report.plans import write_front

        write_front(out.report, found)
    out.show(found.to_json, lambda: table(found))


def table(front: Front) -> str:
    """One line a budget, the largest first."""
    from simulator.studies.warnings import text, warnings_of
    from traces.units import show_bytes, show_percent, show_time

    most, device = front.points[-1].budget_bytes, front.setting.device
    titles = ("budget", "share", "peak", "overhead", "bound", "gap, points", "one GiB less costs")
    lines: list[tuple[str, ...]] = [titles if device is None else (*titles, device.name)]
    for p in reversed(front.points):
        none = "no plan" if p.finished else "not finished"
        bound = p.bound_overhead_percent
        row = (
            show_bytes(p.budget_bytes),
            f"{100 * p.budget_bytes / most:.1f} %" if most else "–",
            show_bytes(p.peak_allocated_bytes),
            show_percent(p.overhead_percent, signed=True) if p.feasible else none,
            "infeasible" if bound is None else show_percent(bound),
            dash(p.gap_points),
            _price(p, front),
        )
        fits = {None: "–", True: "fits", False: "too large"}[p.fits]
        lines.append(row if device is None else (*row, fits))
    saved = front.saved.timeline
    head = (
        f"{front.trace_name}: {front.planner}, {len(front.points)} budgets in {front.solve_seconds:.2f} s; step "
        f"{show_time(saved.step_time_ns)} with everything saved; no plan can go below "
        f"{show_bytes(front.floor_bytes)}"
    )
    late = [show_bytes(p.budget_bytes) for p in reversed(front.points) if not p.finished]
    tail = (
        f"{front.planner} did not finish {len(late)} of {len(front.points)} budgets in their share of --seconds: "
        f"{', '.join(late)}; a plan that stands there was made for another one."
    )
    warnings = (f"warning {text(w)}" for w in warnings_of(front.problem))
    return "\n".join([head, *columns(lines), *([tail] if late else []), *warnings])


def _price(point: Point, front: Front) -> str:
    from traces.units import show_percent, show_time

    if point.price_ns_per_gib is None:
        return "–"
    base_ns = front.saved.timeline.step_time_ns
    share = 100 * point.price_ns_per_gib / base_ns if base_ns else 0.0
    return f"{show_time(point.price_ns_per_gib)} ({show_percent(share, signed=True)})"
