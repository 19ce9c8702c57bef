"""The planners by name, each a function `(problem, budget_bytes, limits) -> Plan`.

A planner raises `BudgetError` if it finds no plan within the budget; it never returns one over it. Planners are
imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final, cast

from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from traces.errors import SpecError
from traces.records.plan import Plan

Planner = Callable[[Problem, int, Limits], Plan]

# Name -> where its function stands in this room, and what it does in one line.
REGISTRY: Final[dict[str, tuple[str, str]]] = {
    "search": (
        "search:plan",
        "the best of all within --seconds: mu-two, then annealing until the bound is reached (the default)",
    ),
    "mu-two": ("mu_two:plan", "μ-TWO, corrected: evict what costs least per byte at the peak until it fits"),
    "mu-two-paper": (
        "mu_two_paper:plan",
        "μ-TWO's recompute half as printed (Purandare et al. 2023), its own memory model included",
    ),
    "per-block": (
        "segments:plan_per_block",
        "what torch.utils.checkpoint around each repeated block does; the budget only decides yes or no",
    ),
    "checkpoint-sequential": (
        "segments:plan_checkpoint_sequential",
        "torch's checkpoint_sequential over the model's blocks, with the best number of segments",
    ),
    "sqrt-n": ("segments:plan_sqrt_n", "√n segments of equal length, their borders saved (Chen et al. 2016)"),
    "recompute-all": ("segments:plan_recompute_all", "save nothing that can be computed again"),
    "save-all": ("segments:plan_save_all", "save everything that backward needs: the step as it is"),
}
MU_TWO_SWAP: Final = "mu-two-swap"  # also copies to host memory, so it must be named
DEFAULT: Final = "search"
SAVE_ALL: Final = "save-all"


def find(name: str) -> Planner:
    """The planner of that name. Raises SpecError: there is none."""
    if name not in REGISTRY and name != MU_TWO_SWAP:
        raise SpecError(f"{name!r} is no planner; there are {', '.join((*REGISTRY, MU_TWO_SWAP))}.")
    place = REGISTRY[name][0] if name in REGISTRY else "mu_two_paper:plan_with_swaps"
    module, _, function = place.partition(":")
    return cast(Planner, getattr(import_module(f"simulator.planners.{module}"), function))


def plan_with(name: str, problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The plan that the named planner makes. Raises SpecError: there is none; BudgetError: no plan is within it."""
    return find(name)(problem, budget_bytes, limits)
