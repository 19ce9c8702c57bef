"""The plan made for a budget of allocated or of reserved bytes, complete with its prediction.

For reserved memory the planner is asked for smaller and smaller allocated peaks until the allocator stays within the
limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from simulator.allocator.device_fit import Setting
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.planners import DEFAULT, plan_with
from simulator.planners.outcome import Infeasible, figures_of_plan
from simulator.studies.lowest_peak import with_lowest_peak
from simulator.studies.prediction import Prediction, predict
from simulator.studies.warnings import provenance, texts
from traces.errors import BudgetError
from traces.plan import ALLOCATED, RESERVED, Plan
from traces.units import show_bytes

UNLIMITED_BYTES: Final = 1 << 62
SHARES: Final = 4  # a planner's time, where several plans are made for one budget
ATTEMPTS: Final = 8  # plans that are made at most for one budget of reserved memory
STRIDES: Final = 8  # the budget falls by an eighth of the limit at most
CLOSE: Final = 100  # stop when the highest budget that may do is within 1/100 of the one that did


def plan_for(
    problem: Problem,
    planner: str,
    limits: Limits,
    setting: Setting,
    *,
    budget_bytes: int | None,
    budget_of: str = ALLOCATED,
    progress: Callable[[str], None] = lambda line: None,
) -> Prediction:
    """The plan for a budget beside everything saved; the plan in it is complete.

    Raises:
        BudgetError: the planner finds none within the budget.
    """

    def make(budget_bytes: int) -> Plan:
        return plan_with(planner, problem, budget_bytes, limits)

    def reserved_bytes(plan: Plan) -> int:
        fit = predict(problem, setting, plan).planned_fit
        assert fit.reserved is not None
        progress(f"a plan that reserves {fit.wanted_bytes:,} bytes")
        # On the device, where the allocator may have given memory back at first.
        settled = not fit.out_of_memory and fit.reserved.steady
        return fit.reserved.peak_reserved_bytes if settled else fit.wanted_bytes

    if budget_bytes is not None and budget_of == RESERVED:
        limits = replace(limits, seconds=limits.seconds / SHARES)  # several plans are made
        plan = plan_within_reserved(make, reserved_bytes, budget_bytes)
    else:
        try:
            plan = make(UNLIMITED_BYTES if budget_bytes is None else budget_bytes)
        except Infeasible as error:
            if planner != DEFAULT:
                raise
            raise with_lowest_peak(problem, error, limits) from None
    plan = replace(plan, budget_bytes=budget_bytes, budget_of=budget_of)
    return completed(predict(problem, setting, plan, budget_bytes))


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
        raise _none_within_reserved(limit_bytes, least or 0, why)
    return best


def _none_within_reserved(limit_bytes: int, least_bytes: int, error: BudgetError | None) -> Infeasible:
    why = f" Below that: {error}" if error is not None else ""
    return Infeasible(
        f"no plan was found whose reserved memory stays within {show_bytes(limit_bytes)} ({limit_bytes} bytes): the "
        f"leanest reserves {show_bytes(least_bytes)} ({least_bytes} bytes). Allow more, try --alloc-conf "
        f"expandable_segments:True, or use a smaller batch.{why}",
        {
            "budget_bytes": limit_bytes,
            "lowest_peak_bytes": least_bytes,
            "floor": error.figures.get("floor") if isinstance(error, Infeasible) else None,
        },
    )


def completed(c: Prediction) -> Prediction:
    """The prediction whose plan carries its figures, the allocator settings, and what to say beside them."""
    told = {"warnings": list(texts(c)), "provenance": provenance(c.trace.meta)}
    predicted = figures_of_plan(
        c.saved.timeline, c.planned.timeline, c.saved_fit.reserved, c.planned_fit.reserved
    )
    conf = c.setting.alloc_conf
    meta = c.plan.meta if conf is None else replace(c.plan.meta, alloc_conf=conf)
    return replace(c, plan=replace(c.plan, meta=meta, predicted={**predicted, **told}))
