"""The fastest of all plans for a small trace, proven by branch and bound: the oracle for planners.

The problem is that of Checkmate (Jain et al., MLSys 2020), "which values are there at each op", within what a schedule
can express: each value of forward is kept; or recomputed for every reader anew, or shared and dropped after any of the
ops that need it; links between values are saved, shared or made anew. It is solved by depth-first branch and bound
(Land and Doig 1960) over values, largest first, since integer programmes have no exact form of the replay's peak. A
branch is cut when a bound on its time is no better than the best plan, or one on its memory is over the budget:

- time: each op behind a released value runs again once at least, and once for each reader that finds the value gone;
- memory: at every op, what is there whatever the plan (`simulator.bounds.instants`) and the values kept so far;
- both: at the tightest instants, the bytes over the budget must come from undecided values, at the best price of any
  (the fractional knapsack of Dantzig 1957).

Where a dropped value would be dropped between two ops that do not need it makes no difference, so that only drops
after ops that need it, or an output of the same op, are tried.

Counts: the exact peak and time of every complete plan. Ignores nothing that the schedule can express; hence small
traces only: it refuses those with more than 24 values to decide, with a value that more than 9 ops need, and those that
it cannot finish in `--seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from simulator.bounds.bound import Bounder
from simulator.core.evaluator import Evaluator
from simulator.core.limits import DEFAULTS, Clock, Limits
from simulator.core.problem import Problem
from simulator.planners.greedy import Search
from simulator.planners.mu_two import cheapest
from simulator.planners.outcome import finish, refuse
from traces.errors import PlanError, SpecError, UnfinishedError
from traces.records.plan import SAVE, Action, Plan

NAME: Final = "exact"
MOST_VALUES: Final = 24
MOST_DROPS: Final = 8
MOST_INSTANTS: Final = 6  # at which the price of what is over the budget is worked out


def plan(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The fastest plan within the budget.

    Raises:
        BudgetError: no plan is within the budget, which is proven.
        SpecError: the trace is too large for it.
        UnfinishedError: the time is over before anything is proven.
    """
    trace = problem.trace
    evaluator = Evaluator(problem)
    first = Search(problem, budget_bytes, limits.clock())
    found = cheapest(first)
    if found is not None and found.time_ns == trace.time_ns:  # no plan adds less than nothing
        return finish(problem, NAME, budget_bytes, first.actions(found.state))
    values = decisions(problem, evaluator)
    start = None if found is None else (found.time_ns, tuple(first.actions(found.state)))
    tree = Tree(problem, evaluator, values, budget_bytes, limits.clock(), start)
    tree.lowest_peak_bytes = first.lowest_peak_bytes
    tree.run(limits.seconds)
    if tree.best is None:
        raise refuse(
            problem,
            NAME,
            budget_bytes,
            tree.lowest_peak_bytes,
            "Proven: no plan is within this budget. ",
        )
    return finish(problem, NAME, budget_bytes, tree.best[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One storage to decide about, and what may happen to it (None: kept; a link: made anew)."""

    storage: int
    wanted: bool  # read by backward; else a link
    options: tuple[Action | None, ...]


def decisions(problem: Problem, evaluator: Evaluator) -> tuple[Value, ...]:
    """The values to decide about, the largest first, links last.

    Raises:
        SpecError: there are too many, or too many ops need one of them.
    """
    trace = problem.trace
    sts = trace.storages
    links = [
        s
        for s in range(len(sts))
        if problem.rebuildable[s]
        and not problem.saved_by_default[s]
        and not problem.pinned[s]
        and sts.last_backward_use[s] < 0
    ]
    saveable = [
        s
        for s in range(len(sts))
        if 0 <= sts.producer[s] < problem.forward_end
        and not problem.saved_by_default[s]
        and not problem.pinned[s]
        and s not in links
    ]
    count = len(problem.candidates) + len(links)
    if count > MOST_VALUES:
        raise SpecError(
            f"{NAME} is for small graphs: this one has {count} values to decide about, and {MOST_VALUES} is the "
            "most; take another planner."
        )
    needing = _needing(problem, evaluator)
    out = []
    for s in sorted(problem.candidates, key=lambda s: (-sts.nbytes[s], s)):
        drops = _shared(s, [evaluator.op_id[k] for k in needing[s]][:-1])
        out.append(Value(storage=s, wanted=True, options=(None, *drops, Action(storage=s, retain=False))))
    for s in links:
        drops = _shared(s, [evaluator.op_id[k] for k in needing[s]][:-1])
        out.append(Value(storage=s, wanted=False, options=(None, Action(storage=s, recipe=SAVE), *drops)))
    out += [
        Value(storage=s, wanted=False, options=(None, Action(storage=s, recipe=SAVE)))
        for s in saveable
        if needing[s]
    ]
    return tuple(out)


def _shared(storage: int, after: Sequence[int]) -> list[Action]:
    if len(after) > MOST_DROPS:
        raise SpecError(
            f"{NAME} is for small graphs: {len(after) + 1} ops of backward need storage {storage}, and "
            f"{MOST_DROPS + 1} is the most; take another planner."
        )
    return [
        Action(storage=storage, evict_after=chosen)
        for count in range(len(after) + 1)
        for chosen in combinations(after, count)
    ]


def _needing(problem: Problem, evaluator: Evaluator) -> dict[int, list[int]]:
    """Storage -> positions of the ops of backward that could make its op run again, in order."""
    trace = problem.trace
    out: dict[int, list[int]] = {s: [] for s in range(len(trace.storages))}
    for c in range(evaluator.forward, len(evaluator.op_id)):
        seen: set[int] = set()
        stack = list(evaluator.needs[c])
        while stack:
            producer = evaluator.producer[stack.pop()]
            if producer not in seen:
                seen.add(producer)
                stack.extend(evaluator.needs[producer])
        for p in seen:
            for s in evaluator.creates[p]:
                out[s].append(c)
    return out


class Tree:
    """The branch and bound over one trace and budget; `best` is (time, actions) of the fastest plan so far."""

    def __init__(
        self,
        problem: Problem,
        evaluator: Evaluator,
        values: tuple[Value, ...],
        budget_bytes: int,
        clock: Clock,
        best: tuple[int, tuple[Action, ...]] | None,
    ) -> None:
        trace = problem.trace
        self.trace, self.evaluator, self.values, self.clock = trace, evaluator, values, clock
        self.budget_bytes, self.best = budget_bytes, best
        self.lowest_peak_bytes = 1 << 62
        sts, ops = trace.storages, trace.ops
        bounder = Bounder(problem)
        bound = bounder.bound(budget_bytes)
        self.possible = bound.feasible
        self.least_ns = trace.time_ns + bound.added_time_ns
        instants = bounder.instants
        # Room for kept values at each op, and which of them are there in addition to what must be.
        self.room = [budget_bytes - u for u in instants.unavoidable_bytes]
        self.occupies: list[tuple[int, ...]] = []
        for v in values:
            s = v.storage
            if not v.wanted:
                self.occupies.append(())
                continue
            self.occupies.append(
                tuple(
                    i
                    for i in range(sts.producer[s] + 1, instants.last_read[s] + 1)
                    if instants.forced_until[s] < i and s not in ops.reads[i]
                )
            )
        order = sorted(range(len(ops)), key=lambda i: (self.room[i] - self._idle(i, 0), i))
        self.tight = order[:MOST_INSTANTS]
        self.readers = {
            v.storage: [
                k for k in range(evaluator.forward, len(evaluator.op_id)) if v.storage in evaluator.needs[k]
            ]
            for v in values
        }

    def _idle(self, op: int, depth: int) -> int:
        """Bytes of undecided values that would be there at an op if all were kept."""
        sts = self.trace.storages
        return sum(
            sts.nbytes[v.storage]
            for v, at in zip(self.values[depth:], self.occupies[depth:], strict=True)
            if op in at
        )

    def run(self, seconds: float) -> None:
        """Search the whole tree; raises UnfinishedError if the time is over first."""
        if self.possible:
            self._branch(0, [], {}, seconds)

    def _branch(self, depth: int, actions: list[Action], reruns: dict[int, int], seconds: float) -> None:
        if self.best is not None and self.best[0] <= self.least_ns:
            return  # no plan is faster than the certified bound
        if self.clock.over:
            raise UnfinishedError(
                f"{NAME} did not finish in {seconds:g} s: the trace is too large for it, or give it more --seconds."
            )
        if depth == len(self.values):
            self._leaf(actions)
            return
        if self._least_ns(depth, reruns) >= (self.best[0] if self.best else 1 << 62):
            return
        value = self.values[depth]
        nbytes = self.trace.storages.nbytes[value.storage]
        for option in value.options:
            if option is None and value.wanted:
                for i in self.occupies[depth]:
                    self.room[i] -= nbytes
                if all(self.room[i] >= 0 for i in self.occupies[depth]):
                    self._branch(depth + 1, actions, reruns, seconds)
                for i in self.occupies[depth]:
                    self.room[i] += nbytes
                continue
            more = reruns
            if option is not None and value.wanted:
                p = self.evaluator.producer[value.storage]
                more = {**reruns, p: max(reruns.get(p, 0), self._runs(option))}
            self._branch(depth + 1, actions if option is None else [*actions, option], more, seconds)

    def _runs(self, action: Action) -> int:
        """How often the op behind a recomputed value must run again at least: its readers, by where it is dropped."""
        readers = self.readers[action.storage]
        if not action.retain:
            return len(readers)
        groups, dropped = 0, True
        position = self.evaluator.position
        drops = sorted(position[c] for c in action.evict_after)
        for before, k in zip([-1, *readers], readers, strict=False):
            dropped = dropped or any(before <= d < k for d in drops)
            groups += dropped
            dropped = False
        return groups

    def _least_ns(self, depth: int, reruns: dict[int, int]) -> int:
        """A time that no plan below this branch undercuts."""
        time_ns = self.evaluator.time_ns
        decided = self.trace.time_ns + sum(time_ns[p] * n for p, n in reruns.items())
        most = 0
        for op in self.tight:
            prices: dict[int, int] = {}
            idle = 0
            for v, at in zip(self.values[depth:], self.occupies[depth:], strict=True):
                if op in at:
                    p = self.evaluator.producer[v.storage]
                    prices[p] = prices.get(p, 0) + self.trace.storages.nbytes[v.storage]
                    idle += self.trace.storages.nbytes[v.storage]
            over, cost = idle - self.room[op], 0
            if over <= 0:
                continue
            free = sum(b for p, b in prices.items() if p in reruns)
            over -= free
            for p, b in sorted(prices.items(), key=lambda x: time_ns[x[0]] / x[1]):
                if over <= 0:
                    break
                if p not in reruns:
                    cost += time_ns[p] if over >= b else time_ns[p] * over // b
                    over -= b
            if over > 0:
                return 1 << 62  # even everything released is not enough
            most = max(most, cost)
        return decided + most

    def _leaf(self, actions: list[Action]) -> None:
        try:
            peak, time_ns = self.evaluator.cost(self.evaluator.state(actions))
        except PlanError:
            return
        self.lowest_peak_bytes = min(self.lowest_peak_bytes, peak)
        if peak <= self.budget_bytes and (self.best is None or time_ns < self.best[0]):
            self.best = (time_ns, tuple(actions))
