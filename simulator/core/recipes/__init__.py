"""Recipes: the ways in which a step can do without a value for a while; each module here is a lever that offers some.

A lever is a module with one function, `offer(facts)`, which reads the trace alone and yields recipes; the executor has
the emitter of the same name (`executor.emit.KIND`). `LEVERS` has them by kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from simulator.core.facts import Facts
from simulator.core.recipes import from_output
from simulator.core.recipes.recipe import Recipe, recompute

LEVERS: Final = {"recompute": recompute, "from_output": from_output.offer}


def offered(facts: Facts) -> Mapping[tuple[str, int], Recipe]:
    """The recipes that all levers offer, by kind and storage; worked out once."""
    return facts.once(
        offered, lambda f: {(r.kind, r.storage): r for offer in LEVERS.values() for r in offer(f)}
    )
