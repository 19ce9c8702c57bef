"""`simulate TRACE`: what one step needs, and the plan that makes it fit."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simulator.cli.options import (
    BUDGET_OF,
    Words,
    device_options,
    measured_lever_options,
    output_options,
    planning_options,
)
from simulator.core.budget import check_budget
from traces.commands import Output, Refused
from traces.errors import SpecError
from traces.files.whole import check_writable
from traces.shapes import Shapes

if TYPE_CHECKING:
    from simulator.studies.answer import Answer

TOP_HOLDERS = 5


@click.command("", hidden=True)
@click.argument("trace_name", metavar="TRACE")
@click.option(
    "--budget",
    help="Bytes, a size such as 8GiB, a share of the step's own peak such as 60%, or `device`: what the device has.",
)
@BUDGET_OF
@device_options
@planning_options
@click.option(
    "--shapes",
    "asked_shapes",
    metavar="RANGE",
    help="What the plan needs at other sizes, such as seq-len=16:512.",
)
@measured_lever_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the plan here.")
@click.option("-f", "--force", is_flag=True, help="Replace the file of -o if it exists.")
@output_options
def plan_command(
    trace_name: str,
    budget: str | None,
    budget_of: str | None,
    memory: Words,
    planner: str | None,
    planning: Words,
    asked_shapes: str | None,
    changes: Words,
    output: Path | None,
    force: bool,
    out: Output,
) -> None:
    """Simulate one trace."""
    from simulator import api
    from simulator.planners import DEFAULT, SAVE_ALL

    planner = planner or (SAVE_ALL if budget is None else DEFAULT)
    if budget is not None and budget != api.DEVICE:
        check_budget(budget)
    if output is not None:
        refuse_to_replace(output, force)

    from simulator.planners.outcome import Infeasible
    from simulator.prediction.levers import left_out, lower_bound
    from simulator.studies.answer import Answer, refusal
    from simulator.studies.shapes import check_shapes, over_shapes, traces_of

    problem = api.problem_of(trace_name, planning["never"], planning["always_save"])
    shapes = None if asked_shapes is None else Shapes.parse(asked_shapes)
    not_used = left_out(problem, api.levers_of(**changes))
    if shapes is not None:
        check_shapes(problem.trace.meta, trace_name, shapes)
    saved = api.simulate(problem, **memory)
    budget_bytes, budget_of = api.budget_in_bytes(problem, budget, budget_of, saved.setting)
    bound = None if budget_bytes is None else lower_bound(problem, budget_bytes, api.levers_of(**changes))
    out.say(f"planning with {planner}")
    start = time.perf_counter()
    try:
        plan = api.plan(
            problem,
            budget_bytes,
            planner=planner,
            budget_of=budget_of,
            progress=out.say,
            **changes,
            **planning,
            **memory,
        )
    except Infeasible as error:
        if out.as_json:
            seconds = time.perf_counter() - start
            told = refusal(trace_name, saved, planner, error, seconds, bound, budget_of)
            out.show(lambda: told, str)
        raise
    seconds = time.perf_counter() - start
    c = api.simulate(problem, plan, **memory)
    if output is not None:
        try:
            plan.save(output, new=not force)
        except FileExistsError:
            refuse_to_replace(output, force)
            raise
    over = None
    if shapes is not None:
        traces = traces_of(problem.trace, trace_name, shapes, out.say)
        over = over_shapes(c, shapes, traces, planning["seed"])
    found = Answer(
        planned=c,
        asked=saved,
        trace_name=trace_name,
        solve_seconds=seconds,
        bound=bound,
        shapes=over,
        left_out=not_used,
    )
    if out.report is not None:
        from simulator.report.step import write_step

        out.say(f"writing {out.report}")
        write_step(out.report, found)
    out.show(found.to_json, lambda: summary(found, output))
    if c.planned_fit.fits is False:
        assert c.planned_fit.device is not None
        raise Refused(f"it does not fit {c.planned_fit.device.name}: {c.planned_fit.out_of_memory}.", 1)
    if over is not None and not over.holds:
        raise Refused("the plan does not hold for every shape that was looked at.", 1)


def refuse_to_replace(path: Path, force: bool) -> None:
    """Raise SpecError if the output is there already and --force is not given, OSError if it cannot be made."""
    if path.is_dir():
        raise SpecError(f"{path} is a directory; name a file with -o.")
    if path.exists() and not force:
        raise SpecError(f"{path} exists; give --force to replace it, or name another file with -o.")
    check_writable(path)


def summary(found: Answer, output: Path | None) -> str:
    """The answer to read; the plan went to `output`."""
    from simulator.prediction.loop_peaks import peaks_table
    from simulator.prediction.step import describe
    from simulator.prediction.warnings import texts_beside_untouched
    from simulator.report.step import at_peak, holders, in_words

    c = found.planned
    lines = [
        f"{found.trace_name}: {describe(c.trace.meta)}",
        *peaks_table(c, found.asked).lines(),
        *(f"{word:<7} {text}" for word, text in in_words(found)),
        *(found.shapes.lines() if found.shapes is not None else []),
        *(f"warning {text}" for text in (*texts_beside_untouched(c), found.left_out) if text),
    ]
    if c.planned.timeline.peak_step >= 0:
        sentence, parts = at_peak(c)
        largest = holders(c.step.trace, c.planned, most=TOP_HOLDERS).without("op", "shape")
        lines += [sentence, *parts.lines(), *largest.lines()]
    if output is not None:
        lines.append(f"Next: execute {shlex.quote(str(output))}")
    elif c.plan.changes:
        lines.append("Next: save the plan with -o plan.json, then run `execute plan.json`.")
    elif c.budget_bytes is None:
        lines.append(f"Next: simulate {shlex.quote(found.trace_name)} --budget 60% -o plan.json")
    return "\n".join(lines)
