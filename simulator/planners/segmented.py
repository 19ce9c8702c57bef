"""A row of ever finer segmentations of forward: where μ-TWO goes on when evicting single values is not enough.

The first is one segment, which rebuilds everything at once; each next one splits the segment whose rebuilding makes
the peak. The row does not depend on the budget, so it is made once for all budgets of a trace.

Counts: the exact peak of every segmentation. Ignores: which of two segments with equal peaks is better split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator.core.evaluator import Evaluator, State, evaluator_of
from simulator.core.problem import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Segmentation:
    """One of the row: what it saves, and its peak."""

    state: State  # not to be edited
    peak_bytes: int


class Segmentations:
    """The row, as far as it has been asked for."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = ev = evaluator
        trace, problem = ev.trace, ev.problem
        ops, sts = trace.ops, trace.storages
        forward_end = problem.forward_end
        self.known: list[Segmentation] = []
        self.ended = False
        self.segment = np.zeros(forward_end, np.int64)  # op of forward -> its segment
        self.producer = np.array(sts.producer, np.int64)
        self.candidates = np.array(problem.candidates, np.int64)
        links = [
            s
            for c in problem.creates[:forward_end]
            for s in c
            if not (problem.saved_by_default[s] or problem.pinned[s])
        ]
        self.links = np.array(links, np.int64)
        read = [(s, i) for i in range(forward_end) for s in ops.reads[i] if sts.producer[s] >= 0]
        self.read, self.reader = np.array(read, np.int64).reshape(-1, 2).T
        sizes = np.array(sts.nbytes, np.int64)
        self.weight = np.zeros(forward_end, np.int64)
        np.add.at(self.weight, self.producer[self.candidates], sizes[self.candidates])
        is_candidate = np.zeros(len(sts), np.bool_)
        is_candidate[self.candidates] = True
        self.crossing = np.zeros(forward_end + 1, np.int64)  # bytes that a border after each op would save
        for s in ev.made_forward:
            if is_candidate[s] or not (problem.pinned[s] or problem.saved_by_default[s]):
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
        """What `segments.actions_for` says of these segments."""
        state, segment = self.evaluator.state(), self.segment
        crosses = np.zeros(len(self.producer), np.bool_)
        crosses[self.read[segment[self.producer[self.read]] != segment[self.reader]]] = True
        inner = self.candidates[~crosses[self.candidates]]
        state.saved[inner], state.retained[inner] = 0, 1
        links = self.links[crosses[self.links]]
        state.saved[links] = state.retained[links] = 1
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
