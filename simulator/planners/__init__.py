"""Turn a planner's name into the function that makes a plan: `(trace, budget_bytes, limits) -> Plan`.

A planner raises `BudgetError` if it finds no plan within the budget; it never returns one over it. Planners are
imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Final, cast

from simulator.core.limits import DEFAULTS, Limits
from traces.errors import SpecError
from traces.plan import Plan
from traces.trace import Trace

Planner = Callable[[Trace, int, Limits], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One planner: where its function lives, and what it does in one line."""

    function: str  # "module:function"
    summary: str
    whole_modules: bool = False  # whether it can obey the constraint of that name


REGISTRY: Final[dict[str, Entry]] = {
    "search": Entry(
        function="simulator.planners.search:plan",
        summary="the best of all within --seconds: mu-two, then annealing until the bound is reached (the default)",
    ),
    "mu-two": Entry(
        function="simulator.planners.mu_two:plan",
        summary="μ-TWO, corrected: release what costs least per byte at the peak until it fits",
    ),
    "mu-two-paper": Entry(
        function="simulator.planners.mu_two_paper:plan",
        summary="μ-TWO's recompute half as printed (Purandare et al. 2023), its own memory model included",
    ),
    "per-block": Entry(
        function="simulator.planners.segments:plan_per_block",
        summary="what torch.utils.checkpoint around each repeated block does; the budget only decides yes or no",
    ),
    "min-cut": Entry(
        function="simulator.planners.min_cut:plan",
        summary="the best of the minimum cuts behind the certified bound, over all prices per byte",
    ),
    "cheap-ops": Entry(
        function="simulator.planners.cheap_ops:plan",
        summary="recompute cheap ops only (pointwise, norms): what memory limits, never a matrix product",
    ),
    "rotor": Entry(
        function="simulator.planners.rotor:plan",
        summary="the optimal plan for a chain of blocks by rotor's dynamic programme (Beaumont et al. 2019)",
    ),
    "checkpoint-sequential": Entry(
        function="simulator.planners.sequential:plan",
        summary="torch's checkpoint_sequential over the model's blocks, with the best number of segments",
    ),
    "whole-modules": Entry(
        function="simulator.planners.whole_modules:plan",
        summary="only whole modules, each keeping its inputs: a plan to use with torch.utils.checkpoint",
        whole_modules=True,
    ),
    "exact": Entry(
        function="simulator.planners.exact:plan",
        summary="the fastest of all plans, proven by branch and bound; small graphs only",
    ),
    "sqrt-n": Entry(
        function="simulator.planners.segments:plan_sqrt_n",
        summary="√n segments of equal length, their borders kept (Chen et al. 2016)",
    ),
    "recompute-all": Entry(
        function="simulator.planners.constant:plan_recompute_all",
        summary="keep nothing that can be computed again",
    ),
    "keep-all": Entry(
        function="simulator.planners.constant:plan_keep_all",
        summary="keep everything that backward needs: the step as it is",
        whole_modules=True,
    ),
}
DEFAULT: Final = "search"


def default_for(limits: Limits) -> str:
    """The planner where none is named: one that can obey the constraints."""
    return "whole-modules" if limits.constraints.whole_modules else DEFAULT


def find(name: str) -> Planner:
    """The planner of that name.

    Raises:
        SpecError: there is none.
    """
    if name not in REGISTRY:
        raise SpecError(f"{name!r} is no planner; there are {', '.join(REGISTRY)}.")
    module, function = REGISTRY[name].function.split(":")
    return cast(Planner, getattr(import_module(module), function))


def plan_with(name: str, trace: Trace, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The plan that the named planner makes.

    Raises:
        SpecError: there is no such planner, or it cannot obey the constraints, or they mean nothing in this trace.
        BudgetError: it finds no plan within the budget.
    """
    if limits.constraints.whole_modules and name in REGISTRY and not REGISTRY[name].whole_modules:
        able = ", ".join(n for n, entry in REGISTRY.items() if entry.whole_modules)
        raise SpecError(f"{name} recomputes single ops; with --whole-modules, use --planner {able}.")
    return find(name)(trace, budget_bytes, limits)
