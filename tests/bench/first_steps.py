"""What `fit` takes until a model trains, and what its first steps at new lengths take beyond the same step again.

python -m tests.bench.first_steps bert-base --batch-size 8 --lengths 128,64,96,80 [--json]

Seconds of the processor (of all threads) and of the clock; of a busy machine only the first say much.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import click


@click.command()
@click.argument("model")
@click.option("--batch-size", type=int, default=8)
@click.option("--lengths", default="128,64,96,80", show_default=True, help="The first is the plan's.")
@click.option("--budget", default="85%", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(model: str, batch_size: int, lengths: str, budget: str, as_json: bool) -> None:
    """Fit MODEL, a name of transformers', and train it at each length twice."""
    from executor import fit
    from tracer.step.step import load_spec

    first, *_ = sizes = [int(n) for n in lengths.split(",")]
    steps = {n: load_spec(model, {"batch_size": batch_size, "seq_len": n})("cpu") for n in {*sizes}}
    step = steps[first]

    def timed(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        clock, processor = time.perf_counter(), time.process_time()
        out = run()
        return out, {"processor": time.process_time() - processor, "wall": time.perf_counter() - clock}

    def train(n: int) -> None:
        trained(*steps[n].args, **steps[n].kwargs).loss.backward()
        trained.zero_grad()

    trained, took = timed(lambda: fit(step.model, step.kwargs, optimizer=step.optimizer, budget=budget))
    found: dict[str, Any] = {"model": model, "batch_size": batch_size, "fit": took, "steps": []}
    for n in sizes:
        once, again = (timed(lambda n=n: train(n))[1] for _ in range(2))
        found["steps"].append({"length": n} | {k: once[k] - again[k] for k in once})
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"{model}: fit {took['processor']:.1f} s of the processor, {took['wall']:.1f} s")
    for row in found["steps"]:
        click.echo(f"  first step of length {row['length']}: {row['processor']:+.2f} s, {row['wall']:+.2f} s")


if __name__ == "__main__":
    main()
