"""Recipes: the ways in which a step can do without a value for a while; each module here is a lever that offers some.

A lever is a module `simulator.core.recipes.KIND` with one function, `offer(problem)`, which reads the trace alone and
yields recipes; the executor has the emitter of the same name (`executor.emit.KIND`). `LEVERS` names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from simulator.core.problem import Problem

LEVERS: Final = ("recompute", "from_output")
BIT: Final = "bit"  # the step's results are those of the untouched one in every bit


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to do without a storage."""

    kind: str  # one of LEVERS
    storage: int
    restore: tuple[int, ...] = ()  # ops that run again to bring the value back
    # Ops that take another value in place of this storage's, at no cost: op, the op whose value it takes in the trace,
    # and the op whose value it takes instead.
    swaps: tuple[tuple[int, int, int], ...] = ()
    payload: int = -1  # the storage behind those other values
    exactness: str = BIT


def offered(problem: Problem) -> Mapping[tuple[str, int], Recipe]:
    """The recipes that all levers offer, by kind and storage; worked out once."""
    return problem.once(offered, _offered)


def _offered(problem: Problem) -> dict[tuple[str, int], Recipe]:
    levers = (import_module(f"simulator.core.recipes.{kind}") for kind in LEVERS)
    return {(r.kind, r.storage): r for lever in levers for r in lever.offer(problem)}
