"""Turn a walked plan into what `simulator.kernels.flip` looks up about it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from simulator.kernels.compiled import compiled
from simulator.kernels.walk import KEEPS

NEVER: Final = 1 << 30
BLOCK: Final = 32


@compiled
def index(
    forward: int,
    facts: Any,
    there: Any,
    share: Any,
    seq: Any,
    peaks: Any,
    steps: int,
    segment_at: Any,  # out, [backward op + 1]: first step of its segment
    # out, [1 or 2, backward op + 2]: what the segment adds; and, where `per_op` has that row, the most that a rerun in
    # it makes a library keep; then the most of these, and in how many segments it is
    segment: Any,
    segment_of: Any,  # out, [step]: the op whose segment it is in
    first_bound: Any,  # out, [storage]: the op for which a shared value is rebuilt, or NEVER
    bound_at: Any,  # out, [storage]: the step of that
    read_at: Any,  # out, [storage + 1], and by storage the steps that read it
    read_step: Any,
    touch_at: Any,  # out, [storage + 1], and by storage the ops whose segments look at it
    touch: Any,
    highest: Any,  # out, [block of steps]: their highest peak
) -> None:
    needs_at, needs, reads_at, reads, creates_at, creates, per_op, per_storage, op_id, _, _ = facts
    n_storages = there.shape[0]
    for s in range(n_storages):
        first_bound[s] = NEVER
        bound_at[s] = -1
    for s in range(n_storages + 1):
        read_at[s] = 0
        touch_at[s] = 0
    demanded = np.full(n_storages, -1, np.int32)
    begin = 0
    for k in range(steps):
        c = seq[k]
        if c < 0:
            for j in range(needs_at[~c], needs_at[~c + 1]):
                demanded[needs[j]] = begin
            continue
        for j in range(needs_at[c], needs_at[c + 1]):
            demanded[needs[j]] = begin
        for m in range(begin, k):
            for j in range(creates_at[~seq[m]], creates_at[~seq[m] + 1]):
                s = creates[j]
                asked = demanded[s] == begin or per_storage[2, s] > op_id[c]
                if asked and share[s] and not there[s] and first_bound[s] == NEVER:
                    first_bound[s] = c
                    bound_at[s] = m
        segment_at[c - forward] = begin
        added = 0
        for j in range(begin, k + 1):
            segment_of[j] = c
            if j < k:
                added += per_op[0, ~seq[j]]
        segment[0, c - forward] = added
        if per_op.shape[0] > KEEPS:
            kept = np.int64(0)
            for m in range(begin, k):
                kept = max(kept, per_op[KEEPS, ~seq[m]])
            segment[1, c - forward] = kept
        begin = k + 1
    n_segments = per_op.shape[1] - forward
    segment_at[n_segments] = steps
    if per_op.shape[0] > KEEPS:
        most = np.int64(0)
        for m in range(n_segments):
            most = max(most, segment[1, m])
        segment[1, n_segments], segment[1, n_segments + 1] = most, 0
        for m in range(n_segments):
            segment[1, n_segments + 1] += segment[1, m] == most

    # Twice over the steps: count, then fill. A storage that two ops of a segment look at is entered twice.
    for fill in range(2):
        if fill:
            n_read = n_touch = 0
            for s in range(n_storages):
                n_read, read_at[s] = n_read + read_at[s], n_read
                n_touch, touch_at[s] = n_touch + touch_at[s], n_touch
        for k in range(steps):
            q = seq[k]
            again = q < 0
            if again:
                q = ~q
            c = segment_of[k]
            for j in range(reads_at[q], reads_at[q + 1]):
                s = reads[j]
                if fill:
                    read_step[read_at[s]] = k
                read_at[s] += 1
            for j in range(needs_at[q], needs_at[q + 1]):
                s = needs[j]
                if fill:
                    touch[touch_at[s]] = c
                touch_at[s] += 1
            if again:
                for j in range(creates_at[q], creates_at[q + 1]):
                    s = creates[j]
                    if fill:
                        touch[touch_at[s]] = c
                    touch_at[s] += 1
    # After the second time each entry is the end of its rows; move them one on.
    for s in range(n_storages, 0, -1):
        read_at[s] = read_at[s - 1]
        touch_at[s] = touch_at[s - 1]
    read_at[0] = touch_at[0] = 0
    for b in range(highest.shape[0]):
        highest[b] = -1
    for t in range(forward + steps):
        highest[t // BLOCK] = max(highest[t // BLOCK], peaks[t])
