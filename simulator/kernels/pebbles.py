"""What bringing the working sets of a step's end together costs at least: a best-first search backwards.

What a state is, and why the search gives a bound, stands in `simulator.bounds.working_sets`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from simulator.kernels.compiled import compiled, inner
from simulator.kernels.prices import demand
from simulator.kernels.records import long, table

WIDTH: Final = 24  # storages of a state; of more, the smallest are not asked for
EMPTY: Final = -1
NO_WAY: Final = 1 << 62

# One row an op, and the gap before it; two more rows than there are ops.
OP: Final = table(
    [
        ("time", np.int64),  # in the unit of the bound; of an op of forward
        ("rise_bytes", np.int64),  # what a run of it adds; of an op of forward
        ("need_bytes", np.int64),  # while it runs, beside what it reads of what is tracked
        ("base_bytes", np.int64),  # in the gap before it, whatever the plan
        ("least_before", np.int64),  # what having all that ops before it read cost, less what memory is worth
        ("row", np.int64),  # of `Cuts`, where that is demanded
        ("reads_at", np.int64),  # of `reads`: the tracked storages that it reads
        ("asks_at", np.int64),  # of `asks`: those that can be brought back for its sake
        ("overwrites", np.int32),  # a tracked storage; -1
        ("may_rerun", np.int32),
    ]
)
STORAGE: Final = table(
    [
        ("nbytes", np.int64),
        ("node", np.int64),  # of `Cuts`; 0: it costs nothing
        ("producer", np.int64),
        ("until", np.int64),  # the last op until which it is there whatever the plan
    ]
)
# A bound on all ways through it, and the cost from it to the end.
NODE: Final = np.dtype(
    [("least", np.int64), ("so_far", np.int64), ("gap", np.int32), ("stale", np.int16), ("cut", np.int16)]
)


class Way(NamedTuple):
    """What the search goes through."""

    ops: Any
    storages: Any
    reads: Any
    asks: Any
    cuts: Any
    most_visits: int  # edges of the network looked at; after that what states themselves cost is left out


class Nodes(NamedTuple):
    """What the search has found: work space."""

    nodes: Any
    states: Any  # [node, WIDTH]: twice a storage; one more if it can be brought back in this gap
    table: Any  # one more than nodes, by their key; a power of two of places, all 0
    heap: Any
    state: Any  # [WIDTH]


@inner
def before(first: int, second: int, nodes: Any) -> bool:
    """Whether one node is looked at before another: the cheaper one, of equal ones the one nearer to the turn."""
    if nodes[first].least != nodes[second].least:
        return bool(nodes[first].least < nodes[second].least)
    return bool(nodes[first].gap < nodes[second].gap)


@inner
def pop(heap: Any, n: int, nodes: Any) -> int:
    """Take the first away: the heap's new length."""
    n -= 1
    last = heap[n]
    k = 0
    while 2 * k + 1 < n:
        child = 2 * k + 1
        if child + 1 < n and before(heap[child + 1], heap[child], nodes):
            child += 1
        if not before(heap[child], last, nodes):
            break
        heap[k] = heap[child]
        k = child
    heap[k] = last
    return n


@inner
def push(heap: Any, n: int, node: int, nodes: Any) -> int:
    """Put a node in: the heap's new length."""
    k = n
    while k and before(node, heap[(k - 1) // 2], nodes):
        heap[k] = heap[(k - 1) // 2]
        k = (k - 1) // 2
    heap[k] = node
    return n + 1


@inner
def include(state: Any, n: int, s: int) -> int:
    """Put a storage into a sorted state, if it is not there; how many there are."""
    s = 2 * s
    k = n
    while k and state[k - 1] > s + 1:
        k -= 1
    if k and state[k - 1] >= s:
        return n
    if n == state.shape[0]:
        if k == n:
            return n
        n -= 1
    for j in range(n, k, -1):
        state[j] = state[j - 1]
    state[k] = s
    return n + 1


@inner
def ask(state: Any, n: int, op: int, way: Any) -> None:
    """Mark what can be brought back in this gap for the sake of an op; all, if the state may lack some of it."""
    for k in range(n):
        for j in range(way.ops[op].asks_at, way.ops[op + 1].asks_at):
            if way.asks[j] == state[k] >> 1 or n == state.shape[0]:
                state[k] |= 1
                break


@inner
def enter(
    n: int, at: int, so_far: int, least: int, way: Any, found: Any, n_nodes: int, n_heap: int
) -> tuple[int, int]:
    """Note that `found.state` is reached in a gap at a cost, unless it was as cheaply before: (nodes, heap).

    What must have been added before the gap, so that ops of backward could run up to it, makes the bound of the new
    node; what the state itself must have cost is left to `cut`.
    """
    state, nodes, states, table = found.state, found.nodes, found.states, found.table
    key = np.uint64(at)
    for j in range(n):
        key = (key ^ np.uint64(state[j])) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    size = np.uint64(table.shape[0])
    place = key & (size - np.uint64(1))
    while table[place]:
        node = table[place] - 1
        if nodes[node].gap == at:
            same = True
            for j in range(states.shape[1]):
                if states[node, j] != (state[j] if j < n else EMPTY):
                    same = False
                    break
            if same:
                if nodes[node].so_far <= so_far:
                    return n_nodes, n_heap
                nodes[node].stale = 1  # it is still in the heap
                break
        place = (place + np.uint64(1)) & (size - np.uint64(1))
    for j in range(states.shape[1]):
        states[n_nodes, j] = state[j] if j < n else EMPTY
    new = nodes[n_nodes]
    new.gap, new.so_far, new.stale, new.cut = at, so_far, 0, 0
    new.least = max(least, so_far + max(0, way.ops[at].least_before))
    table[place] = n_nodes + 1
    return n_nodes + 1, push(found.heap, n_heap, n_nodes, nodes)


@inner
def cut(node: int, dead: int, search: int, way: Any, found: Any) -> tuple[int, int, int]:
    """A bound on all ways through a node that counts what its state cost before: (bound, last search, edges seen)."""
    c, x, states = way.cuts, found.nodes[node], found.states
    row, last = way.ops[x.gap].row, c.left.shape[0] - 1
    least_before = way.ops[x.gap].least_before
    visits = long(0)
    for k in range(states.shape[1]):
        s = way.storages[states[node, k] >> 1].node if states[node, k] >= 0 else long(0)
        if s and not visits:
            visits = long(c.left.shape[1])
            for e in range(c.left.shape[1]):
                c.left[last, e] = c.left[row, e]
        if s:
            added, search, more = demand(s, row, last, dead, search, c)
            least_before += added
            visits += more
    return max(x.least, x.so_far + max(0, least_before)), search, visits


@compiled
def walk_back(
    budget_bytes: int,
    first: int,  # gap where the search ends
    end: int,  # gap where it begins
    root: int,
    most_states: int,  # looked at
    most_stale: int,  # without a gain, after which it ends
    way: Any,
    found: Any,
) -> tuple[int, int]:
    """The bound, in the unit of `root`, and how many states were looked at; NO_WAY: there is no way back."""
    ops, storages, reads = way.ops, way.storages, way.reads
    nodes, states, state, heap = found.nodes, found.states, found.state, found.heap
    nothing = long(0)
    n_nodes, n_heap = enter(nothing, end, nothing, root, way, found, nothing, nothing)
    nodes[0].least = root
    room = states.shape[0] - states.shape[1] - 2
    least = root
    looked = gained = nothing  # how many had been looked at when the bound last rose
    search = visits = nothing
    while n_heap:
        node = heap[0]
        n_heap = pop(heap, n_heap, nodes)
        if nodes[node].stale:
            continue
        # Where nothing has run again, all that is in memory is wanted at the instant: that cannot say more than `root`.
        if nodes[node].so_far and not nodes[node].cut and visits <= way.most_visits:
            nodes[node].cut = 1
            bound, search, more = cut(node, -2 - long(node), search, way, found)
            visits += more
            if bound > nodes[node].least:
                nodes[node].least = bound
                n_heap = push(heap, n_heap, node, nodes)
                continue
        if nodes[node].least > least:
            least, gained = nodes[node].least, looked
        at = long(nodes[node].gap)
        looked += 1
        if at <= first or n_nodes > room or looked > most_states or looked - gained > most_stale:
            return least, looked
        so_far = nodes[node].so_far
        n_held = 0
        while n_held < states.shape[1] and states[node, n_held] >= 0:
            n_held += 1

        # The last run in this gap that made a part of the state.
        for k in range(n_held):
            if not states[node, k] & 1:
                continue
            q = storages[states[node, k] >> 1].producer
            known = False
            for j in range(k):
                if states[node, j] & 1 and storages[states[node, j] >> 1].producer == q:
                    known = True
            if known or not ops[q].may_rerun:
                continue
            n = nothing
            rise, taken, bytes_now = ops[q].rise_bytes, ops[q].overwrites, 0
            for j in range(n_held):
                s = states[node, j] >> 1
                if storages[s].producer != q:
                    state[n] = states[node, j]
                    n += 1
                    bytes_now += storages[s].nbytes
            # What it reads is there too, whether the state has room for it or not.
            for j in range(ops[q].reads_at, ops[q + 1].reads_at):
                s = reads[j]
                if storages[s].until >= at:
                    continue
                new = True
                for i in range(n_held):
                    if states[node, i] >> 1 == s:
                        new = False
                if new:
                    bytes_now += storages[s].nbytes
                    if s == taken:
                        rise -= storages[s].nbytes
                n = include(state, n, long(s))
            if ops[at].base_bytes + bytes_now + rise > budget_bytes:
                continue
            ask(state, n, q, way)
            n_nodes, n_heap = enter(n, at, so_far + ops[q].time, least, way, found, n_nodes, n_heap)

        # Or nothing of it was made in this gap, and all of it was there while the op before ran.
        ran = at - 1
        extra = n = nothing
        for k in range(n_held):
            s = states[node, k] >> 1
            read = False
            for j in range(ops[ran].reads_at, ops[ran + 1].reads_at):
                if reads[j] == s:
                    read = True
            if ops[ran].overwrites == s or (not read and storages[s].until < ran):
                extra += storages[s].nbytes
            if storages[s].until < ran:
                state[n] = 2 * s
                n += 1
        if extra + ops[ran].need_bytes > budget_bytes:
            continue
        for j in range(ops[ran].reads_at, ops[ran + 1].reads_at):
            if storages[reads[j]].until < ran:
                n = include(state, n, long(reads[j]))
        ask(state, n, ran, way)
        n_nodes, n_heap = enter(n, ran, so_far, least, way, found, n_nodes, n_heap)
    return NO_WAY, looked
