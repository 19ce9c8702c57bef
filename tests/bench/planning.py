"""What planning takes with levers beside recomputation alone: processor seconds, in turns.

python -m tests.bench.planning [TRACE ...] [--budgets 90%,60%,45%,32%,28%] [--ways bit,fp] [--runs 3] [--json]

Without a TRACE: BERT-base 16 × 512, GPT-2 8 × 1024 and Llama-1B 4 × 2048, for an H200, recorded once into --cache. Of
each plan the trace is there, all that is worked out of it is not, and the compiled kernels are warm; the least of the
runs counts. Counts: planning and the plan's own figures. Ignores: start-up and reading (`commands` has whole commands).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import click

from simulator.core.limits import Levers, parse_budget
from simulator.core.problem import Problem
from simulator.levers import UNASKED
from simulator.planners.outcome import Infeasible
from simulator.prediction.ask import Question, ask
from tests.bench.recorded import CACHE, trace_of
from traces.records.plan import Plan
from traces.records.store import load
from traces.records.trace import Trace

ALONE: Final = "recompute"
WAYS: Final = {
    ALONE: Levers(kinds=()),
    "bit": Levers(),
    "fp": Levers(allow="fp"),
    "offload": Levers(kinds=("offload",)),
    "all": Levers(allow="fp", kinds=(*UNASKED, "offload")),
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "bert-base": {"batch_size": 16, "seq_len": 512},
    "gpt2": {"batch_size": 8, "seq_len": 1024},
    "llama-1b": {"batch_size": 4, "seq_len": 2048},
}


def planned(trace: Trace, budget: str, levers: Levers) -> tuple[float, Plan | None]:
    """Processor seconds, and the plan, if there is one."""
    problem = Problem(trace)
    budget_bytes = parse_budget(budget, problem.saved.timeline.peak_allocated_bytes)
    problem, began = Problem(trace), time.process_time()
    try:
        found = ask(problem, Question(budget=budget_bytes, levers=levers)).planned.plan
    except Infeasible:
        found = None
    return time.process_time() - began, found


def measure(name: str, trace: Trace, budget: str, ways: list[str], runs: int) -> list[dict[str, Any]]:
    """A row for recomputation alone and for each of WAYS that is asked for."""
    best: dict[str, float] = {}
    plans: dict[str, Plan | None] = {}
    for run in range(runs + 1):
        for way in dict.fromkeys((ALONE, *ways)):
            seconds, plans[way] = planned(trace, budget, WAYS[way])
            if run:  # the first compiles
                best[way] = min(best.get(way, seconds), seconds)
    return [
        {
            "trace": name,
            "budget": budget,
            "way": way,
            "processor_s": round(seconds, 3),
            "beside_alone": round(seconds / best[ALONE], 2),
            "overhead_percent": plan.predicted["plan"]["overhead_percent"] if (plan := plans[way]) else None,
            "kinds": sorted({r.kind for r in plan.rewrites}) if plan else [],
        }
        for way, seconds in best.items()
    ]


@click.command()
@click.argument("traces", nargs=-1)
@click.option("--budgets", default="90%,60%,45%,32%,28%", show_default=True)
@click.option("--ways", default="bit,fp", show_default=True, help=f"Of {', '.join(WAYS)}.")
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, help="Where the traces stay.")
@click.option("--json", "as_json", is_flag=True)
def main(traces: tuple[str, ...], budgets: str, ways: str, runs: int, cache: Path, as_json: bool) -> None:
    """Plan each trace for each budget, and print a line each."""
    rows = []
    for name in traces or MODELS:
        trace = load(name) if traces else trace_of(cache, name, target="h200", **MODELS[name])
        for budget in budgets.split(","):
            rows += (found := measure(name, trace, budget, ways.split(","), runs))
            for row in () if as_json else found:
                added = row["overhead_percent"]
                click.echo(
                    "{trace:12} {budget:>4} {way:10} {processor_s:6.2f} s  {beside_alone:4.2f}x  ".format(
                        **row
                    )
                    + ("no plan" if added is None else f"{added:+.2f} % {' '.join(row['kinds'])}")
                )
    if as_json:
        click.echo(json.dumps(rows))


if __name__ == "__main__":
    main()
