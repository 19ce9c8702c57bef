"""Turn a trace and a budget into what `torch.utils.checkpoint.checkpoint_sequential` does, with the best segment count.

The model is taken as a sequence of blocks: the repeated blocks (`simulator.core.blocks`), or, in a model
without them, its
modules in the order of their first op. For n segments torch puts len // n blocks into each but the last; the last takes
the rest and is run without checkpointing. Kept are the inputs of the others, and all that lies outside the blocks.
Every n from 2 to the number of blocks is replayed, and the fastest within the budget is the plan.

Source: torch/utils/checkpoint.py, `checkpoint_sequential`. Differences from torch's: those of `plan_per_block`.

Counts: the exact peak and time of every n. Ignores: segments of unequal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from simulator.core.blocks import OUTSIDE, block_paths
from simulator.core.evaluator import Evaluator
from simulator.core.graph import analyse
from simulator.core.limits import DEFAULTS, Limits
from simulator.planners.outcome import finish, refuse
from simulator.planners.segments import actions_for
from traces.plan import Action, Plan
from traces.trace import Trace

NAME: Final = "checkpoint-sequential"


def plan(trace: Trace, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The fastest of torch's equal segmentations within the budget; everything kept if that fits.

    Raises:
        BudgetError: none is within the budget.
    """
    graph = analyse(trace, limits.constraints)
    evaluator = Evaluator(trace, graph)
    block = sequence_of(trace.ops.module[: graph.first_backward_op])
    count = max(block, default=OUTSIDE) + 1
    best: tuple[int, tuple[Action, ...]] | None = None
    lowest = 1 << 62
    for segments in range(1, count + 1) if count else (1,):
        segment = [OUTSIDE if b == OUTSIDE else torch_segment(b, count, segments) for b in block]
        actions = actions_for(trace, graph, segment)
        peak, time_ns = evaluator.cost(evaluator.state(actions))
        lowest = min(lowest, peak)
        if peak <= budget_bytes and (best is None or time_ns < best[0]):
            best = (time_ns, actions)
    if best is None:
        raise refuse(trace, graph, NAME, budget_bytes, lowest)
    return finish(trace, graph, NAME, budget_bytes, best[1])


def torch_segment(block: int, blocks: int, segments: int) -> int:
    """The segment of a block as torch forms them; OUTSIDE for the last, which torch does not checkpoint."""
    number = min(block // (blocks // segments), segments - 1)
    return OUTSIDE if number == segments - 1 else number


def sequence_of(modules: Sequence[str]) -> list[int]:
    """The number of each op's block in the sequence; OUTSIDE for ops in none."""
    found = block_paths(modules) or {path: path for path in modules if path}
    number: dict[str, int] = {}
    return [number.setdefault(found[p], len(number)) if p in found else OUTSIDE for p in modules]
