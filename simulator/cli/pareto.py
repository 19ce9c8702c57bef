"""`simulate pareto`: what each GiB costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from simulator.cli.options import Words, device_options, output_options, planning_options
from traces.commands import Output
from traces.units import show_bytes

if TYPE_CHECKING:
    from simulator.studies.pareto import Front


@click.command("pareto")
@click.argument("trace_name", metavar="TRACE")
@click.option(
    "--points", type=click.IntRange(min=2), default=20, show_default=True, help="Number of budgets."
)
@planning_options
@device_options
@output_options
def pareto_command(
    trace_name: str, points: int, planner: str | None, planning: Words, memory: Words, out: Output
) -> None:
    """The whole front of one trace: what each GiB costs.

    Budgets lie evenly between the floor, below which no plan can go, and the peak with everything saved. A larger
    budget never has a slower plan. --seconds is for the whole front.
    """
    from simulator import api

    found = api.pareto(
        trace_name, points, planner=planner, progress=out.say, name=trace_name, **planning, **memory
    )
    if out.report is not None:
        from simulator.report.plans import write_front

        write_front(out.report, found)
    out.show(found.to_json, lambda: table(found))


def table(front: Front) -> str:
    """One line a budget, the largest first."""
    from simulator.prediction.warnings import texts_of
    from simulator.report.plans import front_in_words

    lines = [front_in_words(front), *front.table().without("by the bound").lines()]
    if late := [show_bytes(p.budget_bytes) for p in reversed(front.points) if not p.finished]:
        lines.append(
            f"{front.planner} did not finish {len(late)} of {len(front.points)} budgets in their share of --seconds: "
            f"{', '.join(late)}; a plan that stands there was made for another one."
        )
    return "\n".join([*lines, *(f"warning {text}" for text in texts_of(front.problem))])
