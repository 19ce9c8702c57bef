"""Simulated annealing: from one plan's state to a cheaper one within the budget.

A walk chooses what is saved: a move turns one value or two neighbours
(`simulator.kernels.anneal`); what becomes of rebuilt values follows from that (`simulator.kernels.retain`). Every move
is judged by the exact evaluation. Being over the budget is allowed on the way, at a price that rises while the walk
stays over it and falls while it does not (strategic oscillation), because the way between two good plans often leads
through a bad one. What is paid for is the root of the sum of the squares of the bytes over, step by step: the many
steps that one large value lifts a little cost less than in their sum, and unlike in their maximum each one that is
mended counts.

Source: Kirkpatrick, Gelatt, Vecchi 1983; the price on violations after Glover's strategic oscillation (1977).
"""

from __future__ import annotations

from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.core.evaluator import Evaluator, State
from simulator.core.limits import Limits
from simulator.kernels.anneal import TALLY, Walked, anneal
from simulator.kernels.retain import OF_OP, OF_STORAGE, Retaining
from simulator.kernels.walk import pack_rows
from simulator.planners.mu_two import Found

NEGLIGIBLE_SHARE: Final = 1000  # values smaller than this share of the largest one are left as they are
HOT: Final = 2.0  # the first temperature, in median times of an op that a plan may run again
COLD: Final = 0.02  # the last one
# Being over the budget costs at first: by the largest value, so many first temperatures; by any byte, so many times
# what the bound says that the last byte costs.
PRICE, MARGIN = 10.0, 2.0
REVIEWS, LEAST_REVIEW = 400, 20  # corrections of that price in a walk, and the least moves between two
MOST_STEPS: Final = 1_400_000  # and the most steps between two, some 50 ms: the clock is looked at then
DEARER, CHEAPER = 1.1, 0.96
ROOM: Final = 4  # a state with more steps than so many times those of the first is not looked at
NOT_WALKED: Final = 1 << 62


class Annealer:
    """A walk over the states of one trace and one budget; equal seeds and move counts give equal walks."""

    def __init__(self, evaluator: Evaluator, budget_bytes: int, seed: int) -> None:
        self.evaluator, self.budget_bytes = evaluator, budget_bytes
        self.best: Found | None = None  # the cheapest state seen within the budget
        self.lowest_peak_bytes = 1 << 62
        ev, nbytes, problem = evaluator, evaluator.nbytes, evaluator.problem
        self.largest = max((nbytes[s] for s in problem.candidates), default=0)
        least = max(1, self.largest // NEGLIGIBLE_SHARE)
        candidates = [s for s in problem.candidates if nbytes[s] >= least]
        # Values that backward does not read are saved for the sake of recomputations alone.
        links = [s for s in ev.made_forward if nbytes[s] >= least and problem.recompute_only[s]]
        values = sorted((*candidates, *links), key=lambda s: (ev.producer[s], s)) if candidates else []
        self.values = np.array(values, np.int32)
        times = [t for t in (ev.time_ns[ev.producer[s]] for s in candidates) if t]
        self.unit_ns = float(median(times)) if times else 1.0
        self.rng = np.array([(2 * seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64)], np.uint64)  # never 0
        self.retaining = self._retaining()

    def run(
        self,
        state: State,
        steps: int,
        *,
        clock: Limits,
        heat: float = 1.0,
        target_ns: int = 0,
        ns_per_byte: float = 0.0,
    ) -> Found | None:
        """Walk so many steps, or until the clock is over or the step takes `target_ns`, from what `state` saves, be it
        over the budget; the best plan of all walks so far, None if none fits. `heat` scales the first temperature;
        the last byte of the budget is worth `ns_per_byte` at least.
        """
        if not len(self.values) or steps <= 0:
            return self.best
        hot, cold = heat * HOT * self.unit_ns, COLD * self.unit_ns
        price = max(PRICE * HOT * self.unit_ns / max(1, self.largest), MARGIN * ns_per_byte)
        ev, w, done = self.evaluator, self.begin(state), 0
        figures = w.figures[0]
        while done < steps and not clock.over and not (self.best and self.best.time_ns <= target_ns):
            temperature = hot * (cold / hot) ** (done / steps)
            until = min(steps, done + min(1 + steps // REVIEWS, MOST_STEPS))
            before = int(figures["best_added_ns"])
            anneal(
                until, LEAST_REVIEW, temperature, price, target_ns - ev.base_time_ns, self.budget_bytes,
                self.values, ev.facts, ev.work_space(0), w, self.retaining,
            )  # fmt: skip
            self.lowest_peak_bytes = int(figures["lowest_peak_bytes"])
            if (best_ns := int(figures["best_added_ns"])) < before:
                pairs = w.best_evictions[:, : int(figures["best_evictions"])]
                found = state_of(w.best, self.retaining.may_stay, pairs)
                self.best = Found(state=found, time_ns=ev.base_time_ns + best_ns)
            price *= DEARER if figures["over_bytes"] else CHEAPER
            done = int(figures["steps"])
        return self.best

    def begin(self, state: State) -> Walked:
        """Where a walk from a state begins, as the arrays that the kernel edits."""
        ev, saved, figures = self.evaluator, state.saved.copy(), np.zeros(1, TALLY)
        evictions, best_evictions = np.zeros((2, 2, 4 * len(self.values) + 64), np.int32)
        *_, steps = ev.walk(state)
        ev.work_space(ev.forward + ROOM * (steps - ev.forward))
        # What becomes of what is not saved is decided anew, so the first move is taken.
        figures["added_ns"] = NOT_WALKED
        figures["lowest_peak_bytes"] = self.lowest_peak_bytes
        figures["best_added_ns"] = NOT_WALKED if self.best is None else self.best.time_ns - ev.base_time_ns
        log = np.zeros(2, np.int32)
        return Walked(saved, evictions, saved.copy(), best_evictions, log, self.rng, figures)

    def _retaining(self) -> Retaining:
        ev, problem = self.evaluator, self.evaluator.problem
        n_st, n_op = len(ev.nbytes), len(ev.op_id)
        last_use = [ev.before[k] if k >= 0 else -1 for k in ev.last_backward_use]
        # Until when something may need each storage: itself, or what is made again from it.
        until = list(last_use)
        again = [a and not b for a, b in zip(problem.rebuildable, problem.pinned, strict=True)]
        for k in range(ev.forward - 1, -1, -1):
            latest = max((until[s] for s in ev.creates[k] if again[s]), default=-1)
            for s in ev.needs[k]:
                until[s] = max(until[s], latest)
        going: list[list[int]] = [[] for _ in range(n_op)]
        for s in ev.made_forward:
            if (end := max(until[s], ev.hold[s])) >= 0:
                going[end].append(s)
        ops, storages = np.zeros(n_op + 1, OF_OP), np.zeros(n_st, OF_STORAGE)
        ops["done_at"], done = pack_rows(going)
        settled = np.cumsum(ev.settled)
        ops["fixed_bytes"][:-1] = ev.resident_bytes + settled - np.array(ev.settled)
        storages["last_use"] = np.where(problem.recompute_only, until, last_use)
        may_stay = np.array(problem.recompute_only, np.uint8)
        may_stay[[*problem.candidates, *problem.reloaded]] = 1
        return Retaining(
            done=done, ops=ops, storages=storages, may_stay=may_stay, held=np.zeros(n_st, np.int32)
        )


def state_of(saved: NDArray[np.uint8], may_stay: NDArray[np.uint8], pairs: NDArray[np.int32]) -> State:
    """A state of which all stays that may, but for evictions, rows of ops and storages."""
    evictions: dict[int, tuple[int, ...]] = {}
    for k, s in pairs.T.tolist():
        evictions[k] = (*evictions.get(k, ()), s)
    return State(saved=saved.copy(), retained=may_stay.copy(), evictions=evictions)
