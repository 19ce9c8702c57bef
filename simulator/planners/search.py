"""The default planner: the best plan that a limited time finds.

First μ-TWO's greedy (`mu_two`) and plans from the cuts behind the certified bound: at one instant these are the
cheapest way to free any number of bytes there, so a plan made from the one that just fits costs little more than the
bound, unless other instants or the recomputations themselves need the memory. If the better one is as good as the bound
allows, that is the answer. Else simulated annealing (`annealing`), until the gap to the bound is
closed, the first walks show that what is left of it is the bound's slack, or the time is over: short cool walks from
these plans and from the best, again and again, since one alone often ends in a plan that no single change improves;
then cooler and cooler ones from the best, first coarse ones, which find what to save where the budget is tight. Where
no plan is known yet, coarse walks come first; they also tell how low a peak can be where no plan can fit. Whatever was
found is then tidied: what need not be evicted is saved again.

Counts: the exact peak and time of every plan tried, as `simulator.core.problem` counts them. Ignores: reordering of the
step itself. How much it tries depends on `Limits.seconds` and the size of the trace, not on the clock, unless the
machine is so slow that the time runs out first; so equal seeds make equal plans.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Final

from simulator.bounds import Bound, Instants, bounder_of
from simulator.core.evaluator import Evaluator, State
from simulator.core.from_output import taken, with_swaps
from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.planners.annealing import Annealer
from simulator.planners.mu_two import Found, Search, cheapest, segmented, tidy
from simulator.planners.outcome import finish, refuse
from simulator.planners.segments import segmentations
from traces.errors import BudgetError
from traces.records.plan import Plan

# A plan so close to the bound, in shares of the step, is good enough.
CLOSED: Final = 0.0005
# Where the walks up to the first one from the best plan gain less than STALE of the step, or close less than SLACK of
# the gap, from a plan within NEAR_BOUND of the bound, what is left is mostly the bound's own slack, and the search
# ends. Of 30 such budgets of nine traces, all other walks gained less than STALE on 26, and at most 0.1 points of the
# step on four. Where they gained more, those first ones had closed more than a quarter of the gap.
NEAR_BOUND, STALE, SLACK = 0.03, 0.0001, 1 / 8
# What a step of a walk is reckoned to take: half as much again as it takes on the 2-core machine where it was measured
# (10 to 14 ns; up to twice that on 50,000 ops, whose facts do not fit the caches).
STEP_NS: Final = 16
STEP_NS_PER_OP: Final = 1 / 4000
# A small trace needs fewer moves than there is time for: so many for each pair of values that they are about.
MOVES_PER_PAIR: Final = 40
# Shares of the time. Where a plan is known: a coarse walk from everything saved, then WALK_ROUNDS times a short one
# from each plan and from the best. Where none is: coarse walks. What is left is for walks from the best: whether
# coarse, how hot, and their share of that. The last walks were tried on ResNet-152 and DenseNet-121 where the bound is
# far: with four fine walks at COOL_HEAT in their place, plans near the floor added one point of the step more.
COARSE_FIRST: Final = 0.06
WALK_ROUNDS, SHORT_SHARE = 3, 0.04
COARSE_SHARE: Final = 1 / 3
LAST_WALKS: Final = ((True, 0.5, 0.38), (True, 0.25, 0.28), (False, 0.1, 0.17), (False, 0.02, 0.17))
COOL_HEAT: Final = 0.25
INSTANTS: Final = 4  # whose cuts are tried: that of the bound and others of high peak
# For how low a peak can be: at 0.5 and 0.35 the same peaks in ResNet-152, at 0.25 one 2 % higher.
LOWEST_SECONDS: Final = 0.35
ANY_NS: Final = 1 << 61  # as a target: the first plan within the budget will do

Walk = Callable[..., Found | None]


def plan(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The cheapest plan found within the budget.

    Where ops can take other values at no cost, it is looked for with all of them doing so first.

    Raises:
        BudgetError: none was found.
    """
    limits = limits.together()
    swapped, recipes = taken(problem)
    least_bytes = bounder_of(swapped).floor.peak_bytes if recipes else 0
    if recipes and least_bytes <= budget_bytes < problem.saved.timeline.peak_allocated_bytes:
        with contextlib.suppress(BudgetError):
            found = _search(swapped, budget_bytes, limits).actions
            return finish(problem, "search", budget_bytes, with_swaps(recipes, found))
    return _search(problem, budget_bytes, limits)


def _search(problem: Problem, budget_bytes: int, limits: Limits) -> Plan:
    trace = problem.trace
    greedy = Search(problem, budget_bytes, limits.clock())
    bound = bounder_of(problem).bound(budget_bytes)
    good_enough_ns = trace.time_ns + bound.added_time_ns + int(CLOSED * trace.time_ns)
    known = [found] if (found := cheapest(greedy)) else []
    if not known and not bound.feasible:
        raise refuse(problem, "search", budget_bytes, _lowest_peak(greedy, limits))
    if not known or known[0].time_ns > good_enough_ns:
        known += [found] if (found := best_cut(greedy, bound, good_enough_ns - trace.time_ns)) else []
    best = min(known, key=lambda found: found.time_ns, default=None)
    if best is None or best.time_ns > good_enough_ns:
        best = _anneal(greedy, known, bound, good_enough_ns, limits)
    if best is None:
        raise refuse(problem, "search", budget_bytes, greedy.lowest_peak_bytes)
    return finish(problem, "search", budget_bytes, greedy.evaluator.actions(best.state))


def _steps(seconds: float, ops: int) -> int:
    """How many steps walks over so many ops are reckoned to take in that time."""
    return int(seconds * 1e9 / (STEP_NS + STEP_NS_PER_OP * ops))


def _lowest_peak(greedy: Search, limits: Limits) -> int:
    """The lowest peak that coarse walks for a budget of the floor itself find, where the budget is below the floor: the
    greedy ends where no single step lowers the peak, some percent above that."""
    ev, floor_bytes = greedy.evaluator, bounder_of(greedy.problem).floor.peak_bytes
    if not greedy.budget_bytes < floor_bytes < greedy.lowest_peak_bytes:
        return greedy.lowest_peak_bytes
    annealer = Annealer(ev, greedy.problem, floor_bytes, limits.seed)
    seconds = min(LOWEST_SECONDS, limits.seconds)
    clock = replace(limits, seconds=seconds).clock()
    starts = [ev.state(), min(segmentations(ev), key=lambda found: found.peak_bytes).state]
    for start in starts:
        steps = _steps(seconds, len(ev.op_id)) // len(starts)
        annealer.run(start, steps, clock=clock, target_ns=ANY_NS, coarse=True)
    return min(greedy.lowest_peak_bytes, annealer.lowest_peak_bytes)


# Plans from cuts


def states(
    evaluator: Evaluator, problem: Problem, instants: Instants, op: int
) -> Iterator[tuple[int, State]]:
    """(bytes in memory at the instant, state) by rising price per byte; the first saves everything.

    One and the same State is yielded again and again, edited in place: copy what is to last.
    """
    setting, nbytes = instants.setting(op), evaluator.nbytes
    level = setting.unavoidable_bytes + sum(compress(nbytes, setting.wanted))
    candidates = frozenset(problem.candidates)
    state = evaluator.state()
    saved, retained = state.saved.copy(), state.retained.copy()
    touched: dict[int, tuple[int, ...]] = {}
    freed: dict[int, int] = {}
    yield level, state
    for cut in instants.cuts(op):
        # The component's earlier cut is taken back, this one takes its place.
        for s in touched.get(cut.component, ()):
            state.saved[s], state.retained[s] = saved[s], retained[s]
        evicted = tuple(s for s in cut.evicted if s in candidates)
        for s in evicted:
            state.saved[s], state.retained[s] = 0, 1
        for s in cut.saved:
            state.saved[s] = 1
        touched[cut.component] = (*evicted, *cut.saved)
        frees = sum(nbytes[s] for s in cut.evicted) - sum(nbytes[s] for s in cut.saved)
        level += freed.get(cut.component, 0) - frees
        freed[cut.component] = frees
        yield level, state


def best_cut(search: Search, bound: Bound, good_enough_added_ns: int) -> Found | None:
    """The cheapest plan that cuts lead to, None if none of them fits; ends at an added time that is good enough."""
    instants = bounder_of(search.problem)
    ops = dict.fromkeys((bound.op, *instants.overfull(search.budget_bytes)[:INSTANTS]))
    best: Found | None = None
    for op in list(ops)[:INSTANTS]:
        for state in _starts(search, instants, op):
            if search.clock.over or (best and best.time_ns - search.trace.time_ns <= good_enough_added_ns):
                return best
            if search.evict(state):
                found = tidy(search, state)
                if best is None or found.time_ns < best.time_ns:
                    best = found
    return best


def _starts(search: Search, instants: Instants, op: int) -> list[State]:
    """Around the first state that fits at the instant: the one before, that one, and the next that fits everywhere.

    How far to go for the last is doubled each time, so that few are looked at.
    """
    over, fitting, away = None, list[State](), 0
    for level, state in states(search.evaluator, search.problem, instants, op):
        if level > search.budget_bytes:
            over = state.copy()
            continue
        away += 1
        if away & (away - 1):
            continue
        fits = search.walk(state)[0] <= search.budget_bytes
        if away == 1 or fits:
            fitting.append(state.copy())
        if fits:
            break
    return fitting if over is None else [over, *fitting]


# Walks


def _anneal(
    greedy: Search, known: list[Found], bound: Bound, good_enough_ns: int, limits: Limits
) -> Found | None:
    """The best plan that walks find, tidied."""
    ev = greedy.evaluator
    annealer = Annealer(ev, greedy.problem, greedy.budget_bytes, limits.seed)
    n_op = len(ev.op_id)
    steps = min(_steps(limits.seconds, n_op), MOVES_PER_PAIR * len(annealer.neighbours) ** 2 * n_op)
    walk = partial(
        annealer.run,
        clock=greedy.clock,
        target_ns=good_enough_ns,
        ns_per_byte=bound.price_ns / bound.price_bytes,
    )
    if known:
        best: Found | None = _improve(annealer, walk, greedy, known, steps, bound)
    else:
        best = _find(annealer, walk, greedy, steps)
    greedy.lowest_peak_bytes = min(greedy.lowest_peak_bytes, annealer.lowest_peak_bytes)
    return tidy(greedy, best.state.copy()) if best else None


def _improve(
    annealer: Annealer, walk: Walk, greedy: Search, known: list[Found], steps: int, bound: Bound
) -> Found:
    """The best plan of walks that start at plans within the budget."""
    time_ns = greedy.trace.time_ns
    start = annealer.best = min(known, key=lambda found: found.time_ns)
    gap_ns = start.time_ns - time_ns - bound.added_time_ns
    worth_ns = max(STALE * time_ns, SLACK * gap_ns) if gap_ns < NEAR_BOUND * time_ns else 0
    best = walk(greedy.evaluator.state(), int(COARSE_FIRST * steps), coarse=True) or start
    for _ in range(WALK_ROUNDS):
        for found in known:
            best = walk(found.state, int(2 / len(known) * SHORT_SHARE * steps), heat=COOL_HEAT) or best
            if found is start and start.time_ns - best.time_ns < worth_ns:
                return best
        best = walk(best.state, int(SHORT_SHARE * steps), heat=COOL_HEAT) or best
    rest = int((1 - COARSE_FIRST - 3 * WALK_ROUNDS * SHORT_SHARE) * steps)
    return _last_walks(annealer, walk, greedy, rest, best)


def _find(annealer: Annealer, walk: Walk, greedy: Search, steps: int) -> Found | None:
    """The best plan of walks that start from everything saved, and where the greedy ends without one."""
    ev = greedy.evaluator
    starts = [ev.state(), ev.state(), segmented(greedy)]
    for state in starts[1:]:
        greedy.evict(state)
    for start in starts:
        walk(start, int(COARSE_SHARE / len(starts) * steps), coarse=True)
    rest = int((1 - COARSE_SHARE) * steps)
    if annealer.best is not None:
        return _last_walks(annealer, walk, greedy, rest, annealer.best)
    nearest = min(starts, key=lambda state: ev.excess(state, greedy.budget_bytes))
    return walk(nearest, rest)


def _last_walks(annealer: Annealer, walk: Walk, greedy: Search, steps: int, best: Found) -> Found:
    """The best plan of cooler and cooler walks from the best, tidied where a fine walk goes on from a coarse one's."""
    for coarse, heat, share in LAST_WALKS:
        best = walk(best.state, int(share * steps), coarse=coarse, heat=heat) or best
        if coarse:
            found = tidy(greedy, best.state.copy())
            if found.time_ns < best.time_ns:
                best = annealer.best = found
    return best
