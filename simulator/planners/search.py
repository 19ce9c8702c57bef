"""Turn a trace and a budget into the best plan that a limited time finds: the default planner.

First μ-TWO's greedy (`mu_two`); if its plan is as good as the certified bound allows, that is the answer. Else
simulated annealing (`annealing`): a short fine walk from there; coarse ones from several states, which find what to
keep where the budget is tight, and a cool one from the best of them; and a cool fine one from there, until the gap to
the bound is closed or the time is over. Whatever was found is then tidied: what need not be released is kept again.

Counts: the exact peak and time of every plan tried, as `simulator.engine` counts them. Ignores: reordering of the step
itself. How much it tries depends on `Limits.seconds` and the size of the trace, not on the clock, unless the machine
is so slow that the time runs out first; so equal seeds make equal plans.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from simulator.bounds.bound import Bound, bounder_of
from simulator.fast import State
from simulator.graph import analyse
from simulator.planners.annealing import Annealer, Best
from simulator.planners.limits import DEFAULTS, Clock, Limits
from simulator.planners.mu_two import Found, Search, segmented
from simulator.planners.outcome import finish, refuse
from traces.plan import Plan
from traces.trace import Trace

# A plan so close to the bound, in shares of the step, is good enough.
CLOSED: Final = 0.0005
# What one fine move is reckoned to take on a slow machine: so much, and so much for every op of the trace. A coarse one
# takes as long as so many fine ones.
MOVE_NS: Final = 6_000
MOVE_NS_PER_OP: Final = 14
COARSE_MOVE: Final = 3
# A small trace needs fewer moves than there is time for: so many for each pair of values that they are about.
MOVES_PER_PAIR: Final = 40
# Shares of the time for the first fine walk, from the greedy's plan, and for the coarse ones; heat of the cool ones.
FIRST_SHARE: Final = 0.1
COARSE_SHARE: Final = 0.5
COOL_HEAT: Final = 0.25
# A cool coarse walk from the best of the others is so many times as long as one of them.
AGAIN: Final = 1.5


def plan(trace: Trace, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The cheapest plan found within the budget.

    Raises:
        BudgetError: none was found.
    """
    graph = analyse(trace, limits.constraints)
    clock = limits.clock()
    greedy = Search(trace, graph, budget_bytes, clock)
    found = greedy.run()
    bound = bounder_of(trace, graph).bound(budget_bytes)
    if found is None and not bound.feasible:
        raise refuse(trace, graph, "search", budget_bytes, greedy.lowest_peak_bytes)
    good_enough_ns = bound.added_time_ns + int(CLOSED * trace.time_ns)
    if found is None or found.time_ns - trace.time_ns > good_enough_ns:
        found, lowest = _anneal(greedy, found, bound, good_enough_ns, limits, clock)
        if found is None:
            raise refuse(trace, graph, "search", budget_bytes, min(lowest, greedy.lowest_peak_bytes))
    return finish(trace, graph, "search", budget_bytes, greedy.actions(found))


def _anneal(
    greedy: Search, found: Found | None, bound: Bound, good_enough_ns: int, limits: Limits, clock: Clock
) -> tuple[Found | None, int]:
    """The best plan that walks from the greedy's end find, tidied, and the lowest peak seen on the way."""
    trace, ev = greedy.trace, greedy.evaluator
    annealer = Annealer(ev, greedy.graph, greedy.budget_bytes, limits.seed)
    moves = min(
        int(limits.seconds * 1e9 / (MOVE_NS + MOVE_NS_PER_OP * len(ev.op_id))),
        MOVES_PER_PAIR * len(annealer.neighbours) ** 2,
    )
    walk = partial(annealer.run, target_ns=good_enough_ns, ns_per_byte=bound.price_ns / bound.price_bytes)
    if found is not None:
        annealer.best = Best(state=found.state.copy(), added_ns=found.time_ns - trace.time_ns)
        walk(found.state, int(FIRST_SHARE * moves), clock.share(FIRST_SHARE), heat=COOL_HEAT)
        starts = [ev.state(), annealer.best.state]
    else:
        starts = [ev.state(), *_ends(greedy)]
    coarse = int(COARSE_SHARE * moves)
    until = clock.share(COARSE_SHARE)
    parts = len(starts) + AGAIN
    one = coarse / parts / COARSE_MOVE
    for k, start in enumerate(starts):
        walk(start, int(one), until.share(1 / (parts - k)), coarse=True)
    if annealer.best is not None:
        walk(annealer.best.state, int(AGAIN * one), until, coarse=True, heat=COOL_HEAT)
    rest = moves - coarse - (0 if found is None else int(FIRST_SHARE * moves))
    if annealer.best is None:  # nearest to the budget
        start = min(starts, key=lambda state: ev.excess(state, greedy.budget_bytes)[2])
        best = walk(start, rest, clock)
    else:
        best = walk(annealer.best.state, rest, clock, heat=COOL_HEAT)
    if best is None:
        return None, annealer.lowest_peak_bytes
    return greedy.tidy(best.state.copy()), annealer.lowest_peak_bytes


def _ends(greedy: Search) -> list[State]:
    """Where the greedy ends without a plan, from everything kept and from segments."""
    down, segments = greedy.evaluator.state(), segmented(greedy)
    greedy.release(down)
    greedy.release(segments)
    return [down, segments]
