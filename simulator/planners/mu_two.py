"""μ-TWO's greedy planner, corrected: evict what costs least per byte at the peak until the plan fits, and tidy it.

The differences from the paper are listed in `mu_two_paper`. Tidying makes a plan cheaper within its budget: what can be
is saved again, and then one dear value after the other, cheap ones evicted to make room for it. The greedy and the
walks of `annealing` pass over values of negligible size: the mean and the deviation of a norm, say, cost nothing to
evict where the norm runs again anyway. Dozens of them make room for one more large value, and so does a cheap value for
a dear one of another size.

Counts: the exact peak and time of every plan tried. Ignores: exchanges of several values for several.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.core.evaluator import State, without
from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.planners.greedy import Costs, Found, Search, segmented
from simulator.planners.outcome import finish, refuse
from traces.records.plan import Plan

# How often more may be evicted for one value, because the peak has moved; how often all values are looked at.
MOST_ROUNDS: Final = 4
PASSES: Final = 3
MOST_EXCHANGES: Final = 1000  # so that it ends on any trace


def plan(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The cheapest plan found within the budget.

    Raises:
        BudgetError: none was found.
    """
    search = Search(problem, budget_bytes, limits.clock())
    best = cheapest(search)
    if best is None:
        raise refuse(problem, "mu-two", budget_bytes, search.lowest_peak_bytes)
    return finish(problem, "mu-two", budget_bytes, search.evaluator.actions(best.state))


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


def tidy(search: Search, state: State) -> Found:
    """Save again what can be, and then what others make room for at less cost; ends when time is over."""
    return exchanged(search, search.save_again(state))


def exchanged(search: Search, found: Found) -> Found:
    """The plan after every exchange that makes it cheaper; the state given is not changed.

    One that evicts rebuilt values is left as it is: it lies near the floor, where single exchanges gain nothing.
    """
    if found.state.evictions:
        return found
    limit = search.evaluations + MOST_EXCHANGES
    for _ in range(PASSES):
        before, offer = found, _Offer(search, found)
        gains = {group: offer.gain_ns(group) for group in _evicted(search, found.state)}
        prices = {g: gain / sum(search.evaluator.nbytes[s] for s in g) for g, gain in gains.items() if gain}
        for group in sorted(prices, key=lambda g: (-prices[g], g)):
            if search.clock.over or search.evaluations >= limit:
                return found
            better = offer.taken_for(group)
            if better is not None:
                found, offer = better, _Offer(search, better)
        if found is before:
            break
    return found


def _evicted(search: Search, state: State) -> list[tuple[int, ...]]:
    """The candidates that are computed again; those that one op makes together, since it runs for all of them."""
    groups: dict[int, list[int]] = {}
    for s in search.problem.candidates:
        if not state.saved[s]:
            groups.setdefault(search.evaluator.producer[s], []).append(s)
    return [tuple(g) for g in groups.values()]


class _Offer:
    """The values that a plan saves, by added time per byte if they were evicted."""

    def __init__(self, search: Search, found: Found) -> None:
        self.search, self.found = search, found
        problem, ev, is_saved = search.problem, search.evaluator, found.state.saved
        self.costs = costs = Costs(ev, found.state)
        links = [s for s in ev.made_forward if ev.nbytes[s] and problem.recompute_only[s]]
        saved = [s for s in (*problem.candidates, *links) if is_saved[s]]
        saved.sort(key=lambda s: ((costs.of(s) + 1) / ev.nbytes[s], s))
        self.is_candidate = np.frombuffer(search.is_candidate, np.uint8)
        self.saved = np.array(saved, np.int64)
        self.nbytes = np.array([ev.nbytes[s] for s in saved], np.int64)
        self.cost_ns = np.array([costs.of(s) for s in saved], np.int64)
        self.slack_bytes = search.budget_bytes - search.walk(found.state)[0]

    def gain_ns(self, group: tuple[int, ...]) -> int:
        """The time saved if all values of one op are saved again."""
        costs = self.costs
        ops = costs.chain(group[0])
        return sum(costs.evaluator.time_ns[k] for k in ops if costs.used[k] == len(group))

    def taken_for(self, group: tuple[int, ...]) -> Found | None:
        """A cheaper plan that saves the group in place of some of what is offered; None if that costs what it saves."""
        search, ev = self.search, self.search.evaluator
        gain_ns = self.gain_ns(group)
        everything = np.ones(len(self.saved), np.bool_)
        if self._cheapest(everything, sum(ev.nbytes[s] for s in group) - self.slack_bytes, gain_ns) is None:
            return None
        state = self.found.state.copy()
        for s in group:
            state.saved[s] = 1
            state.evictions = without(state.evictions, s)
        for _ in range(MOST_ROUNDS):
            peak_bytes, added_ns, peak_step, steps = search.walk(state)
            time_ns = ev.base_time_ns + added_ns
            if time_ns >= self.found.time_ns:
                return None
            excess = peak_bytes - search.budget_bytes
            if excess <= 0:
                return Found(state=state, time_ns=time_ns)
            idle = np.zeros(len(state.saved), np.bool_)
            idle[search.idle_among(self.saved, state, peak_step, steps)] = True
            chosen = self._cheapest(idle[self.saved], excess, gain_ns)
            if chosen is None:
                return None
            gain_ns -= int(self.cost_ns[chosen].sum())
            evicted = self.saved[chosen]
            state.saved[evicted], state.retained[evicted] = 0, self.is_candidate[evicted]
        return None

    def _cheapest(self, among: NDArray[np.bool_], excess: int, gain_ns: int) -> NDArray[np.int64] | None:
        """Positions in `saved` of what frees so many bytes, by price; None if that costs as much as is gained."""
        at = np.flatnonzero(among & (self.cost_ns < gain_ns))
        count = int(np.searchsorted(np.cumsum(self.nbytes[at]), excess)) + 1
        if excess > 0 and (count > len(at) or self.cost_ns[at[:count]].sum() >= gain_ns):
            return None
        return at[:count]
