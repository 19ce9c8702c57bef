"""The default planner: the best plan that a limited time finds.

First μ-TWO's greedy (`mu_two`). If its plan is as good as the certified bound allows, that is the answer. Else
simulated annealing (`annealing`) from it, from what the bound saves and from the best plan so far, ever cooler, until
the gap to the bound is closed, a walk shows that what is left of it is the bound's slack, or the time is over. Where no
plan can fit, walks tell how low a peak can be. Whatever was found is tidied.

Counts: the exact peak and time of every plan tried, as `simulator.core.problem` counts them. Ignores: reordering of the
step itself. How much it tries depends on `Limits.seconds` and the size of the trace, not on the clock, unless the
machine is so slow that the time runs out first; so equal seeds make equal plans.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from typing import Final

from simulator.bounds import bounder_of
from simulator.core.evaluator import State
from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.planners.annealing import Annealer
from simulator.planners.mu_two import Found, Search, cheapest, segmented, tidy
from simulator.planners.outcome import finish, refuse
from traces.records.plan import Plan

# A plan so close to the bound, in shares of the step, is good enough.
CLOSED: Final = 0.0005
# Where a walk from the best plan gains less than STALE of the step, or closes less than SLACK of the gap, from a plan
# within NEAR_BOUND of the bound, what is left is mostly the bound's own slack, and the search ends.
NEAR_BOUND, STALE, SLACK = 0.03, 0.0001, 1 / 8
# What a step of a walk is reckoned to take: half as much again as it takes on the 2-core machine where it was measured
# (30 to 42 ns; up to twice that on 50,000 ops, whose facts do not fit the caches).
STEP_NS: Final = 48
STEP_NS_PER_OP: Final = 1 / 1300
# A small trace needs fewer moves than there is time for: so many for each pair of values that they are about.
MOVES_PER_PAIR: Final = 14
# How hot each walk begins, and its share of the time. The hottest begins from everything saved, the others from the
# best. Where what the bound saves is less than FAR times the budget at any instant, it stands in for everything, and
# that walk begins as hot as COOL.
AFRESH, COOL, FAR = 1.0, 1 / 8, 1.5
WALKS: Final = ((0.25, 0.04), (AFRESH, 0.06), (0.5, 0.34), (0.25, 0.26), (0.1, 0.16), (0.02, 0.14))
# For how low a peak can be.
LOWEST_SECONDS: Final = 1.0
SLOWEST: Final = 4  # times as long as it is reckoned, a walk may take for that
TRIES: Final = 3
ANY_NS: Final = 1 << 61  # as a target: the first plan within the budget will do


def plan(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The cheapest plan found within the budget. Raises BudgetError: none was found."""
    limits = limits.started()
    greedy = Search(problem, budget_bytes, limits)
    best, bound = cheapest(greedy), bounder_of(problem).bound(budget_bytes)
    least_ns, floor_bytes = problem.trace.time_ns + bound.added_time_ns, bounder_of(problem).floor.peak_bytes
    good_enough_ns = max(least_ns + int(CLOSED * problem.trace.time_ns), limits.enough_ns * limits.hasty)
    short = replace(limits, seconds=min(LOWEST_SECONDS, limits.seconds))
    if best is None and not bound.feasible:
        # The greedy ends where no single step lowers the peak, some percent above what is possible.
        if budget_bytes < floor_bytes < greedy.lowest_peak_bytes and not limits.enough_ns:
            lower, _ = _shortly(problem, floor_bytes, short)
            greedy.lowest_peak_bytes = min(greedy.lowest_peak_bytes, lower.lowest_peak_bytes)
    elif best is None or best.time_ns > good_enough_ns:
        ns_per_byte = bound.price_ns / bound.price_bytes
        best = anneal(greedy, best, limits, least_ns, good_enough_ns, ns_per_byte)
        # The walk that tells how low a peak can be may find what a longer one does not.
        if best is None and not (limits.over and limits.enough_ns):
            best = _shortly(problem, budget_bytes, short)[1]
    if best is None:
        raise refuse(problem, "search", budget_bytes, _reached(problem, greedy.lowest_peak_bytes, short))
    return finish(problem, "search", budget_bytes, greedy.evaluator.actions(best.state))


def _shortly(problem: Problem, budget_bytes: int, limits: Limits) -> tuple[Search, Found | None]:
    """A search of its own for any plan within the budget, with time of its own, and what it found."""
    own = replace(limits, seconds=SLOWEST * limits.seconds, until=inf)
    search = Search(problem, budget_bytes, own.started())
    return search, anneal(search, None, limits, ANY_NS, ANY_NS)


def _reached(problem: Problem, lowest_peak_bytes: int, limits: Limits) -> int:
    """The peak that a refusal names: the lowest that a search came by, or as little more as one within it reaches."""
    for _ in range(0 if limits.enough_ns else TRIES):
        search, found = _shortly(problem, lowest_peak_bytes, limits)
        if found is not None or cheapest(search) is not None:
            break
        lowest_peak_bytes = search.lowest_peak_bytes
    return lowest_peak_bytes


def anneal(
    greedy: Search,
    best: Found | None,
    limits: Limits,
    least_ns: int,
    good_enough_ns: int,
    ns_per_byte: float = 0.0,
) -> Found | None:
    """The best plan that walks find, from the best known, tidied; None: none is within the budget. By the bound the
    step takes `least_ns` at least, and the last byte of the budget is worth `ns_per_byte`; it ends at `good_enough_ns`.
    """
    ev, step_ns = greedy.evaluator, greedy.trace.time_ns
    annealer, n_op = Annealer(ev, greedy.budget_bytes, limits.seed), len(ev.op_id)
    steps = int(limits.seconds * 1e9 / (STEP_NS + STEP_NS_PER_OP * n_op))
    steps = min(steps, MOVES_PER_PAIR * len(annealer.values) ** 2 * n_op)
    walk = partial(annealer.run, clock=greedy.clock, target_ns=good_enough_ns, ns_per_byte=ns_per_byte)
    for heat, share in WALKS:
        before, afresh = best, heat == AFRESH or best is None
        split = bounded(greedy) if heat == AFRESH else None
        start = split or (ev.state() if heat == AFRESH else segmented(greedy) if best is None else best.state)
        annealer.best = best if split is None else None
        found = walk(start, int(share * steps), heat=heat if split is None else COOL)
        if found is not None:
            best = min(best or found, found, tidy(greedy, found.state.copy()), key=lambda f: f.time_ns)
            if best.time_ns <= good_enough_ns:
                break
        if before is not None and best is not None and not afresh:
            gap_ns, gain_ns = before.time_ns - least_ns, before.time_ns - best.time_ns
            if gap_ns < NEAR_BOUND * step_ns and gain_ns < max(STALE * step_ns, SLACK * gap_ns):
                break
    greedy.lowest_peak_bytes = min(greedy.lowest_peak_bytes, annealer.lowest_peak_bytes)
    return best


def bounded(search: Search) -> State | None:
    """Save what the bound saves at its instant; None if that is far over the budget at another."""
    state = search.evaluator.state()
    for s, saved in bounder_of(search.problem).split(search.budget_bytes).items():
        state.saved[s], state.retained[s] = saved, not saved
    return state if search.walk(state)[0] < FAR * search.budget_bytes else None
