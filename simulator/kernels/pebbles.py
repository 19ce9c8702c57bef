"""Turn the end of a step into what bringing its working sets together costs at least: a best-first search backwards.

What a state is, and why the search gives a bound, stands in `simulator.bounds.working_sets`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from simulator.kernels.compiled import compiled

WIDTH: Final = 24  # storages of a state; of more, the smallest are not asked for
EMPTY: Final = -1
NO_WAY: Final = 1 << 62


@compiled
def before(first: int, second: int, cost: Any, gap: Any) -> bool:
    """Whether one node is looked at before another: the cheaper one, of equal ones the one nearer to the turn."""
    if cost[0, first] != cost[0, second]:
        return bool(cost[0, first] < cost[0, second])
    return bool(gap[first] < gap[second])


@compiled
def push(node: int, heap: Any, n: int, cost: Any, gap: Any) -> int:
    """The heap's new length."""
    k = n
    while k and before(node, heap[(k - 1) // 2], cost, gap):
        heap[k] = heap[(k - 1) // 2]
        k = (k - 1) // 2
    heap[k] = node
    return n + 1


@compiled
def pop(heap: Any, n: int, cost: Any, gap: Any) -> int:
    """Take the first away: the heap's new length."""
    n -= 1
    last = heap[n]
    k = 0
    while 2 * k + 1 < n:
        child = 2 * k + 1
        if child + 1 < n and before(heap[child + 1], heap[child], cost, gap):
            child += 1
        if not before(heap[child], last, cost, gap):
            break
        heap[k] = heap[child]
        k = child
    heap[k] = last
    return n


@compiled
def include(state: Any, n: int, s: int) -> int:
    """Put a storage into a sorted state, if it is not there; how many there are."""
    k = n
    while k and state[k - 1] > s:
        k -= 1
    if k and state[k - 1] == s:
        return n
    if n == state.shape[0]:
        if k == n:
            return n
        n -= 1
    for j in range(n, k, -1):
        state[j] = state[j - 1]
    state[k] = s
    return n + 1


@compiled
def enter(
    state: Any, n: int, at: int, so_far: int, least: int, states: Any, cost: Any, gap: Any, table: Any, heap: Any,
    n_nodes: int, n_heap: int,
) -> tuple[int, int]:  # fmt: skip
    """Note a state that is reached at a cost, unless it was as cheaply before: (nodes, entries in the heap)."""
    key = np.uint64(at)
    for j in range(n):
        key = (key ^ np.uint64(state[j])) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    size = np.uint64(table.shape[0])  # a power of two
    place = key & (size - np.uint64(1))
    while table[place] >= 0:
        node = table[place]
        if gap[node] == at:
            same = True
            for j in range(states.shape[1]):
                if states[node, j] != (state[j] if j < n else EMPTY):
                    same = False
                    break
            if same:
                if cost[1, node] <= so_far:
                    return n_nodes, n_heap
                break  # the node that is in the heap is stale from now on
        place = (place + np.uint64(1)) & (size - np.uint64(1))
    node = n_nodes
    states[node, :n] = state[:n]
    states[node, n:] = EMPTY
    gap[node] = at
    cost[0, node], cost[1, node], cost[2, node] = least, so_far, 0
    if table[place] >= 0:
        cost[2, table[place]] = 1
    table[place] = node
    return n_nodes + 1, push(node, heap, n_heap, cost, gap)


@compiled
def held_of(state: Any, n: int, nbytes: Any) -> Any:
    """Bytes of a state."""
    held = np.int64(0)
    for j in range(n):
        held += nbytes[state[j]]
    return held


@compiled
def paid(state: Any, n: int, at: int, first_read: Any, share: Any, before_share: Any) -> Any:
    """What must have been added before, so that ops of backward could run up to a gap and the state be there."""
    least = before_share[at]
    for j in range(n):
        if first_read[state[j]] >= at:
            least += share[state[j]]
    return least


@compiled
def walk_back(
    budget_bytes: int,
    first: int,  # gap where the search ends
    end: int,  # gap where it begins
    root: int,
    reads_at: Any,  # [op + 1], and the tracked storages that each op reads
    reads: Any,
    overwrites: Any,  # [op]: a tracked storage, or -1
    per_op: Any,  # [3, op of forward]: time in the unit of `root`, what a run adds in bytes, whether it may run again
    base_bytes: Any,  # [gap]
    need_bytes: Any,  # [op]
    per_storage: Any,  # [4, tracked]: bytes, producer, the last op until which it is there whatever the plan, the first
    # op of backward that reads it
    share: Any,  # [tracked]: what having it at a moment must have cost before
    before_share: Any,  # [gap]: the same of all that ops of backward before the gap read, less what memory is worth
    most: Any,  # states looked at, states without a gain after which it ends
    states: Any,  # work space
    cost: Any,
    gap: Any,
    table: Any,
    heap: Any,
) -> tuple[int, int]:
    """The bound, in the unit of `root`, and how many states were looked at; NO_WAY: there is no way back."""
    nbytes, producer, until, first_read = per_storage[0], per_storage[1], per_storage[2], per_storage[3]
    state = np.empty(states.shape[1], states.dtype)
    table[:] = EMPTY
    n_nodes, n_heap = enter(state, 0, end, 0, root, states, cost, gap, table, heap, 0, 0)
    room = states.shape[0] - states.shape[1] - 2
    looked = 0
    least = root
    gained = 0  # how many had been looked at when the bound last rose
    while n_heap:
        node = heap[0]
        n_heap = pop(heap, n_heap, cost, gap)
        if cost[2, node]:
            continue
        if cost[0, node] > least:
            least, gained = cost[0, node], looked
        at = gap[node]
        looked += 1
        if at <= first or n_nodes > room or looked > most[0] or looked - gained > most[1]:
            return least, looked
        so_far = cost[1, node]
        n_held = 0
        while n_held < states.shape[1] and states[node, n_held] >= 0:
            n_held += 1

        # The last run in this gap that made a part of the state.
        for k in range(n_held):
            q = producer[states[node, k]]
            known = False
            for j in range(k):
                if producer[states[node, j]] == q:
                    known = True
            if known or not per_op[2, q]:
                continue
            n = 0
            for j in range(n_held):
                s = states[node, j]
                if producer[s] != q:
                    state[n] = s
                    n += 1
            rise = per_op[1, q]
            taken = overwrites[q]
            bytes_now = held_of(state, n, nbytes)
            # What it reads is there too, whether the state has room for it or not.
            for j in range(reads_at[q], reads_at[q + 1]):
                s = reads[j]
                if until[s] >= at:
                    continue
                new = True
                for i in range(n_held):
                    if states[node, i] == s:
                        new = False
                if new:
                    bytes_now += nbytes[s]
                    if s == taken:
                        rise -= nbytes[s]
                n = include(state, n, s)
            if base_bytes[at] + bytes_now + rise > budget_bytes:
                continue
            now = so_far + per_op[0, q]
            bound = now + paid(state, n, at, first_read, share, before_share)
            n_nodes, n_heap = enter(
                state, n, at, now, max(least, bound), states, cost, gap, table, heap, n_nodes, n_heap
            )

        # Or nothing of it was made in this gap, and all of it was there while the op before ran.
        ran = at - 1
        extra = np.int64(0)
        n = 0
        for k in range(n_held):
            s = states[node, k]
            read = False
            for j in range(reads_at[ran], reads_at[ran + 1]):
                if reads[j] == s:
                    read = True
            if overwrites[ran] == s or (not read and until[s] < ran):
                extra += nbytes[s]
            if until[s] < ran:
                state[n] = s
                n += 1
        if extra + need_bytes[ran] > budget_bytes:
            continue
        for j in range(reads_at[ran], reads_at[ran + 1]):
            if until[reads[j]] < ran:
                n = include(state, n, reads[j])
        bound = so_far + paid(state, n, ran, first_read, share, before_share)
        n_nodes, n_heap = enter(
            state, n, ran, so_far, max(least, bound), states, cost, gap, table, heap, n_nodes, n_heap
        )
    return NO_WAY, looked
