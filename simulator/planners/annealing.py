"""Turn one plan's state into a cheaper one within the budget, by simulated annealing.

A move changes what happens to one value or to two neighbours: kept or recomputed, a rebuilt value shared or not, kept
for the sake of recomputations, dropped after an op or not (`simulator.kernels.anneal`). A *coarse* walk only chooses
what is kept, also a whole stretch of forward at a time; what becomes of rebuilt values follows from that
(`simulator.kernels.retain`). So keeping one more large value is one move, where a fine walk would have to make room
for it first, at many steps. Every move is judged by the exact evaluation. Being over the budget is allowed on the way,
at a price that rises while the walk stays over it and falls while it does not (strategic oscillation), because the way
between two good plans often leads through a bad one. What is paid for is the root of the sum of the squares of the
bytes over, step by step: the many steps that one large value lifts a little cost less than in their sum, and unlike in
their maximum each one that is mended counts.

Source: Kirkpatrick, Gelatt, Vecchi 1983; the price on violations after Glover's strategic oscillation (1977).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from simulator.core.evaluator import Evaluator, State
from simulator.core.limits import Clock
from simulator.core.problem import Problem
from simulator.kernels.anneal import KINDS, anneal
from simulator.kernels.retain import retain

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEGLIGIBLE: Final = 1000  # values smaller than this share of the largest one are left as they are
HOT: Final = 2.0  # the first temperature, in median times of an op that a plan may run again
COLD: Final = 0.02  # the last one
# Being over the budget costs at first: by the largest value, so many first temperatures; by any byte, so many times
# what the bound says that the last byte costs.
PRICE, MARGIN = 10.0, 2.0
REVIEWS, LEAST_REVIEW = 400, 20  # corrections of that price in a walk, and the least moves between two
MOST_STEPS: Final = 4_000_000  # and the most steps between two, some 50 ms: the clock is looked at then
DEARER, CHEAPER = 1.1, 0.96
ROOM: Final = 4  # a state with more steps than so many times those of the first is not looked at
UNKNOWN: Final = 1 << 62
NOTHING: Final = 1 << 62  # crosses a position, or too much: no border there
MOST_CROSSING: Final = 64
# How often each kind of move is made, in the order in which `kernels.anneal` numbers them; and in a coarse walk.
CHANCES: Final = (0.40, 0.30, 0.10, 0.10, 0.04, 0.06, 0.0, 0.0, 0.0)
COARSE: Final = (0.30, 0.30, 0.0, 0.0, 0.0, 0.0, 0.10, 0.10, 0.20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The cheapest state seen within the budget, and its added time."""

    state: State
    added_ns: int


class Annealer:
    """A walk over the states of one trace and one budget; equal seeds and move counts give equal walks."""

    def __init__(self, evaluator: Evaluator, problem: Problem, budget_bytes: int, seed: int) -> None:
        self.evaluator, self.problem, self.budget_bytes = evaluator, problem, budget_bytes
        self.best: Best | None = None
        self.lowest_peak_bytes = 1 << 62
        nbytes, ev = evaluator.nbytes, evaluator
        self.largest = max((nbytes[s] for s in problem.candidates), default=0)
        least = max(1, self.largest // NEGLIGIBLE)
        self.candidates = [s for s in problem.candidates if nbytes[s] >= least]
        # Values that backward does not read, kept or shared for the sake of recomputations alone.
        self.links = [s for s in ev.made_forward if nbytes[s] >= least and problem.recompute_only[s]]
        self.neighbours = sorted((*self.candidates, *self.links), key=lambda s: (ev.producer[s], s))
        times = [t for t in (ev.time_ns[ev.producer[s]] for s in self.candidates) if t]
        self.unit_ns = float(median(times)) if times else 1.0
        self.chances = np.cumsum(CHANCES)
        assert len(CHANCES) == KINDS
        self.rng = np.array([(2 * seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64)], np.uint64)  # never 0
        self.packed = self._pack()
        self.coarse = np.cumsum(COARSE)
        self.retaining = self._pack_retaining()

    def run(
        self,
        state: State,
        steps: int,
        *,
        clock: Clock,
        heat: float = 1.0,
        target_ns: int = 0,
        ns_per_byte: float = 0.0,
        coarse: bool = False,
    ) -> Best | None:
        """Walk from `state`, which is not changed; the best plan of all walks so far, None if none fits.

        Args:
            state: where to begin; may be over the budget.
            steps: how many to walk in all, as `kernels.anneal` counts them.
            clock: when to end before that, wherever it is.
            heat: scales the first temperature.
            target_ns: an added time that is good enough to end at.
            ns_per_byte: what the last byte of the budget is worth at least.
            coarse: choose only what is kept; of `state` only that is taken.
        """
        if not self.candidates or steps <= 0:
            return self.best
        hot, cold = heat * HOT * self.unit_ns, COLD * self.unit_ns
        price = max(PRICE * HOT * self.unit_ns / max(1, self.largest), MARGIN * ns_per_byte)
        walk = Walk(self, state, coarse)
        while walk.steps < steps and not clock.over and not (self.best and self.best.added_ns <= target_ns):
            temperature = hot * (cold / hot) ** (walk.steps / steps)
            some = min(1 + steps // REVIEWS, MOST_STEPS)
            walk.go(min(steps, walk.steps + some), temperature, price, target_ns)
            price *= DEARER if walk.over else CHEAPER
        return self.best

    def retained(self, state: State) -> State:
        """With what `state` keeps, what a coarse walk does with the rest."""
        ev = self.evaluator
        by_producer, gone_at, gone, fixed, last_use, stays, weight, _, work = self.retaining
        drops = np.zeros((2, 4 * len(ev.op_id) + 64), np.int32)
        n = retain(
            ev.forward, self.budget_bytes, ev.facts, by_producer, gone_at, gone, fixed, last_use, stays, state.there,
            weight, work, drops,
        )  # fmt: skip
        return _state(state.there, stays & (state.there == 0), drops[:, :n])

    def _pack(self) -> tuple[NDArray[Any], ...]:
        """What the moves are about, as `kernels.anneal.propose` unpacks it."""
        ev, sts = self.evaluator, self.evaluator.trace.storages
        made = [ev.producer[s] for s in self.neighbours]
        ends = [ev.before[max(sts.last_forward_use[s], 0)] for s in self.neighbours]
        crossing: list[
            list[int]
        ] = []  # for each position of forward, what is made up to it and read after it
        now: list[tuple[int, int]] = []
        k = 0
        for p in range(ev.forward):
            now = [(end, s) for end, s in now if end > p]
            while k < len(made) and made[k] == p:
                now += [(ends[k], self.neighbours[k])] if ends[k] > p else []
                k += 1
            crossing.append([s for _, s in now] if len(now) <= MOST_CROSSING else [])
        is_candidate = np.zeros(len(ev.nbytes), np.uint8)
        is_candidate[list(self.problem.candidates)] = 1
        # The ops of backward at which a rebuilt value may be dropped: those that need something from forward.
        consumers = [k for k in range(ev.forward, len(ev.op_id)) if ev.needs[k]]
        last_use = [ev.before[k] if k >= 0 else -1 for k in ev.last_backward_use]
        ids: list[NDArray[Any]] = [
            np.array(x, np.int32) for x in (self.neighbours, made, self.candidates, self.links)
        ]
        at = np.zeros(ev.forward + 1, np.int32)
        np.cumsum([len(c) for c in crossing], out=at[1:])
        flat = np.array([s for c in crossing for s in c], np.int32)
        cross_bytes = np.array([sum(ev.nbytes[s] for s in c) or NOTHING for c in crossing], np.int64)
        return (
            *ids, is_candidate, np.array(consumers, np.int32), np.array(last_use, np.int32), at, flat, cross_bytes
        )  # fmt: skip

    def _pack_retaining(self) -> tuple[Any, ...]:
        """What `kernels.retain` needs to know."""
        ev = self.evaluator
        n_st, n_op = len(ev.nbytes), len(ev.op_id)
        by_producer = sorted(ev.made_forward, key=lambda s: (ev.producer[s], s))
        last_use = [ev.before[k] if k >= 0 else -1 for k in ev.last_backward_use]
        # Until when something may need each storage: itself, or what is made from it.
        until = [max(a, b) for a, b in zip(last_use, ev.hold, strict=True)]
        for k in range(ev.forward - 1, -1, -1):
            latest = max((until[s] for s in ev.creates[k]), default=-1)
            for s in ev.needs[k]:
                until[s] = max(until[s], latest)
        going: list[list[int]] = [[] for _ in range(n_op)]
        for s in ev.made_forward:
            if until[s] >= 0:
                going[until[s]].append(s)
        gone_at = np.zeros(n_op + 1, np.int32)
        np.cumsum([len(x) for x in going], out=gone_at[1:])
        settled = np.cumsum(ev.settled)
        fixed = ev.resident_bytes + max(ev.rerun_bytes, default=0) + settled - np.array(ev.settled)
        stays = np.zeros(n_st, np.uint8)
        stays[list(self.problem.candidates)] = 1
        stack, order = ev.chain_space()
        ids = [np.zeros(n_st, np.int32) for _ in range(6)]
        work = (*ids, stack, order, np.zeros(n_op, np.int32), np.zeros(n_st))
        return (
            np.array(by_producer, np.int32), gone_at, np.array([s for x in going for s in x], np.int32), fixed,
            np.array(last_use, np.int32), stays, np.ones(n_st + 1), np.ones(n_st + 1), work,
        )  # fmt: skip


class Walk:
    """Where one walk is, as the arrays that the kernel edits."""

    def __init__(self, annealer: Annealer, state: State, coarse: bool) -> None:
        self.annealer, self.evaluator = annealer, annealer.evaluator
        ev, budget_bytes = self.evaluator, annealer.budget_bytes
        self.there, self.share = state.there.copy(), state.share.copy()
        self.chances, self.packed, self.coarse = annealer.chances, annealer.packed, coarse
        if coarse:
            self.chances = annealer.coarse
            values, made = annealer.packed[:2]
            self.packed = (values, made, values, *annealer.packed[3:])
            self.share[:] = annealer.packed[4] & (self.there == 0)
            # Its weights are those with which it was found, if a coarse walk found it; else all the same.
            known = annealer.best is not None and state is annealer.best.state
            annealer.retaining[6][:] = annealer.retaining[7] if known else 1.0
        drops = [
            (k, s) for k, each in sorted(state.drops.items()) for s in sorted(set(each)) if not state.there[s]
        ]
        room = 2 * len(drops) + 4 * len(annealer.neighbours) + 64
        self.drops, self.best_drops, self.spare = (np.zeros((2, room), np.int32) for _ in range(3))
        if drops:
            self.drops[:, : len(drops)] = np.array(drops, np.int32).T
        self.best_there, self.best_share = self.there.copy(), self.share.copy()
        self.log = np.zeros((3, 2 * len(annealer.neighbours) + 8), np.int32)
        peak_bytes, added_ns, _, steps = ev.walk(state)
        peaks = ev.steps(steps)[1][0]
        over = int(np.sqrt(np.square(np.maximum(peaks - budget_bytes, 0).astype(np.float64)).sum()))
        self.space = ev.work_space(ROOM * steps)
        if not over and (annealer.best is None or added_ns < annealer.best.added_ns):
            annealer.best = Best(state=state.copy(), added_ns=added_ns)
        best_ns = UNKNOWN if annealer.best is None else annealer.best.added_ns
        lowest = min(peak_bytes, annealer.lowest_peak_bytes)
        if coarse:  # what becomes of what is not kept is decided anew, so the first move is taken
            added_ns = UNKNOWN
        self.figures = np.array((added_ns, over, len(drops), best_ns, 0, lowest, 0, 0), np.int64)

    @property
    def over(self) -> bool:
        """Whether the walk is at a state over the budget."""
        return bool(self.figures[1])

    @property
    def steps(self) -> int:
        """How many it has walked."""
        return int(self.figures[7])

    def go(
        self, until: int, temperature: float, price: float, target_ns: int, least: int = LEAST_REVIEW
    ) -> None:
        """Go on until so many steps have been walked, and at least so many moves made; tells the annealer."""
        annealer, ev, figures = self.annealer, self.evaluator, self.figures
        before = int(figures[3])
        space, seq, change, levels = self.space
        anneal(
            until, least, temperature, price, target_ns, annealer.budget_bytes, self.chances, self.packed,
            ev.forward, ev.resident_bytes, ev.facts, space, seq, change, levels, self.there, self.share, self.drops,
            self.best_there, self.best_share, self.best_drops, annealer.retaining, self.coarse, self.spare, self.log,
            annealer.rng, figures,
        )  # fmt: skip
        annealer.lowest_peak_bytes = int(figures[5])
        if figures[3] < before:
            found = _state(self.best_there, self.best_share, self.best_drops[:, : int(figures[4])])
            annealer.best = Best(state=found, added_ns=int(figures[3]))

    def state(self) -> State:
        """Where it is."""
        return _state(self.there, self.share, self.drops[:, : int(self.figures[2])])


def _state(there: NDArray[np.uint8], share: NDArray[np.uint8], pairs: NDArray[np.int32]) -> State:
    """A copy of a state whose drops are rows of ops and storages."""
    drops: dict[int, tuple[int, ...]] = {}
    for k, s in pairs.T.tolist():
        drops[k] = (*drops.get(k, ()), s)
    return State(there=there.copy(), share=share.copy(), drops=drops)
