"""What the host takes for a step, eager and by the rewritten graphs with everything saved, in turns in one process.

execute rehearse --gpu h200 -- python -m tests.bench.host resnet152 bert-base     without a GPU, whose kernels take none

Milliseconds, the least of RUNS steps. On a GPU that its host keeps waiting, a step takes as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import click
import torch

from executor.measuring import kept_all
from simulator import plan
from tests.bench.rehearsed import MODELS
from tracer import trace
from tracer.step.loop import run_step
from tracer.step.step import load_spec

RUNS = 12


def milliseconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


@click.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--amp", default="bfloat16", show_default=True)
def main(names: tuple[str, ...], amp: str) -> None:
    """Time steps of models by name."""
    for name in names:
        options = {**MODELS.get(name, {}), "amp": amp}
        empty = plan(trace(name, device="cuda", rounds=1, **options), None)
        step = load_spec(name, options, seed=0)("cuda")
        rewritten = kept_all(step.model, empty)
        steps = [partial(run_step, step, model, step.optimizer) for model in (step.model, rewritten)]
        times = [[milliseconds(s) for s in steps] for _ in range(RUNS)]
        eager, saved = (min(of) for of in zip(*times, strict=True))
        click.echo(
            f"{name}: eager {eager:.1f} ms, everything saved {saved:.1f} ms ({100 * (saved / eager - 1):+.1f} %)"
        )


if __name__ == "__main__":
    main()
