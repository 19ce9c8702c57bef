"""The classic schemes of checkpointing: everything saved, nothing, or forward cut into segments.

A scheme of segments saves what crosses their borders and recomputes the rest. A value crosses if an op of forward
outside its own segment reads it. Rebuilt values are retained for later uses. Ops that may not run twice (dropout, say)
are never part of a chain: their outputs are saved.

Differences from what `torch.utils.checkpoint` does with the same segments: random values are saved rather than
replayed, and a segment's ops run again one by one as backward needs them rather than all at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Final

from simulator.core.evaluator import Evaluator
from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.planners.outcome import finish, refuse
from traces.records.plan import SAVE, Action, Plan

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


def actions_for(problem: Problem, segment: Sequence[int]) -> tuple[Action, ...]:
    """The actions that `segment` (one number per forward op) means.

    Backward's readers do not count as crossing. A value that crosses and that backward does not need is saved for the
    recomputation's sake; `finish` leaves those out that no recomputation reads.
    """
    trace = problem.trace
    ops, sts = trace.ops, trace.storages
    crosses = [False] * len(sts)
    for i in range(problem.forward_end):
        for s in ops.reads[i]:
            p = sts.producer[s]
            if p >= 0 and segment[p] != segment[i]:
                crosses[s] = True
    out = [
        Action(storage=s)
        for s in problem.candidates
        if segment[sts.producer[s]] != OUTSIDE and not crosses[s]
    ]
    out += [
        Action(storage=s, recipe=SAVE)
        for i in range(problem.forward_end)
        for s in problem.creates[i]
        if not problem.saved_by_default[s] and not problem.pinned[s] and (crosses[s] or segment[i] == OUTSIDE)
    ]
    return tuple(out)


def plan_sqrt_n(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """√n segments of equal length over the n ops of forward, their borders saved (Chen et al. 2016).

    Source: "Training deep nets with sublinear memory cost", section 3. n counts the ops that create something. The
    number of segments does not follow the budget.

    Raises:
        BudgetError: the plan is over the budget.
    """
    creating = [bool(problem.creates[i]) for i in range(problem.forward_end)]
    segment = equal_segments(creating, max(1, isqrt(sum(creating))))
    return finish(problem, "sqrt-n", budget_bytes, actions_for(problem, segment))


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

    Raises:
        BudgetError: the plan is over the budget.
    """
    trace = problem.trace
    segment = block_segments(trace.ops.module[: problem.forward_end])
    return finish(problem, "per-block", budget_bytes, actions_for(problem, segment))


def plan_checkpoint_sequential(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The fastest of the plans of torch's `checkpoint_sequential`, by their exact peak and time, for 1 to n segments.

    The model is taken as a sequence of blocks: the repeated ones, or, in a model without them, its modules in the order
    of their first op. For n segments torch puts len // n blocks into each but the last; the last takes the rest and is
    run without checkpointing. Saved are the inputs of the others, and all that lies outside the blocks.

    Source: torch/utils/checkpoint.py, `checkpoint_sequential`. Ignores: segments of unequal length.

    Raises:
        BudgetError: none is within the budget.
    """
    trace = problem.trace
    name = "checkpoint-sequential"
    evaluator = Evaluator(problem)
    block = sequence_of(trace.ops.module[: problem.forward_end])
    count = max(block, default=OUTSIDE) + 1
    best: tuple[int, tuple[Action, ...]] | None = None
    lowest = 1 << 62
    for segments in range(1, max(count, 1) + 1):
        segment = [OUTSIDE if b == OUTSIDE else torch_segment(b, count, segments) for b in block]
        actions = actions_for(problem, segment)
        peak, time_ns = evaluator.cost(evaluator.state(actions))
        lowest = min(lowest, peak)
        if peak <= budget_bytes and (best is None or time_ns < best[0]):
            best = (time_ns, actions)
    if best is None:
        raise refuse(problem, name, budget_bytes, lowest)
    return finish(problem, name, budget_bytes, best[1])


def torch_segment(block: int, blocks: int, segments: int) -> int:
    """The segment of a block as torch forms them; OUTSIDE for the last, which torch does not checkpoint."""
    number = min(block // (blocks // segments), segments - 1)
    return OUTSIDE if number == segments - 1 else number


def sequence_of(modules: Sequence[str]) -> list[int]:
    """The number of each op's block in the sequence; OUTSIDE for ops in none."""
    return _numbered(modules, block_paths(modules) or {path: path for path in modules if path})


def block_segments(modules: Sequence[str]) -> list[int]:
    """The block of each op by its module path; OUTSIDE for ops in none.

    A block is a member of a numbered container that has modules of its own: `layer1.0`, `encoder.layer.3`, `h.5`,
    `features.denseblock1.denselayer2`. Of nested ones the first unbroken run of numbered names counts, so that
    `encoder.block.0.layer.1` belongs to `encoder.block.0` and `features.1.0.block.2` to `features.1.0`.
    """
    return _numbered(modules, block_paths(modules))


def _numbered(modules: Sequence[str], block: Mapping[str, str]) -> list[int]:
    number: dict[str, int] = {}
    return [number.setdefault(block[path], len(number)) if path in block else OUTSIDE for path in modules]


def block_paths(modules: Sequence[str]) -> dict[str, str]:
    """Module path -> the path of its block, as in `block_segments`; paths in no block are left out."""
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
