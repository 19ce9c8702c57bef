"""Turn a small trace into the problem that integer programmes solve: ops, storages, times, sizes, and what may rerun.

Views are dissolved into the storages behind them, as the evaluator does. Takeovers of an input's memory are left out,
in the problem and (`without_takeovers`) in the trace that our planners get, because the programmes do not model them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from simulator.bounds.bound import lower_bound
from simulator.bounds.instants import Instants
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.planners import DEFAULT, find, plan_with
from tests.bench.recorded import BENCH, CACHE, trace_of
from tests.synthetic import ladder, resnet
from tests.tiny import chain
from traces.errors import LowtideError
from traces.records.trace import Trace

GRAPHS: dict[str, Callable[[Path], Trace]] = {
    "chain-8": lambda cache: chain(7),
    "chain-16": lambda cache: chain(15),
    "chain-24": lambda cache: chain(23),
    "ladder-12": lambda cache: ladder(12, seed=1),
    "ladder-20": lambda cache: ladder(20, seed=2),
    "resnet-2": lambda cache: resnet((1, 1), batch=8, side=64),
    "mlp": lambda cache: trace_of(cache, f"{BENCH / 'build_functions.py'}:mlp"),
    "bert-tiny": lambda cache: trace_of(
        cache, "bert-tiny", batch_size=4, seq_len=64, dropout=0.0, optimizer="none", target="h200"
    ),
}


def without_takeovers(trace: Trace) -> Trace:
    """The same trace, in which no op may take over its input's memory."""
    return replace(trace, ops=replace(trace.ops, overwrites=(-1,) * len(trace.ops)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """Ops in order, with the storages that they make and read. Residents are left out of `makes` and `reads`."""

    resident_bytes: int
    times_ns: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]  # op -> storages
    makes: tuple[tuple[int, ...], ...]
    workspace_bytes: tuple[int, ...]  # op -> what it needs while it runs beyond what it makes
    nbytes: tuple[int, ...]  # storage -> size
    producer: tuple[int, ...]  # storage -> op
    hold: tuple[int, ...]  # storage -> op before whose end it is not released; -1
    may_rerun: tuple[bool, ...]
    forward: int  # ops before this one are forward

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Storage -> the ops that read it."""
        out: list[list[int]] = [[] for _ in self.nbytes]
        for i, reads in enumerate(self.reads):
            for s in reads:
                out[s].append(i)
        return tuple(tuple(r) for r in out)


def problem_of(trace: Trace) -> Small:
    """The problem of a trace; what the schedule may not touch (holds, pinned values) is held.

    A view is an op of the problem only where it decides something: in backward, where it demands a value from forward.
    Elsewhere it only makes its base stay until then.
    """
    problem = Problem(trace)
    ops, sts = trace.ops, trace.storages
    turn = problem.forward_end
    mine = [s for s in range(len(sts)) if sts.producer[s] >= 0]
    storage = {s: k for k, s in enumerate(mine)}
    demands = [i >= turn and any(0 <= sts.producer[s] < turn for s in ops.reads[i]) for i in range(len(ops))]
    chosen = [i for i in range(len(ops)) if not problem.is_view[i] or demands[i]]
    number = {i: k for k, i in enumerate(chosen)}
    last = {s: i for i in range(len(ops)) for s in ops.reads[i]}

    def at(op: int) -> int:
        """The chosen op at or before an op."""
        while op >= 0 and op not in number:
            op -= 1
        return number.get(op, -1)

    reads = [[storage[s] for s in ops.reads[i] if s in storage] for i in chosen]
    for i in range(len(ops)):
        if i not in number and at(i) >= 0:
            for s in ops.reads[i]:
                if s in storage and number[sts.producer[s]] < at(i) and storage[s] not in reads[at(i)]:
                    reads[at(i)].append(storage[s])
    hold = []
    for s in mine:
        until = sts.hold[s]
        if problem.pinned[s]:
            until = max(until, last.get(s, -1))
        hold.append(at(until))
    return Small(
        resident_bytes=trace.resident_bytes,
        times_ns=tuple(0 if problem.is_view[i] else ops.time_ns[i] for i in chosen),
        reads=tuple(map(tuple, reads)),
        makes=tuple(tuple(storage[s] for s in problem.creates[i]) for i in chosen),
        workspace_bytes=tuple(problem.transient_bytes[i] - problem.created_bytes[i] for i in chosen),
        nbytes=tuple(sts.nbytes[s] for s in mine),
        producer=tuple(number[sts.producer[s]] for s in mine),
        hold=tuple(hold),
        may_rerun=tuple(problem.may_rerun[i] and i < turn for i in chosen),
        forward=sum(1 for i in chosen if i < turn),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What a programme found."""

    added_ns: int | None  # None: none found, or there is none
    proved: bool  # it is the optimum, or it is proved that there is none
    lower_bound_ns: int  # no plan of the programme's model adds less
    seconds: float
    variables: int


Solver = Callable[[Small, int, float], Solved]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One budget on one graph."""

    graph: str
    ops: int
    share: float  # where the budget lies between the floor (0) and the peak with everything kept (1)
    budget_bytes: int
    optimum: Solved
    optimum_percent: float | None
    bound_percent: float | None  # Lowtide's certified bound
    ours_percent: dict[str, float | None]
    ours_seconds: dict[str, float]


def rows(
    graphs: tuple[str, ...],
    shares: list[float],
    planners: list[str],
    seconds: float,
    cache: Path,
    solve: Solver,
) -> list[Row]:
    """Every graph at every budget, solved by the programme and planned by ours."""
    out = []
    for name in graphs:
        trace = without_takeovers(GRAPHS[name](cache))
        problem = problem_of(trace)
        base = Problem(trace).saved.timeline
        least = Instants(Problem(trace)).floor.peak_bytes
        for share in shares:
            budget_bytes = least + round(share * (base.peak_allocated_bytes - least))
            optimum = solve(problem, budget_bytes, seconds)
            ours: dict[str, float | None] = {}
            took = {}
            for planner in planners:
                begin = time.perf_counter()
                try:
                    plan = plan_with(planner, Problem(trace), budget_bytes, Limits(seconds=seconds))
                    added = Problem(trace).replay(plan.actions).timeline.step_time_ns - base.step_time_ns
                    ours[planner] = 100 * added / base.step_time_ns
                except LowtideError:
                    ours[planner] = None
                took[planner] = time.perf_counter() - begin
            bound = lower_bound(Problem(trace), budget_bytes)
            added_ns = optimum.added_ns
            out.append(
                Row(
                    graph=name,
                    ops=len(problem.times_ns),
                    share=share,
                    budget_bytes=budget_bytes,
                    optimum=optimum,
                    optimum_percent=None if added_ns is None else 100 * added_ns / base.step_time_ns,
                    bound_percent=bound.overhead_percent if bound.feasible else None,
                    ours_percent=ours,
                    ours_seconds=took,
                )
            )
    return out


def command(doc: str, solve: Solver) -> click.Command:
    """The benchmark's command for one programme."""

    @click.command(help=doc)
    @click.argument("graphs", nargs=-1, type=click.Choice([*GRAPHS]))
    @click.option(
        "--shares", default="0.75,0.5,0.25", show_default=True, help="Between floor (0) and keep-all (1)."
    )
    @click.option("--planners", default=DEFAULT, show_default=True)
    @click.option("--seconds", type=float, default=60.0, show_default=True, help="For each solve.")
    @click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
    @click.option("--json", "as_json", is_flag=True)
    def main(
        graphs: tuple[str, ...], shares: str, planners: str, seconds: float, cache: Path, as_json: bool
    ) -> None:
        import json

        names = planners.split(",")
        for planner in names:
            find(planner)
        table = rows(
            graphs or tuple(GRAPHS), [float(s) for s in shares.split(",")], names, seconds, cache, solve
        )
        if as_json:
            click.echo(json.dumps([asdict(r) for r in table]))
            return
        for r in table:
            click.echo(text(r))

    return main


def text(r: Row) -> str:
    """One row to read."""

    def shown(value: float | None) -> str:
        return "none" if value is None else f"+{value:.3f} %"

    found = "proved" if r.optimum.proved else "not proved"
    ours = ", ".join(f"{n} {shown(v)} in {r.ours_seconds[n]:.2f} s" for n, v in r.ours_percent.items())
    return (
        f"{r.graph:10} {r.ops:4} ops, share {r.retained:.2f}: optimum {shown(r.optimum_percent)} ({found}) in "
        f"{r.optimum.seconds:.1f} s, {r.optimum.variables} variables; bound {shown(r.bound_percent)}; ours {ours}"
    )
