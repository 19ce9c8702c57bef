"""μ-TWO's greedy, corrected: evict by bytes freed per added time until a plan fits, then tidy it.

While the simulated peak is over the budget, look at the instant of the peak: among the values that are there but idle,
recompute the one that frees most bytes per added time, and simulate again. The differences from the paper are listed in
`mu_two_paper`. Tidying makes a plan cheaper within its budget: what can be is saved again, and then one dear value
after the other, cheap ones evicted to make room for it. The greedy and the walks of `annealing` pass over values of
negligible size: the mean and the deviation of a norm, say, cost nothing to evict where the norm runs again anyway.
Dozens of them make room for one more large value, and so does a cheap value for a dear one of another size.

Counts: the exact peak and time of every plan tried, as `simulator.core.problem` counts them; the added time of a choice
as the exact union of ops that run again beside those that do already. Ignores: that links that are not retained may run
again more than once (the simulation that follows sees it), exchanges of several values for several, and reordering of
the step itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from simulator.bounds import bounder_of
from simulator.core.evaluator import Evaluator, State, evaluator_of, without
from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.planners.outcome import finish, refuse
from simulator.planners.segments import segmentations
from traces.records.plan import Plan

# Far from the budget, several values are evicted between two simulations: as many as cover this share of the excess.
AT_ONCE = 4
# Values smaller than this share of the largest one are looked at only when nothing larger is left.
NEGLIGIBLE = 4096
# About the most simulations for one plan, so that it ends on any trace; ResNet-152 needs 100 to 1,000.
MOST_EVALUATIONS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A state within the budget, and the time of its step."""

    state: State
    time_ns: int


class Costs:
    """The time that evicting one more value adds, given what is evicted already, and that saving one again takes off.

    A value's chain is its producer and the ops behind it up to values that backward needs anyway; which of those are
    saved does not matter, since the ops behind evicted ones run again already.
    """

    def __init__(self, evaluator: Evaluator, state: State) -> None:
        self.evaluator, self.is_saved = evaluator, state.saved
        self.used = [0] * evaluator.forward  # op -> how many evicted values have it in their chain
        self.chains: dict[int, tuple[int, ...]] = {}
        for s in evaluator.problem.candidates:
            if not state.saved[s]:
                self.evicted(s)

    def chain(self, s: int) -> tuple[int, ...]:
        if s in self.chains:
            return self.chains[s]
        ev, wanted = self.evaluator, self.evaluator.problem.saved_by_default
        seen = {ev.producer[s]}
        stack = [ev.producer[s]]
        while stack:
            for y in ev.needs[stack.pop()]:
                p = ev.producer[y]
                if not wanted[y] and not self.is_saved[y] and p not in seen:
                    seen.add(p)
                    stack.append(p)
        self.chains[s] = tuple(sorted(seen))
        return self.chains[s]

    def of(self, s: int) -> int:
        """Added time if s is evicted too."""
        return sum(self.evaluator.time_ns[k] for k in self.chain(s) if not self.used[k])

    def saves_ns(self, group: Sequence[int]) -> int:
        """Time that it takes off if evicted values that one op makes are saved again."""
        time_ns, used = self.evaluator.time_ns, self.used
        return sum(time_ns[k] for k in self.chain(group[0]) if used[k] == len(group))

    def evicted(self, s: int) -> None:
        """Count s as evicted."""
        for k in self.chain(s):
            self.used[k] += 1


class Search:
    """One budget's search over one trace; deterministic but for the clock.

    That ends `save_again`, and all else only if no plan can fit: then no more is at stake than how low a peak is told.
    """

    def __init__(self, problem: Problem, budget_bytes: int, clock: Limits = DEFAULTS) -> None:
        trace = problem.trace
        self.trace, self.problem, self.budget_bytes = trace, problem, budget_bytes
        self.evaluator = evaluator_of(problem)
        self.lowest_peak_bytes = 1 << 62
        self.large = max((trace.storages.nbytes[s] for s in problem.candidates), default=0) // NEGLIGIBLE
        self.candidates = np.array(problem.candidates, np.int64)
        self.nbytes = np.array(trace.storages.nbytes, np.int64)
        self.last_forward = np.array(self.evaluator.last_forward, np.int64)
        self.evaluations = 0
        self.hopeless = budget_bytes < bounder_of(problem).floor.peak_bytes
        self.clock = clock

    def walk(self, state: State) -> tuple[int, int, int, int]:
        """(peak, added time, peak step, steps), counted."""
        self.evaluations += 1
        found = self.evaluator.walk(state)
        self.lowest_peak_bytes = min(self.lowest_peak_bytes, found[0])
        return found

    @property
    def in_vain(self) -> bool:
        return self.hopeless and self.clock.over

    def evict(self, state: State) -> bool:
        """Evict values in `state`, in place, until the peak is within the budget; False if it does not get there."""
        nbytes = self.evaluator.nbytes
        costs = Costs(self.evaluator, state)
        limit = self.evaluations + MOST_EVALUATIONS // 4
        while self.evaluations < limit and not self.in_vain:
            peak_bytes, _, peak_step, steps = self.walk(state)
            excess = peak_bytes - self.budget_bytes
            if excess <= 0:
                return True
            there = self.idle_among(self.candidates, state, peak_step, steps)
            large = there[self.nbytes[there] >= self.large]  # small ones only if there are no others
            idle = cast(list[int], (large if len(large) else there).tolist())
            wanted = max(1, excess // AT_ONCE)
            for s in sorted(idle, key=lambda s: ((costs.of(s) + 1) / nbytes[s], s)):
                if wanted <= 0:
                    break
                state.saved[s], state.retained[s] = 0, 1
                costs.evicted(s)
                wanted -= nbytes[s]
            if not idle and not self.evict_rebuilt(state, peak_step, steps, excess):
                return False
        return False

    def idle_among(
        self, storages: NDArray[np.int64], state: State, peak_step: int, steps: int
    ) -> NDArray[np.int64]:
        """Return those of these storages that are saved, there at the instant of the peak of the walk before, not in
        use, and needed only later."""
        ev, saved = self.evaluator, storages[state.saved[storages] != 0]
        if peak_step < ev.forward:
            return cast("NDArray[np.int64]", saved[self.last_forward[saved] < peak_step])
        seq = ev.sequence(steps)[: peak_step - ev.forward + 1]
        return cast("NDArray[np.int64]", saved[~ev.read_by(np.where(seq < 0, ~seq, seq))[saved]])

    def evict_rebuilt(self, state: State, peak_step: int, steps: int, excess: int) -> bool:
        """Evict values that a chain rebuilt on its way when the op that demanded the chain has run, those needed last
        first; they are rebuilt once more for their own sake. False if that leaves nothing to try.

        Of the walk before, of so many steps.
        """
        ev, at = self.evaluator, peak_step - self.evaluator.forward
        if at < 0:
            return False
        seq = ev.sequence(steps).tolist()  # ~op where it runs again
        end = next(k for k in range(at, len(seq)) if seq[k] >= 0)
        consumer = seq[end]
        rebuilt = {s for q in seq[: at + 1] if q < 0 for s in ev.creates[~q]}
        rebuilt.difference_update(*(ev.reads[q if q >= 0 else ~q] for q in seq[at : end + 1]))
        rebuilt.difference_update(state.evictions.get(consumer, ()))
        rebuilt = {s for s in rebuilt if state.retained[s] and not state.saved[s]}
        next_use: dict[int, int] = {}
        for k in range(end + 1, len(seq)):
            for s in rebuilt.intersection(ev.reads[seq[k] if seq[k] >= 0 else ~seq[k]]):
                next_use.setdefault(s, k)
        evicted = []
        for s in sorted(next_use, key=lambda s: (-next_use[s], s)):
            if excess <= 0:
                break
            evicted.append(s)
            excess -= ev.nbytes[s]
        if not evicted:
            return False
        state.evictions = {**state.evictions, consumer: (*state.evictions.get(consumer, ()), *evicted)}
        return True

    def save_again(self, state: State) -> Found:
        """Save again what can be saved within the budget, dearest first, until nothing changes."""
        ev = self.evaluator
        limit = self.evaluations + MOST_EVALUATIONS // 2
        _, added_ns, _, _ = self.walk(state)
        room = self.room()
        changed = True
        while changed:
            changed = False
            costs = Costs(ev, state)
            order = sorted(
                (s for s in self.problem.candidates if not state.saved[s]),
                key=lambda s: (-costs.saves_ns([s]) / ev.nbytes[s], s),
            )
            for s in order:
                if ev.nbytes[s] > room[ev.last_forward[s]]:
                    continue
                if self.evaluations >= limit or self.clock.over:
                    return Found(state=state, time_ns=ev.base_time_ns + added_ns)
                before = state.evictions
                state.saved[s] = 1
                state.evictions = without(before, s)
                peak_bytes, its_added_ns, _, _ = self.walk(state)
                if peak_bytes <= self.budget_bytes and its_added_ns <= added_ns:
                    added_ns, room, changed = its_added_ns, self.room(), True
                else:
                    state.saved[s], state.evictions = 0, before
        return Found(state=state, time_ns=ev.base_time_ns + added_ns)

    def room(self) -> list[int]:
        """For each position in forward, how many bytes fit from after it to the end of forward, after the last walk."""
        left = np.append(self.budget_bytes - self.evaluator.peaks(self.evaluator.forward), self.budget_bytes)
        return cast(list[int], np.minimum.accumulate(left[::-1])[::-1][1:].tolist())


def segmented(search: Search) -> State:
    """Save only the borders of segments, as few as meet the budget; the lowest peak of all if none does."""
    lowest = search.evaluator.state(), 1 << 62
    for _, state, peak_bytes in segmentations(search.evaluator):
        search.evaluations += 1
        lowest = min(lowest, (state, peak_bytes), key=lambda of: of[1])
        search.lowest_peak_bytes = min(search.lowest_peak_bytes, peak_bytes)
        if peak_bytes <= search.budget_bytes or search.in_vain:
            break
    return lowest[0]


# How often more may be evicted for one value, because the peak has moved; how often all values are looked at.
MOST_ROUNDS: Final = 4
PASSES: Final = 3
MOST_EXCHANGES: Final = 1000  # so that it ends on any trace


def plan(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The cheapest plan found within the budget. Raises BudgetError: none was found."""
    search = Search(problem, budget_bytes, limits.started())
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
    """Save again what can be, take back evictions, and save what others make room for at less cost; ends when time is
    over."""
    found = search.save_again(state)
    if found.state.evictions:
        found = search.save_again(unevicted(search, found).state)
    return exchanged(search, found)


def unevicted(search: Search, found: Found) -> Found:
    """The plan without the evictions of rebuilt values that neither the budget nor the time asks for."""
    state, best_ns = found.state.copy(), found.time_ns
    for k, s in [(k, s) for k, each in sorted(state.evictions.items()) for s in each]:
        if search.clock.over:
            break
        before, left = state.evictions, tuple(x for x in state.evictions[k] if x != s)
        state.evictions = {j: e for j, e in {**before, k: left}.items() if e}
        peak_bytes, added_ns, _, _ = search.walk(state)
        time_ns = search.evaluator.base_time_ns + added_ns
        if peak_bytes <= search.budget_bytes and time_ns <= best_ns:
            best_ns = time_ns
        else:
            state.evictions = before
    return Found(state=state, time_ns=best_ns)


def exchanged(search: Search, found: Found) -> Found:
    """The plan after every exchange that makes it cheaper; the state given is not changed.

    One that evicts rebuilt values is left as it is: it lies near the floor, where single exchanges gain nothing.
    """
    if found.state.evictions:
        return found
    limit = search.evaluations + MOST_EXCHANGES
    for _ in range(PASSES):
        before, offer = found, _Offer(search, found)
        # What one op makes is saved again together, since it runs for all of it.
        made: dict[int, list[int]] = {}
        for s in search.problem.candidates:
            if not found.state.saved[s]:
                made.setdefault(search.evaluator.producer[s], []).append(s)
        gains = {group: offer.costs.saves_ns(group) for group in map(tuple, made.values())}
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


class _Offer:
    """The values that a plan saves, by added time per byte if they were evicted."""

    def __init__(self, search: Search, found: Found) -> None:
        self.search, self.found = search, found
        problem, ev, is_saved = search.problem, search.evaluator, found.state.saved
        self.costs = costs = Costs(ev, found.state)
        links = [s for s in ev.made_forward if ev.nbytes[s] and problem.recompute_only[s]]
        saved = [s for s in (*problem.candidates, *links) if is_saved[s]]
        saved.sort(key=lambda s: ((costs.of(s) + 1) / ev.nbytes[s], s))
        self.is_candidate = np.zeros(len(ev.nbytes), np.uint8)
        self.is_candidate[list(problem.candidates)] = 1
        self.saved = np.array(saved, np.int64)
        self.nbytes = np.array([ev.nbytes[s] for s in saved], np.int64)
        self.cost_ns = np.array([costs.of(s) for s in saved], np.int64)
        self.slack_bytes = search.budget_bytes - search.walk(found.state)[0]

    def taken_for(self, group: tuple[int, ...]) -> Found | None:
        """A cheaper plan that saves the group in place of some of what is offered; None if that costs what it saves."""
        search, ev = self.search, self.search.evaluator
        gain_ns = self.costs.saves_ns(group)
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
