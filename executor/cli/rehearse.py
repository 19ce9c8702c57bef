"""The command `execute rehearse`: run a training loop on a GPU that is not there, and print what memory it took."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.show.tables import figures_table, table
from traces.commands import Output, OutputFile, answer_options, step_options
from traces.errors import OutOfMemoryProblem, SpecError
from traces.units import show_bytes

if TYPE_CHECKING:
    from torch import nn

    from tracer.rehearsal.record import Rehearsal
    from traces.records.plan import Plan, PredictionWarning

MOST_LINES = 8
APPLY = "executor.cli.rehearse:apply_file"  # in the process on the null driver


@click.command()
@click.argument("model")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--gpu", required=True, help="GPU of `trace targets`, such as h100 or rtx-4090.")
@click.option("--plan", type=click.Path(path_type=Path), help="Apply this plan to the model.")
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    default=5,  # as many as a prediction plays: reserved memory may grow until then
    show_default=True,
    help="Iterations to run. A script ends after so many optimizer steps.",
)
@click.option("--alloc-conf", default="", help="PYTORCH_ALLOC_CONF, such as expandable_segments:True.")
@click.option(
    "--snapshot", type=OutputFile(), help="Write torch's memory snapshot to this file, for `simulate replay`."
)
@step_options
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the weights and the batch.")
@answer_options
def rehearse(
    model: str,
    arguments: tuple[str, ...],
    gpu: str,
    plan: Path | None,
    iterations: int,
    alloc_conf: str,
    snapshot: Path | None,
    seed: int,
    out: Output,
    **options: Any,
) -> None:
    """Run torch's own CUDA code without a GPU, and print what memory the training step takes.

    MODEL is a name that `trace` knows, FILE.py:FUNCTION as `trace` takes it, or a script with a training loop of its
    own, whose ARGUMENTS follow after `--`; or `trace`, `execute` or `python`, which finds the GPU then. Needs a CUDA
    build of torch, and no GPU. Nothing is computed: values are zeros, and there are no times.

    \b
    execute rehearse bert-base --batch-size 16 --seq-len 512 --gpu h100
    execute rehearse my_training.py:build --gpu rtx-4090 --snapshot snapshot.pickle
    execute rehearse train.py --gpu a100-80 -- --epochs 1
    execute rehearse --gpu h100 -- execute campaign gpu-quick -o rehearsed

    Exit code: 0 done, 1 the GPU's memory does not suffice, 2 the input is wrong.
    """
    from tracer.rehearsal.run import COMMANDS, command_on_null_driver
    from tracer.rehearsal.run import rehearse as run

    if model in COMMANDS:
        _refuse_for_commands(model)
        sys.exit(command_on_null_driver([model, *arguments], gpu, alloc_conf))
    out.say(f"Rehearsing {model} on {gpu} ...")
    found = run(
        model,
        gpu,
        options={k: v for k, v in options.items() if v is not None},
        arguments=arguments,
        plan=plan,
        apply=APPLY,
        seed=seed,
        iterations=iterations,
        alloc_conf=alloc_conf,
        snapshot=snapshot,
    )
    out.show(found.to_json, lambda: in_words(found))
    refuse_if_too_large(found)


def _refuse_for_commands(command: str) -> None:
    """Raise SpecError for an option that a command would not hear of."""
    context = click.get_current_context()
    for option in context.command.params:
        name = str(option.name)
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and name not in ("model", "arguments", "gpu", "alloc_conf"):
            raise SpecError(
                f"{command} takes options of its own, so {option.opts[0]} must follow after `--`, if it knows that."
            )


def rehearse_plan(path: Path, model: str, gpu: str, out: Output) -> None:
    """`execute PLAN --rehearse GPU`: the untouched and the planned step, rehearsed beside predicted."""
    from executor.matching import check_alloc_conf
    from executor.measuring import predicted_figures
    from tracer.rehearsal.run import rehearse as run
    from traces.records.measurement import signed_error_percent
    from traces.records.plan import Plan

    plan = Plan.load(path)
    check_alloc_conf(plan.meta, "cuda")
    found = {}
    for label, applied in (("eager", None), ("plan", path)):
        out.say(f"Rehearsing {label} on {gpu} ...")
        found[label] = run(
            model or plan.meta.model,
            gpu,
            options=dict(plan.meta.options),
            script=False,
            plan=applied,
            apply=APPLY,
            seed=plan.meta.seed,
            alloc_conf=plan.meta.alloc_conf,
        )
    predicted, rehearsed = predicted_figures(plan, "plan"), found["plan"]
    answer = {
        "plan": str(path),
        "model": plan.meta.model,
        "options": dict(plan.meta.options),
        "planner": plan.planner,
        "budget_bytes": plan.budget_bytes,
        "budget_of": plan.budget_of,
        "provenance": rehearsed.provenance,
        "predicted": predicted.headline(),
        "rehearsed": rehearsed.figures.headline(),
        "error_percent": signed_error_percent(predicted, rehearsed.figures),
        "within_budget": _within(plan, rehearsed),
        "rehearsals": {label: r.to_json() for label, r in found.items()},
    }
    out.show(lambda: answer, lambda: _beside(plan, found))
    refuse_if_too_large(rehearsed)


def apply_file(model: nn.Module, plan: str) -> Callable[..., Any]:
    """Apply the plan in that file to a model, and return what to call in its place."""
    from executor.training.module import apply_plan
    from traces.records.plan import Plan

    return apply_plan(model, Plan.load(plan))


def refuse_if_too_large(found: Rehearsal) -> None:
    """Raise OutOfMemoryProblem, with exit code 1, if the GPU's memory does not suffice."""
    if not found.fits:
        error = OutOfMemoryProblem(
            f"{found.model} does not fit into {found.gpu}: it reserves "
            f"{show_bytes(found.figures.peak_reserved_bytes)}; torch said there: {found.out_of_memory}"
        )
        error.exit_code = 1
        raise error


def in_words(found: Rehearsal) -> str:
    """A rehearsal for people."""
    env = found.environment
    conf = f", {env['alloc_conf']}" if env.get("alloc_conf") else ""
    phases = [(n, *phase) for n, i in enumerate(found.iterations, 1) for phase in i.phases.items()]
    peaks = table(
        phases,
        [
            ("", "", lambda row: f"iteration {row[0]}, {row[1]}"),
            ("requested", "bytes", lambda row: row[2].requested_bytes),
            ("allocated", "bytes", lambda row: row[2].allocated_bytes),
            ("reserved", "bytes", lambda row: row[2].reserved_bytes),
        ],
    )
    steady, room = found.steady, found.memory_bytes - found.context_bytes
    fits = "fits" if found.fits else "DOES NOT FIT"
    lines = [
        f"{found.model} on {found.gpu}, torch {env.get('torch', '?')}{conf}: {found.provenance}",
        *(f"  {line}" for line in peaks.lines()),
        f"  peak {steady.allocated_bytes:,} bytes allocated, {found.figures.peak_reserved_bytes:,} reserved",
        f"  {fits}: {show_bytes(found.figures.peak_reserved_bytes)} of {show_bytes(room)} "
        f"({found.gpu}, less {show_bytes(found.context_bytes)} for the CUDA context, assumed)",
    ]
    if found.alive:
        lines.append("  alive at the peak, by the line that asked for it:")
    for row in found.alive[:MOST_LINES]:
        line = row.line or "(torch itself)"
        lines.append(f"    {show_bytes(row.requested_bytes):>12}  {row.blocks:5} x  {row.phase:10} {line}")
    return "\n".join([*lines, *_warnings(found)])


def _warnings(found: Rehearsal) -> list[str]:
    return [f"  warning {text}" for text in dict.fromkeys(describe(w) for w in found.warnings)]


def describe(warning: PredictionWarning) -> str:
    """A rehearsal's warning as a sentence."""
    from tracer.rehearsal.record import ASSUMED, HOST_READ

    f = warning.figures
    if warning.code == HOST_READ:
        told = "true" if f["told"] else "zero"
        place = warning.subject or "code without a line in Python"
        return f"{place} reads {f['bytes']} bytes from the GPU, {f['times']} times, and is told {told}."
    if warning.code == ASSUMED:
        return f"{warning.subject}'s buffers count as empty: only a GPU knows how large they are."
    return f"{warning.subject} was asked for, which the null driver has not; torch went on without."


def _within(plan: Plan, rehearsed: Rehearsal) -> bool | None:
    if plan.budget_bytes is None:
        return None
    return (rehearsed.figures.peak_bytes(plan.budget_of) or 0) <= plan.budget_bytes


def _beside(plan: Plan, found: dict[str, Rehearsal]) -> str:
    from executor.measuring import predicted_figures

    rehearsed = found["plan"]
    runs = (
        ("eager, rehearsed", found["eager"].figures),
        ("save-all, predicted", predicted_figures(plan, "baseline")),
        ("plan, predicted", predicted_figures(plan, "plan")),
        ("plan, rehearsed", rehearsed.figures),
    )
    lines = [f"{rehearsed.model} by {plan.planner} on {rehearsed.gpu}: {rehearsed.provenance}"]
    lines += [f"  {line}" for line in figures_table(runs, kind="count").without("step time").lines()]
    kept = _within(plan, rehearsed)
    if kept is not None:
        of = " of reserved memory" if plan.budget_of == "reserved" else ""
        lines.append(f"  budget {plan.budget_bytes:,}{of}: {'kept' if kept else 'EXCEEDED'}")
    return "\n".join([*lines, *_warnings(rehearsed)])
