"""The command `trace`: record a training step, and show what is in a recorded one."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from inspect import unwrap
from pathlib import Path
from typing import Any

import click

from traces.commands import (
    DefaultGroup,
    Grouped,
    Output,
    answer_options,
    echo,
    json_option,
    shard_option,
    stdout_free,
    step_options,
)
from traces.errors import LowtideError, SpecError
from traces.model_spec import short_name
from traces.processes import ending_with_this
from traces.progress import counted
from traces.shapes import Shapes, in_words, label
from traces.units import show_bytes, show_time


@click.group(cls=DefaultGroup, default="run", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lowtide")
def trace() -> None:
    """Record one training step of a model as data: every op and storage, with sizes and times.

    \b
    trace resnet152 --batch-size 32 -o resnet152-b32       without a GPU
    trace bert-base --batch-size 16 --seq-len 512 --target h200
    trace my_training.py:build --device cuda               measured on this machine's GPU
    trace show resnet152-b32
    trace times resnet152-b32 profile.json -o measured     op times of torch.profiler
    trace models

    What is no subcommand goes to `trace run`; see `trace run --help` for the options.
    """


@trace.command("run", cls=Grouped)
@click.argument("model")
@click.option("-o", "--output", type=click.Path(path_type=Path),
              help="Directory of the trace (default: the model's name).")  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Replace a trace that is there.")
@click.option("--target", help="Record the step of this device of `trace targets` (default: cpu).")
@click.option("--device", help="Measure the step on this machine's cpu or cuda. Without it nothing runs.")
@click.option("--ranks", type=click.IntRange(min=2), help="Record one of so many ranks of a job on --target.")
@shard_option
@step_options
@click.option("--shapes", help="Record a trace of each shape of a range, such as seq-len=16:512.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the weights and the batch.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True,
              help="Timed rounds of --device.")  # fmt: skip
@click.option("--warmup", type=click.IntRange(min=1), default=2, show_default=True,
              help="Rounds before the timed ones.")  # fmt: skip
@answer_options
def run_model(
    model: str, shapes: str | None, output: Path | None, force: bool, out: Output, **options: Any
) -> None:
    """Record one training step of MODEL: a name from `trace models`, timm:NAME, hf:CONFIG.json, or
    path/to/file.py:build."""
    # torch's C++ parts and its profiler write to stderr by themselves; what matters reaches the user as an error.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from tracer import api
    from traces.records import store

    begin = time.perf_counter()
    where = output or Path(default_name(model, options))
    if options["ranks"] or options["shard"]:
        sys.exit(record_rank(model, {**options, "shapes": shapes, "trace": where, "force": force}, out))
    del options["ranks"], options["shard"]
    if shapes is not None:
        record_shapes(model, shapes, output, force, options, out)
        return
    store.check_place(where, force=force)

    with stdout_free(out.as_json):
        record = unwrap(api.trace)(model, say=out.say, **options)
    store.save(record, where, force=force)
    seconds = time.perf_counter() - begin
    out.show(
        lambda: {"trace": str(where), "seconds": seconds, **record.summary()}, lambda: record.text(str(where))
    )
    if not out.as_json:
        out.say(
            f"Recorded in {seconds:.1f} s. Next: simulate {shlex.quote(str(where))} --budget 60% -o plan.json"
        )


def record_rank(model: str, options: dict[str, Any], out: Output) -> int:
    """Have `execute rehearse` record one rank of a job; returns its exit code."""
    device, shapes, gpu, *_ = map(options.pop, ("device", "shapes", "target", "rounds", "warmup"))
    if device or shapes or not gpu or not options["ranks"]:
        raise SpecError("one of --ranks is recorded for a --target such as h100, by no --device or --shapes.")
    given = {**options, "gpu": gpu, "json": out.as_json, "quiet": out.quiet}
    words = [f"--{name.replace('_', '-')}={value}".removesuffix("=True") for name, value in given.items()]
    words = [w for w in words if not w.endswith(("=None", "=False"))]
    command = [sys.executable, "-m", "executor", "rehearse", model, *words]
    return subprocess.run(command, check=False, **ending_with_this()).returncode


def answer(words: list[str]) -> dict[str, Any]:
    """What the command does with these words, in a process that others start (`traces.isolated`). Raises LowtideError:
    it failed."""
    try:
        trace.main(words, "trace", standalone_mode=False)
    except click.ClickException as error:
        raise LowtideError(error.format_message()) from None
    return {}


def default_name(model: str, options: dict[str, Any]) -> str:
    """A directory name for a trace: the model, and b for batch, s for sequence."""
    given = {k: v for k, v in options.items() if v is not None}
    return "-".join(filter(None, [short_name(model), label(given)]))


def record_shapes(
    model: str, text: str, output: Path | None, force: bool, options: dict[str, Any], out: Output
) -> None:
    """A trace of each shape that is looked at, in one directory."""
    from tracer import api
    from traces.records import store

    begin = time.perf_counter()
    if options.pop("device") is not None:
        raise SpecError("--shapes records on fake tensors; leave --device out.")
    asked = Shapes.parse(text)
    sizes = asked.looked_at()
    where = output or Path(f"{default_name(model, options)}-shapes")
    places = [where / label(s) for s in sizes]
    for place in places:
        store.check_place(place, force=force)
    for name in sizes[0]:
        if options[name] is not None:
            raise SpecError(f"--{name.replace('_', '-')}: the shapes say this already; leave it out.")
    for shape, place in counted(list(zip(sizes, places, strict=True)), lambda of: in_words(of[0]), out.say):
        with stdout_free(out.as_json):
            record = unwrap(api.trace)(model, **{**options, **shape})
        store.save(record, place, force=force)
    told = {"traces": [str(p) for p in places], "shapes": asked.count, "seconds": time.perf_counter() - begin}
    out.show(lambda: told, lambda: f"{where}: traces of {len(sizes)} of {asked.count:,} shapes")


@trace.command()
@click.argument("directory")
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, help="Rows of each table.")
@json_option
def show(directory: str, top: int, out: Output) -> None:
    """Print what is in the trace in DIRECTORY (a path, or a name from the gallery)."""
    from traces.records import store

    record = store.load(directory)
    store.check_fingerprints(record, directory, graph=True)
    out.show(lambda: {"trace": directory, **record.summary()}, lambda: summary(directory, record, top))


@trace.command()
@click.argument("directory")
@click.argument("profile", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory of the new trace."
)
@click.option("-f", "--force", is_flag=True, help="Replace a trace that is there.")
@json_option
def times(directory: str, profile: Path, output: Path, force: bool, out: Output) -> None:
    """Give the trace in DIRECTORY the op times of PROFILE, which torch.profiler exported (Kineto, Chrome's JSON)."""
    from tracer.costs.profiled import with_times
    from traces.records import store

    store.check_place(output, force=force)
    timed, told = with_times(store.load(directory), profile)
    store.save(timed, output, force=force)
    words = "{measured_ops} of {ops} ops have the median of {steps} measured steps".format(**told)
    words += f"; still estimated: {', '.join(told['estimated'])}" * bool(told["estimated"])
    told |= {"trace": str(output), "time_ns": timed.time_ns}
    out.show(lambda: told, lambda: f"{output}: {words}")


@trace.command()
@json_option
def models(out: Output) -> None:
    """List the models that are known by name."""
    from tracer.step.named.models import list_models

    names = [m.name for m in list_models()]
    out.show(lambda: {"models": names}, lambda: "\n".join(names))


@trace.command()
def targets() -> None:
    """List the devices that --target knows."""
    from traces.devices import devices

    for d in devices():
        echo(
            f"{d.name:12} {show_bytes(d.memory_bytes):>11} {d.bandwidth_bytes_per_s / 1e9:8.0f} GB/s  {d.source}"
        )


def summary(name: str, record: Any, top: int) -> str:
    """A trace for people, with so many rows of the largest tables."""
    from traces.records.trace import FLAG_NAMES

    ops, sts = record.ops, record.storages
    lines = [record.text(name)]
    if not top:
        return lines[0]
    lines.append(
        "\n  largest storages that backward reads: size, op, module, last forward and first backward use"
    )
    for s in sorted(record.saved, key=lambda s: -sts.nbytes[s])[:top]:
        p = sts.producer[s]
        uses = f"{sts.last_forward_use[s]:6} {sts.first_backward_use[s]:6}"
        lines.append(f"  {show_bytes(sts.nbytes[s]):>11}  {ops.name[p]:32} {ops.module[p]:36} {uses}")
    lines.append("\n  slowest ops: time, op, module, flags")
    for i in sorted(range(len(ops)), key=lambda i: -ops.time_ns[i])[:top]:
        marks = ", ".join(n for b, n in FLAG_NAMES.items() if ops.flags[i] & b)
        lines.append(f"  {show_time(ops.time_ns[i]):>11}  {ops.name[i]:32} {ops.module[i]:36} {marks}")
    return "\n".join(lines)
