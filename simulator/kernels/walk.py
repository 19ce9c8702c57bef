"""The peak and the time of a plan: `simulator.core.schedule.build` and `simulator.core.replay`, compiled.

The step is walked op by op from the first op at which the plan can change anything: the end of forward, or the first
eviction in it. What each step gains is known when it runs; what it frees only when the walk has ended, because a value
goes with its last reader. So the walk notes, per storage, the last step that read the current instance, credits that
step when the instance is replaced or the walk ends, and one sum in the end gives the bytes at every step.
"""

from __future__ import annotations

from typing import Any, Final

from simulator.kernels.chain import chain
from simulator.kernels.compiled import compiled, inlined, inner
from simulator.kernels.records import Choice, Facts, Work

# What `walk` returns in place of a peak.
FORBIDDEN: Final = -1  # a chain needs an op that may not run again: then the op that demands it, and that op
FULL: Final = -2  # more steps than the arrays hold
NEVER: Final = -2  # in `first_end`: the instance that forward made is the only one


@inlined
def free(s: int, end: int, ops: Any, storages: Any, steps: Any) -> None:
    """An instance of s goes with that step, whose op takes its memory over if it can."""
    nbytes = storages[s].nbytes
    steps[end].freed_bytes += nbytes
    q = steps[end].op
    if ops[q if q >= 0 else ~q].overwrites == s:
        steps[end].taken_bytes = nbytes


@inner
def replay(facts: Any, choice: Any, work: Any) -> tuple[int, int, int, int]:
    """(peak, added time, peak step, steps), or (FORBIDDEN, op, op, 0), or (FULL, 0, 0, 0).

    Steps are numbered from the start of forward; the rows of `work.steps` say what each is and its peak.
    """
    forward, ops, storages = facts.forward, facts.ops, facts.storages
    reads, creates, made = facts.reads, facts.creates, facts.made
    saved, retained, evict_at, evicted = choice.saved, choice.retained, choice.evict_at, choice.evicted
    there, rebuilt, order, steps = work.there, work.rebuilt, work.order, work.steps
    of_storage, of_op = work.storages, work.ops
    n_ops, room, n_evictions = ops.shape[0] - 1, steps.shape[0], evict_at.shape[0]

    for s in range(there.shape[0]):
        there[s] = saved[s]
        of_storage[s].last = of_storage[s].demanded = -1
        of_storage[s].first_end = NEVER
    for k in range(n_ops):
        of_op[k].visited = -1
    for k in range(forward):
        steps[k].op = k
        steps[k].gained_bytes = ops[k].born_bytes
        steps[k].freed_bytes = steps[k].taken_bytes = 0
    eviction = 0
    while eviction < n_evictions and evict_at[eviction] < forward:
        there[evicted[eviction]] = 0
        eviction += 1

    n = forward  # steps so far
    added_ns = rerun_bytes = 0
    for c in range(forward, n_ops):
        n_rebuilt = 0
        n_order = chain(c, there, facts, work, True)
        if n_order < 0:
            return FORBIDDEN, ops[c].id, ops[~n_order].id, 0
        if n + n_order >= room:
            return FULL, 0, 0, 0
        for k in range(n_order):
            b = order[k]
            for j in range(ops[b].reads_at, ops[b + 1].reads_at):
                of_storage[reads[j]].last = n
            gained = 0
            for j in range(ops[b].creates_at, ops[b + 1].creates_at):
                x = creates[j]
                ahead = retained[x] and storages[x].last_backward > ops[c].id
                if there[x] or not (ahead or of_storage[x].demanded == c):
                    continue
                if of_storage[x].first_end == NEVER:
                    of_storage[x].first_end = of_storage[x].last
                else:
                    free(x, of_storage[x].last, ops, storages, steps)
                of_storage[x].last = n
                there[x] = 1
                rebuilt[n_rebuilt] = x
                n_rebuilt += 1
                gained += storages[x].nbytes
            steps[n].op = ~b
            steps[n].gained_bytes = gained
            steps[n].freed_bytes = steps[n].taken_bytes = 0
            n += 1
            added_ns += ops[b].time_ns
            rerun_bytes = max(rerun_bytes, ops[b].rerun_bytes)
        of_op[c].step = n
        for j in range(ops[c].reads_at, ops[c + 1].reads_at):
            of_storage[reads[j]].last = n
        steps[n].op = c
        steps[n].gained_bytes = ops[c].settled_bytes
        steps[n].freed_bytes = steps[n].taken_bytes = 0
        n += 1
        for k in range(n_rebuilt):
            if not retained[rebuilt[k]]:
                there[rebuilt[k]] = 0
        while eviction < n_evictions and evict_at[eviction] == c:
            there[evicted[eviction]] = 0
            eviction += 1

    for m in range(made.shape[0]):
        s = made[m]
        end = of_storage[s].last
        if of_storage[s].first_end != NEVER:
            free(s, end, ops, storages, steps)
            end = of_storage[s].first_end
        # Now the instance that forward made.
        hold = storages[s].hold
        if hold >= 0 and storages[s].hold_after and of_op[hold].step >= end:
            steps[of_op[hold].step].freed_bytes += storages[s].nbytes
        elif hold >= 0 or end >= 0:
            free(s, max(end, of_op[hold].step) if hold >= 0 else end, ops, storages, steps)
        else:
            end = storages[s].last_forward
            steps[end].freed_bytes += storages[s].nbytes
            if storages[s].forward_take == end:
                steps[end].taken_bytes = storages[s].nbytes

    live = facts.resident_bytes + rerun_bytes
    peak, at = live, -1
    for k in range(n):
        q = steps[k].op
        top = live + ops[q if q >= 0 else ~q].transient_bytes - steps[k].taken_bytes
        steps[k].peak_bytes = top
        live += steps[k].gained_bytes - steps[k].freed_bytes
        if at < 0 or top > peak:
            peak, at = top, k
    return peak, added_ns, at, n


@compiled
def walk(
    forward: int, resident_bytes: int, ops: Any, storages: Any, needs: Any, reads: Any, creates: Any, made: Any,
    saved: Any, retained: Any, evict_at: Any, evicted: Any,
    there: Any, of_storage: Any, of_op: Any, rebuilt: Any, order: Any, stack: Any, steps: Any,
) -> tuple[int, int, int, int]:  # fmt: skip
    """`replay` for callers in Python: a named tuple costs them more than its members one by one."""
    facts = Facts(forward, resident_bytes, ops, storages, needs, reads, creates, made)
    choice = Choice(saved, retained, evict_at, evicted)
    return replay(facts, choice, Work(there, of_storage, of_op, rebuilt, order, stack, steps))
