"""Rewrites: the ways in which a step is changed before anything is recomputed; each module here is a lever that offers
some.

A lever is a module with `offer(facts)`, which yields rewrites; `edit(editing, rewrite)`, which changes the trace as the
executor's emitter of the same name (`executor.emit.KIND`) changes the graph; and `EXACTNESS`, one of
`traces.records.plan.EXACTNESS`; maybe `choices(problem, rewrites, levers, budget_bytes)`, the sets of what it offers
that are worth a plan; where it takes time or may take some away, `adds_ns(facts, rewrite)`, by how much the step takes
longer at least. `LEVERS` has them by name; `pack` stands there once for each of its formats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from simulator.core.problem import Problem
from simulator.core.rewrites import invert, offload, pack, tile
from simulator.core.rewrites.edit import Editing
from traces.errors import PlanError
from traces.records.plan import EXACT, EXACTNESS, Rewrite
from traces.records.trace import Trace
from traces.records.validate import validate

_EXACT_PACKS = {name: lever for name, lever in pack.LEVERS.items() if lever.EXACTNESS == EXACT}
# What planners take by themselves; and with what must be named.
KINDS: Final[dict[str, Any]] = {"tile": tile} | _EXACT_PACKS
LEVERS: Final[dict[str, Any]] = KINDS | {"invert": invert} | pack.LEVERS | {"offload": offload}


def rewritten(trace: Trace, rewrites: Iterable[Rewrite]) -> Trace:
    """The trace of the step so changed. Raises PlanError if a rewrite means nothing in this trace."""
    made = _edited(Editing(trace), rewrites)
    return made.trace() if rewrites else trace


def _edited(editing: Editing, rewrites: Iterable[Rewrite]) -> Editing:
    for rewrite in in_order(rewrites):
        LEVERS[rewrite.kind].edit(editing, rewrite)
    return editing


def in_order(rewrites: Iterable[Rewrite]) -> list[Rewrite]:
    """Rewrites in the order in which they are made, whatever a plan's is: what takes ops out comes first. Raises
    PlanError if one is of no known kind.
    """
    order = {kind: k for k, kind in enumerate(LEVERS)}
    wanted = list(rewrites)
    if unknown := [r.kind for r in wanted if r.kind not in order]:
        raise PlanError(f"unknown rewrite {unknown[0]!r}; there are {', '.join(order)}.")
    return sorted(wanted, key=lambda r: order[r.kind])


def rewritten_problem(problem: Problem, rewrites: Iterable[Rewrite]) -> Problem:
    """The problem of the step so changed, under the same constraints; made once. Its trace has no fingerprints.

    Raises:
        PlanError: a rewrite means nothing in this trace.
        TraceError: the trace so changed contradicts itself.
    """
    return checked(draft_problem(problem, rewrites))


def checked(step: Problem) -> Problem:
    """The same step; raises TraceError if its trace contradicts itself."""
    step.once(validate, lambda p: validate(p.trace))
    return step


def draft_problem(problem: Problem, rewrites: Iterable[Rewrite]) -> Problem:
    """The same, its trace not checked: for a comparison of many."""
    key = tuple(replace(r, op="", error=None) for r in rewrites)  # by what the edits ask for
    if not key:
        return problem
    known: dict[Any, Any] = problem.once(Editing, lambda p: {})
    trace = problem.trace
    return problem.once(
        ("rewritten", key),
        lambda p: Problem(_edited(Editing(trace, known), rewrites).trace(draft=True), p.constraints),
    )


def exactness_of(rewrites: Iterable[Rewrite]) -> str:
    """How the gradients of the step so changed agree with the unchanged one's."""
    return max((LEVERS[r.kind].EXACTNESS for r in rewrites), key=EXACTNESS.index, default=EXACTNESS[0])
