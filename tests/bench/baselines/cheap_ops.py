"""Recompute cheap ops only: pointwise ops, norms, copies, reductions.

What many do by hand: recompute what is large and cheap, keep the matrix products (selective recomputation, Korthikanti
et al., "Reducing activation recomputation in large transformer models", MLSys 2023). An op is cheap if it does few
floating-point operations for each byte that it moves. A value may be recomputed if everything that must run for it is
cheap. Among these, the greedy of `mu_two` chooses until the budget is met.

Counts: the exact peak and time of every plan tried. Ignores: that a dear op may free more than many cheap ones.
"""

from __future__ import annotations

from typing import Final

from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.planners.greedy import Search
from simulator.planners.mu_two import cheapest
from simulator.planners.outcome import finish, refuse
from traces.records.plan import Plan
from traces.records.trace import Trace

NAME: Final = "cheap-ops"
# Norms, softmax and activations do at most 5 for each byte that they move; a float32 product of large matrices with an
# inner dimension of 64 does up to 32.
FLOPS_PER_BYTE: Final = 8


def plan(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The cheapest plan found within the budget that runs only cheap ops again.

    Raises:
        BudgetError: none was found.
    """
    search = Search(
        Problem(problem.trace, problem.constraints, only=cheap_candidates(problem)),
        budget_bytes,
        limits.clock(),
    )
    found = cheapest(search)
    if found is None:
        raise refuse(problem, NAME, budget_bytes, search.lowest_peak_bytes)
    return finish(problem, NAME, budget_bytes, search.actions(found.state))


def is_cheap(trace: Trace, op: int) -> bool:
    """Whether memory, not arithmetic, limits the op."""
    return trace.ops.flops[op] <= FLOPS_PER_BYTE * trace.ops.bytes_moved[op]


def cheap_candidates(problem: Problem) -> tuple[int, ...]:
    """The candidates that cheap ops alone can rebuild from what is kept or can itself be rebuilt so."""
    trace = problem.trace
    ops = trace.ops
    able = [False] * len(trace.storages)  # storage -> is kept, or only cheap ops are needed to make it again
    for i in range(problem.forward_end):
        if problem.is_view[i]:
            continue
        sources = all(problem.resident[s] or problem.saved_by_default[s] or able[s] for s in ops.reads[i])
        for s in problem.creates[i]:
            able[s] = problem.rebuildable[s] and is_cheap(trace, i) and sources
    return tuple(s for s in problem.candidates if able[s])
