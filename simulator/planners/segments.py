"""Turn a trace into plans that cut forward into segments, keep what crosses the cuts, and recompute the rest.

A value crosses if an op of forward outside its own segment reads it. Everything else that a segment makes is
recomputed when backward needs it, rebuilt values being shared. Ops that may not run twice (dropout, say) are never
part of a chain: their outputs are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isqrt

from simulator.graph import Graph, analyse
from simulator.planners.limits import DEFAULTS, Limits
from simulator.planners.outcome import finish
from traces.plan import SAVE, Action, Plan
from traces.trace import Trace

OUTSIDE = -1  # the segment of ops that no segment holds: what they make is kept


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
    graph = analyse(trace)
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
    graph = analyse(trace)
    segment = block_segments(trace.ops.module[: graph.first_backward_op])
    return finish(trace, graph, "per-block", budget_bytes, actions_for(trace, graph, segment))


def block_segments(modules: Sequence[str]) -> list[int]:
    """The block of each op by its module path; OUTSIDE for ops in none.

    A block is a member of a numbered container that has modules of its own: `layer1.0`, `encoder.layer.3`, `h.5`,
    `features.denseblock1.denselayer2`. Of nested ones the first unbroken run of numbered names counts, so that
    `encoder.block.0.layer.1` belongs to `encoder.block.0` and `features.1.0.block.2` to `features.1.0`.
    """
    parents: set[str] = set()
    for path in set(modules):
        parts = path.split(".")
        parents.update(".".join(parts[:k]) for k in range(1, len(parts)))
    number: dict[str, int] = {}
    out = []
    for path in modules:
        block = _block_of(path, parents)
        out.append(number.setdefault(block, len(number)) if block else OUTSIDE)
    return out


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
