"""Plans from the cuts behind the certified bound: what a cut saves is saved, and what does not fit then evicted.

At one instant the cuts are the cheapest way to free any number of bytes there, so a plan made from the one that just
fits costs little more than the bound, unless other instants or the recomputations themselves need the memory.

Source: the cuts of `simulator.bounds.bound`, step 4 of the argument; corrected by the `greedy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from typing import Final

from simulator.bounds.bound import Bound, bounder_of
from simulator.bounds.instants import Instants
from simulator.core.evaluator import Evaluator, State
from simulator.core.problem import Problem
from simulator.planners.greedy import Found, Search
from simulator.planners.mu_two import tidy

INSTANTS: Final = 4  # tried for one budget: that of the bound and others of high peak


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
    instants = bounder_of(search.problem).instants
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
