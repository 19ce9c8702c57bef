"""What a walked state asks of CUDA's caching allocator: `simulator.allocator.requests`, compiled.

The walk (`simulator.kernels.walk`) leaves the ops in the order in which they run. From that and the state it is seen
once more which values each step brings back and which go with it; then every step asks what its op asks in any case.

Counts and ignores: what `simulator.allocator.requests` does; but only the last part of an iteration whose gradients add
up, with those of the parts before it there throughout. Where a view is the last to read a value, the value goes a
little earlier here, before the view runs, which asks nothing.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from simulator.kernels.compiled import inner
from simulator.kernels.records import long, table
from simulator.kernels.walk import NEVER

FULL: Final = -1  # more requests than the arrays hold

# Two rows an op: what it asks if it takes over no input's memory, and if it does.
ASKED: Final = table(
    [
        ("asks_at", np.int32),  # of `asks`: bytes of a new block; ~k: the k-th of them is given back
        ("made_at", np.int32),  # of `made`
        ("gives_back", np.int32),  # the memory taken over, first of all
    ]
)
OF_OP: Final = table(
    [
        ("frees_at", np.int32),  # of `frees`: what goes with it whatever the plan
        ("workspaces_at", np.int32),  # of `workspaces`: bytes that libraries ask for in it, once
        ("takes", np.int32),  # the storage whose memory it takes over whatever the plan; -1
        ("keeps", np.int32),  # whether libraries keep something if it runs a second time
        ("rerun_bytes", np.int64),  # and how much
    ]
)


class Asks(NamedTuple):
    """What the ops of a trace ask, by position."""

    asked: Any  # [2 * op + 1] of ASKED
    asks: Any
    made: Any  # [2, any]: an output, and which block it is; -1: the one that was taken over
    of_op: Any  # [op + 1] of OF_OP
    frees: Any
    workspaces: Any
    backward_workspaces: Any  # the ops of backward in which libraries ask
    state: Any  # bytes of the optimizer's state, asked for when its first op begins:
    optimizer: int  # that op
    residents: Any  # bytes of what is there before the first iteration


class Stream(NamedTuple):
    """The requests of one state, and work space beside the walk's (`Work`), which is used again."""

    blocks: Any  # [request], out: a block, by a number of its own; ~number: given back
    sizes: Any  # [request], out: bytes
    once: Any  # [any, 2], out: how many requests come before, and bytes; in the first iteration alone
    oldest: Any  # [storage]: its blocks, the older first
    newest: Any
    following: Any  # [request]: the block after each of a storage's
    bound: Any  # storages that came back, in the order in which they did
    bound_at: Any  # [step + 1]: of `bound`
    going: Any  # [step]: the last note of what goes with it; -1
    gone: Any  # [2, any]: notes: a storage, and the note before it
    taken: Any  # [step]: whether its op takes over memory that is another's in some plans


def stream(facts: Any, asks: Asks, room: int) -> Stream:
    """Work space for so many steps."""
    n_op, n_st = len(facts.ops) - 1, len(facts.storages)
    requests = 4 * (room + n_st + len(asks.asks))
    once = len(asks.workspaces) + len(asks.state) + n_op + 1
    return Stream(
        blocks=np.empty(requests, np.int64),
        sizes=np.empty(requests, np.int64),
        once=np.empty((once, 2), np.int64),
        oldest=np.empty(n_st, np.int64),
        newest=np.empty(n_st, np.int64),
        following=np.empty(requests, np.int64),
        bound=np.empty(requests, np.int32),
        bound_at=np.empty(room + 1, np.int32),
        going=np.empty(room, np.int32),
        gone=np.empty((2, requests), np.int32),
        taken=np.empty(room, np.uint8),
    )


@inner
def _goes(s: int, end: int, takes: int, op: Any, facts: Any, x: Any, notes: int) -> Any:
    """Note that an instance of s goes with that step, whose op takes its memory over if it can; how many notes."""
    if not facts.storages[s].nbytes:
        return notes
    x.gone[0, notes], x.gone[1, notes] = s, x.going[end]
    x.going[end] = notes
    q = op[end]
    if takes and facts.ops[q if q >= 0 else ~q].overwrites == s:
        x.taken[end] = 1
    return notes + 1


@inner
def _lifetimes(facts: Any, choice: Any, work: Any, n: int, x: Any) -> Any:
    """Fill `bound` and `gone` for n walked steps; False if there is no room."""
    ops, storages, ids, op, rebuilt = facts.ops, facts.storages, facts.ids, work.op, work.stack
    forward, last, first_end = facts.forward, work.last, work.first_end
    saved, demanded = work.present, work.demanded  # whether it may be read now; the op whose chain needs it
    evict_at, evicted = choice.evict_at, choice.evicted
    notes = n_bound = eviction = long(0)
    for s in range(saved.shape[0]):
        saved[s] = choice.saved[s]
        last[s] = -1
        first_end[s] = NEVER
        demanded[s] = -1
    for k in range(n):
        x.going[k] = -1
        x.taken[k] = 0
    for k in range(forward + 1):
        x.bound_at[k] = 0
    while eviction < evict_at.shape[0] and evict_at[eviction] < forward:
        saved[evicted[eviction]] = 0
        eviction += 1
    n_rebuilt = long(0)
    for k in range(forward, n):
        if n_bound + storages.shape[0] >= x.bound.shape[0] or notes + storages.shape[0] >= x.gone.shape[1]:
            return False
        if k == forward or op[k - 1] >= 0:  # a chain begins
            end = k
            while op[end] < 0:
                end += 1
            for j in range(k, end + 1):
                b = op[j] if op[j] >= 0 else ~op[j]
                for i in range(ops[b].needs_at, ops[b + 1].needs_at):
                    if not saved[ids[i]]:
                        demanded[ids[i]] = op[end]
            n_rebuilt = long(0)
            c = op[end]
        b = op[k] if op[k] >= 0 else ~op[k]
        for i in range(ops[b].reads_at, ops[b + 1].reads_at):
            last[ids[i]] = k
        if op[k] < 0:
            for i in range(ops[b].creates_at, ops[b + 1].creates_at):
                s = ids[i]
                stays = choice.retained[s] and storages[s].last_backward > ops[c].id
                if saved[s] or not (demanded[s] == c or stays):
                    continue
                if first_end[s] == NEVER:
                    first_end[s] = last[s]
                else:
                    notes = _goes(long(s), long(last[s]), 1, op, facts, x, notes)
                last[s] = k
                saved[s] = 1
                rebuilt[n_rebuilt] = s
                n_rebuilt += 1
                x.bound[n_bound] = s
                n_bound += 1
        else:
            for j in range(n_rebuilt):
                if not choice.retained[rebuilt[j]]:
                    saved[rebuilt[j]] = 0
            while eviction < evict_at.shape[0] and evict_at[eviction] == b:
                saved[evicted[eviction]] = 0
                eviction += 1
        x.bound_at[k + 1] = n_bound
    for m in range(facts.made_at, ids.shape[0]):
        s = long(ids[m])
        end = long(last[s])
        if first_end[s] != NEVER:
            notes = _goes(s, end, 1, op, facts, x, notes)
            end = long(first_end[s])
        hold = storages[s].hold
        if hold >= 0 and storages[s].hold_after and work.step_of[hold] >= end:
            notes = _goes(s, long(work.step_of[hold]), 0, op, facts, x, notes)
        elif hold >= 0 or end >= 0:
            notes = _goes(s, long(max(end, work.step_of[hold])) if hold >= 0 else end, 1, op, facts, x, notes)
        else:
            end = long(storages[s].last_forward)
            notes = _goes(s, end, 1 if storages[s].forward_take == end else 0, op, facts, x, notes)
    return True


@inner
def _bind(s: int, block: int, x: Any) -> None:
    """The block is the storage's youngest."""
    x.following[block] = -1
    if x.oldest[s] < 0:
        x.oldest[s] = block
    else:
        x.following[x.newest[s]] = block
    x.newest[s] = block


@inner
def _unbind(s: int, x: Any) -> Any:
    """The storage's oldest block, which is not its any more."""
    block = long(x.oldest[s])
    x.oldest[s] = x.following[block]
    return block


@inner
def _give_back(block: int, at: int, x: Any) -> Any:
    x.blocks[at] = ~block
    x.sizes[at] = 0
    return at + 1


@inner
def _frees(k: int, b: int, again: bool, taken: int, asks: Any, x: Any, into: Any) -> Any:
    """The storages that go with a step, but for the one taken over, in order; how many."""
    n = long(0)
    note = x.going[k]
    while note >= 0:
        into[n] = x.gone[0, note]
        n += 1
        note = x.gone[1, note]
    if not again:
        for j in range(asks.of_op[b].frees_at, asks.of_op[b + 1].frees_at):
            into[n] = asks.frees[j]
            n += 1
    left = long(0)
    for j in range(n):
        s = into[j]
        if s == taken:
            taken = long(-1)
            continue
        at = left
        while at > 0 and into[at - 1] > s:
            into[at] = into[at - 1]
            at -= 1
        into[at] = s
        left += 1
    return left


@inner
def requests(facts: Any, choice: Any, work: Any, n: int, asks: Any, x: Any) -> Any:
    """(requests, those asked once, blocks) of n steps, which stand in `blocks`, `sizes`, `once`; FULL: no room."""
    op, going, asked_for = work.op, work.stack, work.visited  # and [op]: whether its libraries have asked
    if not _lifetimes(facts, choice, work, n, x):
        return long(FULL), long(0), long(0)
    n_once = count = at = long(0)
    begun = asks.state.shape[0] == 0
    kept_bytes = False
    waiting = long(0)
    for s in range(x.oldest.shape[0]):
        x.oldest[s] = x.newest[s] = -1
    for b in range(asked_for.shape[0]):
        asked_for[b] = 0
    for k in range(n):
        again = op[k] < 0
        b = long(~op[k]) if again else long(op[k])
        of = asks.of_op[b]
        if not begun and b >= asks.optimizer:
            begun = True
            for j in range(asks.state.shape[0]):
                x.once[n_once, 0], x.once[n_once, 1] = at, asks.state[j]
                n_once += 1
        taken = long(facts.ops[b].overwrites) if x.taken[k] else long(-1) if again else long(of.takes)
        row = 2 * b + (1 if taken >= 0 else 0)
        first, last = asks.asked[row], asks.asked[row + 1]
        if at + (last.asks_at - first.asks_at) + 2 * x.oldest.shape[0] >= x.blocks.shape[0]:
            return long(FULL), long(0), long(0)
        taken_over = _unbind(taken, x) if taken >= 0 else long(-1)
        if first.gives_back:
            at = _give_back(taken_over, at, x)
        base = count
        for j in range(first.asks_at, last.asks_at):
            if asks.asks[j] > 0:
                x.blocks[at], x.sizes[at] = count, asks.asks[j]
                count += 1
                at += 1
            else:
                at = _give_back(base + long(~asks.asks[j]), at, x)
        if not again and not asked_for[b]:
            asked_for[b] = 1
            for j in range(of.workspaces_at, asks.of_op[b + 1].workspaces_at):
                x.once[n_once, 0], x.once[n_once, 1] = at, asks.workspaces[j]
                n_once += 1
        if again and of.keeps:
            while (
                waiting < asks.backward_workspaces.shape[0] and asked_for[asks.backward_workspaces[waiting]]
            ):
                waiting += 1
            if waiting < asks.backward_workspaces.shape[0]:
                w = asks.backward_workspaces[waiting]
                asked_for[w] = 1
                for j in range(asks.of_op[w].workspaces_at, asks.of_op[w + 1].workspaces_at):
                    x.once[n_once, 0], x.once[n_once, 1] = at, asks.workspaces[j]
                    n_once += 1
            if of.rerun_bytes and not kept_bytes:
                kept_bytes = True
                x.once[n_once, 0], x.once[n_once, 1] = at, of.rerun_bytes
                n_once += 1
        for j in range(first.made_at, last.made_at):
            s = long(asks.made[0, j])
            block = base + long(asks.made[1, j]) if asks.made[1, j] >= 0 else taken_over
            binds = not again
            if again:
                for i in range(x.bound_at[k], x.bound_at[k + 1]):
                    if x.bound[i] == s:
                        binds = True
            if binds:
                _bind(s, block, x)
            else:
                at = _give_back(block, at, x)
        for j in range(_frees(long(k), b, again, taken, asks, x, going)):
            at = _give_back(_unbind(long(going[j]), x), at, x)
    if not begun:
        for j in range(asks.state.shape[0]):
            x.once[n_once, 0], x.once[n_once, 1] = at, asks.state[j]
            n_once += 1
    return at, n_once, count
