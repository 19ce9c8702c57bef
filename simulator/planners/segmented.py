"""A row of ever finer segmentations of forward: where μ-TWO goes on when evicting single values is not enough.

The first is one segment, which rebuilds everything at once; each next one splits the segment whose rebuilding makes
the peak. The row does not depend on the budget, so it is made once for all budgets of a trace.

Counts: the exact peak of every segmentation. Ignores: which of two segments with equal peaks is better split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.core.evaluator import Evaluator, State, evaluator_of
from simulator.core.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Segmentation:
    """One of the row: what it saves, and its peak."""

    state: State  # not to be edited
    peak_bytes: int


class Segmentations:
    """The row, as far as it has been asked for."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = ev = evaluator
        problem, ops, sts = ev.problem, ev.trace.ops, ev.trace.storages
        forward_end = problem.forward_end
        self.known: list[Segmentation] = []
        self.ended = False
        self.segment = np.zeros(forward_end, np.int64)  # op of forward -> its segment
        self.producer = np.array(sts.producer, np.int64)
        self.is_candidate = np.zeros(len(sts), np.bool_)
        self.is_candidate[list(problem.candidates)] = True
        # What is saved where it crosses a border, and else not: candidates, and what only forward reads.
        free = ~(np.array(problem.pinned, np.bool_) | np.array(problem.saved_by_default, np.bool_))
        made = np.array(ev.made_forward, np.int64)
        self.decided = made[(self.is_candidate | free)[made]] if len(made) else made
        read = [(s, i) for i in range(forward_end) for s in ops.reads[i] if sts.producer[s] >= 0]
        self.read, self.reader = np.array(read, np.int64).reshape(-1, 2).T
        # Op of forward -> bytes of the candidates that it makes.
        self.weight = np.zeros(forward_end, np.int64)
        for s in problem.candidates:
            self.weight[sts.producer[s]] += sts.nbytes[s]
        self.crossing = np.zeros(forward_end + 1, np.int64)  # bytes that a border after each op would save
        for s in self.decided.tolist():
            first, last = sts.producer[s], sts.last_forward_use[s]
            if last > first:
                # A value that backward reads itself is the better border: of two equal ones it is needed anyway.
                price = sts.nbytes[s] if problem.saved_by_default[s] else 2 * sts.nbytes[s]
                self.crossing[first] += price
                self.crossing[last] -= price
        np.cumsum(self.crossing, out=self.crossing)

    def at(self, k: int) -> Segmentation | None:
        """The k-th of the row; None if nothing was left to split before it."""
        while k >= len(self.known) and not self.ended:
            self._next()
        return self.known[k] if k < len(self.known) else None

    def _next(self) -> None:
        ev, state = self.evaluator, self._state()
        peak_bytes, _, peak_step, steps = ev.walk(state)
        self.known.append(Segmentation(state=state, peak_bytes=peak_bytes))
        seq = ev.sequence(steps)[: max(0, peak_step - ev.forward + 1)]
        again = seq[seq < 0]
        self.ended = True
        if len(again):
            op = ev.op_id[int(~again[-1])]
            members = np.flatnonzero(self.segment == self.segment[op])
            border = split(members, self.weight, self.crossing)
            if border >= 0:
                self.segment[members[members > border]] = len(self.known)
                self.ended = False

    def _state(self) -> State:
        """What `segments.actions_for` says of these segments, which takes thirty times as long to say it."""
        state, decided = self.evaluator.state(), self.decided
        crosses = np.zeros(len(self.producer), np.bool_)
        crosses[self.read[self.segment[self.producer[self.read]] != self.segment[self.reader]]] = True
        state.saved[decided] = crosses[decided]
        state.retained[decided[crosses[decided] != self.is_candidate[decided]]] = 1
        return state


def split(members: NDArray[np.int64], weight: NDArray[np.int64], crossing: NDArray[np.int64]) -> int:
    """The op of a segment after which to split it; -1 if it cannot be split.

    Where least crosses the border, among the positions that leave at least 30 % of the segment's bytes on either
    side; of several such ones the most even split.
    """
    seen = np.cumsum(weight[members])
    total = int(seen[-1])
    at = np.flatnonzero((3 * total <= 10 * seen) & (10 * seen <= 7 * total))
    at = at[at < len(members) - 1]
    if not total or not len(at):
        return -1
    order = np.lexsort((members[at], np.abs(2 * seen[at] - total), crossing[members[at]]))
    return int(members[at[order[0]]])


def segmentations_of(problem: Problem) -> Segmentations:
    """The row of a problem, made once: budget after budget asks."""
    return problem.once("segmentations", lambda problem: Segmentations(evaluator_of(problem)))
