"""Recompute: a value comes back because the op that made it runs again, after whatever that op needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.core.recipes.recipe import Recipe
from traces.records.plan import RECOMPUTE

if TYPE_CHECKING:
    from simulator.core.facts import Facts


def offer(facts: Facts) -> Iterator[Recipe]:
    """A recipe for each candidate, and for each value that only chains read."""
    candidates = facts.reloaded.union(facts.candidates)
    for s, only_chains in enumerate(facts.recompute_only):
        if only_chains or s in candidates:
            yield Recipe(kind=RECOMPUTE, storage=s)
