"""What a planner's state asks of CUDA's caching allocator and reserves: `simulator.allocator.requests`, compiled.

The walk (`simulator.kernels.walk`) leaves the ops in the order in which they run, and notes which values each step
brings back and which go with it; then every step asks what its op asks in any case.

Counts and ignores: what `simulator.allocator.requests` does; but only the last part of an iteration whose gradients add
up, with those of the parts before it there throughout. Where a view is the last to read a value, the value goes a
little earlier here, before the view runs, which asks nothing.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from simulator.kernels.best_fit import MOST, play
from simulator.kernels.compiled import compiled, inner
from simulator.kernels.records import Choice, Notes, long, table
from simulator.kernels.walk import replay

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
    residents: Any  # of what is there before the first iteration, as `allocator.requests.Requests` has it


class Stream(NamedTuple):
    """The requests of one state, and work space beside the walk's (`Work`), which is used again."""

    blocks: Any  # [request], out: a block, by a number of its own; ~number: given back
    sizes: Any  # [request], out: bytes
    once: Any  # [any, 2], out: how many requests come before, and bytes; in the first iteration alone
    oldest: Any  # [storage]: its blocks, the older first
    newest: Any
    following: Any  # [request]: the block after each of a storage's
    notes: Any  # of the walk


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
        notes=Notes(
            bound=np.empty(requests, np.int32),
            bound_at=np.empty(room + 1, np.int32),
            going=np.empty(room, np.int32),
            gone=np.empty(requests, np.int32),
            earlier=np.empty(requests, np.int32),
        ),
    )


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
    note = x.notes.going[k]
    while note >= 0:
        into[n] = x.notes.gone[note]
        n += 1
        note = x.notes.earlier[note]
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
def _ask_once(b: Any, at: Any, n_once: Any, asks: Any, x: Any) -> Any:
    """Ask for what an op needs once; returns how many such requests there are."""
    for j in range(asks.of_op[b].workspaces_at, asks.of_op[b + 1].workspaces_at):
        x.once[n_once, 0], x.once[n_once, 1] = at, asks.workspaces[j]
        n_once += 1
    return n_once


@inner
def requests(facts: Any, choice: Any, work: Any, asks: Any, x: Any) -> Any:
    """(requests, those asked once, blocks) of a state, which stand in `blocks`, `sizes`, `once`; FULL: no room."""
    op, going, asked_for = work.op, work.stack, work.visited  # and [op]: whether its libraries have asked
    peak, _, _, n = replay(facts, choice, work, x.notes, True)
    if peak < 0:
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
        taken = (
            long(facts.ops[b].overwrites) if work.taken_bytes[k] else long(-1) if again else long(of.takes)
        )
        row = 2 * b + (1 if taken >= 0 else 0)
        first, last = asks.asked[row], asks.asked[row + 1]
        if at + (last.asks_at - first.asks_at) + 2 * x.oldest.shape[0] >= x.blocks.shape[0]:
            return long(FULL), long(0), long(0)
        taken_over = _unbind(taken, x) if taken >= 0 else long(-1)
        if first.gives_back:
            at = _give_back(taken_over, at, x)
        if (
            b >= asks.optimizer and not asked_for[b]
        ):  # state that is made for the op, before what the op makes
            asked_for[b] = 1
            n_once = _ask_once(b, at, n_once, asks, x)
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
            n_once = _ask_once(b, at, n_once, asks, x)
        if again and of.keeps:
            while (
                waiting < asks.backward_workspaces.shape[0] and asked_for[asks.backward_workspaces[waiting]]
            ):
                waiting += 1
            if waiting < asks.backward_workspaces.shape[0]:
                w = asks.backward_workspaces[waiting]
                asked_for[w] = 1
                n_once = _ask_once(w, at, n_once, asks, x)
            if of.rerun_bytes and not kept_bytes:
                kept_bytes = True
                x.once[n_once, 0], x.once[n_once, 1] = at, of.rerun_bytes
                n_once += 1
        for j in range(first.made_at, last.made_at):
            s = long(asks.made[0, j])
            block = base + long(asks.made[1, j]) if asks.made[1, j] >= 0 else taken_over
            binds = not again
            if again:
                for i in range(x.notes.bound_at[k], x.notes.bound_at[k + 1]):
                    if x.notes.bound[i] == s:
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


@inner
def reserved(facts: Any, choice: Any, work: Any, asks: Any, x: Any, rows: Any, m: Any, most: int) -> Any:
    """Bytes that a state reserves in the last iteration; above `most`, so many at least; below 0: no room."""
    at, n_once, count = requests(facts, choice, work, asks, x)
    if at < 0 or count > m.held.shape[0]:
        return long(FULL)
    ran, _ = play(asks.residents, x.blocks, x.sizes, at, x.once[:n_once], rows, most, m)
    return long(rows[ran - 1].peak_reserved)


@compiled
def reserve(
    facts: Any, saved: Any, retained: Any, evict_at: Any, evicted: Any, work: Any, asks: Any, x: Any, rows: Any, m: Any
) -> Any:  # fmt: skip
    """The same for callers in Python, to the end."""
    return reserved(facts, Choice(saved, retained, evict_at, evicted), work, asks, x, rows, m, long(MOST))
