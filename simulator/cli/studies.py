"""`simulate compare`, `pareto` and `levers`: studies of one trace."""

from __future__ import annotations

import click

from simulator.cli.options import BUDGET, DEVICE, PLANNER, SEARCH, Words, asking, listed, output_options, show
from traces.commands import Output
from traces.errors import BudgetError


@click.command("compare")
@click.argument("trace_name", metavar="TRACE")
@asking(BUDGET, *SEARCH, *DEVICE)
@click.option("--planners", help="Planners to compare, separated by commas (default: all).")
@output_options
def compare_command(trace_name: str, words: Words, planners: str | None, out: Output) -> None:
    """Compare the planners on one trace and budget.

    Prints the peak, the added time, the gap to the certified bound and the solve time of each planner, or why it has no
    plan. --seconds is for each planner. Exit code: 0 done, 1 no planner has a plan, 2 the input is wrong.
    """
    from simulator.studies.comparison import compare

    names = None if planners is None else listed("--planners", planners)
    found = compare(trace_name, planners=names, name=trace_name, progress=out.say, **words)
    show(out, found)
    if not found.data["feasible"]:
        why = found.rows[0].message
        raise BudgetError(f"no planner has a plan within {found.data['budget_bytes']} bytes: {why}")


@click.command("pareto")
@click.argument("trace_name", metavar="TRACE")
@click.option(
    "--points", type=click.IntRange(min=2), default=20, show_default=True, help="Number of budgets."
)
@asking(PLANNER, *SEARCH, *DEVICE)
@output_options
def pareto_command(trace_name: str, points: int, words: Words, out: Output) -> None:
    """Show what each GiB costs, over the whole range of budgets.

    Budgets lie evenly between the floor, below which no plan can go, and the peak with everything saved. A larger
    budget never has a slower plan. --seconds is for the whole front.
    """
    from simulator.studies.pareto import pareto

    found = pareto(trace_name, points, name=trace_name, progress=out.say, **words)
    show(out, found)


@click.command("levers")
@click.argument("trace_name", metavar="TRACE")
@output_options
def levers_command(trace_name: str, out: Output) -> None:
    """Show what each lever could do to the peak, alone and all together.

    Levers change the step before anything is recomputed. `simulate TRACE --allow` lets a plan take them.
    """
    from simulator.prediction.ask import problem_of
    from simulator.studies.levers import study

    out.say("comparing levers")
    show(out, study(problem_of(trace_name), trace_name))
