"""`simulate TRACE`: what one step needs, and the plan that makes it fit."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simulator.cli.options import BUDGET_OF, DEVICE, ERRORS, LEVERS, PLANNER, SEARCH, Words, asking
from traces.commands import Grouped, Output, OutputFile, Refused, output_options
from traces.errors import SpecError
from traces.files import check_writable
from traces.records.trace import RANK

if TYPE_CHECKING:
    from simulator.prediction.ask import Answer

TOP_HOLDERS = 5
BUDGET = click.option(
    "--budget",
    help="Memory limit: bytes, a size such as 8GiB, a share such as 60%, or `device`: all that the device has.",
)


@click.command("", hidden=True, cls=Grouped)
@click.argument("trace_name", metavar="TRACE")
@asking(BUDGET, *DEVICE, BUDGET_OF, *LEVERS, *ERRORS, PLANNER, *SEARCH)
@click.option("--shapes", metavar="RANGE", help="Check the plan at other sizes too, such as seq-len=16:512.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the plan to this file.")
@click.option("--export", type=OutputFile(), metavar="FILE",
              help="Write the step for memory_viz (FILE ends in .pickle) or Perfetto (in .json).")  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Replace the file of -o.")
@click.option("-v", "--verbose", is_flag=True, help="Tell what lives at the peak, too.")
@output_options
def plan_command(
    trace_name: str, words: Words, shapes: str | None, output: Path | None, export: Path | None, force: bool,
    verbose: bool, out: Output,
) -> None:  # fmt: skip
    """Simulate TRACE, and find the cheapest plan within a budget."""
    from simulator.prediction.ask import ask, problem_of, question

    asked = question(**words)
    if export is not None:
        from simulator.history.export import check_export, write_export

        check_export(export)
    if output is not None:
        refuse_to_replace(output, force)
    problem = problem_of(trace_name)
    ranges = None
    if shapes is not None:
        from simulator.studies.shapes import check_shapes, over_shapes, traces_of
        from traces.shapes import Shapes

        ranges = Shapes.parse(shapes)
        check_shapes(problem.trace.meta, trace_name, ranges)
    found = ask(problem, asked, name=trace_name, say=out.say)
    if found.refusal is not None:
        if out.as_json:
            out.show(found.to_json, str)
        raise found.refusal
    if output is not None:
        refuse_to_replace(output, force)  # somebody's that came meanwhile
        found.planned.plan.save(output)
    if export is not None:
        write_export(export, found.planned)
    over = None
    if ranges is not None:
        traces = traces_of(problem.trace, trace_name, ranges, out.say)
        over = over_shapes(found.planned, ranges, traces, asked.limits.seed)
    if out.report is not None:
        from simulator.report.step import write_step

        out.say(f"writing {out.report}")
        write_step(out.report, found)
    at_sizes = {} if over is None else {"shapes": over.to_json()}
    out.show(
        lambda: {**found.to_json(), **at_sizes},
        lambda: summary(found, [] if over is None else over.lines(), output, verbose),
    )
    fit = found.planned.planned_fit
    if fit.device is not None and fit.out_of_memory:
        raise Refused(f"it does not fit {fit.device.name}: {fit.out_of_memory}.", 1)
    if over is not None and not over.holds:
        raise Refused("the plan does not hold for every shape that was looked at.", 1)


def refuse_to_replace(path: Path, force: bool) -> None:
    """Raise SpecError if the output is there already and --force is not given, OSError if it cannot be made."""
    if path.is_dir():
        raise SpecError(f"{path} is a directory; name a file with -o.")
    if path.exists() and not force:
        raise SpecError(f"{path} exists; give --force to replace it, or name another file with -o.")
    check_writable(path)


def summary(found: Answer, at_sizes: list[str], output: Path | None, verbose: bool) -> str:
    """The answer to read, with what the plan needs at other sizes; the plan went to `output`. `verbose`: with what
    lives at the peak."""
    from simulator.prediction.loop_peaks import peaks_table
    from simulator.prediction.step import UNTOUCHED, describe, texts
    from simulator.report.step import at_peak, holders, in_words

    c = found.planned
    lines = [
        f"{found.trace_name}: {describe(c.trace.meta)}",
        *(f"{word:<8} {text}" for word, text in in_words(found)),
        *peaks_table(c, found.asked).lines(),
        *at_sizes,
        *(f"warning {text}" for text in texts(c, but=UNTOUCHED)),
    ]
    if verbose and c.planned.timeline.peak_step >= 0:
        sentence, parts = at_peak(c)
        largest = holders(c.step.trace, c.planned, most=TOP_HOLDERS).without("op", "shape")
        lines += [sentence, *parts.lines(), *largest.lines()]
    if c.trace.meta.device == RANK:
        lines.append("Next: `execute rehearse --budget` plans this rank's blocks so that they train by it.")
    elif output is not None:
        lines.append(f"Next: execute {shlex.quote(str(output))}")
    elif c.plan.changes:
        lines.append("Next: save the plan with -o plan.json, then run `execute plan.json`.")
    elif c.budget_bytes is None:
        lines.append(f"Next: simulate {shlex.quote(found.trace_name)} --budget 60% -o plan.json")
    return "\n".join(lines)
