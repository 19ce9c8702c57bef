"""Decide what becomes of rebuilt values, given what a plan saves: each stays while there is room for it.

One walk over backward. What a chain rebuilds stays for its later uses; where a step would be over the budget, what is
idle then goes, first what is large, soon rebuilt and not needed for long, each from its last reader on (an eviction).

Counts: all that is in memory at each step, as far as it is known then. Ignores: that a saved value may go before the
last use that anything made from it has; that an eviction makes later chains longer; that a value which goes where an op
reads it may give the op its memory. The walk that follows sees all of it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from simulator.kernels.compiled import inner
from simulator.kernels.walk import chain, long, table

# What `Work.present` says of a value here.
# PASSING: rebuilt for the op at hand, and goes with it.
AWAY, HELD, STAYS, PASSING = range(4)


OF_OP: Final = table(
    [
        ("fixed_bytes", np.int64),  # there before it whatever the plan
        ("done_at", np.int64),  # of `done`: what nothing needs after it, however it is rebuilt
    ]
)
OF_STORAGE: Final = table(
    [
        ("last_use", np.int32),  # the last op of backward that reads it, of a link: that may need it
        # Work space.
        ("cost", np.float64),  # time that it takes to make it again
        ("score", np.float64),  # how well it may go while the op at hand runs
        ("chain_of", np.int32),  # the op for which it was read or made last
        ("read_in", np.int32),  # and the step of that op's chain that reads it last
    ]
)


class Retaining(NamedTuple):
    """All that `retain` knows of a trace beside the facts, and its work space."""

    done: Any
    ops: Any  # [op + 1] of OF_OP
    storages: Any  # [storage] of OF_STORAGE
    may_stay: Any  # [storage]: whether a rebuilt one stays: candidates and links
    held: Any  # rebuilt values that stay


@inner
def add_eviction(k: int, s: int, evictions: Any, n: int) -> int:
    """Add an eviction of s after op k to the sorted evictions[:, :n], unless they have it or are full; their number."""
    if n >= evictions.shape[1]:
        return n
    begin = n
    while begin and (
        evictions[0, begin - 1] > k or (evictions[0, begin - 1] == k and evictions[1, begin - 1] >= s)
    ):
        begin -= 1
    if begin < n and evictions[0, begin] == k and evictions[1, begin] == s:
        return n
    for j in range(n, begin, -1):
        evictions[0, j], evictions[1, j] = evictions[0, j - 1], evictions[1, j - 1]
    evictions[0, begin], evictions[1, begin] = k, s
    return n + 1


@inner
def idlest(n_scored: int, n_held: int, step: int, c: int, r: Any, storages: Any) -> Any:
    """Which of held[:n_held] had best go while that step of the chain for op c runs; -1: each is read from there on.
    Those before `n_scored` have their score for op c."""
    best, most = long(-1), -1.0
    for j in range(n_scored, n_held):
        x = r.storages[r.held[j]]
        x.score = storages[r.held[j]].nbytes / x.cost * np.sqrt(x.last_use - c + 1.0)
    for j in range(n_held):
        x = r.storages[r.held[j]]
        if x.score > most and (x.chain_of != c or x.read_in < step):
            best, most = j, x.score
    return best


@inner
def retain(facts: Any, r: Any, work: Any, budget_bytes: int, saved: Any, evictions: Any) -> Any:
    """The number of evictions, which stand in `evictions`: [2, any], op and storage."""
    ops, storages, ids = facts.ops, facts.storages, facts.ids
    here, held, of_storage, order = work.present, r.held, r.storages, work.op
    n_held = n_evictions = live = long(0)
    ends = long(ops.shape[0])  # no held value goes for good before that op
    for j in range(facts.made_at, ids.shape[0]):
        s = ids[j]
        here[s] = saved[s]
        of_storage[s].chain_of = work.demanded[s] = -1
        if saved[s]:
            live += storages[s].nbytes
        # What it takes to make it again, if all that may stay is there.
        b = storages[s].producer
        total = ops[b].time_ns + 1.0
        for i in range(ops[b].needs_at, ops[b + 1].needs_at):
            y = ids[i]
            if not saved[y] and not r.may_stay[y]:
                total += of_storage[y].cost
        of_storage[s].cost = min(total, 1e15)
    for k in range(ops.shape[0] - 1):
        work.visited[k] = -1
    for c in range(facts.forward, ops.shape[0] - 1):
        n_order = chain(c, facts.forward, here, facts, work, False)
        order[facts.forward + n_order] = ~c
        n_scored = long(0)
        for k in range(n_order + 1):
            b = ~order[facts.forward + k]
            for j in range(ops[b].reads_at, ops[b + 1].reads_at):
                of_storage[ids[j]].chain_of = c
                of_storage[ids[j]].read_in = k
        for k in range(n_order + 1):
            b = ~order[facts.forward + k]
            level = live + r.ops[c].fixed_bytes + facts.transient_bytes[b]
            s = ops[b].overwrites
            if s >= 0 and here[s] == PASSING and of_storage[s].read_in == k:
                level -= storages[s].nbytes
            while n_held and level > budget_bytes:
                j = idlest(n_scored, n_held, k, c, r, storages)
                n_scored = n_held if j < 0 else n_held - 1
                if j < 0:
                    break
                s = long(held[j])
                n_held -= 1
                held[j] = held[n_held]
                n_evictions = add_eviction(long(of_storage[s].chain_of), s, evictions, n_evictions)
                here[s] = AWAY
                live -= storages[s].nbytes
                level -= storages[s].nbytes
            if k < n_order:
                for j in range(ops[b].creates_at, ops[b + 1].creates_at):
                    s = ids[j]
                    stay = r.may_stay[s] and of_storage[s].last_use > c
                    if here[s] or not (work.demanded[s] == c or stay):
                        continue
                    if of_storage[s].chain_of != c:
                        of_storage[s].chain_of = c
                        of_storage[s].read_in = k
                    live += storages[s].nbytes
                    here[s] = PASSING
                    if stay:
                        here[s] = STAYS
                        held[n_held] = s
                        n_held += 1
                        ends = min(ends, of_storage[s].last_use)
                    elif of_storage[s].read_in <= k:
                        here[s] = AWAY
                        live -= storages[s].nbytes
            for j in range(ops[b].reads_at, ops[b + 1].reads_at):
                s = ids[j]
                if here[s] == PASSING and of_storage[s].read_in == k:
                    here[s] = AWAY
                    live -= storages[s].nbytes
        if ends <= c:
            left, ends = 0, long(ops.shape[0])
            for j in range(n_held):
                s = held[j]
                if of_storage[s].last_use > c:
                    ends = min(ends, of_storage[s].last_use)
                    held[left] = s
                    left += 1
                else:
                    here[s] = AWAY
                    live -= storages[s].nbytes
            n_held = left
        for j in range(r.ops[c].done_at, r.ops[c + 1].done_at):
            if here[r.done[j]] == HELD:
                live -= storages[r.done[j]].nbytes
    return n_evictions
