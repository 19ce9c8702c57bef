"""Plans from what torch's activation_memory_budget saves, replayed.

A plan made so saves what torch saves, storage by storage, and shares everything that is recomputed, as torch's backward
graph does: each op runs again at most once, just before the first backward op that needs it, and its value stays until
its last use.

Differences from what torch would run: a value that Lowtide may not compute twice (the output of a random op, say) is
saved, so the plan's gradients are right also where torch's are not; and a storage that torch saves through one of its
views counts as saved for all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from simulator.core.problem import Problem
from simulator.core.replay import Timeline
from simulator.planners.outcome import finish
from tests.bench.baselines.saved_by_torch import SavedSet
from traces.errors import PlanError
from traces.files.json_records import Form, JsonRecord
from traces.records.plan import SAVE, Action, Plan
from traces.records.trace import TraceMeta

UNLIMITED_BYTES: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSets(JsonRecord):
    """What torch chose for one trace, under several budgets."""

    form: ClassVar = Form(
        name="saved sets",
        version_key="saved_version",
        version=1,
        advice="make them with `python -m tests.bench.baselines.torch_budget TRACE -o FILE`",
        error=PlanError,
    )
    trace: TraceMeta
    source: str  # the other system, in words
    capture_seconds: float  # to build and capture the graph, once for all sets
    sets: tuple[SavedSet, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPlan:
    """One of torch's choices as a plan, with its replay."""

    choice: SavedSet
    plan: Plan
    timeline: Timeline


def actions_saving(problem: Problem, saved: Collection[int], again: Collection[int]) -> tuple[Action, ...]:
    """A plan that saves these storages and computes those again."""
    links = [
        s
        for s, op in enumerate(problem.trace.storages.producer)
        if 0 <= op < problem.forward_end and not problem.saved_by_default[s] and not problem.pinned[s]
    ]
    return (
        *(Action(storage=s) for s in problem.candidates if s not in saved),
        *(Action(storage=s, recipe=SAVE) for s in links if s in saved),
        *(Action(storage=s) for s in links if s in again and s not in saved and problem.rebuildable[s]),
    )


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
    n = len(problem.trace.storages)
    if any(not 0 <= s < n for s in (*choice.saved, *choice.recomputed)):
        raise PlanError(f"a saved set names storages that the trace, which has {n}, does not have.")
    return actions_saving(problem, frozenset(choice.saved), frozenset(choice.recomputed))
