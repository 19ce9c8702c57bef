"""A row of ever finer segmentations of forward: where μ-TWO goes on when evicting single values is not enough.

The first is one segment, which rebuilds everything at once; each next one splits the segment whose rebuilding makes
the peak.

Counts: the exact peak of every segmentation. Ignores: which of two segments with equal peaks is better split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.core.evaluator import Evaluator, State


class Segmentation(NamedTuple):
    """One of the row."""

    segment: NDArray[np.int64]  # [op of forward]; of the latest only
    state: State  # what `segments.actions_for` says of these segments, in thirty times the time
    peak_bytes: int


def segmentations(ev: Evaluator) -> Iterator[Segmentation]:
    """The row, until nothing is left to split."""
    problem, ops, sts = ev.problem, ev.trace.ops, ev.trace.storages
    forward_end = problem.forward_end
    producer = np.array(sts.producer, np.int64)
    is_candidate = np.zeros(len(sts), np.bool_)
    is_candidate[list(problem.candidates)] = True
    # What is saved where it crosses a border, and else not: candidates, and what only forward reads.
    free = ~(np.array(problem.pinned, np.bool_) | np.array(problem.saved_by_default, np.bool_))
    decided = np.array(ev.made_forward, np.int64)
    decided = decided[(is_candidate | free)[decided]]
    pairs = [(s, i) for i in range(forward_end) for s in ops.reads[i] if sts.producer[s] >= 0]
    read, reader = np.array(pairs, np.int64).reshape(-1, 2).T
    weight = np.zeros(forward_end, np.int64)  # op of forward -> bytes of the candidates that it makes
    for s in problem.candidates:
        weight[sts.producer[s]] += sts.nbytes[s]
    crossing = np.zeros(forward_end + 1, np.int64)  # bytes that a border after each op would save
    for s in decided.tolist():
        first, last = sts.producer[s], sts.last_forward_use[s]
        if last > first:
            # A value that backward reads itself is the better border: of two equal ones it is needed anyway.
            price = sts.nbytes[s] if problem.saved_by_default[s] else 2 * sts.nbytes[s]
            crossing[first] += price
            crossing[last] -= price
    np.cumsum(crossing, out=crossing)
    segment = np.zeros(forward_end, np.int64)  # op of forward -> its segment
    border, count = 0, 0
    while border >= 0:
        state, count = ev.state(), count + 1
        crosses = np.zeros(len(sts), np.bool_)
        crosses[read[segment[producer[read]] != segment[reader]]] = True
        state.saved[decided] = crosses[decided]
        state.retained[decided[crosses[decided] != is_candidate[decided]]] = 1
        peak_bytes, _, peak_step, steps = ev.walk(state)
        seq = ev.sequence(steps)[: max(0, peak_step - ev.forward + 1)]
        again, border = seq[seq < 0], -1
        yield Segmentation(segment, state, peak_bytes)
        if len(again):
            members = np.flatnonzero(segment == segment[ev.op_id[int(~again[-1])]])
            border = split(members, weight, crossing)
            segment[members[members > border]] = count


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
