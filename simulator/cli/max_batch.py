"""Turn the words after `simulate max-batch` into the largest batches that fit a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simulator.cli.device import alloc_conf_option
from simulator.cli.options import planning_options
from traces.commands import Refused, report_option, say
from traces.errors import SpecError
from traces.model_spec import short_name

if TYPE_CHECKING:
    from simulator.core.limits import Limits
    from simulator.studies.max_batch import MaxBatch

OWN_WORDS = ("--batch-size", "--target", "-o", "--output", "-f", "--force", "--json")  # not for `trace`
DEFAULT_RESERVE = "2%"  # of a GPU: the median error that the prediction is meant to have


@click.command("max-batch", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.argument("trace_words", metavar="[OPTIONS OF trace]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--gpu", metavar="NAME", help="A device of `trace targets`, such as a100-40; `cpu` is one.")
@click.option("--device-memory", "--memory", metavar="SIZE", help="So much memory; without --gpu, of a CPU.")
@click.option("--context", metavar="SIZE", help="What CUDA's context takes of a GPU (assumed: 512MiB).")
@click.option(
    "--reserve", metavar="SIZE", help="What shall stay free, a size or a share (GPU: 2%, CPU: none)."
)
@click.option(
    "--budget-overhead", default="30%", show_default=True, help="What a plan may add to the time of a step."
)
@click.option(
    "--multiple-of", type=click.IntRange(min=1), default=1, show_default=True, help="Of batch sizes."
)
@click.option("--max", "maximum", type=click.IntRange(min=1), default=65536, show_default=True,
              help="The largest batch size to try.")  # fmt: skip
@alloc_conf_option
@click.option("--planner", help="Which planner (see `simulate planners`).")
@planning_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory (default: MODEL-max-batch).")
@report_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def max_batch_command(
    model: str,
    trace_words: tuple[str, ...],
    gpu: str | None,
    device_memory: str | None,
    context: str | None,
    reserve: str | None,
    budget_overhead: str,
    multiple_of: int,
    maximum: int,
    alloc_conf: str | None,
    planner: str | None,
    limits: Limits,
    output: Path | None,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """The largest batch of MODEL that fits a device, without a plan and with one.

    \b
    simulate max-batch bert-base --gpu a100-40 --seq-len 512
    simulate max-batch resnet50 --gpu a100-40 --budget-overhead 10% --alloc-conf expandable_segments:True
    simulate max-batch resnet18 --memory 2GiB --image-size 96 --device cpu     on the CPU, its ops measured

    Any other option goes to `trace`. Traces and plans are kept in one directory and used again. On a GPU reserved
    memory must fit, on the CPU allocated memory. Exit code 1: not even the smallest batch fits.
    """
    from simulator.allocator.device import CPU
    from simulator.allocator.device import device_memory as memory_of
    from simulator.allocator.settings import parse_alloc_conf
    from simulator.planners import DEFAULT, find
    from simulator.studies.max_batch import Request, max_batch, traces_in
    from traces.devices import device
    from traces.files import write_text
    from traces.trace import canonical_json

    if model.startswith("-"):
        raise SpecError(f"{model}: the first word after max-batch is the model's name.")
    taken = [word for word in trace_words if word.partition("=")[0] in OWN_WORDS]
    if taken:
        raise SpecError(f"{taken[0]}: max-batch decides this itself (the device is --gpu).")
    if gpu is None and device_memory is None:
        raise SpecError("name the device with --gpu, or its memory with --memory.")
    if alloc_conf is not None:
        parse_alloc_conf(alloc_conf)
    planner = planner or DEFAULT
    find(planner)
    kind = device(gpu).kind if gpu is not None else CPU
    memory = memory_of(
        kind,
        gpu=gpu,
        memory=device_memory,
        context=context,
        reserve=reserve if reserve is not None or kind == CPU else DEFAULT_RESERVE,
    )
    assert memory is not None
    if alloc_conf is not None and kind == CPU:
        raise SpecError("--alloc-conf: a CPU has no caching allocator; name a GPU with --gpu.")
    measured = any(word.partition("=")[0] == "--device" for word in trace_words)
    target = ("--target", memory.name) if gpu is not None and kind != CPU and not measured else ()
    request = Request(
        model=model,
        device=memory,
        directory=output or Path(f"{short_name(model)}-max-batch"),
        overhead_percent=_percent(budget_overhead),
        planner=planner,
        limits=limits,
        alloc_conf=alloc_conf,
        multiple_of=multiple_of,
        maximum=maximum,
        tracer_options=(*trace_words, *target),
    )

    def progress(line: str) -> None:
        say(line, quiet=quiet)

    found = max_batch(request, traces_in(request, progress), progress)
    write_text(request.directory / "max-batch.json", canonical_json(found.to_json()) + "\n")
    if report is not None:
        from simulator.report.max_batch import write_max_batch

        progress(f"writing {report}")
        write_max_batch(report, found)
    click.echo(json.dumps(found.to_json()) if as_json else table(found))
    if not found.with_plan:
        raise Refused(
            f"{model} does not fit {memory.name} at batch {multiple_of}, with or without a plan.", 1
        )


def table(found: MaxBatch) -> str:
    """The answer to read: the probes, then the two batch sizes."""
    from traces.units import show_bytes, show_percent

    r = found.request
    gpu = r.device.kind != "cpu"
    what = "reserved" if gpu else "allocated"
    rows: list[tuple[str, ...]] = [("batch", what, "fits", f"{what} with plan", "overhead")]
    for p in found.probes:
        kept, plan = (
            None if f is None else f.peak_reserved_bytes if gpu else f.peak_allocated_bytes
            for f in (p.untouched, p.plan)
        )
        least = ">= " if p.plan is None and p.overhead_percent is not None else ""
        price = "" if p.plan_fits is None else least + show_percent(p.overhead_percent)
        rows.append(
            (
                str(p.batch_size),
                show_bytes(kept),
                f"yes, {p.retries_a_step} retries" if p.retries_a_step else "yes" if p.fits else "no",
                "" if p.plan_fits is None else show_bytes(plan),
                price,
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(5)]
    lines = [f"{r.model} on {r.device.room()}"]
    lines += ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    limit = show_bytes(r.device.usable_bytes)
    best = found.probe(found.without_plan)
    if best is None:
        lines.append(f"without a plan: not even batch {r.multiple_of} fits")
    else:
        peak = best.untouched.peak_reserved_bytes if gpu else best.untouched.peak_allocated_bytes
        lines.append(f"without a plan: batch {best.batch_size} ({what} {show_bytes(peak)} of {limit})")
    planned = found.probe(found.with_plan)
    price = f"of at most +{r.overhead_percent:g} %"
    if planned is not None and planned.plan is not None:
        peak = planned.plan.peak_reserved_bytes if gpu else planned.plan.peak_allocated_bytes
        lines.append(
            f"with a plan {price}: batch {planned.batch_size} at {show_percent(planned.overhead_percent, signed=True)} "
            f"({what} {show_bytes(peak)} of {limit}): {r.directory / planned.plan_path}"
        )
    elif best is not None:
        lines.append(f"with a plan {price}: batch {found.with_plan}; no plan makes room for more")
    if found.stopped_at_maximum:
        lines.append(f"The search stopped at {found.with_plan}; --max tries more.")
    lines += [f"{found.provenance}", *(f"warning {text}" for text in found.warnings)]
    return "\n".join(lines)


def _percent(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise SpecError(f"--budget-overhead {text!r}: give a share of the step's time, such as 10%.")
    return value
