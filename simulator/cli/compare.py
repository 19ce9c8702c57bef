"""Turn the words after `simulate compare` and `simulate pareto` into a table, a page, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simulator.cli.device import Asked, device_options
from simulator.cli.options import planning_options
from traces.commands import report_option
from traces.errors import BudgetError, SpecError

if TYPE_CHECKING:
    from simulator.allocator.asking import Asking
    from simulator.core.limits import Limits
    from simulator.core.problem import Problem
    from simulator.studies.comparison import Contest, Entrant
    from simulator.studies.pareto import Front, Point

MESSAGE_WIDTH = 110  # of a reason in the table; the JSON has it whole


@click.command("compare")
@click.argument("trace_name", metavar="TRACE")
@click.option("--budget", required=True, help="Bytes, a size such as 8GiB, or a share of the keep-all peak.")
@click.option(
    "--planners",
    help="Which, with commas (default: all of `simulate planners`).",
)
@planning_options
@device_options
@click.option(
    "--with-torch-budget", is_flag=True, help="Also torch's activation_memory_budget (runs `trace`)."
)
@click.option(
    "--saved",
    type=click.Path(path_type=Path),
    help="The same from what `trace torch-budget` wrote, without running torch.",
)
@report_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def compare_command(
    trace_name: str,
    budget: str,
    planners: str | None,
    limits: Limits,
    asked: Asked,
    with_torch_budget: bool,
    saved: Path | None,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Set the planners side by side on one trace and budget.

    Peak, added time, the gap to the certified bound, and solve time of each, or why it has no plan. --seconds is for
    each planner. Exit code: 0 done, 1 no planner has a plan within the budget, 2 the input is wrong.
    """
    from simulator.core.budget import check_budget, parse_budget
    from simulator.core.problem import Problem
    from simulator.studies.comparison import enter, open_contest
    from traces.store import load

    check_budget(budget)
    asked.check()
    names = chosen_planners(planners)
    trace = load(trace_name)
    problem = Problem(trace, limits.constraints)
    budget_bytes = parse_budget(budget, problem.unconstrained.saved.timeline.peak_allocated_bytes)
    contest = open_contest(problem, trace_name, budget_bytes, _asking(problem, asked))
    contest = enter(contest, names, limits, _progress(quiet))
    if with_torch_budget or saved is not None:
        from simulator.studies.torch_budget import BUDGETS, ask_torch, entrants
        from traces.saved_sets import SavedSets

        sets = (
            ask_torch(trace, BUDGETS, ("dp", "greedy"), progress=_progress(quiet))
            if saved is None
            else SavedSets.load(saved)
        )
        contest = contest.with_entrants(entrants(contest, sets))
    if report is not None:
        from simulator.report.plans import write_contest

        write_contest(report, contest)
    click.echo(json.dumps(contest.to_json()) if as_json else _warned(contest_table(contest), problem))
    if not any(e.feasible for e in contest.entrants):
        raise BudgetError(f"no planner has a plan within {budget_bytes} bytes: {contest.entrants[0].message}")


@click.command("pareto")
@click.argument("trace_name", metavar="TRACE")
@click.option(
    "--points", type=click.IntRange(min=2), default=20, show_default=True, help="Number of budgets."
)
@click.option("--planner", help="Which planner makes the plans (default: the default planner).")
@planning_options
@device_options
@report_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def pareto_command(
    trace_name: str,
    points: int,
    planner: str | None,
    limits: Limits,
    asked: Asked,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """The whole front of one trace: what each GiB costs.

    Budgets lie evenly between the floor, below which no plan can go, and the peak with everything kept. A larger
    budget never has a slower plan. --seconds is for the whole front.
    """
    from simulator.core.problem import Problem
    from simulator.planners import DEFAULT, find
    from simulator.studies.pareto import front
    from traces.store import load

    name = planner or DEFAULT
    find(name)
    asked.check()
    problem = Problem(load(trace_name), limits.constraints)
    done = front(problem, trace_name, name, points, limits, _progress(quiet), _asking(problem, asked))
    if report is not None:
        from simulator.report.plans import write_front

        write_front(report, done)
    click.echo(json.dumps(done.to_json()) if as_json else _warned(front_table(done), problem))


def chosen_planners(text: str | None) -> tuple[str, ...]:
    """Planners from `a,b,c`, all without a text; raises SpecError if one does not exist or stands twice."""
    from simulator.planners import REGISTRY, find

    names = tuple(REGISTRY) if text is None else tuple(word.strip() for word in text.split(","))
    for name in names:
        find(name)
    if len(set(names)) != len(names):
        raise SpecError(f"--planners {text!r}: the same planner stands there twice.")
    return names


def contest_table(contest: Contest) -> str:
    """The contest to read: one line a planner, the cheapest first, those without a plan last."""
    from simulator.studies.comparison import ranked
    from traces.units import show_bytes, show_percent, show_time

    lines: list[tuple[str, ...]] = [("planner", "peak", "overhead", "gap, points", "solve time", "")]
    for e in ranked(contest.entrants):
        gap = "–" if e.gap_points is None else f"{e.gap_points:.2f}"
        seconds = "–" if e.solve_seconds is None else f"{e.solve_seconds:.2f} s"
        overhead = show_percent(e.overhead_percent, signed=True)
        lines.append(
            (
                e.planner,
                show_bytes(e.peak_allocated_bytes),
                overhead,
                gap,
                seconds,
                _note(e, contest.budget_bytes),
            )
        )
    kept, bound = contest.kept, contest.bound
    least = (
        f"no plan adds less than {show_percent(bound.overhead_percent)}" if bound.feasible else bound.reason
    )
    head = (
        f"{contest.trace_name}: budget {show_bytes(contest.budget_bytes)} of "
        f"{show_bytes(kept.peak_allocated_bytes)}, step {show_time(kept.step_time_ns)}; bound: {least}"
    )
    return "\n".join([head, *_aligned(lines, frozenset({0, len(lines[0]) - 1}))])


def _note(e: Entrant, budget_bytes: int) -> str:
    from traces.units import show_bytes

    words = e.message
    if e.fits is False:
        words = f"does not fit the device{'; ' + words if words else ''}"
    if e.peak_allocated_bytes is not None and e.peak_allocated_bytes > budget_bytes:
        words = f"over the budget{'; ' + words if words else ''}"
    elif e.lowest_peak_bytes is not None:
        return f"no plan; lowest peak {show_bytes(e.lowest_peak_bytes)}"
    return words if len(words) <= MESSAGE_WIDTH else words[: MESSAGE_WIDTH - 1] + "…"


def front_table(front: Front) -> str:
    """The front to read: one line a budget, the largest first."""
    from traces.units import show_bytes, show_percent, show_time

    most = front.points[-1].budget_bytes
    titles = ("budget", "share", "peak", "overhead", "bound", "gap, points", "one GiB less costs")
    lines: list[tuple[str, ...]] = [titles if front.device is None else (*titles, front.device.name)]
    for p in reversed(front.points):
        share = f"{100 * p.budget_bytes / most:.1f} %" if most else "–"
        gap = "–" if p.gap_points is None else f"{p.gap_points:.2f}"
        none = "no plan" if p.finished else "not finished"
        overhead = show_percent(p.overhead_percent, signed=True) if p.feasible else none
        bound = "infeasible" if p.bound_overhead_percent is None else show_percent(p.bound_overhead_percent)
        price = _price(p, front)
        row = (
            show_bytes(p.budget_bytes),
            share,
            show_bytes(p.peak_allocated_bytes),
            overhead,
            bound,
            gap,
            price,
        )
        fits = "–" if p.fits is None else "fits" if p.fits else "too large"
        lines.append((*row, fits) if front.device is not None else row)
    head = (
        f"{front.trace_name}: {front.planner}, {len(front.points)} budgets in {front.solve_seconds:.2f} s; step "
        f"{show_time(front.kept.step_time_ns)} with everything kept; no plan can go below "
        f"{show_bytes(front.floor_bytes)}"
    )
    late = [show_bytes(p.budget_bytes) for p in reversed(front.points) if not p.finished]
    tail = (
        f"{front.planner} did not finish {len(late)} of {len(front.points)} budgets in their share of --seconds: "
        f"{', '.join(late)}; a plan that stands there was made for another one."
    )
    return "\n".join([head, *_aligned(lines), *([tail] if late else [])])


def _price(point: Point, front: Front) -> str:
    from traces.units import show_percent, show_time

    if point.price_ns_per_gib is None:
        return "–"
    base_ns = front.kept.step_time_ns
    share = 100 * point.price_ns_per_gib / base_ns if base_ns else 0.0
    return f"{show_time(point.price_ns_per_gib)} ({show_percent(share, signed=True)})"


def _aligned(lines: list[tuple[str, ...]], left: frozenset[int] = frozenset()) -> list[str]:
    """Columns, those in `left` to the left, the others to the right."""
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    return [
        "  ".join(
            f"{cell:<{w}}" if k in left else f"{cell:>{w}}"
            for k, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _asking(problem: Problem, asked: Asked) -> Asking:
    """The question about allocator and device, for plan after plan."""
    from simulator.allocator.asking import Asking

    return Asking(problem, asked.alloc_conf, asked.device(problem.trace.meta))


def _warned(text: str, problem: Problem) -> str:
    """The text with what must be said beside its figures."""
    from simulator.studies.warnings import warnings_of

    return "\n".join([text, *(f"warning {line}" for line in warnings_of(problem))])


def _progress(quiet: bool) -> Callable[[str], None]:
    return (lambda line: None) if quiet else (lambda line: click.echo(line, err=True))
