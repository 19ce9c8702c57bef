"""Cut forward into segments, what crosses their borders saved and the rest recomputed: the classic schemes of
checkpointing, and a row of ever finer cuts.

A value crosses if an op of forward outside its own segment reads it. Rebuilt values are retained for later uses. Ops
that may not run twice (dropout, say) are never part of a chain: their outputs are saved.

Differences from what `torch.utils.checkpoint` does with the same segments: random values are saved rather than
replayed, and a segment's ops run again one by one as backward needs them rather than all at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.core.evaluator import Evaluator, State, evaluator_of
from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.planners.outcome import finish, refuse
from traces.records.plan import Action, Plan

OUTSIDE: Final = -1  # the segment of ops that no segment holds: what they make is saved


def plan_save_all(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """Save everything that backward needs; raises BudgetError if that is over the budget."""
    return finish(problem, "save-all", budget_bytes, ())


def plan_recompute_all(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """Recompute every candidate, retaining what has been rebuilt; raises BudgetError if that is over the budget.

    The peak of this plan is often as high as save-all's: the first chain rebuilds the whole forward pass.
    """
    actions = [Action(storage=s) for s in problem.candidates]
    return finish(problem, "recompute-all", budget_bytes, actions)


class Cutting:
    """One trace as segments see it: what they decide, and where it is read."""

    def __init__(self, ev: Evaluator) -> None:
        problem, sts = ev.problem, ev.trace.storages
        self.ev, self.producer = ev, np.array(sts.producer, np.int64)
        self.is_candidate = np.zeros(len(sts), np.bool_)
        self.is_candidate[list(problem.candidates)] = True
        # What is saved where it crosses a border, and else not: candidates, and what only forward reads.
        free = ~(np.array(problem.pinned, np.bool_) | np.array(problem.saved_by_default, np.bool_))
        made = np.array(ev.made_forward, np.int64)
        self.decided = made[(self.is_candidate | free)[made]]
        pairs = [
            (s, i) for i in range(problem.forward_end) for s in ev.trace.ops.reads[i] if sts.producer[s] >= 0
        ]
        self.read, self.reader = np.array(pairs, np.int64).reshape(-1, 2).T

    def state(self, segment: NDArray[np.int64]) -> State:
        """The state in which what crosses is saved, and what ops make that no segment holds, by the segment of each op
        of forward. Backward's readers do not count as crossing."""
        state, decided = self.ev.state(), self.decided
        saved = np.zeros(len(self.producer), np.bool_)
        saved[decided] = segment[self.producer[decided]] == OUTSIDE
        saved[self.read[segment[self.producer[self.read]] != segment[self.reader]]] = True
        state.saved[decided] = saved[decided]
        state.retained[decided[saved[decided] != self.is_candidate[decided]]] = 1
        return state


def _cheapest(problem: Problem, planner: str, budget_bytes: int, rows: Iterable[Sequence[int]]) -> Plan:
    """The fastest plan within the budget, by exact peak and time, of some ways to cut: the segment of each op of
    forward, or OUTSIDE. Raises BudgetError: none is within it."""
    ev = evaluator_of(problem)
    cutting, lowest = Cutting(ev), 1 << 62
    best: tuple[int, State] | None = None
    for segment in rows:
        state = cutting.state(np.array(segment, np.int64))
        peak, time_ns = ev.cost(state)
        lowest = min(lowest, peak)
        if peak <= budget_bytes and (best is None or time_ns < best[0]):
            best = (time_ns, state)
    if best is None:
        raise refuse(problem, planner, budget_bytes, lowest)
    return finish(problem, planner, budget_bytes, ev.actions(best[1]))


def plan_sqrt_n(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """√n segments of equal length over the n ops of forward, their borders saved (Chen et al. 2016).

    Source: "Training deep nets with sublinear memory cost", section 3. n counts the ops that create something. The
    number of segments does not follow the budget.
    """
    creating = [bool(problem.creates[i]) for i in range(problem.forward_end)]
    segment = equal_segments(creating, max(1, isqrt(sum(creating))))
    return _cheapest(problem, "sqrt-n", budget_bytes, [segment])


def equal_segments(creating: Sequence[bool], count: int) -> list[int]:
    """Number the ops of forward so that each of `count` segments has equally many creating ops, up to one."""
    total = sum(creating)
    out, seen = [], 0
    for creates in creating:
        out.append(min(count - 1, seen * count // total) if total else 0)
        seen += creates
    return out


def plan_per_block(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """Plan as `torch.utils.checkpoint` around each repeated block does: save the blocks' inputs, recompute inside.

    The number of blocks does not follow the budget; a model without repeated blocks is left as it is.
    """
    modules = problem.trace.ops.module[: problem.forward_end]
    block = numbered(modules, block_paths(modules))
    return _cheapest(problem, "per-block", budget_bytes, [block])


def plan_checkpoint_sequential(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The fastest of the plans of torch's `checkpoint_sequential`, by their exact peak and time, for 1 to n segments.

    The model is taken as a sequence of blocks: the repeated ones, or, in a model without them, its modules in the order
    of their first op. For n segments torch puts len // n blocks into each but the last; the last takes the rest and is
    run without checkpointing. Saved are the inputs of the others, and all that lies outside the blocks.

    Source: torch/utils/checkpoint.py, `checkpoint_sequential`. Ignores: segments of unequal length.
    """
    modules = problem.trace.ops.module[: problem.forward_end]
    block = numbered(modules, block_paths(modules) or {path: path for path in modules if path})
    count = max(block, default=OUTSIDE) + 1
    rows = (
        [OUTSIDE if b == OUTSIDE else torch_segment(b, count, segments) for b in block]
        for segments in range(1, max(count, 1) + 1)
    )
    return _cheapest(problem, "checkpoint-sequential", budget_bytes, rows)


def torch_segment(block: int, blocks: int, segments: int) -> int:
    """The segment of a block as torch forms them; OUTSIDE for the last, which torch does not checkpoint."""
    number = min(block // (blocks // segments), segments - 1)
    return OUTSIDE if number == segments - 1 else number


def numbered(modules: Sequence[str], block: Mapping[str, str]) -> list[int]:
    """The number of each op's block, in their order, by its module path; OUTSIDE for ops in none."""
    number: dict[str, int] = {}
    return [number.setdefault(block[path], len(number)) if path in block else OUTSIDE for path in modules]


def block_paths(modules: Sequence[str]) -> dict[str, str]:
    """Module path -> the path of its block; paths in no block are left out.

    A block is a member of a numbered container that has modules of its own: `layer1.0`, `encoder.layer.3`, `h.5`,
    `features.denseblock1.denselayer2`. Of nested ones the first unbroken run of numbered names counts, so that
    `encoder.block.0.layer.1` belongs to `encoder.block.0` and `features.1.0.block.2` to `features.1.0`.
    """
    parents: set[str] = set()
    paths = dict.fromkeys(modules)
    for path in paths:
        parts = path.split(".")
        parents.update(".".join(parts[:k]) for k in range(1, len(parts)))
    return {path: block for path in paths if (block := _block_of(path, parents))}


def _block_of(path: str, parents: set[str]) -> str:
    parts = path.split(".") if path else []
    block = ""
    for k, part in enumerate(parts):
        prefix = ".".join(parts[: k + 1])
        if re.search(r"\d$", part) and prefix in parents:
            block = prefix
        elif block:
            break
    return block


def segmentations(ev: Evaluator) -> Iterator[tuple[NDArray[np.int64], State, int]]:
    """The row, each with its peak, until nothing can be split: where μ-TWO goes on when evicting values is not enough.

    The first is one segment, which rebuilds everything at once; each next one splits the segment whose rebuilding makes
    the peak.

    Counts: the exact peak of every segmentation. Ignores: which of two segments with equal peaks is better split.
    """
    problem, sts = ev.problem, ev.trace.storages
    forward_end, cutting = problem.forward_end, Cutting(ev)
    weight = np.zeros(forward_end, np.int64)  # op of forward -> bytes of the candidates that it makes
    for s in problem.candidates:
        weight[sts.producer[s]] += sts.nbytes[s]
    crossing = np.zeros(forward_end + 1, np.int64)  # bytes that a border after each op would save
    for s in cutting.decided.tolist():
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
        state, count = cutting.state(segment), count + 1
        peak_bytes, _, peak_step, steps = ev.walk(state)
        seq = ev.sequence(steps)[: max(0, peak_step - ev.forward + 1)]
        again, border = seq[seq < 0], -1
        yield segment, state, peak_bytes
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
