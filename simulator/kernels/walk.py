"""The peak and the time of a plan: `simulator.core.schedule.build` and `simulator.core.replay`, compiled.

The step is walked op by op from the first op at which the plan can change anything: the end of forward, or the first
eviction in it. What each step gains is known when it runs; what it frees only when the walk has ended, because a value
goes with its last reader. So the walk notes, per storage, the last step that read the current instance, credits that
step when the instance is replaced or the walk ends, and one sum in the end gives the bytes at every step.
"""

from __future__ import annotations

from typing import Any, Final

from simulator.kernels.compiled import compiled, inlined, inner
from simulator.kernels.records import long

# What `walk` returns in place of a peak.
FORBIDDEN: Final = -1  # a chain needs an op that may not run again: then the op that demands it, and that op
FULL: Final = -2  # more steps than the arrays hold
NEVER: Final = -2  # in `first_end`: the instance that forward made is the only one


@inlined
def chain(c: int, at: int, present: Any, facts: Any, work: Any, checked: bool) -> Any:
    """How many ops must run again for op c, each as ~op from `work.op[at]` on; ~b if op b must and may not.

    Args:
        c: the op, by position.
        at: where to write them.
        present: [storage], whether it is there when c is about to run.
        facts: the trace.
        work: out: `demanded` is c where some op of the chain, or c, needs what is not there, and `visited` where an op
            is in the chain; they were c nowhere before.
        checked: whether it matters if an op may run again.
    """
    ops, storages, ids, stack, order = facts.ops, facts.storages, facts.ids, work.stack, work.op
    n_order = top = long(0)
    for j in range(ops[c + 1].needs_at - 1, ops[c].needs_at - 1, -1):
        if not present[ids[j]]:
            stack[top] = ids[j]
            top += 1
    while top:
        top -= 1
        x = stack[top]
        if x < 0:
            order[at + n_order] = x
            n_order += 1
            continue
        work.demanded[x] = c
        b = storages[x].producer
        if work.visited[b] == c:
            continue
        work.visited[b] = c
        if checked and not ops[b].may_rerun:
            return ~long(b)
        stack[top] = ~b
        top += 1
        for j in range(ops[b + 1].needs_at - 1, ops[b].needs_at - 1, -1):
            if not present[ids[j]]:
                stack[top] = ids[j]
                top += 1
    return n_order


@inner
def free(s: int, end: int, takes: Any, facts: Any, work: Any) -> None:
    """An instance of s goes with that step, whose op takes its memory over if it can and `takes`."""
    nbytes = facts.storages[s].nbytes
    work.freed_bytes[end] += nbytes
    q = work.op[end]
    if takes and facts.ops[q if q >= 0 else ~q].overwrites == s:
        work.taken_bytes[end] = nbytes


@inner
def replay(facts: Any, choice: Any, work: Any) -> tuple[int, int, int, int]:
    """(peak, added time, peak step, steps), or (FORBIDDEN, op, op, 0), or (FULL, 0, 0, 0).

    Steps are numbered from the start of forward; `work.op` and `work.peak_bytes` say what each is and its peak.
    """
    forward, ops, storages = facts.forward, facts.ops, facts.storages
    ids = facts.ids
    saved, retained, evict_at, evicted = choice.saved, choice.retained, choice.evict_at, choice.evicted
    present, rebuilt, last, first_end = work.present, work.stack, work.last, work.first_end
    demanded, step_of, op, peaks = work.demanded, work.step_of, work.op, work.peak_bytes
    freed, taken = work.freed_bytes, work.taken_bytes
    n_ops, room, n_evictions = ops.shape[0] - 1, peaks.shape[0], evict_at.shape[0]

    for s in range(present.shape[0]):
        present[s] = saved[s]
        last[s] = -1
        first_end[s] = NEVER
        demanded[s] = -1
    for k in range(n_ops):
        work.visited[k] = -1
    for k in range(forward):
        freed[k] = 0
        taken[k] = 0
    eviction = 0
    while eviction < n_evictions and evict_at[eviction] < forward:
        present[evicted[eviction]] = 0
        eviction += 1

    n = forward  # steps so far
    added_ns = rerun_bytes = 0
    for c in range(forward, n_ops):
        n_rebuilt = 0
        n_order = chain(c, n, present, facts, work, True)
        if n_order < 0:
            return FORBIDDEN, ops[c].id, ops[~n_order].id, 0
        if n + n_order >= room:
            return FULL, 0, 0, 0
        after = ops[c].id
        for _ in range(n_order):
            b = ~op[n]
            for j in range(ops[b].reads_at, ops[b + 1].reads_at):
                last[ids[j]] = n
            made_bytes = 0
            for j in range(ops[b].creates_at, ops[b + 1].creates_at):
                x = ids[j]
                if present[x] or not (
                    demanded[x] == c or (retained[x] and storages[x].last_backward > after)
                ):
                    continue
                if first_end[x] == NEVER:
                    first_end[x] = last[x]
                else:
                    free(x, last[x], True, facts, work)
                last[x] = n
                present[x] = 1
                rebuilt[n_rebuilt] = x
                n_rebuilt += 1
                made_bytes += storages[x].nbytes
            peaks[n] = made_bytes
            freed[n] = taken[n] = 0
            n += 1
            added_ns += ops[b].time_ns
            rerun_bytes = max(rerun_bytes, ops[b].rerun_bytes)
        step_of[c] = n
        for j in range(ops[c].reads_at, ops[c + 1].reads_at):
            last[ids[j]] = n
        op[n] = c
        freed[n] = taken[n] = 0
        n += 1
        for k in range(n_rebuilt):
            if not retained[rebuilt[k]]:
                present[rebuilt[k]] = 0
        while eviction < n_evictions and evict_at[eviction] == c:
            present[evicted[eviction]] = 0
            eviction += 1

    for m in range(facts.made_at, ids.shape[0]):
        s = ids[m]
        end = last[s]
        if first_end[s] != NEVER:
            free(s, end, True, facts, work)
            end = first_end[s]
        # Now the instance that forward made.
        takes, hold = True, storages[s].hold
        if hold >= 0:
            takes = not storages[s].hold_after or step_of[hold] < end
            end = max(end, step_of[hold])
        elif end < 0:
            end = storages[s].last_forward
            takes = storages[s].forward_take == end
        free(s, end, takes, facts, work)

    transient, adds = facts.transient_bytes, facts.adds_bytes
    live = facts.resident_bytes + rerun_bytes
    peak, at = live if not n else long(-1), long(-1)
    for k in range(forward):
        top = live + transient[k] - taken[k]
        live += adds[k] - freed[k]
        peaks[k] = top
        if top > peak:
            peak, at = top, k
    for k in range(forward, n):
        q = op[k]
        top = live + transient[q if q >= 0 else ~q] - taken[k]
        live += (adds[q] if q >= 0 else peaks[k]) - freed[k]
        peaks[k] = top
        if top > peak:
            peak, at = top, k
    return peak, added_ns, at, n


@compiled
def walk(facts: Any, choice: Any, work: Any) -> tuple[int, int, int, int]:
    """`replay` for callers in Python: of Packed, Choice and Work."""
    return replay(facts, choice, work)
