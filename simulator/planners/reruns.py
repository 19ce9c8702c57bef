"""Turn a planner that does not count what libraries keep because of reruns into plans that leave room for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from simulator.engine import keep_all, run
from simulator.graph import analyse
from simulator.planners.limits import Limits
from simulator.planners.outcome import refuse
from simulator.schedule import build
from traces.errors import BudgetError
from traces.plan import Plan
from traces.trace import Trace


def with_room(
    name: str,
    make: Callable[[Trace, int, Limits], Plan],
    trace: Trace,
    budget_bytes: int,
    limits: Limits,
) -> Plan:
    """The planner's plan for the budget less what a rerun may cost; where it has none, one that needs no such rerun.

    Counts: all of it, whichever ops the plan reruns. So a plan that needs less may be missed, by no more than these
    bytes (1 MiB for cuBLASLt).

    Raises:
        BudgetError: no such plan was found.
    """
    room_bytes = budget_bytes - max(trace.meta.rerun_workspaces.values(), default=0)
    graph = analyse(trace, limits.constraints)
    fits = keep_all(trace, graph).timeline.peak_allocated_bytes <= budget_bytes
    refusal: BudgetError | None = None
    for within_bytes in (budget_bytes, room_bytes) if fits else (room_bytes, budget_bytes):
        try:
            plan = make(trace, within_bytes, limits)
        except BudgetError as error:
            refusal = error
            continue
        peak_bytes = run(trace, build(trace, plan.actions)).peak_allocated_bytes
        if peak_bytes <= budget_bytes:
            return replace(plan, budget_bytes=budget_bytes)
        refusal = refuse(trace, graph, name, budget_bytes, peak_bytes)
    assert refusal is not None
    raise refusal
