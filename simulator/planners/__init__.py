"""The planners by name, each a function `(problem, budget_bytes, limits) -> Plan`.

A planner raises `BudgetError` if it finds no plan within the budget; it never returns one over it. Planners are
imported when they are asked for. One that stands elsewhere is named by its place, `module:function`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Final, cast

from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from traces.errors import LowtideError, SpecError
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
    """The planner of that name, or at that place (`module:function`).

    Raises:
        SpecError: there is none.
    """
    place = f"simulator.planners.{REGISTRY[name][0]}" if name in REGISTRY else name
    if name == MU_TWO_SWAP:
        place = "simulator.planners.mu_two_paper:plan_with_swaps"
    module, colon, function = place.partition(":")
    if not colon:
        raise SpecError(f"{name!r} is no planner; there are {', '.join(REGISTRY)}, or give module:function.")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            f"planner {name!r} cannot be imported ({error}); give module:function, with the module on PYTHONPATH."
        ) from None
    return cast(Planner, found)


def plan_with(name: str, problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The plan that the named planner makes.

    Raises:
        SpecError: there is no such planner, or one that stands elsewhere fails or returns something else.
        BudgetError: it finds no plan within the budget.
    """
    planner = find(name)
    try:
        made = planner(problem, budget_bytes, limits)
    except Exception as error:
        if ":" not in name or isinstance(error, LowtideError):
            raise
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise SpecError(
            f"planner {name!r} failed at {at.filename}:{at.lineno}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Plan):
        raise SpecError(f"planner {name!r} returned a {type(made).__name__}; a planner returns a Plan.")
    return made
