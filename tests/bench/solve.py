"""Solve time and gap to the certified bound against the size of the trace, 500 to 50,000 ops.

python -m tests.bench.solve [TRACE ...] [--planners P,...] [--budgets 90%,60%,30%] [--timeout 120] [--json]

The traces are fake, with the times of an H200, and recorded once into --cache (`--record-only` stops there: about
4 minutes, of which the largest takes half). Each plan is made in a process of its own, with compiled code warm, and
ended after --timeout. Counts: planning alone; the bound's own time stands beside it. Ignores: start-up and reading.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from simulator.bounds import bound_curve
from simulator.core.evaluator import Evaluator
from simulator.core.limits import Limits, parse_budget
from simulator.core.problem import Problem
from simulator.planners import DEFAULT, find, plan_with
from tests.bench.recorded import BENCH, CACHE, trace_of
from traces.errors import LowtideError
from traces.records.trace import Trace

DECODER = str(BENCH / "build_functions.py")
TRACES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18": ("resnet18", {"batch_size": 32}),
    "bert-base": ("bert-base", {"batch_size": 16, "seq_len": 512}),
    "gpt2": ("gpt2", {"batch_size": 8, "seq_len": 1024}),
    "llama-1b": ("llama-1b", {"batch_size": 4, "seq_len": 2048}),
    "resnet152": ("resnet152", {"batch_size": 32}),
    "gpt2-xl": ("gpt2-xl", {"batch_size": 1, "seq_len": 1024}),
    "decoder-96": (f"{DECODER}:decoder96", {"batch_size": 4, "seq_len": 512}),
    "decoder-256": (f"{DECODER}:decoder256", {"batch_size": 4, "seq_len": 512}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One planner's answer for one trace and budget."""

    trace: str
    ops: int
    computing_ops: int
    budget: str
    planner: str
    solve_seconds: float
    overhead_percent: float | None  # None: no plan, or not in time
    bound_percent: float | None
    gap_points: float | None
    bound_seconds: float  # for all budgets of the trace together
    evaluation_seconds: float  # one exact evaluation of the keep-all plan, the least of 20
    note: str = ""


def recorded(name: str, cache: Path) -> Trace:
    model, options = TRACES[name]
    return trace_of(cache, model, **options, target="h200")


def measure(
    name: str, trace: Trace, budgets: list[str], planners: list[str], seconds: float, timeout: float
) -> list[Row]:
    """All planners at all budgets of one trace."""
    base = Problem(trace).saved.timeline
    sizes = [parse_budget(b, base.peak_allocated_bytes) for b in budgets]
    begin = time.perf_counter()
    curve = bound_curve(Problem(trace), sizes)
    bound_seconds = time.perf_counter() - begin
    bounds = {b.budget_bytes: b for b in curve}
    evaluator = Evaluator(Problem(trace))
    state = evaluator.state()
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        evaluator.cost(state)
        times.append(time.perf_counter() - begin)
    evaluation_seconds = min(times)
    del evaluator, state
    out = []
    for text, budget_bytes in zip(budgets, sizes, strict=True):
        for planner in planners:
            took, added, note = alone(trace, planner, budget_bytes, seconds, timeout)
            bound = bounds[budget_bytes]
            least = bound.overhead_percent if bound.feasible else None
            overhead = None if added is None else 100 * added / base.step_time_ns
            out.append(
                Row(
                    trace=name,
                    ops=len(trace.ops),
                    computing_ops=sum(1 for t in trace.ops.time_ns if t),
                    budget=text,
                    planner=planner,
                    solve_seconds=took,
                    overhead_percent=overhead,
                    bound_percent=least,
                    gap_points=None if overhead is None or least is None else overhead - least,
                    bound_seconds=bound_seconds,
                    evaluation_seconds=evaluation_seconds,
                    note=note,
                )
            )
    return out


def alone(
    trace: Trace, planner: str, budget_bytes: int, seconds: float, timeout: float
) -> tuple[float, int | None, str]:
    """Plan in a child process; returns the seconds, the added nanoseconds if there is a plan, and else the reason."""
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_plan, args=(there, trace, planner, budget_bytes, seconds)
    )
    child.start()
    there.close()
    try:
        if here.poll(timeout):
            answer: tuple[float, int | None, str] = here.recv()
            return answer
        return timeout, None, "not in time"
    except EOFError:
        return timeout, None, f"ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()


def _plan(pipe: Any, trace: Trace, planner: str, budget_bytes: int, seconds: float) -> None:
    begin = time.perf_counter()
    try:
        plan = plan_with(planner, Problem(trace), budget_bytes, Limits(seconds=seconds))
    except LowtideError as error:
        pipe.send((time.perf_counter() - begin, None, str(error)[:120]))
        return
    took = time.perf_counter() - begin
    pipe.send((took, Problem(trace).replay(plan.actions).timeline.step_time_ns - trace.time_ns, ""))


@click.command()
@click.argument("traces", nargs=-1, type=click.Choice([*TRACES]))
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
@click.option("--record-only", is_flag=True, help="Record the traces and stop.")
@click.option("--planners", default=DEFAULT, show_default=True)
@click.option("--budgets", default="90%,70%,50%,30%", show_default=True)
@click.option("--seconds", type=float, default=5.0, show_default=True, help="The planner's own limit.")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="After which it is ended.")
@click.option("--json", "as_json", is_flag=True)
def main(
    traces: tuple[str, ...],
    cache: Path,
    record_only: bool,
    planners: str,
    budgets: str,
    seconds: float,
    timeout: float,
    as_json: bool,
) -> None:
    """Time the planners on TRACES (default: all) and compare them with the certified bound."""
    names = planners.split(",")
    for planner in names:
        find(planner)
    chosen = traces or tuple(TRACES)
    if record_only:
        for name in chosen:
            trace = recorded(name, cache)
            click.echo(f"{name:12} {len(trace.ops):6} ops, {len(trace.storages):6} storages")
        return
    out: list[Row] = []
    for name in chosen:
        found = measure(name, recorded(name, cache), budgets.split(","), names, seconds, timeout)
        out += found
        if not as_json:
            for r in found:
                click.echo(text(r))
    if as_json:
        click.echo(json.dumps([asdict(r) for r in out]))


def text(r: Row) -> str:
    """One row to read."""
    if r.overhead_percent is None:
        result = r.note
    else:
        gap = "" if r.gap_points is None else f", gap {r.gap_points:.2f} points"
        result = f"+{r.overhead_percent:.2f} %{gap}"
    return (
        f"{r.trace:12} {r.ops:6} ops  {r.budget:>4}  {r.planner:14} {r.solve_seconds:7.2f} s  {result}  "
        f"(bound {r.bound_seconds:.2f} s, evaluation {1e3 * r.evaluation_seconds:.2f} ms)"
    )


if __name__ == "__main__":
    main()
