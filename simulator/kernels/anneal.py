"""Turn a state into the states around it, one random change after another: the inner loop of simulated annealing.

One call makes many moves at one temperature and one price. Each move changes a few values (see `propose`), the plan is
walked as a whole (`simulator.kernels.walk`), and what is not accepted is taken back. In a coarse walk a move says which
values are kept, and `simulator.kernels.retain` what becomes of the others.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from simulator.kernels.compiled import compiled
from simulator.kernels.retain import add_drop, retain
from simulator.kernels.walk import walk

# What a move may be; `chances` holds how often each is made, summed up.
FLIP: Final = 0  # keep a value that was recomputed, or the other way round
SWAP: Final = 1  # exchange the fates of two values made near each other
LINK: Final = 2  # save a value that only recomputations read, or no longer; or share it once it is rebuilt
SHARE: Final = 3  # share a rebuilt value, or no longer
DROP: Final = 4  # drop a rebuilt value after an op of backward
UNDROP: Final = 5  # take back a drop, or all after one op
BORDER: Final = 6  # release what a stretch of forward makes, but for what crosses one position in it
MOVE_BORDER: Final = 7  # release what one stretch makes, and keep what crosses a position of another
WEIGHT: Final = 8  # let a rebuilt value go sooner or later when there is no room (`simulator.kernels.retain`)
KINDS: Final = 9
WIDE: Final = 20.0  # how many positions of forward a stretch covers on average
MOST: Final = 1 << 62
# What a step of a coarse move and a move that changes nothing count for, in steps of a fine one.
COARSE_STEP: Final = 3
IDLE: Final = 10


@compiled
def below(rng: Any, n: int) -> int:
    """A random number from 0 to n - 1 (xorshift64*, Vigna 2016; the high bits)."""
    x = rng[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    rng[0] = x
    return int(np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % n)


@compiled
def chance(rng: Any) -> float:
    """A random number from 0 to 1, never 0."""
    return (below(rng, 1 << 30) + 1.0) / (1 << 30)


@compiled
def put(s: int, keep: int, is_candidate: Any, there: Any, share: Any, log: Any, n_log: int) -> int:
    """Keep or release a value, noting what it was; the new number of notes."""
    if n_log >= log.shape[1]:
        return n_log
    log[0, n_log], log[1, n_log], log[2, n_log] = s, there[s], share[s]
    there[s] = keep
    if not keep:
        share[s] = is_candidate[s]
    return n_log + 1


@compiled
def without_kept(there: Any, drops: Any, n: int) -> int:
    """Forget the drops of values that are kept; how many are left."""
    left = 0
    for j in range(n):
        if not there[drops[1, j]]:
            drops[0, left], drops[1, left] = drops[0, j], drops[1, j]
            left += 1
    return left


@compiled
def stretch(rng: Any, values: Any, made: Any, mean: float) -> tuple[int, int]:
    """A random stretch of `values`, around one of them, about `mean` positions of forward wide: where in `values`."""
    width = -mean * np.log(chance(rng))
    middle = made[below(rng, values.shape[0])]
    first = np.searchsorted(made, middle - width / 2)
    last = np.searchsorted(made, middle + width / 2)
    return int(first), max(int(last), int(first) + 1)


@compiled
def border(rng: Any, first: int, last: int, made: Any, cross_bytes: Any) -> Any:
    """A position where least crosses, or sometimes any, among those at which values[first:last] are made."""
    if below(rng, 3) == 0:
        return made[first + below(rng, last - first)]
    least, position, ties = MOST, -1, 0
    for j in range(first, last):
        p = made[j]
        if cross_bytes[p] < least:
            least, position, ties = cross_bytes[p], p, 1
        elif cross_bytes[p] == least:
            ties += 1
            if below(rng, ties) == 0:
                position = p
    return position


@compiled
def propose(
    rng: Any, kind: int, problem: Any, there: Any, share: Any, drops: Any, n_drops: int, weight: Any, log: Any
) -> tuple[int, int]:
    """Make one move of a kind in place: (how many values it noted in `log`, how many drops there are now).

    A kept value has no drops. If nothing is noted and the number of drops is the same, nothing has changed.
    """
    values, made, candidates, links, is_candidate, consumers, last_use, cross_at, cross, cross_bytes = problem
    n_log = 0
    n_before = n_drops
    if kind == FLIP:
        s = candidates[below(rng, candidates.shape[0])]
        n_log = put(s, 1 - there[s], is_candidate, there, share, log, n_log)
    elif kind == SWAP:
        k = below(rng, values.shape[0])
        step = 1 + int(-np.log(chance(rng)) / 0.3)
        other = k + step if below(rng, 2) else k - step
        if 0 <= other < values.shape[0] and there[values[k]] != there[values[other]]:
            n_log = put(values[k], 1 - there[values[k]], is_candidate, there, share, log, n_log)
            n_log = put(values[other], 1 - there[values[other]], is_candidate, there, share, log, n_log)
    elif kind in (LINK, SHARE):
        of = links if kind == LINK else candidates
        if of.shape[0]:
            s = of[below(rng, of.shape[0])]
            if kind == LINK and (there[s] or below(rng, 2)):
                n_log = put(s, 1 - there[s], is_candidate, there, share, log, n_log)
            elif not there[s]:
                was = share[s]
                n_log = put(s, 0, is_candidate, there, share, log, n_log)
                share[s] = 1 - was
    elif kind == DROP:
        s = candidates[below(rng, candidates.shape[0])]
        end = np.searchsorted(consumers, last_use[s])
        if not there[s] and share[s] and end:
            n_drops = add_drop(consumers[below(rng, end)], s, drops, n_drops)
    elif kind == UNDROP:
        if n_drops:
            j = below(rng, n_drops)
            k = drops[0, j]
            alone = below(rng, 2)
            left = 0
            for i in range(n_drops):
                if i != j and (alone or drops[0, i] != k):
                    drops[0, left], drops[1, left] = drops[0, i], drops[1, i]
                    left += 1
            n_drops = left
    elif kind in (BORDER, MOVE_BORDER):
        first, last = stretch(rng, values, made, WIDE)
        p = -1
        if kind == BORDER:
            p = border(rng, first, last, made, cross_bytes)
        for j in range(first, last):
            s = values[j]
            crosses = False
            if p >= 0:
                for i in range(cross_at[p], cross_at[p + 1]):
                    if cross[i] == s:
                        crosses = True
            if there[s] and not crosses:
                n_log = put(s, 0, is_candidate, there, share, log, n_log)
        if kind == MOVE_BORDER:
            first, last = stretch(rng, values, made, WIDE)
            p = border(rng, first, last, made, cross_bytes)
        for i in range(cross_at[p], cross_at[p + 1]):
            if not there[cross[i]]:
                n_log = put(cross[i], 1, is_candidate, there, share, log, n_log)
    else:
        s = candidates[below(rng, candidates.shape[0])]
        if is_candidate[s] and not there[s]:
            log[0, 0] = ~s
            n_log = 1
            weight[weight.shape[0] - 1] = weight[s]
            weight[s] = min(256.0, max(1 / 256.0, weight[s] * 2.0 ** (below(rng, 7) - 3)))
    if n_log and n_before:
        n_drops = without_kept(there, drops, n_drops)
    return n_log, n_drops


@compiled
def anneal(
    until: int,  # walks until so many steps have been walked in all,
    least: int,  # and at least so many moves
    temperature: float,
    price: float,
    target_ns: int,
    budget_bytes: int,
    chances: Any,  # [KINDS]: of each kind of move, summed up
    problem: Any,  # see `propose`
    forward: int,
    resident_bytes: int,
    facts: Any,
    space: Any,
    seq: Any,
    change: Any,
    levels: Any,
    there: Any,  # the state, in and out
    share: Any,
    drops: Any,
    best_there: Any,  # the best state, out
    best_share: Any,
    best_drops: Any,
    retaining: Any,  # for `retain`; used if `retain_now`, and then it decides about drops
    retain_now: bool,
    spare: Any,  # work space like `drops`
    log: Any,
    rng: Any,
    figures: Any,  # in and out: added time, bytes over, drops, best added time, its drops, lowest peak, moves, steps
) -> None:
    """Moves until so many steps have been walked, or fewer if the best state is as good as `target_ns`.

    A step is one of the plan that a move leads to, forward included; a coarse move counts COARSE_STEP for each, and one
    that leads nowhere IDLE in all.
    """
    needs_at, needs, reads_at, reads, creates_at, creates, per_op, per_storage, op_id, may_rerun, made = facts
    by_producer, gone_at, gone, fixed, last_use, stays, weight, best_weight, work = retaining
    energy = figures[0] + price * figures[1]
    enough = figures[6] + least
    while figures[7] < until or figures[6] < enough:
        if figures[3] <= target_ns:
            return
        figures[6] += 1
        draw = chance(rng)
        kind = 0
        while kind < KINDS - 1 and draw > chances[kind]:
            kind += 1
        n_before = figures[2]
        spare[:, :n_before] = drops[:, :n_before]
        n_log, n_drops = propose(rng, kind, problem, there, share, drops, n_before, weight, log)
        if not n_log and n_drops == n_before:
            figures[7] += IDLE
            continue
        if retain_now:
            n_drops = retain(
                forward, budget_bytes, facts, by_producer, gone_at, gone, fixed, last_use, stays, there, weight, work,
                drops,
            )  # fmt: skip
        peak, added, _, steps = walk(
            forward, resident_bytes, needs_at, needs, reads_at, reads, creates_at, creates, per_op, per_storage, op_id,
            may_rerun, made, there, share, drops[0, :n_drops], drops[1, :n_drops], space[0], space[1], space[2],
            space[3], space[4], seq, change, levels,
        )  # fmt: skip
        accepted = False
        # A walk that was given up counts as one of forward and backward alone.
        walked = forward + (steps if peak >= 0 else op_id.shape[0] - forward)
        figures[7] += COARSE_STEP * walked if retain_now else walked
        if peak >= 0:
            over = 0
            if peak > budget_bytes:
                squares = 0.0
                for t in range(forward + steps):
                    if levels[0, t] > budget_bytes:
                        excess = float(levels[0, t] - budget_bytes)
                        squares += excess * excess
                over = int(np.sqrt(squares))
            figures[5] = min(figures[5], peak)
            new = added + price * over
            accepted = new <= energy or chance(rng) < np.exp((energy - new) / temperature)
        if accepted:
            energy = new
            figures[0], figures[1], figures[2] = added, over, n_drops
            if not over and added < figures[3]:
                figures[3], figures[4] = added, n_drops
                best_there[:], best_share[:], best_weight[:] = there, share, weight
                best_drops[:, :n_drops] = drops[:, :n_drops]
        else:
            for j in range(n_log - 1, -1, -1):
                if log[0, j] < 0:
                    weight[~log[0, j]] = weight[weight.shape[0] - 1]
                else:
                    there[log[0, j]], share[log[0, j]] = log[1, j], log[2, j]
            drops[:, :n_before] = spare[:, :n_before]
