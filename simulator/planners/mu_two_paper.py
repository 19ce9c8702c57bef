"""μ-TWO as printed, defects included: its recompute half, and both halves, which swap as well.

Source: Purandare, Wasay, Idreos and Jain, "μ-TWO: 3x faster multi-model training with orchestration and memory
optimization", MLSys 2023: Algorithms B (the greedy), D (overhead of recomputation), E and F (effects of a choice on
chosen and remaining tensors), G (memory simulator); with swaps also C (overhead of a swap). Without a second model
there is none to hide a swap behind (C's case 2a), only backward.

Where the text is wrong or silent, and `mu_two` does otherwise:

- B tests the budget only after a choice, so that at least one tensor is always recomputed; and a tensor may win
  although it is not there at the peak. Its line 17 takes the swap candidate out of the pool although the recompute
  candidate was chosen: a slip of the pen, since a choice would be chosen again and again; here the chosen one goes.
- E counts one for each chosen tensor that another serves, however often that one is rebuilt. F(b) overwrites the total
  of a remaining source with what the latest choice needs. F(a) charges nothing for a source that is taken to be
  resident again at the first use. Both add up the times of chains, so that a shared ancestor counts twice.
- G: a recomputed tensor costs its own bytes from its first backward use on, and its chain nothing. The static memory
  is subtracted once, because two models' active terms both hold it; one model has one, so nothing is subtracted here.
- Whether a recomputed tensor is retained for its later uses is not said; here it is.

- The candidates for a swap (idle longest) and for recomputation (most bytes per added time) are different tensors, so
  that a dear swap of one is compared with a cheap recomputation of another. Swaps out cost nothing and free at once,
  here where the lever `offload` has them complete; what cannot be recomputed is no candidate here. The corrected half
  is `--planner mu-two --levers offload`.

Counts: what Algorithm G counts. Ignores: everything that a recomputation chain holds, and its working memory; so the
plan may turn out to be over the budget in the exact replay, and is then refused.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate

from simulator.core.evaluator import evaluator_of
from simulator.core.facts import OFFLOAD, RELOAD, copy_ns
from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.levers import offload, rewritten_problem
from simulator.planners.outcome import Infeasible, finish, refuse
from traces.errors import SpecError
from traces.records.plan import Action, Plan
from traces.records.trace import EAGER
from traces.units import show_bytes

PRINTED, SWAPPING = "mu-two-paper", "mu-two-swap"


def plan(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The plan of Algorithm B. Raises BudgetError: the pool ran empty, or the exact replay finds it over the budget."""
    greedy = Greedy(problem)
    claimed_bytes = greedy.run(budget_bytes)
    try:
        return finish(problem, PRINTED, budget_bytes, [Action(storage=s) for s in sorted(greedy.chosen)])
    except Infeasible as error:
        lowest = error.figures["lowest_peak_bytes"]
        note = f"The paper's own memory model puts this plan at {show_bytes(claimed_bytes)}. "
        raise refuse(problem, PRINTED, budget_bytes, lowest, note) from None


def plan_with_swaps(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The plan of Algorithm B with Algorithm C: the cheaper of a swap and a recomputation is chosen each time. Raises
    BudgetError as `plan` does; SpecError: the device table does not say how fast copies are."""
    greedy = Swapping(problem, budget_bytes)
    greedy.run(budget_bytes)
    ops = problem.trace.ops
    given = [r for s, r in greedy.offered.items() if s in greedy.prompts]
    rewrites = tuple(replace(r, in_before=ops.name[greedy.prompts[r.storage]]) for r in given)
    step = rewritten_problem(problem, rewrites)
    makers = zip(step.trace.storages.producer, range(len(step.trace.storages)), strict=True)
    now = [s for p, s in makers if p < 0 or step.trace.ops.target[p] not in (OFFLOAD, RELOAD)]
    actions = [Action(storage=now[s]) for s in sorted(greedy.chosen - greedy.prompts.keys())]
    made = finish(step, SWAPPING, budget_bytes, actions)
    meta = replace(problem.trace.meta, within_backward=made.meta.within_backward)
    return replace(made, meta=meta, rewrites=rewrites)


class Greedy:
    """Algorithm B with the records of the paper's tables, by storage id."""

    def __init__(self, problem: Problem) -> None:
        trace = problem.trace
        self.trace, self.problem, self.evaluator = trace, problem, evaluator_of(problem)
        sts = trace.storages
        self.pool = set(problem.candidates)
        self.chosen: set[int] = set()
        self.sources: dict[int, set[int]] = {}
        self.ops: dict[int, set[int]] = {}  # the ops that one rebuild runs
        self.recomp_time: dict[int, int] = {}
        for s in problem.candidates:
            self._walk_back(s)
        self.total = dict(self.recomp_time)  # Algorithm D with a count of one
        self.served: dict[int, set[int]] = defaultdict(set)  # source -> those that are rebuilt from it
        for s, sources in self.sources.items():
            for t in sources:
                self.served[t].add(s)
        self.idle_from = [max(a, b) + 1 for a, b in zip(sts.last_forward_use, sts.producer, strict=True)]
        self.relief = [0] * (len(trace.ops) + 1)  # differences of the bytes that the chosen free while idle

    def _walk_back(self, s: int) -> None:
        """Back from a tensor through what is no candidate, to candidates and what is saved anyway."""
        ev, problem = self.evaluator, self.problem
        ops = {ev.producer[s]}
        sources: set[int] = set()
        stack = [ev.producer[s]]
        while stack:
            for t in ev.needs[stack.pop()]:
                if t in self.pool:
                    sources.add(t)
                elif not problem.saved_by_default[t] and not problem.pinned[t] and ev.producer[t] not in ops:
                    ops.add(ev.producer[t])
                    stack.append(ev.producer[t])
        self.sources[s], self.ops[s] = sources, ops
        self.recomp_time[s] = sum(ev.time_ns[k] for k in ops)

    def run(self, budget_bytes: int) -> int:
        """Choose until the budget is met or the pool is empty; returns the peak that Algorithm G claims."""
        sts = self.trace.storages
        peak = self.peak()
        while self.pool:
            r = self.pick()
            self.pool.discard(r)
            count = self._update_chosen(r)
            self.chosen.add(r)
            self._update_remaining(r, count)
            self.relief[self.idle_from[r]] += sts.nbytes[r]
            self.relief[self.until(r)] -= sts.nbytes[r]
            peak = self.peak()
            if peak <= budget_bytes:
                break
        return peak

    def pick(self) -> int:
        """The tensor with most bytes per added time, ties by id; compared as time per byte, so that zero time wins."""
        nbytes = self.trace.storages.nbytes
        return min(self.pool, key=lambda s: (self.total[s] / nbytes[s], s))

    def until(self, s: int) -> int:
        return self.trace.storages.first_backward_use[s]

    def _inherit(self, t: int, r: int) -> None:
        """t is rebuilt from r no longer, but from what r is rebuilt from."""
        self.sources[t].discard(r)
        self.served[r].discard(t)
        self.sources[t] |= self.sources[r]
        for x in self.sources[r]:
            self.served[x].add(t)
        self.ops[t] |= self.ops[r]
        self.recomp_time[t] += self.recomp_time[r]

    def _update_chosen(self, r: int) -> int:
        """Algorithm E: chosen tensors that were rebuilt from r are rebuilt from r's sources; how often r is rebuilt."""
        rebuilt = sorted(self.served[r] & self.chosen)
        for t in rebuilt:
            self._inherit(t, r)
        count = 1 + len(rebuilt)
        self.total[r] = count * self.recomp_time[r]
        return count

    def _update_remaining(self, r: int, count: int) -> None:
        """Algorithm F: what the choice of r changes for those still in the pool."""
        first, last = self.trace.storages.first_backward_use, self.trace.storages.last_backward_use
        for c in sorted(self.served[r] & self.pool):
            if not first[r] <= first[c] <= last[r]:  # then r is resident again
                self._inherit(c, r)
                self.total[c] = self.recomp_time[c] * (1 + len(self.served[c] & self.chosen))
        for c in self.sources[r] & self.pool:
            self.total[c] = count * self.recomp_time[c]

    def peak(self) -> int:
        return max(self.levels(), default=self.trace.resident_bytes)

    def levels(self) -> list[int]:
        """Return what Algorithm G counts at each op: the step with everything saved, less what is away just then."""
        saved = self.problem.saved.timeline.peak_bytes  # one step an op
        return [p - away for p, away in zip(saved, accumulate(self.relief), strict=False)]


class Swapping(Greedy):
    """Algorithm B with its swaps; `prompts` has the op of backward before which each begins to come back.

    A swap in begins so early that it hides behind backward's ops and what is recomputed there, but ends before those
    chosen earlier begin, and no part of it is where Algorithm G's peak is over the budget; what does not hide is its
    overhead.
    """

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        super().__init__(problem)
        self.budget_bytes = budget_bytes
        self.prompts: dict[int, int] = {}
        self.offered = {r.storage: r for r in offload.offer(problem)}
        if any(not r.bytes_per_s for r in self.offered.values()):
            raise SpecError(f"{SWAPPING}: the device table lacks {problem.trace.meta.target}.")
        self.start = [0, *accumulate(self.trace.ops.time_ns)]

    def pick(self) -> int:
        """The cheaper of a swap and a recomputation, which are of different tensors maybe."""
        r = super().pick()
        idle = self.pool & self.offered.keys()
        if not idle:
            return r
        s = max(idle, key=lambda s: (self.start[self.until(s)] - self.start[self.idle_from[s]], -s))
        overhead_ns, prompt = self.swap(s)
        if overhead_ns >= self.total[r]:
            return r
        self.prompts[s] = prompt
        return s

    def until(self, s: int) -> int:
        return self.prompts.get(s, self.trace.storages.first_backward_use[s])

    def swap(self, s: int) -> tuple[int, int]:
        """Algorithm C: what a swap in adds in ns, and the op of the captured graph before which it begins."""
        sts, ops, levels = self.trace.storages, self.trace.ops, self.levels()
        again = {sts.first_backward_use[t]: self.recomp_time[t] for t in self.chosen - self.prompts.keys()}
        need, rate = sts.first_backward_use[s], self.offered[s].bytes_per_s
        k = min((need, *self.prompts.values()))  # one after the other
        left = copy_ns(sts.nbytes[s], rate)
        first = max(self.trace.meta.first_backward_graph_op, self.problem.forward_end)
        while left > 0 and k > first and levels[k - 1] <= self.budget_bytes:
            k -= 1
            left -= ops.time_ns[k] + again.get(k, 0)
        return max(0, left), next(i for i in range(k, need + 1) if not ops.flags[i] & EAGER)
