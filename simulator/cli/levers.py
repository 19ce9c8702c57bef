"""`simulate levers TRACE`: what each way to change the step could do for its memory, and at what time."""

from __future__ import annotations

import click

from simulator.cli.options import output_options
from traces.commands import Output


@click.command("levers")
@click.argument("trace_name", metavar="TRACE")
@click.option(
    "--budget", help="Also: what plans within it add at least. Bytes, a size, or a share such as 60%."
)
@output_options
def levers_command(trace_name: str, budget: str | None, out: Output) -> None:
    """What each lever alone, and all together, could do to the peak.

    Levers change the step before anything is recomputed; `simulate TRACE --allow` lets a plan take them.
    """
    from simulator import api
    from simulator.core.budget import parse_budget
    from simulator.prediction.levers import study

    problem = api.problem_of(trace_name)
    whole = problem.saved.timeline.peak_allocated_bytes
    limit = None if budget is None else parse_budget(budget, whole)
    out.say("comparing levers")
    found = study(problem, trace_name, limit)
    if out.report is not None:
        from simulator.report.plans import write_levers

        write_levers(out.report, found)
    out.show(found.to_json, lambda: "\n".join(found.table().lines()))
