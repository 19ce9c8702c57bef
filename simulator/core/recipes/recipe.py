"""Recipe: one way in which a step can do without a value for a while."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to do without a storage."""

    kind: str  # one of `simulator.core.recipes.LEVERS`
    storage: int
    # Ops that take another value in place of this storage's, at no cost: op, the op whose value it takes in the trace,
    # and the op whose value it takes instead.
    swaps: tuple[tuple[int, int, int], ...] = ()
    payload: int = -1  # the storage behind those other values
