"""Lever: one way to change the step before anything is recomputed, with all that a planner must know of it.

Each module of this room is one lever, or several that differ in a format: what can be changed (`offer`), in which order
and in what steps it is worth trying (`ladders`), what a change does to the trace (`edit`), and how a plan says it
(`told`). A planner climbs ladders and knows nothing else; the executor builds what the edited trace says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from simulator.core.limits import Levers
from simulator.core.problem import Problem
from simulator.levers.edit import Editing
from traces.records.plan import Rewrite
from traces.records.trace import Trace

SHARES: Final = 4  # of the rewrites of one kind, in their order of worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The question that plans are made for."""

    levers: Levers
    budget_bytes: int = 0
    # What the last byte that recomputation saves costs: ns for so many bytes; (0, 0): nobody knows yet.
    price: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Sets of rewrites of which a plan takes none or one; the next rung changes more than the one before."""

    rungs: tuple[tuple[Rewrite, ...], ...]
    first: Sequence[
        int
    ]  # those to try first: from the best of them the climb goes on, up or down, while that helps
    waits: bool = False  # the step may wait for what runs beside it


def ladder(rungs: Iterable[tuple[Rewrite, ...]]) -> Iterator[Ladder]:
    """The ladder of these rungs, all of which are tried; none where there is no rung."""
    if made := tuple(filter(None, rungs)):
        yield Ladder(rungs=made, first=range(len(made)))


def parts(rewrites: Sequence[Rewrite]) -> list[tuple[Rewrite, ...]]:
    """Rewrites of single values, in the parts of which the first, the first two and so on can be chosen."""
    ends = [-(-len(rewrites) * k // SHARES) for k in range(SHARES + 1)]
    return [tuple(rewrites[a:b]) for a, b in pairwise(ends) if a < b]


def by_shares(_: Problem, rewrites: Sequence[Rewrite], __: Wish) -> Iterator[Ladder]:
    """A quarter of what is offered, half of it, and so on."""
    return ladder(accumulate(parts(rewrites)))


def counted(_: Trace, rewrites: Sequence[Rewrite]) -> str:
    """How many values are changed."""
    return f"{len(rewrites)} values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One lever.

    Attributes:
        name: the kind of its rewrites.
        exactness: how gradients agree with the unchanged step's, one of `traces.records.plan.EXACTNESS`.
        offer: the rewrites that the step allows; first what is worth most.
        edit: changes the trace. Raises PlanError if the rewrite means nothing there.
        ladders: what of the rewrites offered can be chosen.
        adds_ns: by how much a rewrite makes the step longer, at least.
        told: what a plan's rewrites do, in words.
        unasked: plans take it without its being named.
    """

    name: str
    exactness: str
    offer: Callable[[Problem], Iterable[Rewrite]]
    edit: Callable[[Editing, Rewrite], None]
    ladders: Callable[[Problem, Sequence[Rewrite], Wish], Iterator[Ladder]] = by_shares
    adds_ns: Callable[[Problem, Rewrite], int] = lambda problem, rewrite: 0
    told: Callable[[Trace, Sequence[Rewrite]], str] = counted
    unasked: bool = False
