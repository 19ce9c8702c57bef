"""The recompute half of μ-TWO as printed, defects included.

Source: Purandare, Wasay, Idreos and Jain, "μ-TWO: 3x faster multi-model training with orchestration and memory
optimization", MLSys 2023: Algorithms B (the greedy), D (overhead of recomputation), E and F (effects of a choice on
chosen and remaining tensors), G (memory simulator). Only recomputation; without a second model there is nothing to
hide a swap behind. Every point at which the printed algorithms are wrong or silent is a switch of `Options`.

Counts: what Algorithm G counts, and what libraries hold because of reruns, of which the paper says nothing. Ignores:
with the defaults, everything that a recomputation chain holds, and its working memory; so the plan may turn out to be
over the budget in the exact replay, and is then refused.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from simulator.core.evaluator import Evaluator
from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.core.replay import run
from simulator.core.schedule import build
from simulator.planners.outcome import Infeasible, finish, refuse
from traces.records.plan import Action, Plan
from traces.units import show_bytes

NAME = "mu-two-paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where the printed algorithms can be read or repaired in two ways; the defaults are as printed, but one.

    The exception is `remove_longest_idle`. Line 17 of Algorithm B takes the swap candidate out of the pool although
    the recompute candidate was chosen. Taken literally, a choice stays in the pool and is chosen again and again, so
    this is read as a slip of the pen; set it to run the letter of the text.
    """

    # B: the budget is tested only after a choice, so that at least one tensor is always recomputed.
    test_budget_first: bool = False
    # B, line 17: remove the tensor with the longest idle time instead of the one chosen.
    remove_longest_idle: bool = False
    # E: the count of a tensor grows by one for each chosen tensor that it serves, however often that one is rebuilt.
    weigh_by_count: bool = False
    # F(b): the total of a remaining source is overwritten with what the latest choice needs; on, its own rebuild
    # and its uses by earlier choices are added.
    keep_other_uses: bool = False
    # F(a): no charge for a source that is taken to be resident again at the first use. Off: always charged.
    assume_resident: bool = True
    # E and F(a): times of chains are added up, so that a shared ancestor counts twice; on, each op counts once.
    exact_chains: bool = False
    # B: a tensor may win although it is not there at the peak; on, only tensors idle at the peak take part.
    peak_gate: bool = False
    # G: a recomputed tensor costs its own bytes from its first backward use on, its chain nothing; on, the exact replay
    # decides when the budget is met.
    exact_peak: bool = False
    # The text subtracts the static memory (weights) once, because two models' active terms both hold it. One model
    # has one active term, so here nothing is subtracted; on, the subtraction is taken literally.
    subtract_static: bool = False
    # The paper does not say whether a recomputed tensor is retained for its later uses.
    retain: bool = True


def plan(
    problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS, options: Options = Options()
) -> Plan:
    """The plan of Algorithm B.

    Raises:
        BudgetError: the pool ran empty, or the exact replay finds the plan over the budget.
    """
    greedy = Greedy(problem, options)
    claimed_bytes = greedy.run(budget_bytes)
    actions = [Action(storage=s, retain=options.retain) for s in sorted(greedy.chosen)]
    try:
        return finish(problem, NAME, budget_bytes, actions)
    except Infeasible as error:
        lowest = error.figures["lowest_peak_bytes"]
        note = f"The paper's own memory model puts this plan at {show_bytes(claimed_bytes)}. "
        raise refuse(problem, NAME, budget_bytes, lowest, note) from None


class Greedy:
    """Algorithm B with the records of the paper's tables, by storage id."""

    def __init__(self, problem: Problem, options: Options) -> None:
        trace = problem.trace
        self.trace, self.options = trace, options
        self.evaluator = Evaluator(problem)
        sts = trace.storages
        self.pool = set(problem.candidates)
        self.chosen: dict[int, None] = {}
        self.sources: dict[int, set[int]] = {}
        self.ops: dict[int, set[int]] = {}  # the ops that one rebuild runs
        self.recomp_time: dict[int, int] = {}
        self.recomp_count: dict[int, int] = dict.fromkeys(problem.candidates, 1)
        for s in problem.candidates:
            self._walk_back(s)
        self.total = dict(self.recomp_time)  # Algorithm D with a count of one
        self.served: dict[int, set[int]] = defaultdict(set)  # source -> those that are rebuilt from it
        for s, sources in self.sources.items():
            for t in sources:
                self.served[t].add(s)
        start = [0, *accumulate(trace.ops.time_ns)]
        self.idle_ns = {
            s: start[sts.first_backward_use[s]] - start[self._last_forward(s) + 1] for s in self.pool
        }
        timeline = run(problem, build(problem))
        self.kept_peaks = timeline.peak_bytes  # one step an op
        self.static_bytes = trace.resident_bytes if options.subtract_static else 0
        self.relief = [0] * (len(trace.ops) + 1)  # differences of the bytes that the chosen free while idle

    def _last_forward(self, s: int) -> int:
        return max(self.trace.storages.last_forward_use[s], self.trace.storages.producer[s])

    def _walk_back(self, s: int) -> None:
        """Back from a tensor through what is no candidate, to candidates and what is saved anyway."""
        ev, problem = self.evaluator, self.evaluator.problem
        ops = {ev.producer[s]}
        sources: set[int] = set()
        stack = [ev.producer[s]]
        while stack:
            for t in ev.needs[stack.pop()]:
                if t in self.recomp_count:
                    sources.add(t)
                elif not problem.saved_by_default[t] and not problem.pinned[t] and ev.producer[t] not in ops:
                    ops.add(ev.producer[t])
                    stack.append(ev.producer[t])
        self.sources[s], self.ops[s] = sources, ops
        self.recomp_time[s] = sum(ev.time_ns[k] for k in ops)

    def run(self, budget_bytes: int) -> int:
        """Choose until the budget is met or the pool is empty; returns the peak that Algorithm G claims."""
        nbytes = self.trace.storages.nbytes
        peak, at = self.peak()
        if self.options.test_budget_first and peak <= budget_bytes:
            return peak
        while self.pool:
            pool = {s for s in self.pool if self._idle_at(s, at)} if self.options.peak_gate else self.pool
            if not pool:
                break
            # largest bytes per added time, ties by id; compared as time per byte, so that zero time wins
            r = min(pool, key=lambda s: (self.total[s] / nbytes[s], s))
            new = r not in self.chosen
            self.pool.discard(
                max(self.pool, key=lambda s: (self.idle_ns[s], -s)) if self.options.remove_longest_idle else r
            )
            if new:
                count = self._update_chosen(r)
                self.chosen[r] = None
                self._update_remaining(r, count)
                self.relief[self._last_forward(r) + 1] += nbytes[r]
                self.relief[self.trace.storages.first_backward_use[r]] -= nbytes[r]
            peak, at = self.peak()
            if peak <= budget_bytes:
                break
        return peak

    def _idle_at(self, s: int, op: int) -> bool:
        return self._last_forward(s) < op < self.trace.storages.first_backward_use[s]

    def _inherit(self, t: int, r: int) -> None:
        """t is rebuilt from r no longer, but from what r is rebuilt from."""
        self.sources[t].discard(r)
        self.served[r].discard(t)
        self.sources[t] |= self.sources[r]
        for x in self.sources[r]:
            self.served[x].add(t)
        self.ops[t] |= self.ops[r]
        if self.options.exact_chains:
            self.recomp_time[t] = sum(self.evaluator.time_ns[k] for k in self.ops[t])
        else:
            self.recomp_time[t] += self.recomp_time[r]

    def _update_chosen(self, r: int) -> int:
        """Algorithm E: chosen tensors that were rebuilt from r are rebuilt from r's sources; how often r is rebuilt."""
        count = 1
        for t in sorted(self.served[r]):
            if t in self.chosen:
                count += self.recomp_count[t] if self.options.weigh_by_count else 1
                self._inherit(t, r)
        self.recomp_count[r] = count
        self.total[r] = count * self.recomp_time[r]
        return count

    def _update_remaining(self, r: int, count: int) -> None:
        """Algorithm F: what the choice of r changes for those still in the pool."""
        sts = self.trace.storages
        for c in sorted(self.served[r]):
            if c not in self.pool:
                continue
            resident = sts.first_backward_use[r] <= sts.first_backward_use[c] <= sts.last_backward_use[r]
            if resident and self.options.assume_resident:
                continue
            self._inherit(c, r)
            uses = sum(1 for t in self.served[c] if t in self.chosen)
            self.total[c] = self.recomp_time[c] * (1 + uses)
        for c in sorted(self.sources[r]):
            if c not in self.pool:
                continue
            uses = count
            if self.options.keep_other_uses:
                uses = 1 + sum(self.recomp_count[t] for t in self.served[c] if t in self.chosen)
            self.total[c] = uses * self.recomp_time[c]

    def peak(self) -> tuple[int, int]:
        """Algorithm G's peak and the op where it is: the step with everything saved, less what is away just then."""
        if self.options.exact_peak:
            state = self.evaluator.state(Action(storage=s, retain=self.options.retain) for s in self.chosen)
            result = self.evaluator.evaluate(state)
            k = result.peak_step
            if k < 0:
                return result.peak_bytes, -1
            position = k if k < self.evaluator.forward else result.seq[k - self.evaluator.forward]
            return result.peak_bytes, self.evaluator.op_id[position]
        rerun = self.evaluator.rerun_bytes
        again = max((rerun[k] for s in self.chosen for k in self.ops[s]), default=0)
        levels = [p - away + again for p, away in zip(self.kept_peaks, accumulate(self.relief), strict=False)]
        peak = max(levels, default=self.trace.resident_bytes)
        return peak - self.static_bytes, levels.index(peak) if levels else -1
