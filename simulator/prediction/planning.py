"""The plan made for a budget of allocated or of reserved bytes, complete with its prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from simulator.allocator.device_fit import Setting, asking_ahead, settings_to_try
from simulator.core.limits import BIT_EXACT, Levers, Limits
from simulator.core.problem import Problem
from simulator.core.rewrites import rewritten_problem
from simulator.planners import DEFAULT, plan_with
from simulator.planners.outcome import Infeasible, figures_of_plan
from simulator.prediction.levers import has_head, nothing_in_tiles, plan_with_levers, with_loss
from simulator.prediction.lowest_peak import with_lowest_peak
from simulator.prediction.step import Prediction, predict
from simulator.prediction.warnings import provenance, texts
from traces.records.plan import ALLOCATED, RESERVED, Plan

UNLIMITED_BYTES: Final = 1 << 62
# A plan that tells whether a step is worth more is looked for in so small a part of the time.
SOONER: Final = 8


def plan_for(
    problem: Problem,
    planner: str,
    limits: Limits,
    setting: Setting,
    *,
    budget_bytes: int | None,
    budget_of: str = ALLOCATED,
    levers: Levers = BIT_EXACT,
    progress: Callable[[str], None] = lambda line: None,
) -> Prediction:
    """The plan for a budget beside everything saved; the plan in it is complete. Raises BudgetError: the planner finds
    none within the budget.
    """

    under: dict[Problem, Setting] = {}  # by the step that was planned

    def make(step: Problem, limits: Limits = limits) -> Plan:
        if budget_bytes is not None and budget_of == RESERVED:
            from simulator.prediction.reserved_budget import plan_within_reserved

            settings = (setting,) if setting.asked else settings_to_try(step.trace.meta, setting)
            within = plan_within_reserved(step, planner, limits, settings, budget_bytes, progress)
            under[step] = within.setting
            return within.plan
        try:
            return plan_with(planner, step, UNLIMITED_BYTES if budget_bytes is None else budget_bytes, limits)
        except Infeasible as error:
            if planner != DEFAULT:
                raise
            raise with_lowest_peak(step, error, limits) from None

    sooner = partial(make, limits=replace(limits, seconds=limits.seconds / SOONER))
    if why := nothing_in_tiles(problem.trace, levers):
        progress(why)
    plan = make(problem) if budget_bytes is None else _cheapest(problem, budget_bytes, levers, make, sooner)
    step = rewritten_problem(problem.planned_by(plan), plan.rewrites)
    setting = under.get(step, setting)
    ahead = 0 if setting.settings is None else setting.settings.ahead_bytes
    plan = replace(plan, budget_bytes=budget_bytes, budget_of=budget_of, ahead_bytes=ahead)
    setting = asking_ahead(setting, 0)
    return completed(predict(problem, setting, plan, budget_bytes))


def _cheapest(
    problem: Problem,
    budget_bytes: int,
    levers: Levers,
    make: Callable[[Problem], Plan],
    sooner: Callable[[Problem], Plan],
) -> Plan:
    """The cheapest plan: of model and loss function as one only if that runs the loss head in tiles, or if the model
    alone has none. Raises Infeasible if there is none; the refusal with the lower peak.
    """
    joined = with_loss(problem, levers)
    if joined is None or problem.saved.timeline.peak_allocated_bytes <= budget_bytes:
        return plan_with_levers(problem, budget_bytes, levers, make, sooner)
    found: list[Plan] = []
    refusals: list[Infeasible] = []
    for step, mine in (joined, (problem, levers)):
        try:
            found.append(plan_with_levers(step, budget_bytes, mine, make, sooner))
        except Infeasible as error:
            refusals.append(error)
        if found and step is joined[0] and has_head(step, found[0].rewrites):
            break
    if not found:
        raise min(refusals, key=lambda error: error.figures["lowest_peak_bytes"])
    return found[-1]


def completed(c: Prediction) -> Prediction:
    """The prediction whose plan carries its figures, the allocator settings, and what to say beside them."""
    told = {"warnings": list(texts(c)), "provenance": provenance(c.trace.meta)}
    predicted = figures_of_plan(c.saved_figures, c.planned_figures, c.planned.timeline)
    conf = c.setting.alloc_conf
    meta = c.plan.meta if conf is None else replace(c.plan.meta, alloc_conf=conf)
    return replace(c, plan=replace(c.plan, meta=meta, predicted={**predicted, **told}).sealed())
