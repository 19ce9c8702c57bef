"""Turn a trace and a budget into the best plan among the minimum cuts behind the certified bound.

At an instant of the step, the cheapest way to keep less, for a price per byte, is a minimum cut (the argument stands in
`simulator.bounds.bound`; the idea of cutting the joint graph is that of torch's partitioner, He 2022, and of maximum
closures, Picard 1976). A rising price walks through all cuts, from everything kept to everything recomputed; each is
a plan, and the replay decides which fit. Tried are the end of forward and the instants of highest peak.

Counts: the exact peak and time of every cut tried. Ignores: plans that are no cut at any price (those inside the hull),
and what chains hold while they run, so that a cut that keeps little can still have a high peak.
"""

from __future__ import annotations

from typing import Final

from simulator.bounds.bound import bounder_of
from simulator.fast import evaluator_of
from simulator.graph import analyse
from simulator.planners.limits import DEFAULTS, Limits
from simulator.planners.outcome import finish, refuse
from traces.plan import SAVE, Action, Plan
from traces.trace import Trace

NAME: Final = "min-cut"
MOST_INSTANTS: Final = 8


def plan(trace: Trace, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The cheapest cut within the budget.

    Raises:
        BudgetError: no cut tried is.
    """
    graph = analyse(trace, limits.constraints)
    evaluator = evaluator_of(trace, graph)
    instants = bounder_of(trace, graph).instants
    clock = limits.clock()
    candidates = frozenset(graph.candidates)
    best: tuple[int, tuple[Action, ...]] | None = None
    lowest = 1 << 62
    for op in instants.overfull(budget_bytes)[:MOST_INSTANTS]:
        if best is not None and clock.over:
            break
        state = evaluator.state()
        kept, share = state.there.copy(), state.share.copy()
        released: dict[int, tuple[int, ...]] = {}
        saved: dict[int, tuple[int, ...]] = {}
        peak, time_ns = evaluator.cost(state)
        lowest = min(lowest, peak)
        if peak <= budget_bytes:
            best = (time_ns, ())
            break
        for cut in instants.cuts(op):
            # take the component's earlier cut back, put this one in its place
            for s in (*released.get(cut.component, ()), *saved.get(cut.component, ())):
                state.there[s], state.share[s] = kept[s], share[s]
            released[cut.component] = tuple(s for s in cut.released if s in candidates)
            saved[cut.component] = cut.saved
            for s in released[cut.component]:
                state.there[s], state.share[s] = 0, 1
            for s in cut.saved:
                state.there[s] = 1
            peak, time_ns = evaluator.cost(state)
            lowest = min(lowest, peak)
            if peak <= budget_bytes and (best is None or time_ns < best[0]):
                actions = [Action(storage=s) for mine in released.values() for s in mine]
                actions += [Action(storage=s, action=SAVE) for mine in saved.values() for s in mine]
                best = (time_ns, tuple(actions))
    if best is None:
        raise refuse(trace, graph, NAME, budget_bytes, lowest)
    return finish(trace, graph, NAME, budget_bytes, best[1])
