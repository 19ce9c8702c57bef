"""Recompute: a value comes back because the op that made it runs again, after whatever that op needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.core.recipes import Recipe
from traces.plan import RECOMPUTE

if TYPE_CHECKING:
    from simulator.core.problem import Problem


def offer(problem: Problem) -> Iterator[Recipe]:
    """A recipe for each candidate, and for each value that only chains read."""
    candidates = frozenset(problem.candidates)
    for s, producer in enumerate(problem.trace.storages.producer):
        if problem.recompute_only[s] or s in candidates:
            yield Recipe(kind=RECOMPUTE, storage=s, restore=(producer,))
