"""The command `trace`: record a training step, and show what is in a recorded one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tracer.cli.torch_budget import torch_budget
from traces.commands import DefaultGroup, print_json, say
from traces.model_spec import short_name
from traces.units import show_bytes, show_time


@click.group(cls=DefaultGroup, default="run", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lowtide")
def trace() -> None:
    """Record one training step of a model as a profiled operator trace.

    \b
    trace resnet152 --batch-size 32 -o resnet152-b32       no GPU, no activation memory
    trace bert-base --batch-size 16 --seq-len 512 --target h200
    trace my_training.py:build --device cuda               measured on this machine's GPU
    trace show resnet152-b32
    trace models

    What is no subcommand goes to `trace run`; see `trace run --help` for the options.
    """


@trace.command("run")
@click.argument("model")
@click.option("--batch-size", type=click.IntRange(min=1), help="Examples in the batch.")
@click.option("--seq-len", type=click.IntRange(min=1), help="Tokens in an example (transformers).")
@click.option("--image-size", type=click.IntRange(min=1), help="Height and width of an image (vision).")
@click.option("--optimizer", help="sgd, adam, adamw or none.")
@click.option("--optimizer-impl", help="foreach, fused or for-loop; without it, what torch chooses.")
@click.option("--dtype", help="Of the weights: float32, bfloat16 or float16.")
@click.option("--amp", help="Autocast of forward and loss to bfloat16 or float16; the weights stay float32.")
@click.option(
    "--tf32/--no-tf32", default=None, help="Whether float32 is computed as TF32 on CUDA; default: torch's."
)
@click.option("--dropout", type=float, help="Instead of the model's own dropout probabilities.")
@click.option("--attention", help="sdpa or eager (transformers).")
@click.option("--target", help="The device whose ops and times are wanted: h200, h100, a100-80, ..., cpu.")
@click.option(
    "--device", help="Measure for real on cpu or cuda. Without it nothing is run and nothing allocated."
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Timed rounds (--device)."
)
@click.option(
    "--warmup", type=click.IntRange(min=1), default=2, show_default=True, help="Rounds before them."
)
@click.option("--profile", type=click.Path(path_type=Path), help="The device profile to use and to fill.")
@click.option("--no-profile", is_flag=True, help="Use no device profile and fill none.")
@click.option(
    "--calibrate", is_flag=True, help="Run every op that the profile lacks alone on the target, and keep it."
)
@click.option(
    "--probe", is_flag=True, help="Measure this processor's rates, for a second, for times on a CPU."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Directory of the trace; default: its name."
)
@click.option("-f", "--force", is_flag=True, help="Replace a trace that stands there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def run_model(
    model: str,
    target: str | None,
    device: str | None,
    rounds: int,
    warmup: int,
    profile: Path | None,
    no_profile: bool,
    calibrate: bool,
    probe: bool,
    seed: int,
    output: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Record one training step of MODEL: a name from `trace models`, or path/to/file.py:build."""
    import os
    import time

    # torch's C++ parts and its profiler write to stderr by themselves; what matters reaches the user as an error.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from tracer.build.step import check_device, load_spec, require_torch
    from traces import store
    from traces.devices import device as device_entry
    from traces.errors import SpecError

    begin = time.perf_counter()
    if target is not None and device is not None:
        raise SpecError("--target predicts times and --device measures them; give one of the two.")
    if calibrate and device is not None:
        raise SpecError(
            "--device measures every op in the step, --calibrate each alone; give one of the two."
        )
    if no_profile and profile is not None:
        raise SpecError("--profile names a device profile and --no-profile wants none; give one of the two.")
    entry = device_entry(target or ("cpu" if device in (None, "cpu") else "h200"))
    require_torch()
    if device is not None:
        check_device(device)
    if options.get("tf32") and entry.kind != "cuda":
        raise SpecError("--tf32 concerns GPUs; give one with --target, or --device cuda.")
    if probe and (device is not None or entry.kind != "cpu"):
        raise SpecError(
            "--probe measures this processor for the times of a trace of --target cpu; leave it out with "
            + (
                "--device, which measures the ops themselves."
                if device is not None
                else f"--target {target}."
            )
        )
    given = {k: v for k, v in options.items() if v is not None}
    build = load_spec(model, given, seed=seed)
    where = output or Path(default_name(model, given))
    store.check_place(where, force=force)
    say(f"Capturing {model} ...", quiet=quiet)
    from tracer.recording import ProfileUse, record_fake, record_real

    use = ProfileUse(path=profile, off=no_profile, calibrate=calibrate)

    def tell(text: str) -> None:
        say(text, quiet=quiet)

    if device is not None:

        def round_done(done: int) -> None:
            if sys.stderr.isatty() and not quiet:
                text = f"measuring: round {done} of {rounds}" if done < rounds else ""
                click.echo(f"\r{text:40}\r", nl=False, err=True)

        record = record_real(
            build, entry, device, use, tell, rounds=rounds, warmup=warmup, progress=round_done
        )
    else:
        if probe:
            from tracer.costs.machine import probed_cpu, rates_text

            entry = probed_cpu()
            tell(rates_text(entry))
        record = record_fake(build, entry, use, tell)
    store.save(record, where, force=force)
    seconds = time.perf_counter() - begin
    if as_json:
        print_json({"trace": str(where), "seconds": seconds, **summary(record)})
        return
    print_summary(str(where), record, top=0)
    say(f"Recorded in {seconds:.1f} s. Next: simulate {where} --budget 60% -o plan.json", quiet=quiet)


def default_name(model: str, options: dict[str, Any]) -> str:
    """A directory name for a trace: the model, and b for batch, s for sequence."""
    marks = {"batch_size": "b", "seq_len": "s", "image_size": "px"}
    return "-".join([short_name(model), *(f"{m}{options[k]}" for k, m in marks.items() if k in options)])


@trace.command()
@click.argument("directory")
@click.option(
    "--top", type=click.IntRange(min=0), default=10, show_default=True, help="Rows of the largest tables."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def show(directory: str, top: int, as_json: bool) -> None:
    """Print what is in the trace in DIRECTORY (a path, or a name from the gallery)."""
    from traces import store

    record = store.load(directory)
    store.check_fingerprints(record, directory, graph=True)
    if as_json:
        print_json({"trace": directory, **summary(record)})
        return
    print_summary(directory, record, top=top)


@trace.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def models(as_json: bool) -> None:
    """List the models that are known by name."""
    from tracer.build.models import list_models

    names = [m.name for m in list_models()]
    if as_json:
        print_json({"models": names})
    else:
        click.echo("\n".join(names))


@trace.command()
def targets() -> None:
    """List the devices that --target knows."""
    from traces.devices import DEVICES

    for d in DEVICES:
        click.echo(
            f"{d.name:12} {show_bytes(d.memory_bytes):>11} {d.bandwidth_bytes_per_s / 1e9:8.0f} GB/s  {d.source}"
        )


trace.add_command(torch_budget)


def saved_storages(record: Any) -> list[int]:
    """The storages that forward makes and backward reads."""
    ops, sts = record.ops, record.storages
    return [
        s
        for s, producer in enumerate(sts.producer)
        if producer >= 0 and ops.phase[producer] == "forward" and sts.last_backward_use[s] >= 0
    ]


def summary(record: Any) -> dict[str, Any]:
    """The figures of a trace that `--json` shows."""
    from traces.trace import BACKWARD, CATEGORIES, VIEW

    ops, sts = record.ops, record.storages
    resident = dict.fromkeys(CATEGORIES, 0)
    for s, producer in enumerate(sts.producer):
        if producer < 0:
            resident[sts.category[s]] += sts.nbytes[s]
    saved = saved_storages(record)
    phases = dict.fromkeys(ops.phase, 0)
    for p, t in zip(ops.phase, ops.time_ns, strict=True):
        phases[p] += t
    return {
        "meta": record.meta.to_json(),
        "ops": len(ops),
        "computing_ops": sum(1 for f in ops.flags if not f & VIEW),
        "storages": len(sts),
        "resident_bytes": {c: b for c, b in resident.items() if b},
        "gradient_bytes": sum(n for n, c in zip(sts.nbytes, sts.category, strict=True) if c == "gradient"),
        "saved_storages": len(saved),
        "saved_bytes": sum(sts.nbytes[s] for s in saved),
        "flops": sum(ops.flops),
        "time_ns": record.time_ns,
        "phase_time_ns": phases,
        "backward_ops": sum(1 for p in ops.phase if p == BACKWARD),
    }


def print_summary(name: str, record: Any, *, top: int) -> None:
    """A trace for people."""
    from traces.trace import FLAG_NAMES

    data, meta, ops, sts = summary(record), record.meta, record.ops, record.storages
    from_profile = any(meta.workspace.get(k) for k in ("measured", "interpolated"))
    estimated = f"profile and roofline of {meta.target}" if from_profile else f"roofline of {meta.target}"
    origin = f"measured on {meta.target}" if meta.mode == "real" else estimated
    options = ", ".join(f"{k} {v}" for k, v in meta.options.items())
    click.echo(f"{name}: {meta.model} ({options}), {meta.optimizer}, torch {meta.torch_version}")
    click.echo(
        f"  ops          {data['ops']} ({data['computing_ops']} that compute), {data['storages']} storages"
    )
    for category, nbytes in data["resident_bytes"].items():
        click.echo(f"  {category:16} {show_bytes(nbytes):>11}")
    click.echo(f"  {'gradient':16} {show_bytes(data['gradient_bytes']):>11}")
    click.echo(
        f"  {'activation':16} {show_bytes(data['saved_bytes']):>11} in {data['saved_storages']} storages saved "
        "for backward"
    )
    click.echo(f"  step         {show_time(data['time_ns'])} ({origin}); "
               + ", ".join(f"{p} {show_time(t)}" for p, t in data["phase_time_ns"].items()))  # fmt: skip
    click.echo(f"  fingerprint  {meta.fingerprint} (graph {meta.graph_fingerprint})")
    if not top:
        return
    saved = saved_storages(record)
    click.echo(
        "\n  largest storages that backward reads: size, op, module, last forward and first backward use"
    )
    for s in sorted(saved, key=lambda s: -sts.nbytes[s])[:top]:
        p = sts.producer[s]
        click.echo(f"  {show_bytes(sts.nbytes[s]):>11}  {ops.name[p]:32} {ops.module[p]:36} "
                   f"{sts.last_forward_use[s]:6} {sts.first_backward_use[s]:6}")  # fmt: skip
    click.echo("\n  slowest ops: time, op, module, flags")
    for i in sorted(range(len(ops)), key=lambda i: -ops.time_ns[i])[:top]:
        marks = ", ".join(n for b, n in FLAG_NAMES.items() if ops.flags[i] & b)
        click.echo(f"  {show_time(ops.time_ns[i]):>11}  {ops.name[i]:32} {ops.module[i]:36} {marks}")


def main() -> None:
    """Entry point of `trace`."""
    trace()


if __name__ == "__main__":
    main()
