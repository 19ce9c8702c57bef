"""Rewrites: the ways in which a step is changed before anything is recomputed; each module here is a lever that offers
some.

A lever is a module with `offer(facts)`, which yields rewrites; `edit(editing, rewrite)`, which changes the trace as the
executor's emitter of the same name (`executor.emit.KIND`) changes the graph; and `EXACTNESS`, one of
`traces.records.plan.EXACTNESS`; maybe `choices(facts, rewrites, levers)`, the sets of what it offers that are worth a
plan. `LEVERS` has them by name; `pack` stands there once for each of its formats.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from simulator.core.problem import Problem
from simulator.core.rewrites import fuse, invert, offload, pack, tile
from simulator.core.rewrites.edit import Editing
from traces.errors import PlanError
from traces.records.plan import EXACT, EXACTNESS, Rewrite
from traces.records.trace import Trace

KINDS: Final[dict[str, Any]] = {"tile": tile, "fuse": fuse} | {
    name: lever for name, lever in pack.LEVERS.items() if lever.EXACTNESS == EXACT
}  # that planners take by themselves
LEVERS: Final[dict[str, Any]] = (
    KINDS | {"invert": invert} | pack.LEVERS | {"offload": offload}
)  # and those that must be named


def rewritten(trace: Trace, rewrites: Iterable[Rewrite]) -> Trace:
    """The trace of the step so changed.

    Raises:
        PlanError: a rewrite means nothing in this trace.
    """
    editing, done = Editing(trace), False
    for rewrite in in_order(rewrites):
        LEVERS[rewrite.kind].edit(editing, rewrite)
        done = True
    return editing.trace() if done else trace


def in_order(rewrites: Iterable[Rewrite]) -> list[Rewrite]:
    """Rewrites in the order in which they are made, whatever a plan's is: what takes ops out comes first.

    Raises:
        PlanError: one is of no known kind.
    """
    order = {kind: k for k, kind in enumerate(LEVERS)}
    wanted = list(rewrites)
    if unknown := [r.kind for r in wanted if r.kind not in order]:
        raise PlanError(f"unknown rewrite {unknown[0]!r}; there are {', '.join(order)}.")
    return sorted(wanted, key=lambda r: order[r.kind])


def rewritten_problem(problem: Problem, rewrites: Iterable[Rewrite]) -> Problem:
    """The problem of the step so changed, under the same constraints; made once."""
    key = tuple(rewrites)
    if not key:
        return problem
    return problem.once(("rewritten", key), lambda p: Problem(rewritten(p.trace, key), p.constraints))


def exactness_of(rewrites: Iterable[Rewrite]) -> str:
    """How the gradients of the step so changed agree with the unchanged one's."""
    return max((LEVERS[r.kind].EXACTNESS for r in rewrites), key=EXACTNESS.index, default=EXACTNESS[0])
