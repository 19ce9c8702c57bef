"""The command `execute`: run a plan on the real model, verify it, and measure it beside eager and its prediction."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from executor.cli.rehearse import rehearse
from executor.matching import check_kind, check_trusted, trace_of
from simulator.cli.options import DASK
from traces import commands
from traces.commands import Grouped, Output, OutputFile, echo, output_options, stdout_free
from traces.errors import BudgetError, LowtideError, VerificationError
from traces.files import write_text
from traces.provenance import refuse_page
from traces.records.plan import Plan
from traces.units import show_bytes

if TYPE_CHECKING:
    from executor.measuring import Settings


def _settings(steps: int, verify: bool, **given: Any) -> Settings:
    from executor.measuring import Settings

    return Settings(steps=steps if verify else 0, **given)


MEASURING: Final = (
    click.option("--device", default="cpu", show_default=True, help="Run on cpu or cuda."),
    click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True,
                 help="Training steps to compare with the untouched model."),
    click.option("--memory-steps", type=click.IntRange(min=1), default=5, show_default=True,
                 help="Iterations whose peak memory is measured. All but the first count as steady."),
    click.option("--warmup", type=click.IntRange(min=0), default=2, show_default=True,
                 help="Iterations before the timed ones."),
    click.option("--runs", type=click.IntRange(min=1), default=10, show_default=True,
                 help="Timed iterations, of which the median counts."),
    click.option("--verify/--no-verify", default=True, show_default=True,
                 help="Compare losses, gradients, parameters, buffers and random state with eager."),
)  # fmt: skip
MODEL: Final = click.option("--model", default="",
    help="Build this model, such as file.py:build, instead of the one that the file names.")  # fmt: skip
TRUST: Final = click.option("--trust", is_flag=True,
    help="Allow to run the Python file that the plan or the trace names as its model.")  # fmt: skip


@click.group(
    cls=commands.DefaultGroup, default="run", context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="lowtide")
def execute() -> None:
    """Train by a plan, verify that the results are the same, and measure peak memory and time.

    \b
    execute plan.json --device cuda --report error.html
    execute plan.json --json
    execute campaign cpu -o DIR            how wrong predictions are, over many models and budgets
    execute errors TRACE -o errors.json    how much approximate formats change the gradient
    execute rehearse train.py --gpu h100   the memory of your own loop on a GPU that is not there

    What is no subcommand goes to `execute run`; see `execute run --help` for the options.
    """


execute.add_command(rehearse)


@execute.command("run", cls=Grouped)
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=OutputFile(), help="Save the measurement as JSON.")
@click.option("--trace", "trace_name", help="Trace of the plan, for the pictures of the report.")
@TRUST
@commands.gathered("settings", _settings, MODEL, *MEASURING)
@output_options
def run_plan(
    plan: Path, trust: bool, output: Path | None, trace_name: str | None, settings: Settings, out: Output
) -> None:
    """Train by PLAN, which `simulate -o` wrote, and compare it with the untouched model.

    Each measurement runs in a fresh process.

    Exit code 1: the planned step did not compute what the untouched model computes, or its measured peak is over the
    budget.
    """
    if out.report is not None:
        refuse_page()
    given = Plan.load(plan)
    check_trusted(plan, given.meta.model, settings.model, trust)
    from executor.plans import measure_plan
    from executor.report import in_words

    measurement = measure_plan(given, plan, settings, out.say)
    if output is not None:
        measurement.save(output)
    out.show(
        lambda: {"plan": str(plan), **measurement.to_json(), "within_budget": measurement.within_budget},
        lambda: in_words(measurement),
    )
    if out.report is not None:
        from executor.report import write_measurement

        if trace_name is None and given.meta.mode == "real":
            out.say("The report's curves are drawn without measured workspaces; give --trace for those.")
        out.say("Writing the report ...")
        with stdout_free(out.as_json):
            recorded = trace_of(given, settings.model, settings.device, trace_name)
        write_measurement(out.report, measurement, recorded, given)
    if measurement.verified is False:
        note = f" ({measurement.verification_note})" if measurement.verification_note else ""
        raise VerificationError(
            "the planned step does not compute what the untouched model computes: "
            f"{plan}: {measurement.first_difference}{note}."
        )
    if measurement.within_budget is False:
        peak_bytes = measurement.measured.peak_bytes(measurement.budget_of)
        raise BudgetError(
            f"the planned step's peak is {show_bytes(peak_bytes)}, over the budget of "
            f"{show_bytes(measurement.budget_bytes)} ({plan}); plan for less, or trace again as it runs here."
        )


@execute.command()
@click.argument("plan", type=click.Path(path_type=Path))
@MODEL
@TRUST
@click.option("-o", "--output", type=OutputFile(), help="Write the policy to this Python file.")
@commands.json_option
def export(plan: Path, model: str, trust: bool, output: Path | None, out: Output) -> None:
    """Write PLAN as selective checkpointing, predict its peak, and list the settings of every n-th layer."""
    from executor.exports import exports

    given = Plan.load(plan)
    check_trusted(plan, given.meta.model, model, trust)
    with stdout_free(out.as_json):
        made = exports(given, model)
    peak = made["policy_peak_bytes"]
    over = given.budget_bytes is not None and peak > given.budget_bytes
    lines = [f"policy: {show_bytes(peak)}{' (OVER the budget)' if over else ''}"]
    every = [(n, ", ".join(blocks)) for n, blocks in made["every_n_layers"].items()]
    lines += [f"  not measured: gradient_checkpointing_enable(every_n_layers={n}): {of}" for n, of in every]
    if output is not None:
        write_text(output, made["policy"])
        lines.append(f"Next: from {output.stem} import apply; apply(model)")
    out.show(lambda: {"plan": str(plan), **made}, lambda: "\n".join(lines))


@execute.command()
@click.argument("trace")
@click.option("-o", "--output", type=OutputFile(), required=True, help="Write the errors to this file.")
@MODEL
@TRUST
@click.option("--device", default="cpu", show_default=True, help="Run on cpu or cuda.")
@click.option("--levers", metavar="NAMES", help="Formats to measure (default: all).")
@commands.quiet_option
def errors(
    trace: str,
    output: Path,
    model: str,
    trust: bool,
    device: str,
    levers: str | None,
    out: Output,
) -> None:
    """Measure how much approximate formats change the gradient of one step on its batch, for `simulate --errors`."""
    from executor.fitting.gradient_errors import LOSSY, gradient_errors
    from tracer.step.step import check_device, load_spec
    from traces.records.store import load

    check_device(device)
    given = load(trace)
    check_kind(given.meta, device)
    check_trusted(trace, given.meta.model, model, trust)
    build = load_spec(model or given.meta.model, dict(given.meta.options), seed=given.meta.seed)
    kinds = LOSSY if levers is None else [x.strip() for x in levers.split(",") if x.strip()]
    found = gradient_errors(build, given, kinds, device, out.say)
    found.save(output)
    for kind in found.kinds:
        parts = [p for p in found.parts if p.kind == kind]
        whole = math.sqrt(sum(p.error**2 for p in parts))
        echo(
            f"{kind:10} {sum(len(p.storages) for p in parts):4} values: relative error of the gradient {whole:.2e}"
        )
    echo(
        f"Next: simulate {shlex.quote(trace)} --budget 60% --allow approximate --max-gradient-error 0.01 "
        f"--errors {shlex.quote(str(output))}"
    )


@execute.command()
@click.argument("cases")
@click.option("-o", "--output", type=click.Path(path_type=Path),
              help="Directory of the result (default: campaign-NAME).")  # fmt: skip
@click.option("--device", help="Run on cpu or cuda, instead of what the file says.")
@DASK
@output_options
def campaign(cases: str, output: Path | None, device: str | None, dask: str, out: Output) -> None:
    """Predict, run and measure every case of CASES, and report how wrong the predictions were.

    CASES is a TOML file of cases, or `cpu`, `gpu` or `gpu-quick` for one of those that come with Lowtide. A case that
    does not fit, or that no plan fits, is a result. A campaign that was stopped goes on where its directory says.

    Exit code 1: a planned step did not compute what the untouched model computes. 2: a case failed.
    """
    from executor.campaign import page
    from executor.campaign.run import FAILED, NOT_EQUAL, Book, load_cases, run_campaign

    if out.report is not None:
        refuse_page()
    method, asked = load_cases(cases)
    book = Book(name=Path(cases).stem, method=replace(method, device=device or method.device))
    book = run_campaign(book, asked, output or Path(f"campaign-{book.name}"), out.say, dask)
    if out.report is not None:
        page.write_campaign(out.report, book)
    out.show(lambda: page.answer(book), lambda: page.summary(book))
    for status, error in ((NOT_EQUAL, VerificationError), (FAILED, LowtideError)):
        if wrong := [r for r in book.records if r.status == status]:
            raise error(
                f"{len(wrong)} of {len(book.records)} cases: {status}; {wrong[0].case.label}: {wrong[0].message}"
            )
