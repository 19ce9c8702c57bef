"""Recipe: one way in which a step can do without a value for a while; the first of them is to recompute it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from traces.records.plan import RECOMPUTE

if TYPE_CHECKING:
    from simulator.core.facts import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to do without a storage."""

    kind: str  # one of `simulator.core.recipes.LEVERS`
    storage: int
    # Ops that take another value in place of this storage's, at no cost: op, the op whose value it takes in the trace,
    # and the op whose value it takes instead.
    swaps: tuple[tuple[int, int, int], ...] = ()
    payload: int = -1  # the storage behind those other values


def recompute(facts: Facts) -> Iterator[Recipe]:
    """The op that made a value runs again: for each candidate, and for each value that only chains read."""
    candidates = facts.reloaded.union(facts.candidates)
    for s, only_chains in enumerate(facts.recompute_only):
        if only_chains or s in candidates:
            yield Recipe(kind=RECOMPUTE, storage=s)
