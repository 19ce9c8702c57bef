"""μ-TWO's greedy planner, corrected: evict what costs least per byte at the peak until the plan fits, and tidy it.

The differences from the paper are listed in `mu_two_paper`.
"""

from __future__ import annotations

from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.planners.exchange import tidy
from simulator.planners.greedy import Found, Search, segmented
from simulator.planners.outcome import finish, refuse
from traces.records.plan import Plan


def plan(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The cheapest plan found within the budget.

    Raises:
        BudgetError: none was found.
    """
    search = Search(problem, budget_bytes, limits.clock())
    best = cheapest(search)
    if best is None:
        raise refuse(problem, "mu-two", budget_bytes, search.lowest_peak_bytes)
    return finish(problem, "mu-two", budget_bytes, search.actions(best))


def cheapest(search: Search) -> Found | None:
    """The better of two ways down, or None: from everything saved, and, where that gets stuck or has to evict rebuilt
    values, from segments."""
    state = search.evaluator.state()
    best = tidy(search, state) if search.evict(state) else None
    if best is None or best.state.evictions:
        state = segmented(search)
        if search.evict(state):
            other = tidy(search, state)
            if best is None or other.time_ns < best.time_ns:
                best = other
    return best
