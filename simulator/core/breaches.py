"""Whether a schedule obeys the constraints: the check behind every plan."""

from __future__ import annotations

from simulator.core.problem import Problem
from simulator.core.schedule import Schedule
from simulator.core.selectors import resolve


def breach(problem: Problem, schedule: Schedule) -> str:
    """In words, the first thing that a schedule does against the problem's constraints; empty if it obeys them.

    Looks at the steps themselves, so it holds whatever the planner and the graph believed.

    Raises:
        SpecError: a constraint names nothing in this trace.
    """
    trace, constraints = problem.trace, problem.constraints
    if not constraints:
        return ""
    meant = resolve(trace, constraints)
    ops = trace.ops
    for op, again, binds in zip(schedule.op, schedule.recompute, schedule.binds, strict=True):
        if not again:
            continue
        if op in meant.never:
            return f"op {op} ({ops.name[op]}) would run again, which --never forbids"
        for s in binds:
            if s in meant.always_saved:
                return f"storage {s} ({trace.storages.name[s]}) would be computed again, which --always-save forbids"
    return ""
