"""`simulate compare`: planners side by side on one trace and budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from simulator.cli.options import Words, device_options, listed, output_options, search_options
from simulator.core.budget import check_budget
from traces.commands import Output
from traces.errors import BudgetError

if TYPE_CHECKING:
    from simulator.studies.comparison import Comparison


@click.command("compare")
@click.argument("trace_name", metavar="TRACE")
@click.option(
    "--budget", required=True, help="Bytes, a size such as 8GiB, or a share of the step's own peak."
)
@click.option("--planners", help="Which, with commas (default: all of `simulate planners`).")
@search_options
@device_options
@output_options
def compare_command(
    trace_name: str,
    budget: str,
    planners: str | None,
    planning: Words,
    memory: Words,
    out: Output,
) -> None:
    """Set the planners side by side on one trace and budget.

    Peak, added time, the gap to the certified bound, and solve time of each, or why it has no plan. --seconds is for
    each planner. Exit code: 0 done, 1 no planner has a plan within the budget, 2 the input is wrong.
    """
    from simulator import api

    check_budget(budget)
    names = chosen_planners(planners)
    found = api.compare(trace_name, budget, names, progress=out.say, name=trace_name, **planning, **memory)
    if out.report is not None:
        from simulator.report.plans import write_comparison

        write_comparison(out.report, found)
    out.show(found.to_json, lambda: table(found))
    if not any(e.feasible for e in found.entrants):
        raise BudgetError(
            f"no planner has a plan within {found.budget_bytes} bytes: {found.entrants[0].message}"
        )


def chosen_planners(text: str | None) -> tuple[str, ...] | None:
    """Planners from `a,b,c`, None (all) without a text; raises SpecError if one does not exist or stands twice."""
    from simulator.planners import find

    if text is None:
        return None
    names = listed("--planners", text)
    for name in names:
        find(name)
    return names


def table(found: Comparison) -> str:
    """One line a planner, the cheapest first, those without a plan last."""
    from simulator.prediction.warnings import texts_of
    from simulator.report.plans import comparison_in_words

    rows = found.table().without("step time", "ops run again").lines()
    warned = (f"warning {text}" for text in texts_of(found.problem))
    return "\n".join([comparison_in_words(found), *rows, *warned])
