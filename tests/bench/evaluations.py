"""Exact evaluations of a plan a second, for plans of several densities and traces of several sizes.

python -m tests.bench.evaluations [TRACE...] [--json]

A TRACE is a directory or a name of the gallery. Without one: the gallery's models, and chains of 500 to 50,000 ops.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import click

from simulator.core.evaluator import Evaluator, State
from simulator.core.problem import Problem
from tests.synthetic import ladder
from traces.records.plan import Action
from traces.records.store import load
from traces.records.trace import Trace

LENGTHS = (250, 2_500, 25_000)  # values; two ops each
KINDS = {"keep-all": 0.0, "recompute 40 %": 0.4, "recompute 70 %": 0.7, "recompute-all": 1.0}
SECONDS = 0.3  # for each figure


def rate(evaluate: Callable[[], int]) -> float:
    """How often a second: the best of five runs, each of which evaluates as often as it says."""
    evaluate()
    best = 0.0
    for _ in range(5):
        begin, count = time.perf_counter(), 0
        while (seconds := time.perf_counter() - begin) < SECONDS / 5:
            count += evaluate()
        best = max(best, count / seconds)
    return best


def measure(name: str, trace: Trace) -> list[dict[str, Any]]:
    begin = time.perf_counter()
    problem = Problem(trace)
    evaluator = Evaluator(problem)
    build_seconds = time.perf_counter() - begin
    draw = random.Random(0)
    out = []
    for kind, share_released in KINDS.items():
        state = evaluator.state(
            Action(storage=s) for s in problem.candidates if draw.random() < share_released
        )
        state.retained[list(problem.candidates)] = 1

        def whole(state: State = state) -> int:
            evaluator.cost(state)
            return 1

        steps = evaluator.walk(state)[3]
        out.append(
            {
                "trace": name,
                "ops": len(trace.ops),
                "plan": kind,
                "steps": steps,
                "evaluator_seconds": build_seconds,
                "evaluations_per_second": rate(whole),
            }
        )
        out[-1]["ns_per_step"] = 1e9 / out[-1]["evaluations_per_second"] / steps
    return out


@click.command()
@click.argument("traces", nargs=-1)
@click.option("--json", "as_json", is_flag=True)
def main(traces: tuple[str, ...], as_json: bool) -> None:
    """Measure, and print one line for each trace and kind of plan."""
    rows = []
    for name in traces or ("resnet152", "bert-base"):
        rows += measure(name, load(name))
    if not traces:
        for length in LENGTHS:
            rows += measure(f"chain of {length:,} values", ladder(length, seed=0))
    if as_json:
        click.echo(json.dumps(rows))
        return
    for r in rows:
        click.echo(
            f"{r['trace']:24} {r['ops']:6} ops  {r['plan']:14} {r['evaluations_per_second']:9,.0f} evaluations/s"
            f" ({r['ns_per_step']:.1f} ns a step)"
        )


if __name__ == "__main__":
    main()
