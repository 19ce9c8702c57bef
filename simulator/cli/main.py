"""Turn the words after `simulate` into a plan, a page, an answer on stdout, or a reasoned no."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.cli.compare import compare_command, pareto_command
from simulator.cli.device import (
    DEVICE,
    Asked,
    alloc_conf_option,
    budget_of_option,
    device_options,
)
from simulator.cli.max_batch import max_batch_command
from simulator.cli.options import planning_options
from simulator.cli.replay import replay_command
from traces.commands import DefaultGroup, Refused, analysis_option, report_option
from traces.errors import BudgetError, SpecError
from traces.files import check_writable
from traces.model_spec import short_name
from traces.plan import ALLOCATED, RESERVED

if TYPE_CHECKING:
    from simulator.core.limits import Limits
    from simulator.studies.sweep import Sweep, SweepRequest

DEFAULT_COMMAND = ""  # a name that no trace can have


FORMER = {"torch-budget": "`simulate compare TRACE --budget BUDGET --with-torch-budget`"}


class SimulateGroup(DefaultGroup):
    """Shows the options of the default command, a simulation, as its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in FORMER:
            raise Refused(f"there is no `simulate {args[0]}` any more; use {FORMER[args[0]]}.", 2)
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "TRACE [--budget BUDGET] [OPTIONS]")
        formatter.write_usage(ctx.command_path, "COMMAND [OPTIONS]", prefix=" " * len("Usage: "))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        plan = self.commands[DEFAULT_COMMAND]
        plan.format_options(click.Context(plan, info_name=ctx.info_name), formatter)
        rows = [
            (name, command.get_short_help_str(80))
            for name, command in self.commands.items()
            if not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(
    cls=SimulateGroup,
    default=DEFAULT_COMMAND,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)
@click.version_option(package_name="lowtide")
def main() -> None:
    """Find the cheapest way to make a training step fit into a memory budget.

    TRACE is a directory that `trace` wrote, or the name of a trace in the gallery. Without a budget the step is
    simulated as it is.

    \b
    simulate resnet152-b32                                    how much it needs
    simulate resnet152-b32 --budget 60% -o plan.json          make it fit
    simulate sweep resnet152 --batch-sizes 8,16,32 --budget 60%
    simulate compare resnet152-b32 --budget 60%               all planners side by side
    simulate pareto resnet152-b32                             what each GiB costs
    simulate max-batch bert-base --gpu a100-40                the largest batch that fits
    simulate planners                                         list the planners
    simulate replay snapshot.pickle                           a GPU's recorded allocations

    Exit code: 0 done, 1 the budget cannot be met, 2 the input is wrong.
    """


@main.command(DEFAULT_COMMAND, hidden=True)
@click.argument("trace_name", metavar="TRACE")
@click.option(
    "--budget",
    help="Bytes, a size such as 8GiB, a share of the keep-all peak such as 60%, or `device`: what the device has.",
)
@budget_of_option
@device_options
@click.option("--planner", help="Which planner (default: search; see `simulate planners`).")
@planning_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the plan here.")
@click.option("-f", "--force", is_flag=True, help="Replace the file of -o if it exists.")
@report_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a summary.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def plan_command(
    trace_name: str,
    budget: str | None,
    budget_of: str,
    asked: Asked,
    planner: str | None,
    limits: Limits,
    output: Path | None,
    force: bool,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Simulate one trace."""
    from simulator.planners import SAVE_ALL

    say = progress(quiet)
    planner = known_planner(planner) if planner or budget is not None else SAVE_ALL
    if budget is not None and budget != DEVICE:
        check_budget_text(budget)
    asked.check()
    if output is not None:
        refuse_to_replace(output, force)

    from simulator.core.budget import parse_budget
    from simulator.core.problem import Problem
    from simulator.planners.outcome import Refusal
    from simulator.studies.answer import answer, refusal, summary
    from simulator.studies.fit import fit
    from simulator.studies.planning import keep_all, planned, whole_bytes
    from traces.store import check_fingerprints, load

    trace = load(trace_name)
    check_fingerprints(trace, trace_name)
    question, device = asked.question(trace.meta), asked.device(trace.meta)
    problem = Problem(trace, limits.constraints)
    kept = keep_all(problem, question)
    budget_bytes = None
    if budget == DEVICE:
        if device is None:
            raise SpecError("--budget device: name the device with --gpu or --device-memory.")
        budget_bytes, budget_of = device.usable_bytes, ALLOCATED if question is None else RESERVED
    elif budget is not None:
        budget_bytes = parse_budget(budget, whole_bytes(kept, budget_of))
    bound = None
    if budget_bytes is not None:
        from simulator.bounds.bound import bound_answer

        bound = bound_answer(problem, budget_bytes)
    say(f"planning with {planner}")
    start = time.perf_counter()
    try:
        c = planned(
            problem,
            planner,
            limits,
            budget_bytes=budget_bytes,
            budget_of=budget_of,
            question=question,
            progress=say,
        )
    except Refusal as error:
        if as_json:
            seconds = time.perf_counter() - start
            click.echo(json.dumps(refusal(trace_name, kept, planner, error, seconds, bound)))
        raise
    seconds = time.perf_counter() - start
    fits = fit(c, device)
    if output is not None:
        c.plan.save(output)
    if report is not None:
        from simulator.report.step import write_comparison

        say(f"writing {report}")
        write_comparison(report, c, fits)
    if as_json:
        click.echo(json.dumps(answer(c, trace_name, seconds, bound, fits)))
    else:
        click.echo(summary(c, trace_name, seconds, None if output is None else str(output), bound, fits))
    if fits is not None and not fits.plan_fits:
        raise Refused(f"it does not fit {fits.device.name}: {fits.message}.", 1)


@main.command("sweep")
@click.argument("model")
@click.option("--batch-sizes", required=True, help="For example 8,16,32,64.")
@click.option(
    "--budget", required=True, help="As in `simulate TRACE --budget`; a share is of each batch's own peak."
)
@budget_of_option
@alloc_conf_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory (default: MODEL-sweep).")
@click.option("--planner", help="Which planner (default: search).")
@planning_options
@report_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--seq-len", type=click.IntRange(min=1), help="Sequence length, for `trace`.")
@click.option("--target", help="The device behind the op times, for `trace`.")
@click.option("--optimizer", help="The optimizer, for `trace`.")
@analysis_option
@click.option("--trace-option", multiple=True, metavar="KEY=VALUE", help="Any other option of `trace`.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def sweep_command(
    model: str,
    batch_sizes: str,
    budget: str,
    budget_of: str,
    alloc_conf: str | None,
    output: Path | None,
    planner: str | None,
    limits: Limits,
    report: Path | None,
    as_json: bool,
    seq_len: int | None,
    target: str | None,
    optimizer: str | None,
    analysis: str | None,
    trace_option: Sequence[str],
    quiet: bool,
) -> None:
    """Trace and plan MODEL at several batch sizes.

    Traces, plans and sweep.json are written to one directory. A trace that the same options made before is used
    again. A batch size for which no plan fits is reported as such; the exit code is 1 only if none fits.
    """
    from simulator.studies.sweep import SweepRequest, predict

    check_budget_text(budget)
    words: list[str] = []
    for key, value in (("--seq-len", seq_len), ("--target", target), ("--optimizer", optimizer)):
        if value is not None:
            words += [key, str(value)]
    for text in trace_option:
        key, separator, value = text.lstrip("-").partition("=")
        if not key:
            raise SpecError(
                f"--trace-option {text!r} names no option; give KEY=VALUE, such as image-size=256."
            )
        words += [f"--{key}", value] if separator else [f"--{key}"]
    asked = Asked(alloc_conf=alloc_conf)
    asked.check()
    request = SweepRequest(
        model=model,
        batch_sizes=parse_batch_sizes(batch_sizes),
        budget=budget,
        budget_of=budget_of,
        alloc_conf=alloc_conf,
        planner=known_planner(planner),
        limits=limits,
        directory=output or Path(f"{short_name(model)}-sweep"),
        tracer_options=tuple(words),
    )
    sweep = predict(request, progress(quiet))
    if report is not None:
        from simulator.report.sweep import write_sweep

        write_sweep(report, sweep, root=request.directory, analysis=analysis or "")
    click.echo(json.dumps(sweep.to_json()) if as_json else sweep_table(sweep, request))
    if not any(row.feasible for row in sweep.rows):
        raise BudgetError(f"no batch size fits: {sweep.rows[0].message}")


@main.command("planners")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a list.")
def planners_command(as_json: bool) -> None:
    """List the planners."""
    from simulator.planners import REGISTRY

    if as_json:
        click.echo(json.dumps({name: summary for name, (_, summary) in REGISTRY.items()}))
        return
    width = max(len(name) for name in REGISTRY)
    for name, (_, summary) in REGISTRY.items():
        click.echo(f"{name:<{width}}  {summary}")


main.add_command(compare_command)
main.add_command(pareto_command)
main.add_command(max_batch_command)
main.add_command(replay_command)


def progress(quiet: bool) -> Callable[[str], None]:
    """What tells the user on stderr what is being done; what the modules inside log is told there too."""
    import logging

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            click.echo(record.getMessage(), err=True)

    logger = logging.getLogger("lowtide")
    logger.setLevel(logging.INFO)
    logger.handlers = [] if quiet else [Told()]
    logger.propagate = False
    return (lambda line: None) if quiet else (lambda line: click.echo(line, err=True))


def known_planner(name: str | None) -> str:
    """The planner to use; raises SpecError if there is none of that name."""
    from simulator.planners import DEFAULT, find

    find(name or DEFAULT)
    return name or DEFAULT


def check_budget_text(text: str) -> None:
    """Raise SpecError before any work if the text cannot be a budget."""
    from simulator.core.budget import check_budget

    check_budget(text)


def refuse_to_replace(path: Path, force: bool) -> None:
    """Raise SpecError if the output is there already and --force is not given, OSError if it cannot be made."""
    if path.is_dir():
        raise SpecError(f"{path} is a directory; name a file with -o.")
    if path.exists() and not force:
        raise SpecError(f"{path} exists; give --force to replace it, or name another file with -o.")
    check_writable(path)


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes from `8,16,32`; raises SpecError if one is no positive number or stands twice."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise SpecError(f"--batch-sizes {text!r}: give positive whole numbers with commas, such as 8,16,32.")
    sizes = tuple(int(word) for word in words)
    if len(set(sizes)) != len(sizes):
        raise SpecError(f"--batch-sizes {text!r}: the same size stands there twice.")
    return sizes


def sweep_table(sweep: Sweep, request: SweepRequest) -> str:
    """The sweep to read: one line a batch size."""
    from traces.units import show_bytes, show_percent, show_time

    table: list[tuple[Any, ...]] = [
        ("batch", "peak", "with plan", "step", "with plan", "overhead", "recomputed ops")
    ]
    for row in sweep.rows:
        before = (row.batch_size, show_bytes(row.baseline.peak_allocated_bytes))
        step = show_time(row.baseline.step_time_ns)
        if row.feasible:
            table.append(
                (
                    *before,
                    show_bytes(row.plan.peak_allocated_bytes),
                    step,
                    show_time(row.plan.step_time_ns),
                    show_percent(row.overhead_percent, signed=True),
                    row.recomputed_ops,
                )
            )
        else:
            table.append((*before, "does not fit", step, "–", "–", "–"))
    widths = [max(len(str(line[k])) for line in table) for k in range(len(table[0]))]
    lines = ["  ".join(f"{cell!s:>{w}}" for cell, w in zip(line, widths, strict=True)) for line in table]
    lines += [
        f"batch {row.batch_size}: reserved {show_bytes(row.baseline.peak_reserved_bytes)}"
        + (f" -> {show_bytes(row.plan.peak_reserved_bytes)}" if row.feasible else "")
        for row in sweep.rows
        if row.baseline.peak_reserved_bytes is not None
    ]
    lines += [f"batch {row.batch_size}: {row.message}" for row in sweep.rows if not row.feasible]
    lines += [f"warning {text}" for text in sweep.warnings]
    lines.append(
        f"Written to {request.directory}: sweep.json, traces, plans. Next: execute sweep {request.directory}"
    )
    return "\n".join(lines)
