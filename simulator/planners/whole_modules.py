"""Turn a trace and a budget into a plan that recomputes whole modules only, for use with torch.utils.checkpoint.

Each module is either left as it is, or keeps only what goes in and what others read of it, as if it were called
through `torch.utils.checkpoint`. Which modules there are is the constraint `whole_modules`; without it, the repeated
blocks. Chosen like `mu_two`'s values: while the replayed peak is over the budget, release the module that frees most
bytes per added time and lowers the peak, then leave again what need not be released.

Differences from torch's: random ops are kept rather than replayed, so their outputs take memory; and a module's ops
run again one by one as backward needs them, while torch's run all at once, which can take more at that moment.

Counts: the exact peak and time of every set of modules tried. Ignores: sets that no sequence of single choices
reaches.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulator.core.blocks import OUTSIDE, whole_module_instances
from simulator.core.evaluator import Evaluator
from simulator.core.graph import analyse
from simulator.core.limits import AUTO, DEFAULTS, Clock, Limits
from simulator.planners.outcome import finish, refuse
from simulator.planners.segments import actions_for
from traces.plan import Action, Plan
from traces.trace import Trace

NAME = "whole-modules"


def plan(trace: Trace, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The cheapest set of whole modules found within the budget.

    Raises:
        BudgetError: none was found.
        SpecError: no module matches the constraint's glob.
    """
    glob = limits.constraints.whole_modules or AUTO
    graph = analyse(trace, replace(limits.constraints, whole_modules=glob))
    choice = Choice(trace, budget_bytes, glob, Evaluator(trace, graph), limits.clock())
    found = choice.release()
    if found is None:
        note = (
            "" if choice.modules else "It found no repeated blocks; name modules with --whole-modules=GLOB. "
        )
        raise refuse(trace, graph, NAME, budget_bytes, choice.lowest_peak_bytes, note)
    return finish(trace, graph, NAME, budget_bytes, choice.actions(choice.keep_again(found)))


class Choice:
    """One budget's choice among the modules of one trace."""

    def __init__(
        self, trace: Trace, budget_bytes: int, glob: str, evaluator: Evaluator, clock: Clock
    ) -> None:
        self.trace, self.budget_bytes, self.evaluator, self.clock = trace, budget_bytes, evaluator, clock
        self.graph = evaluator.graph
        self.instance = whole_module_instances(trace, glob)
        self.modules = tuple(dict.fromkeys(self.instance[m] for m in trace.ops.module if m in self.instance))
        # What a module changes is its own: which of its values others read does not depend on what else is chosen.
        self.empty = evaluator.state(self.actions(frozenset()))
        self.released = {}
        for m in self.modules:
            alone = evaluator.state(self.actions(frozenset({m})))
            self.released[m] = np.flatnonzero(alone.there != self.empty.there)
        self.known: dict[frozenset[str], tuple[int, int]] = {}
        self.lowest_peak_bytes = 1 << 62

    def actions(self, chosen: frozenset[str]) -> tuple[Action, ...]:
        """The actions that recompute these modules."""
        number = {m: k for k, m in enumerate(self.modules)}
        segment = [
            number[block] if (block := self.instance.get(m, "")) in chosen else OUTSIDE
            for m in self.trace.ops.module[: self.graph.first_backward_op]
        ]
        return actions_for(self.trace, self.graph, segment)

    def cost(self, chosen: frozenset[str]) -> tuple[int, int]:
        """Peak and time of a set of modules."""
        if chosen not in self.known:
            state = self.empty.copy()
            for m in chosen:
                state.there[self.released[m]], state.share[self.released[m]] = 0, 1
            self.known[chosen] = self.evaluator.cost(state)
            self.lowest_peak_bytes = min(self.lowest_peak_bytes, self.known[chosen][0])
        return self.known[chosen]

    def release(self) -> frozenset[str] | None:
        """A set within the budget, module by module; None if that does not get there.

        Where no single module lowers the peak, the one that adds least time goes, since two together may.
        """
        chosen: frozenset[str] = frozenset()
        while self.cost(chosen)[0] > self.budget_bytes:
            peak, time_ns = self.cost(chosen)
            rest = [m for m in self.modules if m not in chosen]
            if not rest:
                return None
            if self.clock.over:  # no time to compare: the next one in the order of forward
                chosen |= {rest[0]}
                continue

            def value(
                m: str, chosen: frozenset[str] = chosen, peak: int = peak, base: int = time_ns
            ) -> float:
                after, cost_ns = self.cost(chosen | {m})
                gain = min(peak - after, peak - self.budget_bytes)
                return -gain / (cost_ns - base + 1) if gain > 0 else (cost_ns - base + 1)

            chosen |= {min(rest, key=value)}
        return chosen

    def keep_again(self, chosen: frozenset[str]) -> frozenset[str]:
        """Leave single modules, or swap one for a cheaper one, while that saves time within the budget."""
        while not self.clock.over:
            tried = [chosen - {m} for m in chosen]
            tried += [chosen - {m} | {n} for m in chosen for n in self.modules if n not in chosen]
            best = chosen
            for other in sorted(tried, key=sorted):
                if self.clock.over:
                    break
                peak, time_ns = self.cost(other)
                if peak <= self.budget_bytes and time_ns < self.cost(best)[1]:
                    best = other
            if best == chosen:
                break
            chosen = best
        return chosen
