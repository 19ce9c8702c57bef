"""Simulated annealing within a limit of reserved memory: the moves of `simulator.kernels.anneal`, each judged by the
allocator.

What a state reserves takes fifty times as long to say as its peak, so a move is given up before that where its added
time and its peak alone are too much, and within it once more is reserved than could be accepted.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from simulator.kernels.anneal import chance, move, note_best, take_back
from simulator.kernels.compiled import compiled
from simulator.kernels.records import Choice, long, table
from simulator.kernels.requests import reserved
from simulator.kernels.walk import replay

MOST: Final = 1 << 61
SQUEEZED: Final = table(
    [
        ("reserved_bytes", np.int64),  # of the state at hand
        ("best_reserved_bytes", np.int64),
        ("judged", np.int64),  # states that the allocator served, in all
        ("full", np.int64),  # whether work space was missing
    ]
)


@compiled
def squeeze(
    judged: int,  # until so many states have been judged by the allocator,
    moves_left: int,  # or so many moves made
    temperature: float,
    price: float,
    limit_bytes: int,
    moves: Any,
    facts: Any,
    work: Any,
    w: Any,
    of_storage: Any,
    asks: Any,
    x: Any,
    rows: Any,
    m: Any,
    told: Any,  # [1] of SQUEEZED
) -> None:
    """Moves; the best state is the cheapest within the limit, of equal ones that which reserves least."""
    figures, rng, sums = w.figures[0], w.rng, told[0]
    energy = figures.added_ns + price * max(0, sums.reserved_bytes - limit_bytes)
    while sums.judged < judged and moves_left > 0 and not sums.full:
        moves_left -= 1
        n_log, n_evictions = move(moves, of_storage, w)
        if not n_log and n_evictions == figures.evictions:
            continue
        choice = Choice(w.saved, w.retained, w.evictions[0, :n_evictions], w.evictions[1, :n_evictions])
        peak, added, _, _ = replay(facts, choice, work, x.notes, False)
        bearable = energy - temperature * np.log(chance(rng))
        accepted = False
        now = long(MOST)
        if peak >= 0 and added + price * max(0, peak - limit_bytes) <= bearable:
            most = long(min(float(MOST), limit_bytes + (bearable - added) / price))
            now = reserved(facts, choice, work, asks, x, rows, m, most)
            sums.judged += 1
            if now < 0:
                sums.full = 1
            accepted = 0 <= now <= most
        if accepted:
            energy = added + price * max(0, now - limit_bytes)
            figures.added_ns, figures.evictions, sums.reserved_bytes = added, n_evictions, now
            if now <= limit_bytes and (
                added < figures.best_added_ns
                or (added == figures.best_added_ns and now < sums.best_reserved_bytes)
            ):
                note_best(of_storage, w)
                sums.best_reserved_bytes = now
        else:
            take_back(of_storage, w, n_log)
