"""The peak and the time of a plan: `simulator.core.schedule.build` and `simulator.core.problem`, compiled.

The step is walked op by op from the first op at which the plan can change anything: the end of forward, or the first
eviction in it. What each step gains is known when it runs; what it frees only when the walk has ended, because a value
goes with its last reader. So the walk notes, per storage, the last step that read the current instance, credits that
step when the instance is replaced or the walk ends, and one sum in the end gives the bytes at every step.

A table is one argument and its row lies in one place in memory, so a kernel that reads several facts of one op fetches
them at once. Lists of ids of every op (what it needs, reads, creates) lie one behind the other: those of op k from
`ops[k].needs_at` to `ops[k + 1].needs_at`, so `ops` has one row more than there are ops.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from simulator.kernels.compiled import compiled, inlined, inner

# For kernels to call each other with numbers of one width, and no literals: they are compiled for each mix of types.
long: Any = np.int64


def table(fields: list[tuple[str, type]]) -> np.dtype[Any]:
    """The type of a table's rows; aligned, as kernels want them."""
    return np.dtype(fields, align=True)


OPS_ROW: Final = table(
    [
        ("time_ns", np.int64),
        ("needs_at", np.int32),  # of `ids`: storages of forward that it takes, in a chain's order
        ("reads_at", np.uint32),  # of `ids`: storages of forward that it reads
        ("creates_at", np.uint32),  # of `ids`: storages of forward that it makes
        ("overwrites", np.int32),  # a storage whose memory it takes over if that ends here; -1
        ("id", np.int32),  # in the trace
        ("may_rerun", np.int32),
    ]
)
STORAGES_ROW: Final = table(
    [
        ("nbytes", np.int64),
        ("producer", np.uint32),
        ("last_forward", np.int32),  # the op after which forward needs it no more
        ("last_backward", np.int32),  # op by id in the trace; -1
        ("hold", np.int32),  # the op of backward until which the first instance is held whatever the plan; -1
        ("hold_after", np.int32),  # whether beyond that op's end: then it cannot take it over
        ("forward_take", np.int32),  # the op of forward that takes it over if it ends there; -1
    ]
)


class Packed(NamedTuple):
    """One trace, by position: ops are numbered as those that are left when views are dissolved."""

    forward: int  # how many ops forward has
    resident_bytes: int
    made_at: int  # of `ids`: the storages that forward makes, in that order
    ops: Any  # [op + 1] of OPS_ROW
    storages: Any  # [storage] of STORAGES_ROW
    ids: Any  # the lists of storages of all ops
    transient_bytes: Any  # [op]: what its own run adds at most
    # [op]: what its first run leaves behind, less what it frees whatever the plan: in forward all that it makes
    adds_bytes: Any


class Choice(NamedTuple):
    """The decisions of a plan."""

    saved: Any  # [storage]: whether it is there from forward on
    retained: Any  # [storage]: whether it stays when it has come back
    evict_at: Any  # [eviction]: op after which a storage is absent, ascending
    evicted: Any  # [eviction]: that storage


class Work(NamedTuple):
    """Work space of `walk`; nothing in it lasts from one call to the next, but for the steps, which are a result.

    Steps are those of the schedule, views left out.
    """

    present: Any  # [storage]: whether it may be read
    last: Any  # [storage]: the step that last read the instance that is there
    # [storage]: the step that last read what forward made, once it has come back; NEVER: it has not.
    first_end: Any
    demanded: Any  # [storage]: the op whose chain needs it
    visited: Any  # [op]: the op in whose chain it is
    step_of: Any  # [op]
    stack: Any  # of a chain; then what came back for the op at hand
    op: Any  # [step + op], out: the op (of forward they stand), ~op if it runs again. A chain stands there first
    freed_bytes: Any  # [step]
    taken_bytes: Any  # [step]: of what is freed, what the step's op takes over
    peak_bytes: Any  # [step], out; of a step that runs again first what it makes


def steps(room: int, n_ops: int) -> dict[str, Any]:
    """The columns of `Work` that have so many steps, and room for a chain beyond."""
    columns = ("freed_bytes", "taken_bytes", "peak_bytes")
    return {
        "op": np.arange(room + n_ops + 1, dtype=np.int32),
        **{name: np.zeros(room, np.int64) for name in columns},
    }


def pack_lists(*lists: Any) -> tuple[list[Any], Any]:
    """Rows of ids of several kinds one behind the other: where each row starts, with the end, by kind; and the ids."""
    starts, ids = [], np.zeros(0, np.int32)
    for rows in lists:
        start, more = pack_rows(rows)
        starts.append(start + np.int32(len(ids)))
        ids = np.concatenate((ids, more))
    return starts, ids.astype(np.uint32)


def pack_rows(rows: Any) -> tuple[Any, Any]:
    """Lists of ids one behind the other, and where each starts, with the end behind the last."""
    at = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=at[1:])
    return at, np.array([s for row in rows for s in row], np.int32)


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
    added_ns = 0
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
    live = facts.resident_bytes
    peak, at = live if not n else long(-1), long(-1)
    for k in range(n):
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
