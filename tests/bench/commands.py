"""What commands take as whole processes, with what they start: a trace, plans, and the first plan on a machine.

    python -m tests.bench.commands [--only trace|simulate|recompute|levers|first] [--runs 3] [--json]

Processor time (user and system) says the same on a busy machine, within a tenth; the wall clock is what a user waits,
on a quiet one. `recompute` and `levers` plan one step for one budget: by recomputation alone, and with tiles and
packing. The least of the runs counts. `first` compiles the kernels into an empty place of its own each time; the others
find them compiled. The bytecode of Python is there for all of them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any, Final

import click

COMMANDS: Final = {
    "trace": "tracer resnet152 --batch-size 32",
    "simulate": "simulator resnet152 --budget 60%",
    "recompute": "simulator bert-base --budget 60% --levers narrow8",  # which BERT has no use for
    "levers": "simulator bert-base --budget 60% --allow fp",
    "first": "simulator bert-base --budget 80%",
}


def once(words: list[str], **environment: str) -> tuple[float, float]:
    """Processor and wall seconds of a command and of all that it starts.

    Raises:
        RuntimeError: it failed; with what it wrote.
    """
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | environment
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *words], env=env, capture_output=True, text=True, check=False
    )
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"{words[0]} ended with {done.returncode}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def measure(name: str, runs: int) -> dict[str, Any]:
    """The least processor and wall seconds of some runs of one of COMMANDS, after one that does not count."""
    with tempfile.TemporaryDirectory() as empty:
        found = [
            once(
                [*COMMANDS[name].split(), "-o", f"{empty}/output-{run}"],
                **({"NUMBA_CACHE_DIR": f"{empty}/{run}"} if name == "first" else {}),
            )
            for run in range(runs + 1)
        ]
    processor, wall = zip(*found[1:], strict=True)
    return {
        "command": name,
        "processor_s": round(min(processor), 2),
        "wall_s": round(min(wall), 2),
        "load": round(os.getloadavg()[0], 1),
        "runs": runs,
    }


@click.command()
@click.option("--only", type=click.Choice([*COMMANDS]), multiple=True, help="Not all of them.")
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(only: tuple[str, ...], runs: int, as_json: bool) -> None:
    """Time the commands, one at a time."""
    rows = [measure(name, runs) for name in only or COMMANDS]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        click.echo(
            "{command:10} processor {processor_s:6.2f} s   wall {wall_s:6.2f} s   load {load}".format(**row)
        )


if __name__ == "__main__":
    main()
