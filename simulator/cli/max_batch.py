"""`simulate max-batch`: the largest batches that fit a device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.cli.options import (
    ALLOC_CONF,
    TRACE_WORDS,
    Words,
    answer_options,
    check_alloc_conf,
    lever_options,
    planning_options,
    words_for_trace,
)
from traces.commands import Output, Refused
from traces.errors import SpecError
from traces.units import show_bytes, show_percent

if TYPE_CHECKING:
    from simulator.allocator.device import DeviceMemory
    from simulator.studies.max_batch import MaxBatch

DEFAULT_RESERVE = "2%"  # of a GPU: the median error that the prediction is meant to have


@click.command("max-batch", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@TRACE_WORDS
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
@ALLOC_CONF
@planning_options
@lever_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory (default: MODEL-max-batch).")
@answer_options
def max_batch_command(
    model: str,
    trace_words: tuple[str, ...],
    gpu: str | None,
    device_memory: str | None,
    context: str | None,
    reserve: str | None,
    budget_overhead: str,
    alloc_conf: str | None,
    planning: Words,
    changes: Words,
    output: Path | None,
    out: Output,
    **others: Any,
) -> None:
    """The largest batch of MODEL that fits a device, without a plan and with one.

    \b
    simulate max-batch bert-base --gpu a100-40 --seq-len 512
    simulate max-batch resnet50 --gpu a100-40 --budget-overhead 10% --alloc-conf expandable_segments:True
    simulate max-batch resnet18 --memory 2GiB --image-size 96 --device cpu     on the CPU, its ops measured

    Any other option goes to `trace`. Traces and plans stay in one directory and are used again. On a GPU reserved
    memory must fit, on the CPU allocated memory. Exit code 1: not even the smallest batch fits.
    """
    from simulator import api
    from simulator.allocator.device import CPU
    from traces.files.json_records import canonical_json
    from traces.files.whole import write_text

    words_for_trace(model, trace_words, "--target")  # which --gpu decides
    check_alloc_conf(alloc_conf)
    memory = _memory(gpu, device_memory, context, reserve)
    if alloc_conf is not None and memory.kind == CPU:
        raise SpecError("--alloc-conf: a CPU has no caching allocator; name a GPU with --gpu.")
    found = api.max_batch(
        model,
        memory,
        budget_overhead_percent=_percent(budget_overhead),
        directory=output,
        alloc_conf=alloc_conf,
        trace_options=trace_words,
        progress=out.say,
        **changes,
        **planning,
        **others,
    )
    write_text(found.request.directory / "max-batch.json", canonical_json(found.to_json()) + "\n")
    out.show(found.to_json, lambda: table(found))
    if not found.with_plan:
        raise Refused(
            f"{model} does not fit {memory.name} at batch {found.request.multiple_of}, with or without a plan.",
            1,
        )


def _memory(gpu: str | None, size: str | None, context: str | None, reserve: str | None) -> DeviceMemory:
    """The device that the words name."""
    from simulator.allocator.device import CPU, device_memory
    from traces.devices import device

    if gpu is None and size is None:
        raise SpecError("name the device with --gpu, or its memory with --memory.")
    if reserve is None and gpu is not None and device(gpu).kind != CPU:
        reserve = DEFAULT_RESERVE
    memory = device_memory(gpu=gpu, memory=size, context=context, reserve=reserve)
    assert memory is not None
    return memory


def table(found: MaxBatch) -> str:
    """The answer to read: the probes, then the two batch sizes."""
    r, what = found.request, found.memory
    lines = [f"{r.model} on {r.device.room()}", *found.table().without("plan fits", "").lines()]
    limit = show_bytes(r.device.usable_bytes)
    best, planned = found.probe(found.without_plan), found.probe(found.with_plan)
    if best is None:
        lines.append(f"without a plan: not even batch {r.multiple_of} fits")
    else:
        peak = show_bytes(found.peak_bytes(best.untouched))
        lines.append(f"without a plan: batch {best.batch_size} ({what} {peak} of {limit})")
    price = f"of at most +{r.overhead_percent:g} %"
    if planned is not None and planned.plan is not None:
        peak = show_bytes(found.peak_bytes(planned.plan))
        added = show_percent(planned.overhead_percent, signed=True)
        lines.append(
            f"with a plan {price}: batch {planned.batch_size} at {added} ({what} {peak} of {limit}): "
            f"{r.directory / planned.plan_path}"
        )
    elif best is not None:
        lines.append(f"with a plan {price}: batch {found.with_plan}; no plan makes room for more")
    if found.stopped_at_maximum:
        lines.append(f"The search stopped at {found.with_plan}; --max tries more.")
    return "\n".join([*lines, found.provenance, *(f"warning {text}" for text in found.warnings)])


def _percent(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise SpecError(f"--budget-overhead {text!r}: give a share of the step's time, such as 10%.")
    return value
