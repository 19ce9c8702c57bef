"""Recompute cheap ops only: pointwise ops, norms, copies, reductions.

What many do by hand: recompute what is large and cheap, keep the matrix products (selective recomputation, Korthikanti
et al., "Reducing activation recomputation in large transformer models", MLSys 2023). An op is cheap if it does few
floating-point operations for each byte that it moves. A value may be recomputed if everything that must run for it is
cheap. Among these, the greedy of `mu_two` chooses until the budget is met.

Counts: the exact peak and time of every plan tried. Ignores: that a dear op may free more than many cheap ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from simulator.core.graph import Graph, analyse
from simulator.core.limits import DEFAULTS, Limits
from simulator.planners.mu_two import Search
from simulator.planners.outcome import finish, refuse
from traces.plan import Plan
from traces.trace import Trace

NAME: Final = "cheap-ops"
# Norms, softmax and activations do at most 5 for each byte that they move; a float32 product of large matrices with an
# inner dimension of 64 does up to 32.
FLOPS_PER_BYTE: Final = 8


def plan(trace: Trace, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The cheapest plan found within the budget that runs only cheap ops again.

    Raises:
        BudgetError: none was found.
    """
    graph = analyse(trace, limits.constraints)
    search = Search(
        trace, replace(graph, candidates=cheap_candidates(trace, graph)), budget_bytes, limits.clock()
    )
    found = search.run()
    if found is None:
        raise refuse(trace, graph, NAME, budget_bytes, search.lowest_peak_bytes)
    return finish(trace, graph, NAME, budget_bytes, search.actions(found))


def is_cheap(trace: Trace, op: int) -> bool:
    """Whether memory, not arithmetic, limits the op."""
    return trace.ops.flops[op] <= FLOPS_PER_BYTE * trace.ops.bytes_moved[op]


def cheap_candidates(trace: Trace, graph: Graph) -> tuple[int, ...]:
    """The candidates that cheap ops alone can rebuild from what is kept or can itself be rebuilt so."""
    ops = trace.ops
    able = [False] * len(trace.storages)  # storage -> is kept, or only cheap ops are needed to make it again
    for i in range(graph.first_backward_op):
        if graph.is_view[i]:
            continue
        sources = all(graph.resident[s] or graph.wanted[s] or able[s] for s in ops.reads[i])
        for s in graph.creates[i]:
            able[s] = graph.rebuildable[s] and is_cheap(trace, i) and sources
    return tuple(s for s in graph.candidates if able[s])
