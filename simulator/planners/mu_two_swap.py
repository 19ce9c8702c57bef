"""μ-TWO as printed, both halves: of each tensor it is decided by overhead whether it is swapped or recomputed.

Source: as `mu_two_paper`, with Algorithm C (overhead of a swap). The candidate for a swap is the tensor that is idle
longest, that for recomputation the one with most bytes per added time; the cheaper of the two choices is made. A swap
in begins so early that it hides behind backward's ops and what is recomputed there, but ends before those chosen
earlier begin, and no part of it is where Algorithm G's peak is over the budget; what does not hide is its overhead. The
paper hides it behind another model's forward first (its case 2a), of which there is none here.

Where the text is wrong or silent, and the lever `offload` does otherwise (`--planner mu-two --levers offload` is the
corrected half): the two candidates are different tensors, so that a dear swap of one is compared with a cheap
recomputation of another; swaps out cost nothing and free at once, here where `offload` has them complete; tensors that
cannot be recomputed are no candidates here.

Counts: what Algorithms C and G count. Ignores: what those ignore; so the plan may turn out to be over the budget, or
dearer, in the exact replay.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.core.rewrites import offload, rewritten_problem
from simulator.core.transfers import OFFLOAD, RELOAD, copy_ns
from simulator.planners.mu_two_paper import Greedy
from simulator.planners.outcome import finish
from traces.errors import SpecError
from traces.records.plan import Action, Plan
from traces.records.trace import EAGER

NAME = "mu-two-swap"


def plan(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The plan of Algorithm B.

    Raises:
        BudgetError: the pool ran empty, or the exact replay finds the plan over the budget.
        SpecError: the device table does not say how fast copies are.
    """
    greedy = Swapping(problem, budget_bytes)
    greedy.run(budget_bytes)
    ops = problem.trace.ops
    given = [r for s, r in greedy.offered.items() if s in greedy.prompts]
    rewrites = tuple(replace(r, in_before=ops.name[greedy.prompts[r.storage]]) for r in given)
    step = rewritten_problem(problem, rewrites)
    makers = zip(step.trace.storages.producer, range(len(step.trace.storages)), strict=True)
    now = [s for p, s in makers if p < 0 or step.trace.ops.target[p] not in (OFFLOAD, RELOAD)]
    actions = [Action(storage=now[s]) for s in sorted(greedy.chosen - greedy.prompts.keys())]
    made = finish(step, NAME, budget_bytes, actions)
    meta = replace(problem.trace.meta, within_backward=made.meta.within_backward)
    return replace(made, meta=meta, rewrites=rewrites)


class Swapping(Greedy):
    """Algorithm B with its swaps; `prompts` has the op of backward before which each begins to come back."""

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        super().__init__(problem)
        self.budget_bytes = budget_bytes
        self.prompts: dict[int, int] = {}
        self.offered = {r.storage: r for r in offload.offer(problem)}
        if any(not r.bytes_per_s for r in self.offered.values()):
            raise SpecError(f"{NAME}: the device table lacks {problem.trace.meta.target}.")
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
        """The op until which a chosen tensor is away."""
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
