"""Plan the blocks of a rehearsed loop within a budget of all that its process takes of the GPU; rehearse the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from executor.rehearsed.compose import Composed, compose
from simulator.bounds import bounder_of
from simulator.core.limits import parse_budget
from simulator.core.problem import Problem
from simulator.planners.outcome import Infeasible, percent
from simulator.prediction.ask import ask, question
from tracer.rehearsal.peak import ACTIVATIONS, REST
from tracer.rehearsal.record import Rehearsal
from traces.devices import Links
from traces.errors import BudgetError, LowtideError
from traces.files import to_json
from traces.records.plan import ALLOCATED, Action, BlockPlans
from traces.records.trace import digests
from traces.units import show_bytes

MOST_PLANS: Final = 3  # that are rehearsed
CLOSE: Final = 0.01  # of the budget, that a plan may leave
# What torch reserves beyond what plans ask for is then small, and no matter of chance.
SEGMENTS: Final = "expandable_segments:True"
RECORD: Final = "executor.rehearsed.record:recording"
PLANNED: Final = "executor.rehearsed.record:planned"
Run = Callable[..., Rehearsal]  # a rehearsal with further arguments of `tracer.rehearsal.run.rehearse`


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was rehearsed, and the plans that were found."""

    budget_bytes: int
    rehearsals: Mapping[str, Rehearsal]  # untouched, and with the blocks compiled: saved (everything), plan
    plans: BlockPlans | None = None
    # What else could be done, and what the process then takes of the GPU.
    others: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as `execute rehearse --budget --json` prints it."""
        *_, last = self.rehearsals.values()
        return {
            "budget_bytes": self.budget_bytes,
            "within_budget": last.gpu_bytes <= self.budget_bytes,
            "predicted": to_json(self.plans.predicted) if self.plans else None,
            "others": self.others,
            "rehearsals": {name: r.to_json() for name, r in self.rehearsals.items()},
        }


def plan_within(
    budget: str, run: Run, more_ranks: Run | None, links: Links, say: Callable[[str], None]
) -> Found:
    """Rehearse untouched, with the blocks recorded, and by plans, until one keeps the budget.

    The budget is of what nvidia-smi would show, in bytes, or a share of what it shows untouched. A plan that takes more
    or clearly less tells how far to tighten or loosen what it was made for. Raises BudgetError if no plan within the
    budget was found, or none kept it when it was rehearsed. Communication takes the time of `links`; a rank that keeps
    the budget untouched gets a plan if that spares some of it.
    """
    say("Rehearsing it untouched ...")
    untouched = run()
    limit = parse_budget(budget, untouched.gpu_bytes)
    run = partial(run, alloc_conf=untouched.environment.get("alloc_conf") or SEGMENTS)
    kept = Found(budget_bytes=limit, rehearsals={"untouched": untouched})
    fits = untouched.gpu_bytes <= limit
    if fits and more_ranks is None:
        return kept
    with suppress(LowtideError) if fits else nullcontext():
        say("Rehearsing it with its blocks recorded ...")
        saved, step = recorded(run, links)
        if fits and not step.script:
            return kept
        with TemporaryDirectory() as name:
            planned, plans = _rehearsed(limit, saved, step, run, Path(name) / "plan.json", say)
        told = plans.predicted
        if fits and told["added_ns"] >= 0:
            return kept
        kept = replace(
            kept, rehearsals={"untouched": untouched, "saved": saved, "plan": planned}, plans=plans
        )
    if fits:
        return kept
    others = [
        {"what": "every block checkpointed", "gpu_bytes": told["every_block_bytes"], "rehearsed": False,
         "added_percent": told["every_block_percent"]},
        {"what": "half the micro-batch, no plan", "gpu_bytes": _half_the_batch(saved), "rehearsed": False},
    ]  # fmt: skip
    if more_ranks is not None:
        say("Rehearsing it untouched on twice as many ranks ...")
        twice = more_ranks()
        what = f"{twice.ranks} ranks, no plan"
        others.append({"what": what, "gpu_bytes": twice.gpu_bytes, "rehearsed": True})
    return replace(kept, others=(*others,))


def recorded(run: Run, links: Links) -> tuple[Rehearsal, Composed]:
    """Rehearse with everything saved in the blocks, which are recorded, and compose the rank's step of them."""
    with TemporaryDirectory() as name:
        saved = run(around=(RECORD, name))
        step = compose(Path(name), links)
    trace = step.trace
    meta = replace(
        trace.meta,
        model=f"{saved.model}, rank {saved.rank} of {saved.ranks}" if saved.ranks else saved.model,
        torch_version=saved.environment["torch"],
        **digests(trace.ops, trace.storages),
    )
    return saved, replace(step, trace=replace(trace, meta=meta))


def _rehearsed(
    limit: int, saved: Rehearsal, step: Composed, run: Run, file: Path, say: Callable[[str], None]
) -> tuple[Rehearsal, BlockPlans]:
    """The cheapest plan that kept the budget, and its rehearsal."""
    problem = Problem(step.trace)
    before_ns = problem.replay(step.script).timeline.step_time_ns
    # What lies outside of torch, and what it reserves beyond what is asked of it.
    beside = saved.gpu_bytes - saved.steady.requested_bytes
    least_ns = problem.saved.timeline.step_time_ns  # with all gathered parameters kept
    bound_ns = bounder_of(problem).bound(max(1, limit - saved.outside_bytes)).added_time_ns
    decided = {g.storage: g for g in step.gathers if g.storage >= 0}
    of_blocks = (Action(storage=s) for s in problem.candidates if s not in decided)
    whole = problem.replay((*of_blocks, *step.script)).timeline
    # Of the blocks, with what is not hidden of their communication.
    whole_ns = before_ns - sum(g.exposed_ns for g in decided.values())
    best: tuple[float, Rehearsal, BlockPlans] | None = None
    within, lowest, seen = limit - beside, saved.gpu_bytes, set[tuple[Action, ...]]()
    for _ in range(MOST_PLANS):
        answer = ask(problem, question(max(1, within), budget_of=ALLOCATED, levers=()))
        if answer.refusal is not None and not seen:
            assert isinstance(answer.refusal, Infeasible)
            figures = answer.refusal.figures
            lowest = figures["lowest_peak_bytes"] + beside
            floor = figures["floor"]["peak_allocated_bytes"] + saved.outside_bytes
            raise BudgetError(
                f"no plan of the blocks keeps {show_bytes(limit)} of the GPU: the lowest that was found takes about "
                f"{show_bytes(lowest)}. None goes below {show_bytes(floor)}. Give a larger budget, more ranks, or a "
                f"smaller micro-batch: half of it would take about {show_bytes(_half_the_batch(saved))} without a plan."
            )
        if answer.found is None or answer.found.plan.actions in seen:
            break
        actions, after = answer.found.plan.actions, answer.found.planned.timeline
        seen.add(actions)
        added = percent(after.step_time_ns - before_ns, whole_ns)
        again = step.again(actions)
        needs = after.peak_allocated_bytes + beside
        predicted = {
            "budget_bytes": limit,
            "gpu_bytes": needs,
            "added_percent": round(added, 3),
            "added_ns": after.step_time_ns - before_ns,
            "bound_percent": round(percent(least_ns + bound_ns - before_ns, whole_ns), 3),
            "every_block_percent": round(percent(whole.step_time_ns - before_ns, whole_ns), 3),
            "every_block_bytes": whole.peak_allocated_bytes + beside,
            "blocks": len(step.graphs),
            "alloc_conf": saved.environment["alloc_conf"],
            "communication": {
                "assumed": str(step.links),
                "sharded_blocks": len(step.gathers),
                "gathered_again": len(again),
                "exposed_ns": sum(g.exposed_ns for g in again.values()),
            },
        }
        plans = BlockPlans(
            model=saved.model,
            plans=step.plans(actions, answer.found.plan.planner),
            reshard_after_forward={
                g.block: not g.reshards for g in decided.values() if g.reshards != (g.block in again)
            },
            predicted=predicted,
        )
        plans.save(file)
        say(f"Rehearsing a plan for {show_bytes(needs)}, {added:+.1f} % ...")
        planned = run(around=(PLANNED, str(file)))
        lowest, over = min(lowest, planned.gpu_bytes), planned.gpu_bytes - limit
        if over <= 0 and (best is None or added < best[0]):
            best = added, planned, plans
        if -CLOSE * limit <= over <= 0 or (over < 0 and after.step_time_ns == least_ns):
            break
        within = after.peak_allocated_bytes - over
    if best is None:
        raise BudgetError(
            f"no plan was found that keeps {show_bytes(limit)}: {len(seen)} were rehearsed, and the lowest takes "
            f"{show_bytes(lowest)} of the GPU. Give a budget of that or more."
        )
    return best[1:]


def _half_the_batch(saved: Rehearsal) -> int:
    """What half the micro-batch would take: half of all that is neither the optimizer's nor communication's."""
    return saved.gpu_bytes - sum(saved.at_the_peak.get(kind, 0) for kind in (ACTIVATIONS, REST)) // 2
