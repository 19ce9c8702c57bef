"""Plans from what torch's activation_memory_budget saves, as rows of a comparison.

torch itself runs elsewhere (`tests.bench.baselines.torch_budget`); here its saved sets are read and replayed. A plan
made so saves what torch saves, storage by storage, and shares everything that is recomputed, as torch's backward graph
does: each op runs again at most once, just before the first backward op that needs it, and its value stays until its
last use.

Differences from what torch would run: a value that Lowtide may not compute twice (the output of a random op, say) is
saved, so the plan's gradients are right also where torch's are not; and a storage that torch saves through one of its
views counts as saved for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from simulator.core.problem import Problem
from simulator.core.replay import Timeline
from simulator.planners.outcome import finish
from simulator.studies.comparison import Comparison, Entrant
from traces.errors import PlanError
from traces.records.plan import SAVE, Action, Plan
from traces.records.saved_sets import SavedSet, SavedSets

UNLIMITED_BYTES: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPlan:
    """One of torch's choices as a plan, with its replay."""

    choice: SavedSet
    plan: Plan
    timeline: Timeline


def plans(problem: Problem, sets: SavedSets) -> tuple[TorchPlan, ...]:
    """A plan for each saved set. Raises PlanError if the sets are of another trace."""
    trace = problem.trace
    if sets.trace.fingerprint != trace.meta.fingerprint:
        raise PlanError(
            f"the saved sets were made for the trace {sets.trace.fingerprint} and this is {trace.meta.fingerprint}; "
            "make them again (`python -m tests.bench.baselines.torch_budget`)."
        )
    out = []
    for choice in sets.sets:
        found = finish(problem, f"torch {choice.label}", UNLIMITED_BYTES, actions_for(problem, choice))
        out.append(
            TorchPlan(
                choice=choice,
                plan=replace(found, budget_bytes=None),  # torch was given none in bytes
                timeline=problem.replay(found.actions).timeline,
            )
        )
    return tuple(out)


def actions_for(problem: Problem, choice: SavedSet) -> tuple[Action, ...]:
    """The actions that a saved set means; see the module's text. Raises PlanError if it names a storage that the trace
    does not have.
    """
    trace = problem.trace
    n = len(trace.storages)
    if any(not 0 <= s < n for s in (*choice.saved, *choice.recomputed)):
        raise PlanError(f"a saved set names storages that the trace, which has {n}, does not have.")
    saved = frozenset(choice.saved)
    out = [Action(storage=s) for s in problem.candidates if s not in saved]
    links = [
        s
        for s in range(n)
        if 0 <= trace.storages.producer[s] < problem.forward_end
        and not problem.saved_by_default[s]
        and not problem.pinned[s]
    ]
    again = frozenset(choice.recomputed)
    out += [Action(storage=s, recipe=SAVE) for s in links if s in saved]
    out += [Action(storage=s) for s in links if s in again and s not in saved and problem.rebuildable[s]]
    return tuple(out)


def entrants(comparison: Comparison, sets: SavedSets) -> tuple[Entrant, ...]:
    """torch's plans as rows of a comparison; budgets for which torch makes the same plan share a row.

    A plan whose gradients torch would get wrong does not count as feasible, whatever its peak. Raises PlanError if the
    sets are of another trace.
    """
    same: dict[tuple[tuple[int, ...], tuple[int, ...]], list[TorchPlan]] = {}
    for p in plans(comparison.problem, sets):
        same.setdefault((p.choice.saved, p.choice.recomputed), []).append(p)
    out = []
    for group in same.values():
        first = group[0]
        notes = []
        if not first.choice.valid:
            again = len(first.choice.random_again)
            notes.append(
                f"wrong gradients as torch runs it ({again} random ops again); replayed with them kept"
            )
        if len(group) > 1:
            notes.append("the same plan for " + ", ".join(p.choice.label for p in group[1:]))
        name, seconds = f"torch {first.choice.label}", first.choice.solve_seconds
        row = comparison.judged(name, first.plan, seconds, peer=True, message="; ".join(notes))
        if not first.choice.valid:
            row = replace(row, feasible=False, gap_points=None)
        out.append(row)
    return tuple(out)
