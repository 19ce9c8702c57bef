"""Step time of the rewritten graphs with an empty plan beside eager, interleaved in one process.

python -m tests.bench.step_overhead resnet18 --batch-size 8 --image-size 96 --rounds 30 [--json]
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import click


@click.command()
@click.argument("model")
@click.option("--batch-size", type=int, default=8)
@click.option("--image-size", type=int)
@click.option("--seq-len", type=int)
@click.option("--rounds", type=int, default=30, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(model: str, rounds: int, as_json: bool, **options: Any) -> None:
    """Time MODEL's step both ways, in turns, and print the medians and their ratio."""
    from executor.training.module import apply_plan
    from tracer.record.step import trace_step
    from tracer.step.loop import run_step
    from tracer.step.step import load_spec
    from traces.devices import device
    from traces.records.plan import Plan

    build = load_spec(model, {k: v for k, v in options.items() if v is not None})
    plan = Plan(meta=trace_step(build, device("cpu")).trace.meta)
    eager, planned = build("cpu"), build("cpu")
    ways = {"eager": (eager, eager.model), "keep_all": (planned, apply_plan(planned.model, plan))}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for k in range(rounds + 3):
        for name, (step, callee) in ways.items() if k % 2 else reversed(ways.items()):
            begin = time.perf_counter()
            run_step(step, callee, step.optimizer)
            if k >= 3:
                times[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(t) for name, t in times.items()}
    ratio = medians["keep_all"] / medians["eager"]
    if as_json:
        click.echo(
            json.dumps({"model": model, "options": options, "rounds": rounds, "ratio": ratio, **medians})
        )
    else:
        click.echo(f"{model}: eager {medians['eager'] * 1e3:.1f} ms, keep-all {medians['keep_all'] * 1e3:.1f} ms, "
                   f"ratio {ratio:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
