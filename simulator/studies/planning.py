"""Turn a budget, of allocated or of reserved memory, into a plan that was judged against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from simulator.allocator.question import Question
from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.planners import DEFAULT, plan_with
from simulator.planners.outcome import Refusal
from simulator.studies.prediction import Comparison, compare, with_reserved
from simulator.studies.warnings import answered
from simulator.studies.within_reserved import plan_within_reserved
from traces.errors import SpecError
from traces.plan import ALLOCATED, RESERVED, Plan

UNLIMITED_BYTES: Final = 1 << 62
SHARES: Final = 4  # a planner's time, where several plans are made for one budget


def keep_all(problem: Problem, question: Question | None) -> Comparison:
    """The step with everything kept, and what the allocator makes of it."""
    return answered(with_reserved(compare(problem, Plan(meta=problem.trace.meta), None), question))


def whole_bytes(kept: Comparison, budget_of: str) -> int:
    """What 100 % of a budget stands for.

    Raises:
        SpecError: a budget of reserved memory for a CPU's trace.
    """
    if budget_of == ALLOCATED:
        return kept.kept_timeline.peak_allocated_bytes
    if kept.kept_reserved is None:
        raise SpecError(
            "--budget-of reserved: the trace holds the graph of a CPU, where no allocator reserves memory; trace it "
            "with --target for a GPU, or with --device cuda."
        )
    return kept.kept_reserved.figures.peak_reserved_bytes


def planned(
    problem: Problem,
    planner: str,
    limits: Limits = DEFAULTS,
    *,
    budget_bytes: int | None,
    budget_of: str = ALLOCATED,
    question: Question | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """The plan for a budget, beside everything kept; the plan is in it, complete.

    Raises:
        BudgetError: the planner finds none within the budget.
    """

    def make(budget_bytes: int) -> Plan:
        return plan_with(planner, problem, budget_bytes, limits)

    def reserved_bytes(plan: Plan) -> int:
        run = with_reserved(compare(problem, plan, None), question).planned_reserved
        assert run is not None
        progress(f"a plan that reserves {run.wanted_bytes:,} bytes")
        if (
            run.fits and run.figures.steady
        ):  # on the device, where the allocator may have given memory back at first
            return run.figures.peak_reserved_bytes
        return run.wanted_bytes

    if budget_bytes is not None and budget_of == RESERVED:
        limits = replace(limits, seconds=limits.seconds / SHARES)  # several plans are made
        plan = plan_within_reserved(make, reserved_bytes, budget_bytes)
    else:
        try:
            plan = make(UNLIMITED_BYTES if budget_bytes is None else budget_bytes)
        except Refusal as error:
            if planner != DEFAULT:
                raise
            from simulator.studies.lowest_peak import with_lowest_peak

            raise with_lowest_peak(problem, error, limits) from None
    plan = replace(plan, budget_bytes=budget_bytes, budget_of=budget_of)
    return answered(with_reserved(compare(problem, plan, budget_bytes), question))
