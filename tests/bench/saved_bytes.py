"""How many bytes bit-exact levers alone take off what forward hands to backward, within a limit of added time.

python -m tests.bench.saved_bytes TRACE... [--most 1.5] [--levers bits,narrow16] [--measure] [--json]

Another question than a budget's: the peak may be anywhere, and may even rise. So the cuts of the bound at the end of
forward answer it (`simulator.bounds.bound`). Taken in order of their price they are a plan; merged with what packing a
value saves and takes, the last one in part, they say what no plan with these levers can save more.

Counts: the time of everything that runs again, and of both ops of a packed value; all that is in memory when forward
has ended, but for what is there throughout. Ignores, in the bound: that values are saved whole or not at all, that a
packed value may be recomputed, too.

`--measure` trains with the plan on the CPU, and with everything saved: what the CPU's allocator has live when backward
begins, beside the prediction. Needs torch and a trace for the CPU.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from simulator.bounds.bound import bounder_of
from simulator.bounds.instants import TURN
from simulator.core.evaluator import State
from simulator.core.problem import Problem
from simulator.core.rewrites import rewritten_problem
from simulator.core.rewrites.pack import ranked
from simulator.planners.cuts import states
from simulator.planners.greedy import Search
from simulator.planners.outcome import finish, percent
from simulator.prediction.planning import UNLIMITED_BYTES
from traces.records.plan import Action, Plan, Rewrite

EXACT = ("bits", "narrow8", "narrow16", "narrow32")
PARTS = 8  # so many shares of what can be packed are tried
STEPS: Final = 3  # measured; the last one counts
TURN_MARK: Final = "lowtide turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The fewest bytes that forward hands to backward, in the plan found and as a bound on all; times in ns."""

    step_time_ns: int
    saved_bytes: int  # with everything saved
    most_added_ns: int
    plan_bytes: int
    plan_added_ns: int
    plan_actions: tuple[Action, ...]
    plan_rewrites: tuple[Rewrite, ...]
    least_bytes: int  # no plan hands over less


def fewest(problem: Problem, most_added_ns: int, kinds: tuple[str, ...] = EXACT) -> Saving:
    """The plan that hands over the fewest bytes of those that the cuts lead to, and the bound."""
    packed = [rewrite for rewrite, _, _ in ranked(problem, kinds)]
    sets = dict.fromkeys(tuple(packed[: -(-len(packed) * k // PARTS)]) for k in range(PARTS + 1))
    found = [x for rewrites in sets if (x := _plan(problem, rewrites, most_added_ns)) is not None]
    nbytes, added_ns, actions, rewrites = min(found, key=lambda x: x[:2])
    return Saving(
        step_time_ns=problem.trace.time_ns,
        saved_bytes=handed_bytes(problem),
        most_added_ns=most_added_ns,
        plan_bytes=nbytes,
        plan_added_ns=added_ns,
        plan_actions=actions,
        plan_rewrites=rewrites,
        least_bytes=least_bytes(problem, most_added_ns, kinds),
    )


def handed_bytes(problem: Problem, actions: tuple[Action, ...] = ()) -> int:
    """What is in memory when forward has ended, beside what is there throughout."""
    replay = problem.replay(actions)
    at = replay.schedule.forward_steps - 1
    return replay.timeline.live_bytes[at] - replay.timeline.resident_bytes


def least_bytes(problem: Problem, added_ns: int, kinds: tuple[str, ...] = EXACT) -> int:
    """What any plan that adds so much time hands over at least."""
    instant = bounder_of(problem).instants.at(TURN)
    steps = [*instant.steps, *((ns, nbytes) for _, nbytes, ns in ranked(problem, kinds))]
    left = instant.unavoidable_bytes - problem.trace.resident_bytes + instant.most_bytes
    for ns, nbytes in sorted(steps, key=lambda step: step[0] / step[1]):
        left -= nbytes if ns <= added_ns else -(-nbytes * added_ns // ns)
        added_ns -= min(ns, added_ns)
    return max(0, left)


def _plan(
    problem: Problem, rewrites: tuple[Rewrite, ...], most_added_ns: int
) -> tuple[int, int, tuple[Action, ...], tuple[Rewrite, ...]] | None:
    """(bytes, added time, actions, rewrites) with these values packed; None if that takes too long by itself."""
    step = rewritten_problem(problem, rewrites)
    search = Search(step, UNLIMITED_BYTES)
    ev, most_ns = search.evaluator, problem.trace.time_ns + most_added_ns
    if ev.base_time_ns > most_ns:
        return None
    best = ev.state()
    for _, state in states(ev, step, bounder_of(step).instants, TURN):
        if ev.cost(state)[1] > most_ns:
            break
        best = state.copy()
    _fill(search, best, most_ns)
    actions = tuple(search.actions(best))
    added_ns = step.replay(actions).timeline.step_time_ns - problem.trace.time_ns
    return handed_bytes(step, actions), added_ns, actions, rewrites


def _fill(search: Search, state: State, most_ns: int) -> None:
    """Evict what else there is time for, in place: first what takes least time for its bytes."""
    ev = search.evaluator
    now_ns = ev.cost(state)[1]
    prices = []
    for s in search.problem.candidates:
        if state.saved[s]:
            state.saved[s], state.retained[s] = 0, 1
            prices.append(((ev.cost(state)[1] - now_ns) / ev.nbytes[s], s))
            state.saved[s] = 1
    for _, s in sorted(prices):
        state.saved[s], state.retained[s] = 0, 1
        if ev.cost(state)[1] > most_ns:
            state.saved[s] = 1


def plan_of(problem: Problem, actions: tuple[Action, ...], rewrites: tuple[Rewrite, ...]) -> Plan:
    """What was found as a plan that `execute` takes."""
    plan = finish(rewritten_problem(problem, rewrites), "saved-bytes", UNLIMITED_BYTES, actions)
    return replace(plan, meta=problem.trace.meta, rewrites=rewrites).sealed()


def measure(problem: Problem, actions: tuple[Action, ...], rewrites: tuple[Rewrite, ...]) -> int:
    """By how many bytes a plan lowers what is live on the CPU when backward begins, measured in fresh processes."""
    from traces.isolated import forking, run_fresh

    with tempfile.TemporaryDirectory() as folder, forking("executor.training.module"):
        live: list[int] = []
        for plan in (plan_of(problem, (), ()), plan_of(problem, actions, rewrites)):
            path = plan.save(Path(folder) / f"{len(live)}.json")
            arguments = {"plan_path": str(path)}
            live.append(run_fresh("tests.bench.saved_bytes:live_at_turn", arguments, what="measured")["live"])
    return live[0] - live[1]


def live_at_turn(plan_path: str) -> dict[str, int]:
    """What is live on the CPU when the last step's backward begins; in a fresh process."""
    from torch.profiler import record_function

    from executor.training.module import apply_plan
    from tracer.measure.probes import cpu_live, memory_profiler
    from tracer.step.loop import BACKWARD, run_step
    from tracer.step.step import load_spec

    def mark(phase: str) -> None:
        if phase == BACKWARD:
            with record_function(TURN_MARK):
                pass

    plan = Plan.load(plan_path)
    with memory_profiler() as prof:
        step = load_spec(plan.meta.model, dict(plan.meta.options), seed=plan.meta.seed)("cpu")
        model = apply_plan(step.model, plan)
        for k in range(STEPS):
            run_step(step, model, step.optimizer, mark if k == STEPS - 1 else None)
    moments, live, spans = cpu_live(prof, TURN_MARK)
    return {"live": live[bisect_left(moments, spans[TURN_MARK][0])]}


@click.command()
@click.argument("traces", nargs=-1, required=True)
@click.option("--most", default=1.5, show_default=True, help="Added time, in percent of the step.")
@click.option(
    "--levers", default=",".join(EXACT), show_default=True, help="Formats that values may be packed in."
)
@click.option("--measure", "measured", is_flag=True, help="Train with the plan on the CPU.")
@click.option("--json", "as_json", is_flag=True)
def main(traces: tuple[str, ...], most: float, levers: str, measured: bool, as_json: bool) -> None:
    """The fewest bytes that forward hands to backward, for each trace."""
    from simulator import api

    rows: dict[str, dict[str, Any]] = {}
    for name in traces:
        problem = api.problem_of(name)
        kinds = tuple(k for k in levers.split(",") if k)
        found = fewest(problem, int(problem.trace.time_ns * most / 100), kinds)
        rows[name] = asdict(found) | {
            "plan_actions": len(found.plan_actions),
            "plan_rewrites": len(found.plan_rewrites),
            "plan_percent": percent(found.plan_bytes - found.saved_bytes, found.saved_bytes),
            "plan_added_percent": percent(found.plan_added_ns, found.step_time_ns),
            "least_percent": percent(found.least_bytes - found.saved_bytes, found.saved_bytes),
        }
        if measured:
            saved = measure(problem, found.plan_actions, found.plan_rewrites)
            rows[name]["measured_percent"] = percent(-saved, found.saved_bytes)
            rows[name]["measured_off_bytes"] = saved - (found.saved_bytes - found.plan_bytes)
        if not as_json:
            click.echo(
                "{0}: {plan_percent:+.1f} % at {plan_added_percent:+.2f} % of time, {plan_rewrites} values packed; "
                "no plan {least_percent:+.1f} %".format(name, **rows[name])
            )
            if measured:
                told = (
                    "  on the CPU {measured_percent:+.1f} %, {measured_off_bytes:+,} B beside the prediction"
                )
                click.echo(told.format(**rows[name]))
    if as_json:
        click.echo(json.dumps(rows))


if __name__ == "__main__":
    main()
