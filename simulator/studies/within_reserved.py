"""Turn a limit on reserved memory into a plan: lower the budget of allocated memory until the allocator keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from simulator.planners.outcome import Refusal
from traces.errors import BudgetError
from traces.plan import Plan
from traces.units import show_bytes

ATTEMPTS: Final = 8  # plans that are made at most
STRIDES: Final = 8  # the budget falls by an eighth of the limit at most
CLOSE: Final = 100  # stop when the highest budget that may do is within 1/100 of the one that did


def plan_within_reserved(
    make: Callable[[int], Plan], reserved_bytes: Callable[[Plan], int], limit_bytes: int
) -> Plan:
    """The plan whose reserved memory is within the limit and whose budget of allocated memory is the highest found.

    A plan within an allocated budget needs that much and its fragmentation more, which differs from plan to plan. So
    the budget starts at the limit, falls by what is too much, and once a plan fits is bisected between the last that
    did not and the one that did. Same input, same plan, if the planner gives the same for the same budget.

    Args:
        make: the plan for a budget of allocated memory; raises BudgetError if there is none.
        reserved_bytes: what the allocator reserves for a plan.
        limit_bytes: of reserved memory.

    Raises:
        BudgetError: no budget that was tried gave a plan within the limit.
    """
    best: Plan | None = None
    budget, high, low = limit_bytes, limit_bytes + 1, 0
    why: BudgetError | None = None  # there is no plan for the budget `low`
    least = None  # reserved by the leanest plan that was too large
    for _ in range(ATTEMPTS):
        try:
            plan = make(budget)
        except BudgetError as error:
            if least is None:
                raise
            if best is not None:
                break
            why, low, budget = error, budget, (budget + high) // 2
            continue
        reserved = reserved_bytes(plan)
        if reserved <= limit_bytes:
            best, low = plan, budget
        else:
            high = budget
            least = reserved if least is None else min(least, reserved)
        if best is None:
            fall = min(max(reserved - limit_bytes, limit_bytes // (2 * CLOSE), 1), limit_bytes // STRIDES)
            budget = (low + high) // 2 if low else budget - max(1, fall)
            if budget < 1:
                break
        elif high - low <= max(1, limit_bytes // CLOSE):
            break
        else:
            budget = (low + high) // 2
    if best is None:
        raise _refusal(limit_bytes, least or 0, why)
    return best


def _refusal(limit_bytes: int, least_bytes: int, error: BudgetError | None) -> Refusal:
    why = f" Below that: {error}" if error is not None else ""
    return Refusal(
        f"no plan was found whose reserved memory stays within {show_bytes(limit_bytes)} ({limit_bytes} bytes): the "
        f"leanest reserves {show_bytes(least_bytes)} ({least_bytes} bytes). Allow more, try --alloc-conf "
        f"expandable_segments:True, or use a smaller batch.{why}",
        {
            "budget_bytes": limit_bytes,
            "lowest_peak_bytes": least_bytes,
            "floor": error.figures.get("floor") if isinstance(error, Refusal) else None,
        },
    )
