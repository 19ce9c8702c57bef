"""The best plan among the minimum cuts behind the certified bound.

At an instant of the step, the cheapest way to keep less, for a price per byte, is a minimum cut (the argument stands in
`simulator.bounds.bound`; the idea of cutting the joint graph is that of torch's partitioner, He 2022, and of maximum
closures, Picard 1976). A rising price walks through all cuts, from everything kept to everything recomputed; each is
a plan, and the replay decides which fit. Tried are the end of forward and the instants of highest peak.

Counts: the exact peak and time of every cut tried. Ignores: plans that are no cut at any price (those inside the hull),
and what chains hold while they run, so that a cut that keeps little can still have a high peak.
"""

from __future__ import annotations

from typing import Final

from simulator.bounds.bound import bounder_of
from simulator.core.evaluator import evaluator_of
from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.planners.greedy import Found, Search
from simulator.planners.outcome import finish, refuse
from simulator.planners.search import states
from traces.records.plan import Plan

NAME: Final = "min-cut"
MOST_INSTANTS: Final = 8


def plan(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The cheapest cut within the budget.

    Raises:
        BudgetError: no cut tried is.
    """
    evaluator = evaluator_of(problem)
    instants = bounder_of(problem).instants
    clock = limits.clock()
    search = Search(problem, budget_bytes, clock)
    best: Found | None = None
    for op in instants.overfull(budget_bytes)[:MOST_INSTANTS]:
        if best is not None and clock.over:
            break
        for _, state in states(evaluator, problem, instants, op):
            peak_bytes, added_ns, _, _ = search.walk(state)
            time_ns = evaluator.base_time_ns + added_ns
            if peak_bytes <= budget_bytes and (best is None or time_ns < best.time_ns):
                best = Found(state=state.copy(), time_ns=time_ns)
    if best is None:
        raise refuse(problem, NAME, budget_bytes, search.lowest_peak_bytes)
    return finish(problem, NAME, budget_bytes, search.evaluator.actions(best.state))
