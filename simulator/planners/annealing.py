"""Turn one plan's state into a cheaper one within the budget, by simulated annealing over single choices.

A move changes what happens to one value or to two neighbours: kept or recomputed, a rebuilt value shared or not, kept
for the sake of recomputations, dropped after an op or not. Every move is judged by the exact evaluation. Being over
the budget is allowed on the way, at a price per byte and step that rises while the walk stays over it and falls while
it does not (strategic oscillation), because the way between two good plans often leads through a bad one.

Source: Kirkpatrick, Gelatt, Vecchi 1983; the price on violations after Glover's strategic oscillation (1977).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from simulator.fast import Evaluator, State, without
from simulator.graph import Graph
from simulator.planners.limits import Clock
from traces.errors import PlanError

NEGLIGIBLE = 1000  # values smaller than this share of the largest one are left as they are
HOT = 2.0  # the first temperature, in median times of an op that a plan may run again
COLD = 0.02  # the last one
# Being over the budget for one step costs at first: by the largest value, so many first temperatures; by any byte, so
# many times what the bound says that the last byte costs.
PRICE, MARGIN = 10.0, 2.0
REVIEWS, LEAST_REVIEW = 400, 20  # corrections of that price in a walk, and the least moves between two
DEARER, CHEAPER = 1.1, 0.96
CHECK = 64  # moves between two looks at the clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The cheapest state seen within the budget, and its added time."""

    state: State
    added_ns: int


class Annealer:
    """A walk over the states of one trace and one budget; equal seeds and move counts give equal walks."""

    def __init__(self, evaluator: Evaluator, graph: Graph, budget_bytes: int, seed: int) -> None:
        self.evaluator, self.graph, self.budget_bytes = evaluator, graph, budget_bytes
        self.random = random.Random(seed)
        self.best: Best | None = None
        self.lowest_peak_bytes = 1 << 62
        self.moves = 0
        nbytes, ev = evaluator.nbytes, evaluator
        self.largest = max((nbytes[s] for s in graph.candidates), default=0)
        least = max(1, self.largest // NEGLIGIBLE)
        self.candidates = [s for s in graph.candidates if nbytes[s] >= least]
        self.is_candidate = bytearray(len(nbytes))
        for s in graph.candidates:
            self.is_candidate[s] = 1
        # Values that backward does not read, kept or shared for the sake of recomputations alone.
        self.links = [
            s
            for s in ev.made_forward
            if nbytes[s] >= least and graph.rebuildable[s] and not graph.wanted[s] and not graph.pinned[s]
        ]
        self.neighbours = sorted((*self.candidates, *self.links), key=lambda s: (ev.producer[s], s))
        self.place = {s: k for k, s in enumerate(self.neighbours)}
        times = [t for t in (ev.time_ns[ev.producer[s]] for s in self.candidates) if t]
        self.unit_ns = float(median(times)) if times else 1.0
        # The ops of backward at which a rebuilt value may be dropped: those that need something from forward.
        self.consumers = [k for k in range(ev.forward, len(ev.op_id)) if ev.needs[k]]

    def run(
        self,
        state: State,
        moves: int,
        clock: Clock,
        *,
        heat: float = 1.0,
        target_ns: int = 0,
        ns_per_byte: float = 0.0,
    ) -> Best | None:
        """Walk from `state`, which is not changed; the best plan of all walks so far, None if none fits.

        Args:
            state: where to begin; may be over the budget.
            moves: how many to try; fewer if the clock runs out, and then the temperature falls faster.
            clock: when to end.
            heat: scales the first temperature.
            target_ns: an added time that is good enough to end at.
            ns_per_byte: what the last byte of the budget is worth at least.
        """
        if not self.candidates:
            return self.best
        rnd = self.random
        current = state.copy()
        hot, cold = heat * HOT * self.unit_ns, COLD * self.unit_ns
        price = max(PRICE * HOT * self.unit_ns / max(1, self.largest), MARGIN * ns_per_byte)
        review = max(LEAST_REVIEW, moves // REVIEWS)
        begin_s = clock.left_seconds
        added, over = self._look(current)
        energy = added + price * over
        temperature = hot
        for k in range(moves):
            if k % CHECK == 0:
                spent = 1 - clock.left_seconds / begin_s if begin_s else 1.0
                if spent >= 1 or (self.best is not None and self.best.added_ns <= target_ns):
                    break
                temperature = hot * (cold / hot) ** max(k / moves, spent)
            if k % review == review - 1:
                price *= DEARER if over else CHEAPER
                energy = added + price * over
            undo = self._move(current)
            if undo is None:
                continue
            self.moves += 1
            try:
                new_added, new_over = self._look(current)
                new_energy = new_added + price * new_over
            except PlanError:
                new_added, new_over, new_energy = 0, 0, math.inf
            if new_energy <= energy or rnd.random() < math.exp((energy - new_energy) / temperature):
                energy, added, over = new_energy, new_added, new_over
            else:
                undo()
        return self.best

    def _look(self, state: State) -> tuple[int, int]:
        """Added time, and bytes over the budget summed over steps; remembers the best."""
        ev = self.evaluator
        peak, added, over = ev.excess(state, self.budget_bytes)
        if peak < self.lowest_peak_bytes:
            self.lowest_peak_bytes = peak
        if not over and (self.best is None or added < self.best.added_ns):
            self.best = Best(state=state.copy(), added_ns=added)
        return added, over

    # Moves. Each changes the state and returns how to change it back; None if there was nothing to do.

    def _move(self, state: State) -> Callable[[], None] | None:
        r = self.random.random()
        if r < 0.40:
            return self._flip(state, self.random.choice(self.candidates))
        if r < 0.70:
            return self._swap(state)
        if r < 0.80:
            return self._link(state)
        if r < 0.90:
            return self._share(state)
        return self._undrop(state) if state.drops and r < 0.96 else self._drop(state)

    def _flip(self, state: State, s: int) -> Callable[[], None]:
        """Keep what was recomputed, or the other way round."""
        drops = state.drops
        kept, shared = self._set(state, s, not state.there[s])

        def undo() -> None:
            state.there[s], state.share[s], state.drops = kept, shared, drops

        return undo

    def _swap(self, state: State) -> Callable[[], None] | None:
        """Exchange the fates of two values made near each other."""
        rnd = self.random
        k = rnd.randrange(len(self.neighbours))
        other = k + rnd.choice((-1, 1)) * (1 + int(rnd.expovariate(0.3)))
        if not 0 <= other < len(self.neighbours):
            return None
        a, b = self.neighbours[k], self.neighbours[other]
        if state.there[a] == state.there[b]:
            return None
        drops = state.drops
        first = self._set(state, a, not state.there[a])
        second = self._set(state, b, not state.there[b])

        def undo() -> None:
            state.there[a], state.share[a] = first
            state.there[b], state.share[b] = second
            state.drops = drops

        return undo

    def _link(self, state: State) -> Callable[[], None] | None:
        """Save a value that only recomputations read, or no longer; or share it once it is rebuilt."""
        if not self.links:
            return None
        s = self.random.choice(self.links)
        if state.there[s] or self.random.random() < 0.5:
            return self._flip(state, s)
        return self._share_of(state, s)

    def _share(self, state: State) -> Callable[[], None] | None:
        s = self.random.choice(self.candidates)
        return None if state.there[s] else self._share_of(state, s)

    def _share_of(self, state: State, s: int) -> Callable[[], None]:
        before = state.share[s]
        state.share[s] = 1 - before

        def undo() -> None:
            state.share[s] = before

        return undo

    def _drop(self, state: State) -> Callable[[], None] | None:
        """Drop a rebuilt value after an op of backward, so that it is rebuilt once more for later ones."""
        ev, s = self.evaluator, self.random.choice(self.candidates)
        if state.there[s] or not state.share[s] or ev.last_backward_use[s] < 0:
            return None
        end = bisect_left(self.consumers, ev.before[ev.last_backward_use[s]])
        if not end:
            return None
        k = self.consumers[self.random.randrange(end)]
        before = state.drops
        if s in before.get(k, ()):
            return None
        state.drops = {**before, k: (*before.get(k, ()), s)}

        def undo() -> None:
            state.drops = before

        return undo

    def _undrop(self, state: State) -> Callable[[], None]:
        """Take back one drop, or all after one op."""
        rnd, before = self.random, state.drops
        k = rnd.choice(list(before))
        gone = set(before[k]) if rnd.random() < 0.5 else {rnd.choice(before[k])}
        left = tuple(s for s in before[k] if s not in gone)
        state.drops = {q: d for q, d in before.items() if q != k} | ({k: left} if left else {})

        def undo() -> None:
            state.drops = before

        return undo

    def _set(self, state: State, s: int, keep: bool) -> tuple[np.uint8, np.uint8]:
        """Keep or release a value; what it was before."""
        before = state.there[s], state.share[s]
        state.there[s] = keep
        if keep:
            state.drops = without(state.drops, s)
        else:
            state.share[s] = self.is_candidate[s]
        return before
