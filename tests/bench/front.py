"""How long a whole front of plans takes, as a process of its own.

python -m tests.bench.front [bert-base|resnet152 ...] [--rounds N] [--points N] [--planner mu-two] [--json]

`process_seconds` has the start of Python, imports, loading the compiled loops and reading the trace. `front_seconds`
is what `simulate pareto` reports for the front by itself. Counts: wall time, the median and the least of all rounds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import click

from tests.bench.recorded import CACHE, directory_of, trace_of

MODELS: dict[str, dict[str, Any]] = {
    "bert-base": {"batch_size": 16, "seq_len": 512, "target": "h200"},
    "resnet152": {"batch_size": 32, "target": "h200"},
}


def measure(name: str, cache: Path, rounds: int, points: int, planner: str) -> dict[str, Any]:
    """One model."""
    options = MODELS[name]
    trace = trace_of(cache, name, **options)
    words = [sys.executable, "-m", "simulator", "pareto", str(directory_of(cache, name, **options))]
    words += ["--points", str(points), "--planner", planner, "--json", "-q"]
    front(words)  # so that the loops are compiled
    process_seconds, front_seconds = [], []
    answer: dict[str, Any] = {}
    for _ in range(rounds):
        begin = time.perf_counter()
        answer = front(words)
        process_seconds.append(time.perf_counter() - begin)
        front_seconds.append(answer["solve_seconds"])
    planned = [p["overhead_percent"] for p in answer["points"] if p["feasible"]]
    return {
        "model": name,
        "options": options,
        "ops": len(trace.ops),
        "planner": planner,
        "points": len(answer["points"]),
        "feasible_points": len(planned),
        "rounds": rounds,
        "front_seconds": spread(front_seconds),
        "process_seconds": spread(process_seconds),
    }


def front(words: list[str]) -> dict[str, Any]:
    """Run `simulate pareto` and read its answer."""
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median": round(median(seconds), 3), "least": round(min(seconds), 3)}


@click.command()
@click.argument("models", nargs=-1, type=click.Choice([*MODELS]))
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--points", type=click.IntRange(min=2), default=20, show_default=True)
@click.option("--planner", default="mu-two", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(models: tuple[str, ...], cache: Path, rounds: int, points: int, planner: str, as_json: bool) -> None:
    """Time the front of MODELS (default: both)."""
    out = [measure(name, cache, rounds, points, planner) for name in models or MODELS]
    if as_json:
        click.echo(json.dumps(out))
        return
    for data in out:
        click.echo(f"{data['model']} {data['options']}: {data['ops']} ops, {data['points']} budgets")
        for key in ("front_seconds", "process_seconds"):
            click.echo(f"  {key:24} median {data[key]['median']:.2f}  least {data[key]['least']:.2f}")


if __name__ == "__main__":
    main()
