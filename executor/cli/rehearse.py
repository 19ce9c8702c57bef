"""The command `execute rehearse`: run a training loop on a GPU that is not there, and print what memory it took."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from simulator.cli.options import numbers
from simulator.core.limits import parse_budget
from simulator.show.tables import table
from traces.commands import Grouped, Output, OutputFile, Refused, answer_options, shard_option, step_options
from traces.devices import NETWORK_GBIT_PER_S, Links, device
from traces.errors import SpecError
from traces.progress import counted
from traces.units import show_bytes, show_time

if TYPE_CHECKING:
    from executor.rehearsed.budget import Found
    from tracer.rehearsal.jobs import Job
    from tracer.rehearsal.record import Rehearsal


MOST_LINES = 8
FIGURES = ("requested", "allocated", "reserved", "in all")
STEADY = 3  # iterations after which the step repeats itself
# In the process on the null driver.
APPLY = "executor.training.module:apply_plan"
SHARD = "executor.rehearsed.shard:sharded"


@click.command(cls=Grouped)
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
    "--snapshot", type=OutputFile(), help="Write torch's memory snapshot to this file, for `simulate why`."
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Record a rank's step, its gathers and reductions too, into this new directory, for `simulate`.",
)
@click.option("-f", "--force", is_flag=True, help="Replace a trace that is there.")
@click.option("--ranks", callback=numbers, help="Ranks of a distributed job; several numbers give a table.")
@click.option(
    "--rank",
    callback=partial(numbers, least=0),
    help="Which of them to rehearse, such as 0,7. Default: 0.",
)
@click.option("--nodes", type=click.IntRange(min=1), help="Machines of the job. Default: of 8 GPUs each.")
@shard_option
@click.option(
    "--budget",
    help="Plan the model's blocks within this much of the GPU, as by nvidia-smi: a size, or a share of "
    "what it takes untouched (80%).",
)
@click.option(
    "--network",
    type=click.FloatRange(min=0, min_open=True),
    default=NETWORK_GBIT_PER_S,
    show_default=True,
    help="Gbit/s that each GPU has to other machines; a plan's communication is reckoned by it.",
)
@click.option("-o", "--output", type=OutputFile(), help="Write that plan to this file, for `apply_plan`.")
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
    trace: Path | None,
    force: bool,
    ranks: list[int],
    rank: list[int],
    nodes: int | None,
    shard: str | None,
    budget: str | None,
    network: float,
    output: Path | None,
    seed: int,
    out: Output,
    **options: Any,
) -> None:
    """Run torch's own CUDA code without a GPU, and print what memory the training step takes.

    MODEL is a name that `trace` knows, FILE.py:FUNCTION as `trace` takes it, or a script with a training loop of its
    own, whose ARGUMENTS follow after `--`; or `trace`, `execute` or `python`, which finds the GPU then. Needs a CUDA
    build of torch, and no GPU. Nothing is computed: values are zeros, and there are no times.

    A distributed script runs as one of its ranks: with --ranks, or as the line that starts it says, which begins with
    `torchrun`, `accelerate launch` or `python -m torch.distributed.run`. The other ranks are not there; each is taken
    to hold what this one holds. A model for one GPU is sharded with --shard.

    \b
    execute rehearse bert-base --batch-size 16 --seq-len 512 --gpu h100
    execute rehearse train.py --gpu a100-80 -- --epochs 1
    execute rehearse train.py --gpu h100 --ranks 8 --rank 0,7
    execute rehearse gpt2 --gpu h100 --ranks 8 --shard fsdp2
    execute rehearse train.py --gpu h100 --ranks 1,2,4,8        what shrinks with ranks, and what does not
    execute rehearse --gpu h100 -- torchrun --nproc-per-node 8 train.py --epochs 1

    Exit code: 0 done, 1 the GPU's memory does not suffice, 2 the input is wrong.
    """
    from tracer.rehearsal.jobs import jobs_of, launch_of
    from tracer.rehearsal.run import COMMANDS, command_on_null_driver
    from tracer.rehearsal.run import rehearse as run

    launch = launch_of([model, *arguments], distributed=bool(ranks))
    if model in COMMANDS and launch is None:
        _refuse_for_commands(model)
        sys.exit(command_on_null_driver([model, *arguments], gpu, alloc_conf))
    if launch is not None:
        model, arguments = launch.program, launch.arguments
    jobs = jobs_of(launch, ranks, rank, nodes)
    one = partial(
        run,
        model,
        options={k: v for k, v in options.items() if v is not None},
        arguments=arguments,
        module=launch is not None and launch.module,
        apply=(APPLY, str(plan)) if plan else (),
        script=True if jobs[0][0] and Path(model).is_file() and not shard else None,
        shard=(SHARD, shard) if shard else (),
        seed=seed,
        iterations=iterations,
        alloc_conf=alloc_conf,
    )
    if budget or trace:
        if len(jobs) > 1 or plan or snapshot or (budget and trace) or iterations < STEADY:
            raise SpecError(
                "--budget plans for one rank, and --trace records one: give one of the two, without --plan and "
                f"--snapshot, and {STEADY} iterations or more."
            )
        links = Links(gpu=device(gpu), network_gbit_per_s=network)
        if trace:
            _record(trace, force, links, one, *jobs[0], out)
        else:
            _within_budget(str(budget), links, output, one, *jobs[0], out)
        return
    if output:
        raise SpecError("-o writes a plan, which --budget makes.")
    found, said = [], click.get_current_context().with_resource(TemporaryDirectory())
    told = f"rehearsing {model} on {gpu}"
    for job, number in counted(
        jobs, lambda of: f"{told}, rank {of[1]} of {of[0].ranks}" if of[0] else told, out.say
    ):
        file = snapshot
        if snapshot and job and len(jobs) > 1:
            file = snapshot.with_stem(f"{snapshot.stem}-{number}-of-{job.ranks}")
        found.append(last := one(gpu, snapshot=file, job=job, rank=number, said=said))
        if len(jobs) > 1:
            out.say(f"{show_bytes(last.gpu_bytes)} in all, {'fits' if last.fits else 'does not fit'}")
    if len(found) == 1:
        out.show(found[0].to_json, lambda: in_words(found[0]))
    else:
        out.show(lambda: {"rehearsals": [f.to_json() for f in found]}, lambda: ranks_in_words(found))
    for each in found:
        if not each.fits:
            raise Refused(
                f"{each.model} does not fit into {each.gpu}: it reserves "
                f"{show_bytes(each.figures.peak_reserved_bytes)} beside {_outside(each)}; torch said there: "
                f"{each.out_of_memory}",
                1,
            )


def _record(
    place: Path, force: bool, links: Links, run: Any, job: Job | None, number: int, out: Output
) -> None:
    """`execute rehearse --trace`: write the step of a rank as a trace."""
    from executor.rehearsed.budget import recorded
    from tracer.rehearsal.run import LARGE_BYTES
    from traces.records import store

    store.check_place(place, force=force)
    large = replace(links.gpu, memory_bytes=LARGE_BYTES)  # what is recorded need not fit
    saved, step = recorded(partial(run, large, job=job, rank=number), links)
    saved = replace(saved, memory_bytes=links.gpu.memory_bytes)
    store.save(step.trace, place, force=force)
    what = f"  wrote {place}, with everything saved and gathered once. Next: simulate {place} --budget 60%"
    out.show(saved.to_json, lambda: f"{in_words(saved)}\n{what}")


def _within_budget(
    budget: str, links: Links, output: Path | None, run: Any, job: Job | None, number: int, out: Output
) -> None:
    """`execute rehearse --budget`: find a plan and write it."""
    from executor.rehearsed.budget import plan_within
    from tracer.rehearsal.run import LARGE_BYTES

    large = replace(links.gpu, memory_bytes=LARGE_BYTES)
    parse_budget(budget)
    one = partial(run, large, rank=number)
    twice = replace(job, ranks=2 * job.ranks, nodes=2 * job.nodes) if job and job.ranks > 1 else None
    more = partial(one, job=twice) if twice else None
    found = plan_within(budget, partial(one, job=job), more, links, out.say)
    if output and found.plans:
        found.plans.save(output)
    out.show(found.to_json, lambda: _budget_in_words(found, output))


def _budget_in_words(found: Found, output: Path | None) -> str:
    limit = show_bytes(found.budget_bytes)
    *_, last = found.rehearsals.values()
    lines = [_title(found.rehearsals["untouched"])]
    lines += _rows([(name, *_figures(run)) for name, run in found.rehearsals.items()], *FIGURES)
    if found.plans is None:
        return "\n".join(
            [*lines, f"  budget {limit} of the GPU, as by nvidia-smi: kept untouched, no plan is needed"]
        )
    told = found.plans.predicted
    lines += [
        f"  budget {limit} of the GPU, as by nvidia-smi: kept by the plan",
        f"  {told['blocks']} blocks by {len(found.plans.plans)} plans: {told['added_percent']:+.2f} % of their time by "
        f"roofline; no plan within the budget adds less than {told['bound_percent']:.2f} %",
        f"  at the plan's peak: {_held(last)}",
    ]
    if (links := told["communication"])["sharded_blocks"]:
        lines.append(
            f"  communication assumed: {links['assumed']}; {links['gathered_again']} of {links['sharded_blocks']} "
            f"sharded blocks reshard after forward, for {show_time(links['exposed_ns'])} that nothing hides"
        )
    for other in found.others:
        added = f", +{other['added_percent']:.2f} %" if "added_percent" in other else ""
        estimated = "" if other["rehearsed"] else " (estimated)"
        lines.append(f"    {other['what']}: {show_bytes(other['gpu_bytes'])}{added}{estimated}")
    if output:
        lines.append(f"  wrote {output}: apply_plan(model, {str(output)!r}) trains by it")
    if told["alloc_conf"]:
        lines.append(f"  set PYTORCH_ALLOC_CONF={told['alloc_conf']} before torch is imported")
    return "\n".join([*lines, *_warnings(last)])


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


def in_words(found: Rehearsal) -> str:
    """A rehearsal for people."""
    phases = [
        (f"iteration {n}, {name}", p.requested_bytes, p.allocated_bytes, p.reserved_bytes)
        for n, i in enumerate(found.iterations, 1)
        for name, p in i.phases.items()
    ]
    steady = found.steady
    fits = "fits" if found.fits else "DOES NOT FIT"
    lines = [
        _title(found),
        *_rows(phases, "requested", "allocated", "reserved"),
        f"  peak {steady.allocated_bytes:,} bytes allocated, {found.figures.peak_reserved_bytes:,} reserved",
        f"  outside torch, assumed: {_outside(found)}",
        f"  {fits}: {show_bytes(found.gpu_bytes)} of {show_bytes(found.memory_bytes)} ({found.gpu}), as by nvidia-smi",
    ]
    if found.alive:
        lines += [f"  at the peak: {_held(found)}", "  by the line that asked for it:"]
    for row in found.alive[:MOST_LINES]:
        line = row.line or "(torch itself)"
        lines.append(f"    {show_bytes(row.requested_bytes):>12}  {row.blocks:5} x  {row.phase:10} {line}")
    return "\n".join([*lines, *_warnings(found)])


def ranks_in_words(found: Sequence[Rehearsal]) -> str:
    """Several ranks, or jobs of several sizes, one a line."""
    named = [(f"rank {f.rank} of {f.ranks}", f) for f in found]
    rows = [(name, *_figures(f), f.outside_bytes, "yes" if f.fits else "NO") for name, f in named]
    held = [(name, *(f.at_the_peak.get(what, 0) for what in found[0].at_the_peak)) for name, f in named]
    lines = [
        _title(found[0], ranks=False),
        *_rows(rows, *FIGURES, "outside torch", "fits"),
        "  at the peak",
        *_rows(held, *found[0].at_the_peak),
    ]
    return "\n".join([*lines, *dict.fromkeys(w for f in found for w in _warnings(f))])


def _figures(found: Rehearsal) -> tuple[int | None, ...]:
    """By name in FIGURES, bytes."""
    steady = found.steady
    return steady.requested_bytes, steady.allocated_bytes, found.figures.peak_reserved_bytes, found.gpu_bytes


def _held(found: Rehearsal) -> str:
    return ", ".join(f"{show_bytes(n)} {what}" for what, n in found.at_the_peak.items() if n)


def _outside(found: Rehearsal) -> str:
    """What of the GPU's memory lies outside of torch: "512.00 MiB for the CUDA context, 688.00 MiB for NCCL (8)"."""
    text = f"{show_bytes(found.context_bytes)} for the CUDA context"
    if found.communicators:
        of = ", ".join(str(c.ranks) for c in found.communicators)
        text += f", {show_bytes(found.communicators_bytes)} for NCCL's communicators (of {of} ranks)"
    return text


def _title(found: Rehearsal, ranks: bool = True) -> str:
    env = found.environment
    conf = f", {env['alloc_conf']}" if env.get("alloc_conf") else ""
    rank = f", rank {found.rank} of {found.ranks}" if ranks and found.ranks else ""
    rank += f", {found.shard}, its batch on each rank" if found.shard else ""
    return f"{found.model} on {found.gpu}{rank}, torch {env.get('torch', '?')}{conf}: {found.provenance}"


def _rows(rows: Sequence[tuple[Any, ...]], *names: str) -> list[str]:
    """Rows of a name and bytes, or words."""
    columns: list[tuple[str, str, Callable[[Any], Any]]] = [("", "", itemgetter(0))]
    columns += [(name, "" if name == "fits" else "bytes", itemgetter(k)) for k, name in enumerate(names, 1)]
    return [f"  {line}" for line in table(rows, columns).lines()]


def _warnings(found: Rehearsal) -> list[str]:
    from tracer.rehearsal.record import describe

    return [f"  warning {text}" for text in dict.fromkeys(describe(w) for w in found.warnings)]
