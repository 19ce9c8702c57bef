"""Turn the values that a plan keeps into what it does with the rebuilt ones: each stays while there is room for it.

One walk over backward. What a chain rebuilds stays for its later uses; where a step would be over the budget, what is
idle then goes, first what is large, soon rebuilt and not needed for long, each from its last reader on (a drop).

Counts: all that is in memory at each step, as far as it is known then. Ignores: that a kept value may go before the
last use that anything made from it has; that a drop makes later chains longer. The walk that follows sees both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.kernels.chain import chain
from simulator.kernels.compiled import compiled


@compiled
def add_drop(k: int, s: int, drops: Any, n: int) -> int:
    """Add a drop of s after op k to the sorted drops[:, :n], unless it is in them or they are full; the new number."""
    if n >= drops.shape[1]:
        return n
    begin, end = 0, n
    while begin < end:
        middle = (begin + end) // 2
        if drops[0, middle] < k or (drops[0, middle] == k and drops[1, middle] < s):
            begin = middle + 1
        else:
            end = middle
    if begin < n and drops[0, begin] == k and drops[1, begin] == s:
        return n
    for j in range(n, begin, -1):
        drops[0, j], drops[1, j] = drops[0, j - 1], drops[1, j - 1]
    drops[0, begin], drops[1, begin] = k, s
    return n + 1


@compiled
def idlest(
    held: Any, n_held: int, step: int, c: int, stamp: Any, read_in: Any, last_use: Any, nbytes: Any, cost: Any,
    weight: Any,
) -> int:  # fmt: skip
    """Which of held[:n_held] had best go while that step of the chain for op c runs; -1: each is read from there on."""
    best, most = -1, -1.0
    for j in range(n_held):
        s = held[j]
        if stamp[s] == c and read_in[s] >= step:
            continue
        score = nbytes[s] / cost[s] * np.sqrt(last_use[s] - c + 1.0) * weight[s]
        if score > most:
            best, most = j, score
    return best


@compiled
def retain(
    forward: int,
    budget_bytes: int,
    facts: Any,
    made: Any,  # the storages that forward makes, in that order
    gone_at: Any,  # [op + 1], and by op the storages that nothing needs after it, however they are rebuilt
    gone: Any,
    fixed: Any,  # [op]: bytes that are there before it whatever the plan
    last_use: Any,  # [storage]: the last op of backward that reads it
    stays: Any,  # [storage]: whether a rebuilt one may stay
    kept: Any,  # [storage]
    weight: Any,  # [storage]: makes it go sooner or later
    work: Any,
    drops: Any,  # out
) -> int:
    """The number of drops."""
    needs_at, needs, reads_at, reads, creates_at, creates, per_op, per_storage, _, _, _ = facts
    time_ns, rise, overwrites = per_op[0], per_op[1], per_op[3]
    nbytes, producer = per_storage[0], per_storage[1]
    here, stamp, read_in, demanded, last_at, held, stack, order, visited, cost = work
    n_held = n_drops = 0
    live = np.int64(0)
    for j in range(made.shape[0]):
        s = made[j]
        here[s] = kept[s]
        stamp[s] = demanded[s] = -1
        if kept[s]:
            live += nbytes[s]
        # What it takes to make it again, if all that may stay is there.
        total = time_ns[producer[s]] + 1.0
        b = producer[s]
        for i in range(needs_at[b], needs_at[b + 1]):
            y = needs[i]
            if not kept[y] and not stays[y]:
                total += cost[y]
        cost[s] = min(total, 1e15)
    for k in range(visited.shape[0]):
        visited[k] = -1
    for c in range(forward, fixed.shape[0]):
        n_order = chain(c, c, here, needs_at, needs, producer, None, demanded, visited, stack, order)
        order[n_order] = c
        for k in range(n_order + 1):
            b = order[k]
            for j in range(reads_at[b], reads_at[b + 1]):
                stamp[reads[j]] = c
                read_in[reads[j]] = k
        # `here` is 1 for what was kept, 2 for what was rebuilt and stays, 3 for what is rebuilt now, 4 if that goes.
        for k in range(n_order + 1):
            b = order[k]
            level = live + fixed[c] + rise[b]
            s = overwrites[b]
            if s >= 0 and here[s] == 4 and read_in[s] == k:
                level -= nbytes[s]
            while level > budget_bytes:
                j = idlest(held, n_held, k, c, stamp, read_in, last_use, nbytes, cost, weight)
                if j < 0:
                    break
                s = held[j]
                n_held -= 1
                held[j] = held[n_held]
                at = c if stamp[s] == c else last_at[s]
                n_drops = add_drop(at, s, drops, n_drops)
                here[s] = 0
                live -= nbytes[s]
                level -= nbytes[s]
            if k < n_order:
                for j in range(creates_at[b], creates_at[b + 1]):
                    s = creates[j]
                    stay = stays[s] and last_use[s] > c
                    if here[s] or not (demanded[s] == c or stay):
                        continue
                    if stamp[s] != c:
                        stamp[s] = c
                        read_in[s] = k
                    live += nbytes[s]
                    here[s] = 4
                    if stay:
                        here[s] = 3
                        held[n_held] = s
                        n_held += 1
                    elif read_in[s] <= k:
                        here[s] = 0
                        live -= nbytes[s]
            for j in range(reads_at[b], reads_at[b + 1]):
                s = reads[j]
                if here[s] == 4 and read_in[s] == k:
                    here[s] = 0
                    live -= nbytes[s]
        left = 0
        for j in range(n_held):
            s = held[j]
            if stamp[s] == c:
                last_at[s] = c
            if last_use[s] > c:
                here[s] = 2
                held[left] = s
                left += 1
            else:
                here[s] = 0
                live -= nbytes[s]
        n_held = left
        for j in range(gone_at[c], gone_at[c + 1]):
            if here[gone[j]] == 1:
                live -= nbytes[gone[j]]
    return n_drops
