"""The command `execute`: run a plan on the real model, verify it, and measure it beside eager and its prediction."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from executor.cli.campaign import campaign
from executor.cli.rehearse import figures_table, rehearse, rehearse_plan
from traces.commands import (
    DefaultGroup,
    OutputFile,
    analysis_option,
    echo,
    print_json,
    report_option,
    say,
    stdout_free,
)
from traces.errors import SpecError
from traces.provenance import REHEARSED, refuse_page
from traces.records.measurement import RunFigures, signed_error_percent
from traces.records.plan import ALLOCATED
from traces.units import show_bytes, show_time

if TYPE_CHECKING:
    from executor.plans import Outcome, Settings
    from simulator.studies.sweep import SweepRow


def _measuring(command: Any) -> Any:
    """The options that every measuring command has; how to measure reaches it as one record."""

    @wraps(command)
    def measuring(*, steps: int, verify: bool, **more: Any) -> None:
        from executor.plans import Settings

        given = {f.name: more.pop(f.name) for f in fields(Settings) if f.name in more}
        command(settings=Settings(steps=steps if verify else 0, **given), **more)

    made: Any = measuring
    for option in reversed(
        (
            click.option("--device", default="cpu", show_default=True, help="cpu or cuda."),
            click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True,
                         help="Training steps that are compared with the untouched model."),
            click.option("--memory-steps", type=click.IntRange(min=1), default=5, show_default=True,
                         help="Iterations whose peak memory is measured; from the third on they count as steady."),
            click.option("--warmup", type=click.IntRange(min=0), default=2, show_default=True,
                         help="Iterations before the timed ones."),
            click.option("--runs", type=click.IntRange(min=1), default=10, show_default=True,
                         help="Timed iterations, of which the median counts."),
            click.option("--verify/--no-verify", default=True, show_default=True,
                         help="Compare losses, gradients, parameters, buffers and random state with eager."),
            report_option,
            click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
            click.option("-q", "--quiet", is_flag=True, help="No progress on stderr."),
        )
    ):  # fmt: skip
        made = option(made)
    return made


@click.group(cls=DefaultGroup, default="run", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lowtide")
def execute() -> None:
    """Train by a plan, verify that the results are the same, and measure peak memory and time.

    \b
    execute plan.json --device cuda --report error.html
    execute plan.json --json
    execute sweep DIR                      the plans that `simulate sweep -o DIR` made
    execute campaign cpu -o DIR            how wrong predictions are, over many models and budgets
    execute errors TRACE -o errors.json    by how much approximate formats change the gradient
    execute rehearse train.py --gpu h100   your own loop on a GPU that is not there: its memory
    execute plan.json --rehearse h100      the planned step there

    What is no subcommand goes to `execute run`; see `execute run --help` for the options.
    """


execute.add_command(campaign)
execute.add_command(rehearse)


@execute.command("run")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--model", default="", help="Build this instead of what the plan names (the same step elsewhere)."
)
@click.option("-o", "--output", type=OutputFile(), help="Save the measurement as JSON.")
@click.option(
    "--rehearse", "rehearsed_on", help="Measure nothing: run on this GPU, which is not there (h100, ...)."
)
@click.option("--trace", "trace_name", help="The trace behind the plan, for the report's pictures.")
@_measuring
def run_plan(
    plan: Path,
    output: Path | None,
    trace_name: str | None,
    rehearsed_on: str | None,
    settings: Settings,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Execute PLAN (made by `simulate ... -o plan.json`), each variant in a fresh process.

    Exit code 1: the planned step did not compute what the untouched model computes, its measured peak is over the
    budget, or (--rehearse) it does not fit.
    """
    if rehearsed_on is not None:
        if output is not None or report is not None:
            raise SpecError(
                "--rehearse measures nothing, so there is nothing for --output or --report; leave them out."
            )
        rehearse_plan(plan, settings.model, rehearsed_on, as_json=as_json, quiet=quiet)
        return
    if report is not None:
        refuse_page()
    from executor.plans import measure_plan
    from traces.errors import BudgetError, VerificationError

    outcome = measure_plan(plan, settings, lambda text: say(text, quiet=quiet))
    measurement = outcome.measurement
    if output is not None:
        measurement.save(output)
    if as_json:
        print_json(answer(outcome))
    else:
        print_outcome(outcome)
    if report is not None:
        from executor.matching import trace_of
        from executor.report import write_measurement

        if trace_name is None and outcome.plan.meta.mode == "real":
            say(
                "The report's curves are drawn without measured workspaces; give --trace for those.",
                quiet=quiet,
            )
        say("Writing the report ...", quiet=quiet)
        with stdout_free(as_json):
            recorded = trace_of(outcome.plan, settings.model, settings.device, trace_name)
        write_measurement(report, measurement, recorded, outcome.plan, measured_curve=outcome.curve or None)
    if measurement.verified is False:
        raise VerificationError(
            f"the planned step does not compute what the untouched model computes: {outcome.first_difference}"
            + (f" ({note})." if (note := _note(outcome)) else ".")
        )
    if measurement.within_budget is False:
        raise BudgetError(
            f"the planned step's peak is {show_bytes(measurement.limited_bytes)}, over the budget of "
            f"{show_bytes(measurement.budget_bytes)}; plan for less, or trace again as it runs here."
        )


@execute.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--model", default="", help="Build this instead of what the plan names.")
@click.option("--torch-budget/--no-torch-budget", default=True, help="Ask torch's partitioner, too.")
@click.option(
    "-o", "--output", type=OutputFile(), help="Write the selective-checkpoint policy as a Python file."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def export(plan: Path, model: str, torch_budget: bool, output: Path | None, as_json: bool) -> None:
    """What PLAN comes to for those who keep their tools, each with the peak that it is predicted to need itself."""
    from dataclasses import asdict

    from executor.exports import exports
    from traces.files.whole import write_text
    from traces.records.plan import Plan

    given = Plan.load(plan)
    with stdout_free(as_json):
        made = exports(given, model, torch_budget=torch_budget)
    if output is not None:
        write_text(output, made.policy)
    if as_json:
        print_json({"plan": str(plan), "budget_bytes": given.budget_bytes, **asdict(made)})
        return
    echo(f"the plan {show_bytes(made.plan_peak_bytes)}; untouched {show_bytes(made.untouched_peak_bytes)}")
    for e in made.exports:
        fits = {None: "", True: " (within the budget)", False: " (OVER the budget)"}[e.within_budget]
        echo(
            f"  {e.kind:26}{show_bytes(e.peak_bytes):>12}{fits}  {e.setting}"
            + (f"; {e.note}" if e.note else "")
        )
    if output is not None:
        echo(f"Next: from {output.stem} import apply; apply(model)")


@execute.command()
@click.argument("what", metavar="TRACE_OR_PLAN")
@click.option("-o", "--output", type=OutputFile(), required=True, help="Where the answer goes.")
@click.option(
    "--model", default="", help="Build this instead of what the trace names (the same step elsewhere)."
)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--levers", metavar="NAMES", help="Which formats (default: all that are approximate).")
@click.option("--max-gradient-error", type=float, help="Measure no more of a format once it is over that.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def errors(
    what: str,
    output: Path,
    model: str,
    device: str,
    levers: str | None,
    max_gradient_error: float | None,
    quiet: bool,
) -> None:
    """By how much approximate formats change the gradient of one step on its batch, for `simulate --errors`.

    Of a PLAN: by how much it changes the gradient as a whole, written into the plan.
    """
    from executor.fitting.gradient_errors import ANY, LOSSY, gradient_errors, with_error
    from executor.matching import check_kind
    from tracer.build.step import check_device, load_spec
    from traces.records.plan import Plan
    from traces.records.store import load

    check_device(device)
    given = Plan.load(what) if Path(what).is_file() else load(what)
    check_kind(given.meta, device)
    build = load_spec(model or given.meta.model, dict(given.meta.options), seed=given.meta.seed)
    if isinstance(given, Plan):
        measured = with_error(build, given, device)
        measured.save(output)
        echo(f"relative error of the gradient {measured.gradient_error:.2e}")
        return
    kinds = LOSSY if levers is None else [x.strip() for x in levers.split(",") if x.strip()]
    tell = partial(say, quiet=quiet)
    found = gradient_errors(build, given, kinds, device, most=max_gradient_error or ANY, say=tell)
    found.save(output)
    for kind in found.kinds:
        parts = [p for p in found.parts if p.kind == kind]
        whole = math.sqrt(sum(p.error**2 for p in parts))
        echo(
            f"{kind:10} {sum(len(p.storages) for p in parts):4} values: relative error of the gradient {whole:.2e}"
        )
    echo(
        f"Next: simulate {what} --budget 60% --allow approximate --max-gradient-error 0.01 --errors {output}"
    )


@execute.command()
@click.argument("directory", type=click.Path(path_type=Path))
@analysis_option
@_measuring
def sweep(
    directory: Path,
    analysis: str | None,
    settings: Settings,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure the plans of a sweep: DIRECTORY is what `simulate sweep MODEL ... -o DIRECTORY` made.

    Each row of DIRECTORY/sweep.json that has a plan is measured (or, without a plan that fits, left as it is), and
    the figures are written back after every row, so that an interrupted sweep goes on where it stopped.
    """
    from executor.sweeps import measure_sweep
    from traces.errors import BudgetError, VerificationError

    done = measure_sweep(directory, settings, lambda text: say(text, quiet=quiet))
    table = done.sweep
    if report is not None:
        from simulator.report.sweep import write_sweep

        root = directory if directory.is_dir() else directory.parent
        write_sweep(report, table, root=root, analysis=analysis or "", measured_on=done.place)
    if as_json:
        print_json(table.to_json())
    else:
        for row in table.rows:
            measured = ", ".join(
                f"{k} {show_bytes(f.peak_allocated_bytes or 0)} {show_time(f.step_time_ns or 0)}"
                for k, f in row.measured.items()
            )
            note = (
                f"; budget {show_bytes(row.budget_bytes)} EXCEEDED" if _peak(row) > row.budget_bytes else ""
            )
            echo(f"batch size {row.batch_size:5}: {measured or row.message or 'not measured'}{note}")
    if done.failures:
        raise VerificationError("; ".join(done.failures))
    over = [row.batch_size for row in table.rows if _peak(row) > row.budget_bytes]
    if over:
        raise BudgetError(f"measured peaks are over the budget at batch size {', '.join(map(str, over))}.")


def _peak(row: SweepRow) -> int:
    """The measured peak of a row's plan, in the memory that its budget is of; 0 if none was measured."""
    return row.measured.get("plan", RunFigures()).peak_bytes(row.budget_of) or 0


def answer(outcome: Outcome) -> dict[str, Any]:
    """The object that `execute --json` prints."""
    m, checked = outcome.measurement, outcome.verification
    runs = ("predicted", "measured", "eager", "keep_all", "keep_all_predicted")
    return {
        "plan": outcome.plan_path,
        **m.to_json(),
        **{k: getattr(m, k).headline() for k in runs},
        "within_budget": m.within_budget,
        "bit_equal": checked.bit_equal if checked else None,
        "verification_note": _note(outcome),
        "eager_against_itself": checked.control_difference if checked else {},
        "first_difference": outcome.first_difference,
        "peaks_bytes": {k: list(getattr(m, k).peaks_bytes) for k in ("eager", "keep_all", "measured")},
    }


def _note(outcome: Outcome) -> str:
    return outcome.verification.note if outcome.verification else ""


def print_outcome(outcome: Outcome) -> None:
    """A measurement for people."""
    m = outcome.measurement
    echo(f"{m.model} by {m.planner} on {m.device} ({m.provenance})")
    rehearsed = m.provenance == REHEARSED
    found = "rehearsed" if rehearsed else "measured"
    runs = (
        (f"eager, {found}", m.eager),
        ("keep-all, predicted", m.keep_all_predicted),
        (f"keep-all, {found}", m.keep_all),
        ("plan, predicted", m.predicted),
        (f"plan, {found}", m.measured),
    )
    for line in figures_table(runs).lines():
        echo(f"  {line}")
    errors = signed_error_percent(m.predicted, m.measured).items()
    parts = [f"{k.removesuffix('_bytes').removesuffix('_ns')} {v:+.2f} %" for k, v in errors if v is not None]
    echo("  error of the plan's prediction: " + ", ".join(parts))
    if m.slowdown_percent is not None:
        said, real = m.predicted_slowdown_percent, m.slowdown_percent
        more = f", predicted {said:+.2f} % ({said - real:+.2f} points)" if said is not None else ""
        echo(f"  slow-down by the plan: measured {real:+.2f} %{more}")
    if m.within_budget is not None:
        of = " of reserved memory" if m.budget_of != ALLOCATED else ""
        echo(f"  budget {show_bytes(m.budget_bytes)}{of}: {'kept' if m.within_budget else 'EXCEEDED'}")
    for text in m.warnings:
        echo(f"  warning, beside the prediction: {text}")
    if m.verified is None:
        from executor.plans import UNVERIFIED

        reason = "nothing is computed on a GPU that is not there" if rehearsed else "--no-verify"
        failed = any(text.startswith(UNVERIFIED) for text in m.warnings)
        echo(f"  not verified ({'see the warning' if failed else reason})")
    else:
        kinds = ", ".join(k.replace("_", " ") for k in m.max_abs_difference)
        echo(f"  {_verdict(outcome)} over {m.steps} steps in {kinds}")


def _verdict(outcome: Outcome) -> str:
    checked = outcome.verification
    if checked is None or not checked.equal:
        return "NOT equal to eager"
    if checked.bit_equal:
        return "verified: bit-equal with eager"
    return f"verified ({checked.note or 'within the difference of eager from itself, whose kernels vary'})"


def main() -> None:
    """Entry point of `execute`."""
    execute()
