"""The questions that have one answer about a trace, as functions; the commands ask them too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from simulator.core.limits import NONE, Constraints
from simulator.core.problem import Problem
from simulator.prediction.ask import Device, Say, Words, ask, question, silent
from simulator.prediction.step import Prediction, predict
from traces.records.plan import Plan
from traces.records.store import check_fingerprints, load
from traces.records.trace import Trace

if TYPE_CHECKING:
    from simulator.bounds.bound import Bound

# A trace, its directory or name in the gallery, or it under its constraints.
Source = Trace | str | Path | Problem
Budget = str | int  # bytes, a size, a share of the step's own peak, or "device"


def problem_of(trace: Source, constraints: Constraints = NONE) -> Problem:
    """One trace under constraints, which every function here takes in place of the trace, so that work is shared.

    Args:
        trace: a Trace, a directory, a name in the gallery, or a Problem, which has its constraints.

    Raises:
        TraceError: there is no such trace, or it is malformed.
        SpecError: a selector means nothing in this trace.
    """
    if isinstance(trace, Problem):
        return trace
    if not isinstance(trace, Trace):
        name, trace = str(trace), load(str(trace))
        check_fingerprints(trace, name)
    return Problem(trace, constraints)


def simulate(
    trace: Source,
    plan: Plan | str | Path | None = None,
    *,
    alloc_conf: str | None = None,
    device: Device | None = None,
) -> Prediction:
    """Replay a training step, as it is and with a plan.

    Args:
        plan: a Plan or its file; None: everything is saved.
        alloc_conf: as PYTORCH_ALLOC_CONF would be; None: as the plan says, or else as the trace was recorded.
        device: whether the step fits it: a name such as "a100-40", a size, or the memory as it is.

    Returns:
        peaks, times and reserved memory of both runs; in a notebook it shows the memory over the step.

    Raises:
        PlanError: the plan is of another trace, or malformed.
        SpecError: no such device or setting.
    """
    problem = problem_of(trace)
    if isinstance(plan, str | Path):
        plan = Plan.load(plan)
    if plan is not None and alloc_conf is None and plan.meta.alloc_conf != problem.trace.meta.alloc_conf:
        alloc_conf = plan.meta.alloc_conf
    setting = question(alloc_conf=alloc_conf, device=device).setting(problem.trace.meta)
    return predict(problem, setting, plan, None if plan is None else plan.budget_bytes)


def plan(
    trace: Source,
    budget: Budget | None,
    *,
    device: Device | None = None,
    progress: Say = silent,
    **words: Unpack[Words],
) -> Plan:
    """Find what to recompute so that the step's peak stays within a budget, at the least added time.

    Args:
        budget: bytes, a size, a share of the step's own peak, or "device": what `device` has; None: no limit.
        device: of a budget "device", or of a plan that is to fit it.
        progress: told one line about each thing that is done.
        words: those of `simulator.prediction.ask.Words`, such as `allow="fp"` or `seconds=20`.

    Returns:
        the complete plan with its predicted figures, which `save` writes for `execute`.

    Raises:
        Infeasible: no plan was found within the budget; its `figures` hold the lowest peak that was reached and the
            floor below which no plan can go.
        SpecError: no such budget, planner, selector or device.
    """
    asked = question(budget, device, **words)
    return ask(problem_of(trace, asked.constraints), asked, say=progress).planned.plan


def bound(
    trace: Source, budget: Budget, *, never: Sequence[str] = (), always_save: Sequence[str] = ()
) -> Bound:
    """Return what every plan within a budget of allocated memory must add to the step's time at least, certified.

    Returns:
        `added_time_ns`, `overhead_percent` and the `reason`; `feasible` is False where certainly no plan fits.

    Raises:
        SpecError: no such budget or selector.
    """
    from simulator.bounds.bound import lower_bound

    asked = question(budget=budget, never=never, always_save=always_save)
    problem = problem_of(trace, asked.constraints)
    limit, _ = asked.limit(predict(problem, asked.setting(problem.trace.meta)))
    assert limit is not None
    return lower_bound(problem, limit)
