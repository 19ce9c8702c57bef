"""Turn a schedule and constraints into what the schedule does against them: the check behind every plan."""

from __future__ import annotations

from simulator.core.blocks import whole_module_instances
from simulator.core.problem import Problem
from simulator.core.schedule import Schedule
from simulator.core.selectors import resolve
from traces.trace import FORWARD, Trace


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
            if s in meant.keep:
                return f"storage {s} ({trace.storages.name[s]}) would be computed again, which --always-keep forbids"
    if constraints.whole_modules:
        return _partial_module(problem, schedule)
    return ""


def crossing(trace: Trace, instance: dict[str, str]) -> list[bool]:
    """Storage -> whether an op of forward outside the module that makes it reads it."""
    ops, sts = trace.ops, trace.storages
    out = [False] * len(sts)
    for i in range(len(ops)):
        if ops.phase[i] == FORWARD:
            for s in ops.reads[i]:
                p = sts.producer[s]
                if p >= 0 and instance.get(ops.module[p]) != instance.get(ops.module[i]):
                    out[s] = True
    return out


def _partial_module(problem: Problem, schedule: Schedule) -> str:
    """An op that runs again outside the modules, or a value of a recomputed module that is kept all the same."""
    trace = problem.trace
    ops, sts = trace.ops, trace.storages
    instance = whole_module_instances(trace, problem.constraints.whole_modules)
    chosen: dict[str, int] = {}
    for op, again in zip(schedule.op, schedule.recompute, strict=True):
        if again and not problem.is_view[op]:
            if ops.module[op] not in instance:
                return f"op {op} ({ops.name[op]}) would run again outside the modules of --whole-modules"
            chosen.setdefault(instance[ops.module[op]], op)
    released = {s for frees in schedule.frees[: schedule.forward_steps] for s in frees}
    crosses = crossing(trace, instance)
    for s in problem.candidates:
        module = instance.get(ops.module[sts.producer[s]], "")
        if module in chosen and not crosses[s] and s not in released:
            return f"storage {s} ({sts.name[s]}) is kept although its module {module} would be recomputed"
    return ""
