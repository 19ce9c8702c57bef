"""Simulated annealing's inner loop: one random change of a plan after another, each judged by a walk.

One call makes many moves at one temperature and one price. Each move changes a few values (see `propose`), the plan is
walked as a whole (`simulator.kernels.walk`), and what is not accepted is taken back. In a coarse walk a move says which
values are saved, and `simulator.kernels.retain` what becomes of the others.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from simulator.kernels.compiled import compiled, inner
from simulator.kernels.retain import add_eviction, retain
from simulator.kernels.walk import Choice, long, replay, table

# What a move may be; `chances` holds how often each is made, summed up.
FLIP: Final = 0  # save a value that was recomputed, or the other way round
SWAP: Final = 1  # exchange the fates of two values made near each other
LINK: Final = 2  # save a value that only recomputations read, or no longer; or retain it once it is rebuilt
RETAIN: Final = 3  # retain a rebuilt value, or no longer
EVICT: Final = 4  # evict a value after an op of backward
UNEVICT: Final = 5  # take back an eviction, or all after one op
BORDER: Final = 6  # save nothing of what a stretch of forward makes, but for what crosses one position in it
MOVE_BORDER: Final = 7  # save nothing of what one stretch makes, and save what crosses a position of another
WEIGHT: Final = 8  # let a rebuilt value go sooner or later when there is no room (`simulator.kernels.retain`)
MOVE_KINDS: Final = 9
DRAWN: Final = (FLIP, RETAIN, EVICT, WEIGHT)  # these are about one candidate
WIDTH: Final = 20.0  # how many positions of forward a stretch covers on average
HIGHEST: Final = 1 << 62
# What a step of a coarse move and a move that changes nothing count for, in steps of a fine one.
COARSE_STEP: Final = 3
IDLE: Final = 10

TALLY: Final = table(
    [
        ("added_ns", np.int64),
        ("over_bytes", np.int64),
        ("evictions", np.int64),  # how many the state has
        ("best_added_ns", np.int64),
        ("best_evictions", np.int64),
        ("lowest_peak_bytes", np.int64),
        ("moves", np.int64),
        ("steps", np.int64),
        ("weight_before", np.float64),  # of the value whose weight the move changed
    ]
)
VALUE: Final = table([("storage", np.int32), ("made", np.int32)])  # and the op of forward that makes it
# One row an op of forward: what is made up to it and read after it.
# Of `cross`; HIGHEST: no border there.
BORDER_AT: Final = np.dtype([("cross_at", np.int64), ("cross_bytes", np.int64)])


class Moves(NamedTuple):
    """The data that moves are drawn from."""

    values: Any  # [value] of VALUE, in the order in which forward makes them
    candidates: Any  # those that backward reads; in a coarse walk all
    links: Any  # those that only recomputations read
    consumers: Any  # the ops of backward that need something from forward
    borders: Any  # [op of forward + 1] of BORDER_AT
    cross: Any
    chances: Any  # [MOVE_KINDS]: of each kind of move, summed up


class Walked(NamedTuple):
    """A state, edited in place, the best one so far, and what is needed to take a move back."""

    saved: Any
    retained: Any
    evictions: Any  # [2, any]: op and storage, sorted
    best: Any  # [2, storage]: saved, retained
    best_evictions: Any
    before: Any  # the evictions before the move
    log: Any  # [3, any]: storage, whether it was saved and retained; (~storage, of which the weight was changed)
    rng: Any  # [1]: where the random numbers are
    figures: Any  # [1] of TALLY


@inner
def below(rng: Any, n: int) -> Any:
    """A random number from 0 to n - 1 (xorshift64*, Vigna 2016; the high bits)."""
    x = rng[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    rng[0] = x
    return long((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % n


@inner
def chance(rng: Any) -> float:
    """A random number from 0 to 1, never 0."""
    return float((below(rng, long(1 << 30)) + 1.0) / (1 << 30))


@inner
def put(s: int, save: int, of_storage: Any, w: Any, n_log: int) -> int:
    """Save a value or do not, noting what it was; the new number of notes."""
    if n_log >= w.log.shape[1]:
        return n_log
    w.log[0, n_log], w.log[1, n_log], w.log[2, n_log] = s, w.saved[s], w.retained[s]
    w.saved[s] = save
    w.retained[s] = of_storage[s].may_stay
    return n_log + 1


@inner
def without_new(w: Any, n_log: int, n: int) -> Any:
    """Forget the evictions of values that the move has saved; how many are left."""
    for k in range(n_log):
        s = w.log[0, k]
        if s >= 0 and w.saved[s] and not w.log[1, k]:
            left = long(0)
            for j in range(n):
                if w.evictions[1, j] != s:
                    w.evictions[0, left], w.evictions[1, left] = w.evictions[0, j], w.evictions[1, j]
                    left += 1
            n = left
    return n


@inner
def made_from(values: Any, least: float) -> int:
    """How many of the values are made before that."""
    begin, end = 0, values.shape[0]
    while begin < end:
        middle = (begin + end) // 2
        if values[middle].made < least:
            begin = middle + 1
        else:
            end = middle
    return begin


@inner
def stretch(values: Any, rng: Any) -> Any:
    """A random stretch of values, around one of them, about WIDTH positions of forward wide: where."""
    width = -WIDTH * np.log(chance(rng))
    middle = values[below(rng, long(values.shape[0]))].made
    first = made_from(values, middle - width / 2)
    return first, max(made_from(values, middle + width / 2), first + 1)


@inner
def border(first: int, last: int, moves: Any, rng: Any) -> Any:
    """A position where least crosses, or sometimes any, among those at which values[first:last] are made."""
    if below(rng, long(3)) == 0:
        return long(moves.values[first + below(rng, last - first)].made)
    least, position, ties = HIGHEST, long(-1), long(0)
    for j in range(first, last):
        p = moves.values[j].made
        if moves.borders[p].cross_bytes < least:
            least, position, ties = moves.borders[p].cross_bytes, long(p), long(1)
        elif moves.borders[p].cross_bytes == least:
            ties += 1
            if below(rng, ties) == 0:
                position = long(p)
    return position


@inner
def propose(kind: int, moves: Any, of_storage: Any, w: Any, n_evictions: int) -> Any:
    """Make one move of a kind in place: (how many values it noted in `log`, how many evictions there are now).

    If nothing is noted and their number is the same, nothing has changed.
    """
    values, candidates, rng, saved = moves.values, moves.candidates, w.rng, w.saved
    n_log = long(0)
    n_before = n_evictions
    # Values to save, or not to; and what is said of the first if it is not saved.
    first = second = retained = long(-1)
    s = long(candidates[below(rng, long(candidates.shape[0]))]) if kind in DRAWN else long(-1)
    if kind == FLIP:
        first = s
    elif kind == SWAP:
        k = below(rng, long(values.shape[0]))
        step = 1 + long(-np.log(chance(rng)) / 0.3)
        other = k + step if below(rng, long(2)) else k - step
        if 0 <= other < values.shape[0] and saved[values[k].storage] != saved[values[other].storage]:
            first, second = long(values[k].storage), long(values[other].storage)
    elif kind == LINK:
        if moves.links.shape[0]:
            s = long(moves.links[below(rng, long(moves.links.shape[0]))])
            first = s
            if not saved[s] and not below(rng, long(2)):
                retained = long(1 - w.retained[s])
    elif kind == RETAIN:
        if not saved[s]:
            first, retained = s, long(1 - w.retained[s])
    elif kind == EVICT:
        end = long(0)
        while end < moves.consumers.shape[0] and moves.consumers[end] < of_storage[s].last_use:
            end += 1
        if w.retained[s] and end:
            k = long(moves.consumers[below(rng, end)])
            n_evictions = add_eviction(k, s, w.evictions, n_evictions)
    elif kind == UNEVICT:
        if n_evictions:
            j = below(rng, n_evictions)
            k = long(w.evictions[0, j])
            alone = below(rng, long(2))
            n_evictions = long(0)
            for i in range(n_before):
                if i != j and (alone or w.evictions[0, i] != k):
                    w.evictions[0, n_evictions], w.evictions[1, n_evictions] = (
                        w.evictions[0, i],
                        w.evictions[1, i],
                    )
                    n_evictions += 1
    elif kind == WEIGHT:
        if of_storage[s].may_stay and not saved[s]:
            w.log[0, 0] = ~s
            n_log += 1
            before = of_storage[s].weight
            w.figures[0].weight_before = before
            of_storage[s].weight = min(256.0, max(1 / 256.0, before * 2.0 ** (below(rng, long(7)) - 3)))
    else:
        p = long(-1)
        for leaving in range(kind - BORDER, -1, -1):
            begin, end = stretch(values, rng)
            if not leaving:
                p = border(begin, end, moves, rng)
            if leaving or kind == BORDER:
                for j in range(begin, end):
                    s = long(values[j].storage)
                    crosses = False
                    if p >= 0:
                        for i in range(moves.borders[p].cross_at, moves.borders[p + 1].cross_at):
                            if moves.cross[i] == s:
                                crosses = True
                    if saved[s] and not crosses:
                        n_log = put(s, long(0), of_storage, w, n_log)
        for i in range(moves.borders[p].cross_at, moves.borders[p + 1].cross_at):
            if not saved[moves.cross[i]]:
                n_log = put(long(moves.cross[i]), long(1), of_storage, w, n_log)
    while first >= 0:
        n_log = put(first, long(1 - saved[first]) if retained < 0 else long(0), of_storage, w, n_log)
        if retained >= 0:
            w.retained[first] = retained
        first, second = second, long(-1)
    if n_log and n_before:
        n_evictions = without_new(w, n_log, n_evictions)
    return n_log, n_evictions


@inner
def copy(of: Any, to: Any, n: int) -> None:
    for j in range(n):
        to[0, j], to[1, j] = of[0, j], of[1, j]


@inner
def move(moves: Any, of_storage: Any, w: Any) -> Any:
    """Make a random move in place, as `propose`; `before` has the evictions as they were."""
    n_before = w.figures[0].evictions
    copy(w.evictions, w.before, n_before)
    draw = chance(w.rng)
    kind = 0
    while kind < MOVE_KINDS - 1 and draw > moves.chances[kind]:
        kind += 1
    return propose(long(kind), moves, of_storage, w, n_before)


@inner
def take_back(of_storage: Any, w: Any, n_log: int) -> None:
    for j in range(n_log - 1, -1, -1):
        if w.log[0, j] < 0:
            of_storage[~w.log[0, j]].weight = w.figures[0].weight_before
        else:
            w.saved[w.log[0, j]], w.retained[w.log[0, j]] = w.log[1, j], w.log[2, j]
    copy(w.before, w.evictions, w.figures[0].evictions)


@inner
def note_best(of_storage: Any, w: Any) -> None:
    figures = w.figures[0]
    figures.best_added_ns, figures.best_evictions = figures.added_ns, figures.evictions
    for s in range(w.saved.shape[0]):
        w.best[0, s], w.best[1, s] = w.saved[s], w.retained[s]
        of_storage[s].best_weight = of_storage[s].weight
    copy(w.evictions, w.best_evictions, figures.evictions)


@compiled
def anneal(
    until: int,  # walks until so many steps have been walked in all,
    least: int,  # and at least so many moves
    temperature: float,
    price: float,
    target_ns: int,
    budget_bytes: int,
    moves: Any,
    facts: Any,
    work: Any,
    w: Any,
    retaining: Any,  # used if `coarse`: then it decides about evictions
    coarse: bool,
) -> None:
    """Moves until so many steps have been walked, or fewer if the best state is as good as `target_ns`.

    A step is one of the plan that a move leads to, forward included; a coarse move counts COARSE_STEP for each, and one
    that leads nowhere IDLE in all.
    """
    figures, rng, peaks = w.figures[0], w.rng, work.peak_bytes
    of_storage = retaining.storages
    energy = figures.added_ns + price * figures.over_bytes
    enough = figures.moves + least
    while figures.steps < until or figures.moves < enough:
        if figures.best_added_ns <= target_ns:
            return
        figures.moves += 1
        n_log, n_evictions = move(moves, of_storage, w)
        if not n_log and n_evictions == figures.evictions:
            figures.steps += IDLE
            continue
        if coarse:
            n_evictions = retain(facts, retaining, work, budget_bytes, w.saved, w.evictions)
        choice = Choice(w.saved, w.retained, w.evictions[0, :n_evictions], w.evictions[1, :n_evictions])
        peak, added, _, walked = replay(facts, choice, work)
        accepted = False
        if peak < 0:  # a walk that was given up counts as one of forward and backward alone
            walked = facts.ops.shape[0] - 1
        figures.steps += COARSE_STEP * walked if coarse else walked
        over = 0
        new = 0.0
        if peak >= 0:
            if peak > budget_bytes:
                squares = 0.0
                for t in range(walked):
                    if peaks[t] > budget_bytes:
                        excess = float(peaks[t] - budget_bytes)
                        squares += excess * excess
                over = int(np.sqrt(squares))
            figures.lowest_peak_bytes = min(figures.lowest_peak_bytes, peak)
            new = added + price * over
            accepted = new <= energy or chance(rng) < np.exp((energy - new) / temperature)
        if accepted:
            energy = new
            figures.added_ns, figures.over_bytes, figures.evictions = added, over, n_evictions
            if not over and added < figures.best_added_ns:
                note_best(of_storage, w)
        else:
            take_back(of_storage, w, n_log)
