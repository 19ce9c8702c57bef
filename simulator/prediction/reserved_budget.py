"""The plan for a budget of reserved memory, and the allocator settings under which it keeps to it.

A plan for so many allocated bytes reserves more, by what the allocator cannot use. So the planner is asked for smaller
and smaller allocated peaks until the allocator stays within the limit, under the settings that reserve least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from simulator.allocator.device import Setting, device_fit
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.planners import plan_with
from simulator.planners.outcome import Infeasible
from traces.errors import BudgetError
from traces.records.plan import Plan
from traces.records.trace import MOST
from traces.units import show_bytes

SHARES: Final = 4  # of the time, one for each plan as long as there is some left
ATTEMPTS: Final = 6  # plans that are made at most for one budget of reserved memory
STRIDES: Final = 8  # the budget falls by an eighth of the limit at most
CLOSE: Final = 300  # it falls by 1/300 at least, and is halved no further


class Tried(NamedTuple):
    """A plan, what the allocator reserves for it, and the setting that suits it best."""

    plan: Plan
    reserved_bytes: int
    setting: Setting


def plan_within_reserved(
    problem: Problem,
    planner: str,
    limits: Limits,
    settings: Sequence[Setting],
    limit_bytes: int,
    say: Callable[[str], None],
) -> tuple[Plan, Setting]:
    """The cheapest plan found whose reserved memory is within the limit, and its setting (the most welcome comes
    first); of equally dear plans the leanest. Raises BudgetError: none was found."""
    limits = limits.started()
    share = replace(limits, seconds=limits.seconds / SHARES)

    def judged(how: Limits, budget_bytes: int) -> Tried:
        plan = plan_with(planner, problem, budget_bytes, how)
        found: list[Tried] = []
        for setting in settings:
            fit = device_fit(problem, problem.replay(plan.actions), setting)
            assert fit.reserved is not None
            # On the device, where the allocator may have given memory back at first.
            settled = not fit.out_of_memory and fit.reserved.steady
            reserved_bytes = fit.reserved.peak_reserved_bytes if settled else fit.wanted_bytes
            found.append(Tried(plan, reserved_bytes, setting))
            if found[-1].reserved_bytes <= limit_bytes:
                break
        best = min(found, key=lambda t: t.reserved_bytes)
        told = best.setting.alloc_conf or "torch's default settings"
        added = plan.predicted["plan"]["overhead_percent"]
        say(f"a plan that adds {added:.2f} % reserves {best.reserved_bytes:,} bytes under {told}")
        return best

    tried, why = lower_until_within(partial(judged, share), limit_bytes, limits)
    if not (within := [t for t in tried if t.reserved_bytes <= limit_bytes]) and not limits.enough_ns:
        # A hasty search ends at other plans, whose blocks may lie better.
        hasty = partial(judged, replace(share, hasty=True, enough_ns=MOST))
        tried += lower_until_within(hasty, limit_bytes, limits)[0]
        within = [t for t in tried if t.reserved_bytes <= limit_bytes]
    if within:
        best = min(within, key=lambda t: (t.plan.predicted["plan"]["step_time_ns"], t.reserved_bytes))
        return best.plan, best.setting
    leanest = min(tried, key=lambda t: t.reserved_bytes)
    below = f" Below that: {why}" if why is not None else ""
    raise Infeasible(
        f"no plan was found whose reserved memory stays within {show_bytes(limit_bytes)} ({limit_bytes} bytes): the "
        f"leanest reserves {show_bytes(leanest.reserved_bytes)} ({leanest.reserved_bytes} bytes). Allow more, try "
        f"--alloc-conf expandable_segments:True, or use a smaller batch.{below}",
        {
            "budget_bytes": limit_bytes,
            "lowest_peak_bytes": leanest.reserved_bytes,
            "floor": why.figures.get("floor") if isinstance(why, Infeasible) else None,
        },
    )


def lower_until_within(
    make: Callable[[int], Tried], limit_bytes: int, clock: Limits
) -> tuple[list[Tried], BudgetError | None]:
    """The plans for a few budgets of allocated memory; and why there is none for a lower one, if one was asked for.

    A plan within an allocated budget needs that much and its fragmentation more, which differs from plan to plan. So
    the budget starts at the limit and falls by what is too much; once a plan is within it or there is none, it is
    halved between that and the one before, as long as there is time. Raises BudgetError: there is no plan for a budget
    of the limit itself.
    """
    tried: list[Tried] = []
    budget, high, low, why = limit_bytes, limit_bytes + 1, 0, None
    for _ in range(ATTEMPTS):
        try:
            found = make(budget)
        except BudgetError as error:
            if not tried:
                raise
            why, low = error, budget
        else:
            tried.append(found)
            over = found.reserved_bytes - limit_bytes
            low, high = (budget, high) if over <= 0 else (low, budget)
            if clock.enough_ns:  # it will do, or would not, and a lower budget's plan is dearer
                cheap = found.plan.predicted["plan"]["step_time_ns"] <= clock.enough_ns
                if cheap == (over <= 0):
                    break
            if not low:
                budget -= min(max(over, limit_bytes // CLOSE, 1), limit_bytes // STRIDES + 1)
        if low:
            budget = (low + high) // 2
        enough = clock.enough_ns or any(t.reserved_bytes <= limit_bytes for t in tried)
        if (enough and clock.over) or budget < 1 or high - low <= max(1, limit_bytes // CLOSE):
            break
    return tried, why
