"""Simulated annealing's inner loop: one random change of what a plan saves after another, each judged by a walk.

One call makes many moves at one temperature and one price. A move says which values are saved,
`simulator.kernels.retain` what becomes of the others, the plan is walked as a whole (`simulator.kernels.walk`), and
what is not accepted is taken back.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from simulator.kernels.compiled import compiled, inner
from simulator.kernels.retain import retain
from simulator.kernels.walk import Choice, long, replay, table

# How often a move is a flip: save a value that was recomputed, or the other way round. Else it exchanges the fates of
# two values made near each other.
FLIPS: Final = 0.6
IDLE: Final = 4  # steps for which a move that changes nothing counts

TALLY: Final = table(
    [
        ("added_ns", np.int64),
        ("over_bytes", np.int64),
        ("best_added_ns", np.int64),
        ("best_evictions", np.int64),
        ("lowest_peak_bytes", np.int64),
        ("moves", np.int64),
        ("steps", np.int64),
    ]
)


class Walked(NamedTuple):
    """What a state saves, edited in place, the best one so far, and what is needed to take a move back."""

    saved: Any
    evictions: Any  # [2, any]: op and storage, sorted; of the state that was walked last
    best: Any  # [storage]: whether it is saved
    best_evictions: Any
    log: Any  # [any]: storages of which a move changed whether they are saved
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
def propose(values: Any, w: Any) -> Any:
    """Make one move in place: how many values it noted in `log`."""
    rng, saved = w.rng, w.saved
    swaps = chance(rng) > FLIPS
    k = below(rng, long(values.shape[0]))
    s = long(values[k])
    n_log = long(1)
    w.log[0] = s
    if swaps:
        step = 1 + long(-np.log(chance(rng)) / 0.3)
        other = k + step if below(rng, long(2)) else k - step
        if not 0 <= other < values.shape[0] or saved[s] == saved[values[other]]:
            return long(0)
        n_log = long(2)
        w.log[1] = values[other]
    for j in range(n_log):
        saved[w.log[j]] = 1 - saved[w.log[j]]
    return n_log


@inner
def note_best(w: Any, n_evictions: int) -> None:
    w.figures[0].best_added_ns, w.figures[0].best_evictions = w.figures[0].added_ns, n_evictions
    for s in range(w.saved.shape[0]):
        w.best[s] = w.saved[s]
    for j in range(n_evictions):
        w.best_evictions[0, j], w.best_evictions[1, j] = w.evictions[0, j], w.evictions[1, j]


@compiled
def anneal(
    until: int,  # walks until so many steps have been walked in all,
    least: int,  # and at least so many moves
    temperature: float,
    price: float,
    target_ns: int,
    budget_bytes: int,
    values: Any,  # storages of forward, in the order in which they are made
    facts: Any,
    work: Any,
    w: Any,
    retaining: Any,
) -> None:
    """Moves until so many steps have been walked, or fewer if the best state is as good as `target_ns`.

    A step is one of the plan that a move leads to, forward included; a move that leads nowhere counts IDLE in all.
    """
    figures, rng, peaks = w.figures[0], w.rng, work.peak_bytes
    energy = figures.added_ns + price * figures.over_bytes
    enough = figures.moves + least
    while figures.steps < until or figures.moves < enough:
        if figures.best_added_ns <= target_ns:
            return
        figures.moves += 1
        n_log = propose(values, w)
        if not n_log:
            figures.steps += IDLE
            continue
        n = retain(facts, retaining, work, budget_bytes, w.saved, w.evictions)
        choice = Choice(w.saved, retaining.may_stay, w.evictions[0, :n], w.evictions[1, :n])
        peak, added, _, walked = replay(facts, choice, work)
        accepted = False
        if peak < 0:  # a walk that was given up counts as one of forward and backward alone
            walked = facts.ops.shape[0] - 1
        figures.steps += walked
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
            figures.added_ns, figures.over_bytes = added, over
            if not over and added < figures.best_added_ns:
                note_best(w, n)
        else:
            for j in range(n_log):
                w.saved[w.log[j]] = 1 - w.saved[w.log[j]]
