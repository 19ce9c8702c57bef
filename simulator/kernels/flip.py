"""Turn a walked plan and a few flips of it into the peak and the time of the flipped plan, from what differs alone.

For plans without drops. Then a storage from forward is, when op c of backward is about to run, either kept, or shared
and rebuilt for an op before c, or not there. So the steps that run for c (its *segment*: a chain, then c) follow from
what is there for c, and a flip changes only segments that look at a storage whose being there has changed. They are
walked again in order, each telling for which later ones something else is there now. What is alive from one segment
to another, a kept or a shared value, is one interval of steps; where its end or begin moves, a range of steps gains or
loses its bytes. The peak of the unchanged steps under these ranges comes from the maxima of blocks of steps.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from simulator.kernels.chain import chain, missing
from simulator.kernels.changes import (
    change,
    end_at,
    gather,
    highest_under,
    kept_under,
    move_point,
    next_touch,
    op_at,
    pop,
    push,
)
from simulator.kernels.compiled import compiled
from simulator.kernels.flip_index import NEVER
from simulator.kernels.walk import FORBIDDEN, KEEPS

GIVEN_UP: Final = -2  # so much changes, or so oddly, that the plan must be walked as a whole


@compiled
def flip(forward: int, facts: Any, base: Any, work: Any, flips: Any, begin: int, end: int) -> tuple[Any, Any]:
    """(peak, added time beside the base) of the base with flips[begin:end], or (FORBIDDEN or GIVEN_UP, 0).

    A flip s >= 0 keeps storage s if it was not kept, and the other way round; ~s does so with sharing.
    """
    needs_at, needs, reads_at, reads, creates_at, creates, per_op, per_storage, op_id, may_rerun, _ = facts
    (there_before, share_before, seq, peaks, live_at, segment_at, segment, segment_of, bound_before, bound_at,
     read_at, read_step, touch_at, touch, highest, held, taken_over) = base  # fmt: skip
    there, share, bound, epoch, ids, stamps, op_stamps, stack, order, heap, walked, flows, changes = work
    time_ns, settled, rise, overwrites = per_op[0], per_op[2], per_op[1], per_op[3]
    nbytes, producer, last_backward = per_storage[0], per_storage[1], per_storage[2]
    last_forward, hold, forward_take = per_storage[3], per_storage[4], per_storage[6]
    pending, log, alone, bound_in, read_in, affected = ids[0], ids[1], ids[2], ids[3], ids[4], ids[5]
    demanded, read_now, seen, settled_now = stamps[0], stamps[1], stamps[2], stamps[3]
    visited, in_walk = op_stamps[0], op_stamps[1]
    step_op, step_c, walk_c, walk_at = walked[0], walked[1], walked[2], walked[3]
    gained, released, takes = flows[0], flows[1], flows[2]
    room = pending.shape[0] - 2
    epoch[0] += 1
    now = epoch[0]
    mark = epoch[1]
    size = n_log = n_walks = n_steps = 0
    difference = np.int64(0)
    status = 0
    for f in range(begin, end):
        x = flips[f]
        if x >= 0:
            there[x] = 1 - there[x]
        else:
            x = ~x
            share[x] = 1 - share[x]
        if touch_at[x] < touch_at[x + 1]:
            push(heap, size, (np.int64(touch[touch_at[x]]) << 32) | x)
            size += 1

    # Walk again, in order, the segments for which something else is there now.
    while size:
        c = heap[0] >> 32
        n_pending = 0
        while size and heap[0] >> 32 == c:
            x = pop(heap, size) & 0xFFFFFFFF
            size -= 1
            if n_pending == 0 or pending[n_pending - 1] != x:
                pending[n_pending] = x
                n_pending += 1
        mark += 1
        first_step, main_step = segment_at[c - forward], segment_at[c - forward + 1] - 1
        if held[c] or n_steps + main_step - first_step >= step_op.shape[0]:
            status = GIVEN_UP
            break
        for k in range(first_step, main_step):
            q = ~seq[k]
            for j in range(creates_at[q], creates_at[q + 1]):
                x = creates[j]
                if bound[x] == c:
                    if n_log >= room or n_pending >= room:
                        status = GIVEN_UP
                        break
                    bound[x] = NEVER
                    log[n_log] = x
                    pending[n_pending] = x
                    n_log += 1
                    n_pending += 1
        if status:
            break
        n_order = chain(
            c, mark, there, (share, bound), needs_at, needs, producer, may_rerun, demanded, visited, stack, order
        )  # fmt: skip
        if n_order < 0:
            status = FORBIDDEN
            break
        if n_steps + n_order + 1 >= step_op.shape[0] or n_walks + 1 >= walk_c.shape[0]:
            status = GIVEN_UP
            break
        walk_c[n_walks] = c
        walk_at[n_walks] = n_steps
        n_walks += 1
        in_walk[c] = now
        n_alone = 0
        for k in range(n_order + 1):
            q = order[k] if k < n_order else c
            for j in range(reads_at[q], reads_at[q + 1]):
                read_in[reads[j]] = n_steps
                read_now[reads[j]] = now
            step_op[n_steps] = q
            step_c[n_steps] = c
            released[n_steps] = 0
            takes[n_steps] = 0
            gain = settled[q]
            if k < n_order:
                difference += time_ns[q]
                gain = 0
                for j in range(creates_at[q], creates_at[q + 1]):
                    x = creates[j]
                    if not missing(x, c, there, (share, bound)):
                        continue
                    if not (demanded[x] == mark or (share[x] and last_backward[x] > op_id[c])):
                        continue
                    if n_log >= room or n_pending >= room or n_alone >= room:
                        status = GIVEN_UP
                        break
                    gain += nbytes[x]
                    bound_in[x] = n_steps
                    if share[x]:
                        bound[x] = c
                        log[n_log] = x
                        pending[n_pending] = x
                        n_log += 1
                        n_pending += 1
                    else:
                        alone[n_alone] = x
                        n_alone += 1
            gained[n_steps] = gain
            n_steps += 1
        difference -= segment[0, c - forward]
        for k in range(n_alone):
            x = alone[k]
            at = bound_in[x]
            if read_now[x] == now and read_in[x] > at:
                at = read_in[x]
            end_at(x, at, nbytes, overwrites, step_op, released, takes)
        for k in range(n_pending):
            x = pending[k]
            if settled_now[x] == mark:
                continue
            settled_now[x] = mark
            was = there_before[x] or (share_before[x] and bound_before[x] <= c)
            is_now = there[x] or (share[x] and bound[x] <= c)
            if was != is_now or (share[x] != share_before[x] and not was):
                after = next_touch(touch, touch_at[x], touch_at[x + 1], c)
                if after < NEVER:
                    if size + 2 >= heap.shape[0]:
                        status = GIVEN_UP
                        break
                    push(heap, size, (np.int64(after) << 32) | x)
                    size += 1
        if status:
            break
    epoch[1] = mark

    # The storages whose life from segment to segment may have changed.
    n_affected = 0
    if not status:
        for f in range(begin, end):
            pending[0] = flips[f] if flips[f] >= 0 else ~flips[f]
            n_affected = gather(affected, n_affected, seen, now, pending, 0, 1)
        for w in range(n_walks):
            at = segment_at[walk_c[w] - forward]
            stop = walk_at[w + 1] if w + 1 < n_walks else n_steps
            n_old = segment_at[walk_c[w] - forward + 1] - at
            for k in range(n_old + stop - walk_at[w]):
                q = op_at(seq, at + k) if k < n_old else step_op[walk_at[w] + k - n_old]
                n_affected = gather(affected, n_affected, seen, now, reads, reads_at[q], reads_at[q + 1])
                if q < forward:
                    n_affected = gather(
                        affected, n_affected, seen, now, creates, creates_at[q], creates_at[q + 1]
                    )

    n_changes = 0
    for a in range(n_affected):
        x = affected[a]
        if hold[x] >= 0 and taken_over[x]:
            status = GIVEN_UP
        if status or n_changes + 12 > changes.shape[1]:
            status = GIVEN_UP
            break
        size_bytes = nbytes[x]
        # The last step that reads it: among those that stay as they were (old), and those walked (new).
        read = read_step[read_at[x + 1] - 1] if read_at[x + 1] > read_at[x] else -1
        j = read_at[x + 1] - 1
        while j >= read_at[x] and in_walk[segment_of[read_step[j]]] == now:
            j -= 1
        old = read_step[j] if j >= read_at[x] else -1
        new = read_in[x] if read_now[x] == now else -1
        shared_before = not there_before[x] and share_before[x] and bound_before[x] < NEVER
        shared_now = not there[x] and share[x] and bound[x] < NEVER
        begin_t = -1
        if shared_now:
            if in_walk[bound[x]] == now:
                begin_t = forward + segment_at[bound[x] - forward + 1]
                new = max(new, bound_in[x])
            else:
                begin_t = forward + bound_at[x] + 1
                old = max(old, bound_at[x])
        in_new = new >= 0 and (old < 0 or step_c[new] > segment_of[old])
        end_t = -1  # of the current instance
        if there[x] or shared_now:
            if in_new:
                end_t = forward + segment_at[step_c[new] - forward]
            elif old >= 0:
                end_t = forward + old
        held_t = -1
        if hold[x] >= 0:
            held_t = forward + segment_at[hold[x] - forward + 1] - 1

        # The instance that forward made: until when, before and now, and which step's memory it becomes.
        until_before = forward + read if there_before[x] and read >= 0 else -1
        until_now = end_t if there[x] else -1
        point_before = point_now = -1
        if held_t > until_before:
            until_before = held_t
        if until_before < 0:
            until_before, point_before = last_forward[x], forward_take[x]
        elif hold[x] < 0 and overwrites[op_at(seq, until_before - forward)] == x:
            point_before = until_before
        ends_new = there[x] and in_new and until_now > held_t
        if held_t > until_now:
            until_now = held_t
        if until_now < 0:
            until_now, point_now = last_forward[x], forward_take[x]
        elif ends_new:
            end_at(x, new, nbytes, overwrites, step_op, released, takes)
        elif hold[x] < 0 and overwrites[op_at(seq, until_now - forward)] == x:
            point_now = until_now
        if until_before != until_now:
            more = size_bytes if until_now > until_before else -size_bytes
            first, last = min(until_before, until_now), max(until_before, until_now)
            n_changes = change(changes, n_changes, first + 1, last + 1, more, 0)

        # The shared instance.
        again_before = again_now = -1
        if shared_before:
            last = max(read, bound_at[x])
            n_changes = change(
                changes, n_changes, forward + bound_at[x] + 1, forward + last + 1, -size_bytes, 0
            )
            if overwrites[op_at(seq, last)] == x:
                again_before = forward + last
        if shared_now:
            if begin_t <= end_t:
                n_changes = change(changes, n_changes, begin_t, end_t + 1, size_bytes, 0)
            if in_new:
                end_at(x, new, nbytes, overwrites, step_op, released, takes)
            elif overwrites[op_at(seq, end_t - forward)] == x:
                again_now = end_t
        n_changes = move_point(changes, n_changes, point_before, point_now, size_bytes)
        n_changes = move_point(changes, n_changes, again_before, again_now, size_bytes)

    most: Any = np.int64(status)
    if not status:
        most = highest_under(
            forward, seq, peaks, highest, live_at, segment_at, rise, heap, walk_c, walk_at, n_walks, n_steps, step_op,
            gained, released, takes, changes, n_changes,
        )  # fmt: skip
        if per_op.shape[0] > KEEPS:
            most += kept_under(
                forward, segment[1], per_op[KEEPS], walk_c, n_walks, step_op, n_steps, in_walk, now
            )
    for k in range(n_log):
        bound[log[k]] = bound_before[log[k]]
    for f in range(begin, end):
        x = flips[f]
        if x >= 0:
            there[x] = 1 - there[x]
        else:
            share[~x] = 1 - share[~x]
    return most, difference


@compiled
def flip_each(
    forward: int, facts: Any, base: Any, work: Any, flips: Any, group_at: Any, peaks: Any, added_ns: Any
) -> None:
    """`flip` for each group of flips by itself: flips[group_at[g]:group_at[g + 1]]."""
    for g in range(peaks.shape[0]):
        peaks[g], added_ns[g] = flip(forward, facts, base, work, flips, group_at[g], group_at[g + 1])
