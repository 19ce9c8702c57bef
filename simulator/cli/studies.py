"""The studies: `simulate compare` and `pareto` of one trace, `sweep`, `max-batch` and `capacity` of one model
at several batch sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from simulator.cli.options import (
    ALLOC_CONF,
    BUDGET,
    BUDGET_OF,
    DASK,
    DEVICE,
    LEVERS,
    PLANNER,
    SEARCH,
    TRACE_WORDS,
    Words,
    asking,
    listed,
    numbers,
    show,
    words_for_trace,
)
from traces.commands import Output, Refused, answer_options, output_options
from traces.errors import BudgetError, SpecError


def _percent(_: click.Context, option: click.Parameter, text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise SpecError(f"{option.opts[0]} {text!r}: give a share of the step's time, such as 10%.")
    return value


BUDGET_OVERHEAD = click.option("--budget-overhead", "budget_overhead_percent", default="30%", callback=_percent,
                               show_default=True, help="Time that a plan may add to a step.")  # fmt: skip


@click.command("compare")
@click.argument("trace_name", metavar="TRACE")
@asking(BUDGET, *SEARCH, *DEVICE)
@click.option("--planners", callback=listed, help="Planners to compare, separated by commas (default: all).")
@output_options
def compare_command(trace_name: str, words: Words, planners: tuple[str, ...] | None, out: Output) -> None:
    """Compare the planners on one trace and budget.

    Prints the peak, the added time, the gap to the certified bound and the solve time of each planner, or why it has no
    plan. --seconds is for each planner. Exit code: 0 done, 1 no planner has a plan, 2 the input is wrong.
    """
    from simulator.studies.comparison import compare

    found = compare(trace_name, planners=planners, name=trace_name, progress=out.say, **words)
    show(out, found)
    if not found.data["feasible"]:
        why = found.rows[0].message
        raise BudgetError(f"no planner has a plan within {found.data['budget_bytes']} bytes: {why}")


@click.command("pareto")
@click.argument("trace_name", metavar="TRACE")
@click.option("--points", type=click.IntRange(min=2), default=20, show_default=True, help="How many budgets.")
@asking(PLANNER, *SEARCH, *DEVICE)
@output_options
def pareto_command(trace_name: str, points: int, words: Words, out: Output) -> None:
    """Show what each GiB costs, over the whole range of budgets.

    Budgets lie evenly between the floor, below which no plan can go, and the peak with everything saved. A larger
    budget never has a slower plan. --seconds is for the whole front, about.
    """
    from simulator.studies.pareto import pareto

    found = pareto(trace_name, points, name=trace_name, progress=out.say, **words)
    show(out, found)


@click.command("sweep", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@TRACE_WORDS
@click.option("--batch-sizes", callback=numbers, required=True, help="Batch sizes, such as 8,16,32,64.")
@asking(BUDGET, BUDGET_OF, ALLOC_CONF, PLANNER, *SEARCH, *LEVERS)
@click.option("-o", "--output", "directory", type=click.Path(path_type=Path),
              help="Directory of the result (default: MODEL-sweep).")  # fmt: skip
@DASK
@output_options
def sweep_command(
    model: str, trace_words: tuple[str, ...], batch_sizes: list[int], words: Words, out: Output, **place: Any
) -> None:
    """Trace and plan MODEL at several batch sizes.

    Any other option goes to `trace`, such as --seq-len 512 or --target h200. Traces, plans and sweep.json are written
    to one directory; a trace that the same options made before is used again. A batch size for which no plan fits is
    reported as such; the exit code is 1 only if none fits.
    """
    from simulator.prediction.ask import question
    from simulator.studies.sweep import sweep
    from simulator.studies.tracing import Traced

    asked = question(**words)
    traced = Traced.of(model, study="sweep", words=words_for_trace(model, trace_words), **place)
    found = sweep(traced, batch_sizes, asked, out.say)
    if out.report is not None:
        from simulator.report.sweep import write_sweep

        write_sweep(out.report, found, traced.directory)
    out.show(found.to_json, lambda: "\n".join(found.lines(traced.directory)))
    if not any(row.feasible for row in found.rows):
        raise BudgetError(f"no batch size fits: {found.rows[0].message}")


@click.command("max-batch", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@TRACE_WORDS
@BUDGET_OVERHEAD
@click.option("--multiple-of", type=click.IntRange(min=1), default=1, show_default=True,
              help="Try only multiples of this.")  # fmt: skip
@click.option("--max", "maximum", type=click.IntRange(min=1), default=65536, show_default=True,
              help="Largest batch size to try.")  # fmt: skip
@asking(*DEVICE, PLANNER, *SEARCH, *LEVERS)
@click.option("-o", "--output", "directory", type=click.Path(path_type=Path),
              help="Directory of the result (default: MODEL-max-batch).")  # fmt: skip
@DASK
@answer_options
def max_batch_command(
    model: str, trace_words: tuple[str, ...], words: Words, out: Output, **limits: Any
) -> None:
    """Find the largest batch of MODEL that fits a device, without a plan and with one.

    \b
    simulate max-batch bert-base --gpu a100-40 --seq-len 512
    simulate max-batch resnet50 --gpu a100-40 --budget-overhead 10% --alloc-conf expandable_segments:True
    simulate max-batch resnet18 --memory 2GiB --image-size 96 --device cpu     on the CPU, its ops measured

    Any other option goes to `trace`. Traces and plans stay in one directory and are used again. On a GPU reserved
    memory must fit, and 2 % stay free; on the CPU allocated memory. Exit code 1: not even the smallest batch fits.
    """
    from simulator.studies.max_batch import max_batch
    from traces.files import canonical_json, write_text

    words_for_trace(model, trace_words, "--target")  # which --gpu decides
    found = max_batch(model, trace_options=trace_words, progress=out.say, **words, **limits)
    write_text(found.directory / "max-batch.json", canonical_json(found.data) + "\n")
    show(out, found)
    if not found.with_plan:
        smallest = f"{found.data['device_memory']['device']} at batch {limits['multiple_of']}"
        raise Refused(f"{model} does not fit {smallest}, with or without a plan.", 1)


@click.command("capacity", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@TRACE_WORDS
@click.option("--gpus", callback=listed, required=True,
              help="Devices of `trace targets`, such as h100,a100-80,rtx-4090.")  # fmt: skip
@click.option("--batch-sizes", default="8,16,32,64,128,256", callback=numbers, show_default=True,
              help="Batch sizes to answer for.")  # fmt: skip
@click.option("--ranks", default="1", callback=numbers, show_default=True,
              help="Numbers of ranks to shard MODEL over, such as 1,8,64.")  # fmt: skip
@BUDGET_OVERHEAD
@asking(*DEVICE[2:], PLANNER, *SEARCH, *LEVERS)
@click.option("-o", "--output", "directory", type=click.Path(path_type=Path),
              help="Directory of the result (default: MODEL-capacity).")  # fmt: skip
@DASK
@output_options
def capacity_command(
    model: str, trace_words: tuple[str, ...], batch_sizes: list[int], words: Words, out: Output, **more: Any
) -> None:
    """Show which batch sizes of MODEL fit which GPUs, untouched and with a plan, and the largest on each.

    \b
    simulate capacity bert-base --gpus h100,a100-80,rtx-4090 --batch-sizes 16,64,256 --report capacity.html
    simulate capacity llama-1b --gpus h100,a100-80 --ranks 8,64 --amp bfloat16

    Any other option goes to `trace`. All is answered by the line through two traces of each GPU; `simulate max-batch`
    confirms the largest batch. One of several --ranks is rehearsed (`execute rehearse --shard fsdp2`), untouched and
    with its blocks recorded, on both sides of its largest batch; plans of these are not rehearsed.
    Exit code 1: none fits anywhere.
    """
    from simulator.studies.capacity import capacity

    words_for_trace(model, trace_words, "--target")
    words |= {"batch_sizes": sorted(batch_sizes), "trace_options": trace_words, "progress": out.say}
    found = capacity(model, **words, **more)
    show(out, found)
    if not any(of.with_plan for of in found.rows):
        raise Refused(f"{model} fits none of {','.join(more['gpus'])}, with or without a plan.", 1)
