"""Turn a trace into plans that cut forward into segments, keep what crosses the cuts, and recompute the rest.

A value crosses if an op of forward outside its own segment reads it. Everything else that a segment makes is
recomputed when backward needs it, rebuilt values being shared. Ops that may not run twice (dropout, say) are never
part of a chain: their outputs are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from simulator.core.blocks import OUTSIDE, block_segments
from simulator.core.graph import Graph, analyse
from simulator.core.limits import DEFAULTS, Limits
from simulator.planners.outcome import finish
from traces.plan import SAVE, Action, Plan
from traces.trace import Trace


def actions_for(trace: Trace, graph: Graph, segment: Sequence[int]) -> tuple[Action, ...]:
    """The actions that `segment` (one number per forward op) means.

    Backward's readers do not count as crossing. A value that crosses and that backward does not need is saved for the
    recomputation's sake; `finish` leaves those out that no recomputation reads.
    """
    ops, sts = trace.ops, trace.storages
    crosses = [False] * len(sts)
    for i in range(graph.first_backward_op):
        for s in ops.reads[i]:
            p = sts.producer[s]
            if p >= 0 and segment[p] != segment[i]:
                crosses[s] = True
    out = [
        Action(storage=s) for s in graph.candidates if segment[sts.producer[s]] != OUTSIDE and not crosses[s]
    ]
    out += [
        Action(storage=s, action=SAVE)
        for i in range(graph.first_backward_op)
        for s in graph.creates[i]
        if not graph.wanted[s] and not graph.pinned[s] and (crosses[s] or segment[i] == OUTSIDE)
    ]
    return tuple(out)


def plan_sqrt_n(trace: Trace, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """√n segments of equal length over the n ops of forward, their borders kept (Chen et al. 2016).

    Source: "Training deep nets with sublinear memory cost", section 3. n counts the ops that create something. The
    number of segments does not follow the budget.

    Raises:
        BudgetError: the plan is over the budget.
    """
    graph = analyse(trace, limits.constraints)
    creating = [bool(graph.creates[i]) for i in range(graph.first_backward_op)]
    segment = equal_segments(creating, max(1, isqrt(sum(creating))))
    return finish(trace, graph, "sqrt-n", budget_bytes, actions_for(trace, graph, segment))


def equal_segments(creating: Sequence[bool], count: int) -> list[int]:
    """Number the ops of forward so that each of `count` segments has equally many creating ops, up to one."""
    total = sum(creating)
    out, seen = [], 0
    for creates in creating:
        out.append(min(count - 1, seen * count // total) if total else 0)
        seen += creates
    return out


def plan_per_block(trace: Trace, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """What `torch.utils.checkpoint` around each repeated block does: keep the blocks' inputs, recompute inside.

    Differences from torch's: random ops are kept rather than replayed, and a block's ops run again one by one as
    backward needs them rather than all at once. The number of blocks does not follow the budget; a model without
    repeated blocks is left as it is.

    Raises:
        BudgetError: the plan is over the budget.
    """
    graph = analyse(trace, limits.constraints)
    segment = block_segments(trace.ops.module[: graph.first_backward_op])
    return finish(trace, graph, "per-block", budget_bytes, actions_for(trace, graph, segment))
