"""Turn a state, as arrays, into the peak and the time of its plan: `simulator.core.evaluator`, compiled.

The step after forward is walked op by op. What each step gains is known when it runs; what it releases only when the
walk has ended, because a value goes with its last reader. So the walk notes, per storage, the last step that read the
current instance, credits that step when the instance is replaced or the walk ends, and one sum in the end gives the
bytes at every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from simulator.kernels.chain import chain
from simulator.kernels.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Ids = NDArray[np.int32]
    Longs = NDArray[np.int64]

# What `walk` returns in place of a peak.
FORBIDDEN: Final = -1  # a chain needs an op that may not run again: then the op that demands it, and that op
FULL: Final = -2  # more steps than the arrays hold
NOBODY: Final = np.int32(-1)
KEEPS: Final = 5  # the row of `per_op` that is not always there


@compiled
def walk(
    forward: int,
    resident_bytes: int,
    needs_at: Ids,
    needs: Ids,
    reads_at: Ids,
    reads: Ids,
    creates_at: Ids,
    creates: Ids,
    # [5 or 6, op]: time, rise, bytes that it settles by itself, storage that it may take over, bytes made; and, only
    # where any library does, what one keeps once the op has run again
    per_op: Longs,
    per_storage: Longs,  # [7, storage], in the order in which they are unpacked below
    op_id: Ids,
    may_rerun: Bytes,
    made: Ids,
    there0: Bytes,
    share: Bytes,
    drop_at: Ids,
    dropped: Ids,
    there: Bytes,
    instance: Bytes,
    of_storage: Ids,  # [3, storage], work space: last reader, chain that demanded it, values rebuilt
    of_op: Ids,  # [3, op], work space: chain that visited it, step, order
    stack: Ids,
    seq: Ids,  # out: position of the op of each step after forward; ~position if it runs again
    change: Longs,  # [3, step], work space: gained, released, takeovers
    levels: Longs,  # [2, step], out: peak, bytes before; forward's steps, then those of `seq`
) -> tuple[int, int, int, int]:
    """(peak, added time, peak step, steps after forward), or (FORBIDDEN, op, op, 0), or (FULL, 0, 0, 0)."""
    n_ops = op_id.shape[0]
    n_storages = there0.shape[0]
    room = seq.shape[0]
    time_ns, rise, settled, overwrites, born = per_op[0], per_op[1], per_op[2], per_op[3], per_op[4]
    nbytes, producer, last_backward = per_storage[0], per_storage[1], per_storage[2]
    last_forward, hold = per_storage[3], per_storage[4]
    hold_after, forward_take = per_storage[5], per_storage[6]
    last, demanded, rebuilt = of_storage[0], of_storage[1], of_storage[2]
    visited, step_of, order = of_op[0], of_op[1], of_op[2]
    gained, released, takes = change[0], change[1], change[2]
    peaks, before = levels[0], levels[1]

    for s in range(n_storages):
        there[s] = there0[s]
        instance[s] = there0[s]  # 0 none after forward, 1 the one from forward, 2 a rebuilt one
        last[s] = -1
        demanded[s] = -1
    for k in range(n_ops):
        visited[k] = -1
        step_of[k] = -1
    n_drops, drop = drop_at.shape[0], 0
    while drop < n_drops and drop_at[drop] < forward:
        if not there0[dropped[drop]]:
            there[dropped[drop]] = 0
        drop += 1

    steps = 0
    added_ns = 0
    for c in range(forward, n_ops):
        n_rebuilt = 0
        n_order = chain(c, c, there, needs_at, needs, producer, may_rerun, demanded, visited, stack, order)
        if n_order < 0:
            return FORBIDDEN, op_id[c], op_id[~n_order], 0
        if n_order:
            if steps + n_order >= room:
                return FULL, 0, 0, 0
            after = op_id[c]
            for k in range(n_order):
                b = order[k]
                bound = 0
                for j in range(reads_at[b], reads_at[b + 1]):
                    last[reads[j]] = steps
                for j in range(creates_at[b], creates_at[b + 1]):
                    x = creates[j]
                    if there[x] or not (demanded[x] == c or (share[x] and last_backward[x] > after)):
                        continue
                    if instance[x] == 2:
                        released[last[x]] += nbytes[x]
                        q = seq[last[x]]
                        if overwrites[q if q >= 0 else ~q] == x:
                            takes[last[x]] = nbytes[x]
                    instance[x] = 2
                    last[x] = steps
                    there[x] = 1
                    rebuilt[n_rebuilt] = x
                    n_rebuilt += 1
                    bound += nbytes[x]
                seq[steps] = ~b
                gained[steps] = bound
                released[steps] = 0
                takes[steps] = 0
                steps += 1
                added_ns += time_ns[b]
        if steps >= room:
            return FULL, 0, 0, 0
        step_of[c] = steps
        for j in range(reads_at[c], reads_at[c + 1]):
            last[reads[j]] = steps
        seq[steps] = c
        gained[steps] = settled[c]
        released[steps] = 0
        takes[steps] = 0
        steps += 1
        for k in range(n_rebuilt):
            if not share[rebuilt[k]]:
                there[rebuilt[k]] = 0
        while drop < n_drops and drop_at[drop] == c:
            if not there0[dropped[drop]]:
                there[dropped[drop]] = 0
            drop += 1

    # Forward gains nothing here that `per_op` does not know; `peaks` first holds what its steps release.
    for k in range(forward):
        peaks[k] = 0
    for m in range(made.shape[0]):
        s = made[m]
        end = NOBODY
        if instance[s] == 2:
            released[last[s]] += nbytes[s]
            q = seq[last[s]]
            if overwrites[q if q >= 0 else ~q] == s:
                takes[last[s]] = nbytes[s]
        elif instance[s]:
            end = last[s]
        # Now the instance that forward made.
        takeable = True
        if hold[s] >= 0:
            held = step_of[hold[s]]
            if held > end or (held == end and hold_after[s]):
                end = held
                takeable = not hold_after[s]
        if end >= 0:
            released[end] += nbytes[s]
            q = seq[end]
            if takeable and overwrites[q if q >= 0 else ~q] == s:
                takes[end] = nbytes[s]
        else:
            peaks[last_forward[s]] += nbytes[s]

    live = resident_bytes
    if per_op.shape[0] > KEEPS:
        kept_bytes = 0
        for k in range(steps):
            if seq[k] < 0:
                kept_bytes = max(kept_bytes, per_op[KEEPS, ~seq[k]])
        live += kept_bytes
    peak = live
    at = -1
    for k in range(forward):
        s = overwrites[k]
        top_bytes = live + rise[k]
        released_bytes = peaks[k]
        if s >= 0 and forward_take[s] == k:
            # It takes the value over if that ends here.
            still = there0[s] and instance[s] == 1 and last[s] >= 0
            if not still and hold[s] < 0:
                top_bytes -= nbytes[s]
        peaks[k] = top_bytes
        before[k] = live
        live += born[k] - released_bytes
        if at < 0 or top_bytes > peak:
            peak = top_bytes
            at = k
    for k in range(steps):
        q = seq[k]
        top_bytes = live + rise[q if q >= 0 else ~q] - takes[k]
        peaks[forward + k] = top_bytes
        before[forward + k] = live
        live += gained[k] - released[k]
        if at < 0 or top_bytes > peak:
            peak = top_bytes
            at = forward + k
    return peak, added_ns, at, steps
