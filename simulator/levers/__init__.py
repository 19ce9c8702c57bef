"""Levers: the ways in which a step is changed before anything is recomputed, in the order in which they are made.

Each module of this room is one lever, or several that differ in a format: what can be changed (`offer`), in which order
and in what steps it is worth trying (`ladders`), what a change does to the trace (`edit`) and how
a plan says it (`told`). A planner climbs ladders and knows nothing else; the executor builds what the edited
trace says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final, cast

from simulator.core.formats import FORMATS
from simulator.core.limits import Levers
from simulator.core.problem import Problem
from simulator.levers.edit import Editing, Ladder, by_shares, counted
from traces.errors import PlanError
from traces.records.plan import APPROXIMATE, EXACT, EXACTNESS, FP, Plan, Rewrite
from traces.records.store import validate
from traces.records.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One lever; its module is imported when it is asked for something."""

    name: str  # the kind of its rewrites
    exactness: str  # how gradients agree with the unchanged step's
    module: str
    unasked: bool = False  # plans take it without its being named

    def _ask(self, function: str, *of: Any, otherwise: Any = None) -> Any:
        return getattr(import_module(f"simulator.levers.{self.module}"), function, otherwise)(*of)

    def offer(self, problem: Problem) -> Iterable[Rewrite]:
        """The rewrites that the step allows; first what is worth most."""
        return cast(Iterable[Rewrite], self._ask("offer", problem, self.name))

    def ladders(self, problem: Problem, rewrites: Sequence[Rewrite], levers: Levers) -> Iterator[Ladder]:
        """What of the rewrites offered can be chosen."""
        of = problem, rewrites, levers
        return cast(Iterator[Ladder], self._ask("ladders", *of, otherwise=by_shares))

    def edit(self, editing: Editing, rewrite: Rewrite) -> None:
        """Change the trace. Raises PlanError if the rewrite means nothing there."""
        self._ask("edit", editing, rewrite)

    def told(self, trace: Trace, rewrites: Sequence[Rewrite]) -> str:
        """What a plan's rewrites do, in words."""
        return str(self._ask("told", trace, rewrites, otherwise=counted))


def _packs(*, exact: bool) -> list[Lever]:
    of, names = EXACT if exact else APPROXIMATE, (n for n, format in FORMATS.items() if format.exact == exact)
    return [Lever(name=n, exactness=of, module="pack", unasked=exact) for n in names]


LEVERS: Final[dict[str, Lever]] = {
    lever.name: lever
    for lever in (
        Lever(name="tile", exactness=FP, module="tile", unasked=True),
        Lever(name="from_output", exactness=EXACT, module="invert", unasked=True),
        *_packs(exact=True),
        Lever(name="invert", exactness=FP, module="invert"),
        *_packs(exact=False),
        Lever(name="offload", exactness=EXACT, module="offload"),
    )
}
UNASKED: Final = tuple(name for name, lever in LEVERS.items() if lever.unasked)


def edited(editing: Editing, rewrites: Iterable[Rewrite]) -> Editing:
    """Return the same editing, once the rewrites are made. Raises PlanError if one means nothing in its trace."""
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
    """The problem of the step so changed, without fingerprints; made once. Raises PlanError: a rewrite means nothing in
    this trace; TraceError: the trace so changed contradicts itself."""
    return checked(draft_problem(problem, rewrites))


def checked(step: Problem) -> Problem:
    """Return the same step; raises TraceError if its trace contradicts itself."""
    step.once(validate, lambda p: validate(p.trace))
    return step


def draft_problem(problem: Problem, rewrites: Iterable[Rewrite]) -> Problem:
    """Return the same, its trace not checked: for a comparison of many."""
    key = tuple(replace(r, op="", error=None) for r in rewrites)  # by what the edits ask for
    if not key:
        return problem
    known: dict[Any, Any] = problem.once(Editing, lambda p: {})
    trace = problem.trace
    return problem.once(
        ("rewritten", key),
        lambda p: Problem(edited(Editing(trace, known), rewrites).trace(draft=True)),
    )


def exactness_of(rewrites: Iterable[Rewrite]) -> str:
    """How the gradients of the step so changed agree with the unchanged one's."""
    return max((LEVERS[r.kind].exactness for r in rewrites), key=EXACTNESS.index, default=EXACTNESS[0])


def rewrites_in_words(trace: Trace, plan: Plan) -> Iterator[str]:
    """How the step is changed, a line a kind."""
    by_kind: dict[str, list[Rewrite]] = {}
    for r in plan.rewrites:
        by_kind.setdefault(r.kind, []).append(r)
    for kind, rewrites in by_kind.items():
        errors = [r.error for r in rewrites if r.error is not None]
        error = f"; relative error of the gradient {max(errors):.1e}" if errors else ""
        yield f"{kind}: {LEVERS[kind].told(trace, rewrites)}{error}"
