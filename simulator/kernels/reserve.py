"""What a planner's state reserves, in one go: its walk, its requests, and the allocator that serves them."""

from __future__ import annotations

from typing import Any

from simulator.kernels.best_fit import play
from simulator.kernels.compiled import compiled, inner
from simulator.kernels.records import Choice, long
from simulator.kernels.requests import requests
from simulator.kernels.walk import replay

MOST = 1 << 62


@inner
def reserved(
    facts: Any, choice: Any, work: Any, n: int, asks: Any, x: Any, rows: Any, m: Any, most: int
) -> Any:
    """Bytes that n walked steps reserve in the last iteration; above `most`, so many at least; below 0: no room."""
    at, n_once, count = requests(facts, choice, work, n, asks, x)
    if at < 0 or count > m.held.shape[0]:
        return long(-1)
    ran, _ = play(asks.residents, x.blocks, x.sizes, at, x.once[:n_once], rows, most, m)
    return long(rows[ran - 1].peak_reserved)


@compiled
def reserve(
    facts: Any,
    saved: Any,
    retained: Any,
    evict_at: Any,
    evicted: Any,
    work: Any,
    asks: Any,
    x: Any,
    rows: Any,
    m: Any,
) -> Any:
    """(peak, added time, bytes reserved) of a state; what `replay` returns where it cannot, and -1: no room."""
    choice = Choice(saved, retained, evict_at, evicted)
    peak, added, _, n = replay(facts, choice, work)
    if peak < 0:
        return peak, added, long(0)
    return peak, added, reserved(facts, choice, work, n, asks, x, rows, m, long(MOST))
