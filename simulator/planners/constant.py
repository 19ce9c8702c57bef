"""Turn a trace into the two plans that need no choice: keep everything, keep nothing."""

from __future__ import annotations

from simulator.core.graph import analyse
from simulator.core.limits import DEFAULTS, Limits
from simulator.planners.outcome import finish
from traces.plan import Action, Plan
from traces.trace import Trace


def plan_keep_all(trace: Trace, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """Keep everything that backward needs; raises BudgetError if that is over the budget."""
    return finish(trace, analyse(trace, limits.constraints), "keep-all", budget_bytes, ())


def plan_recompute_all(trace: Trace, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """Recompute every candidate, sharing what has been rebuilt; raises BudgetError if that is over the budget.

    The peak of this plan is often as high as keep-all's: the first chain rebuilds the whole forward pass.
    """
    graph = analyse(trace, limits.constraints)
    actions = [Action(storage=s) for s in graph.candidates]
    return finish(trace, graph, "recompute-all", budget_bytes, actions)
