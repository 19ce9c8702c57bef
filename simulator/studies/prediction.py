"""Turn a Trace and a Plan into two replays of the step: everything kept, and with the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from simulator.allocator.question import Question, Reserved, reserve
from simulator.core.problem import Problem
from simulator.core.schedule import Schedule
from simulator.core.timeline import Timeline
from simulator.planners.outcome import figures, predicted
from traces.measurement import RunFigures
from traces.plan import Plan
from traces.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One trace replayed with everything kept and with a plan."""

    trace: Trace
    plan: Plan
    problem: Problem  # with the constraints that the plan was made under
    kept: Schedule
    kept_timeline: Timeline
    planned: Schedule
    planned_timeline: Timeline
    budget_bytes: int | None
    question: Question | None = None  # None: no caching allocator, or not asked
    kept_reserved: Reserved | None = None
    planned_reserved: Reserved | None = None

    @property
    def kept_figures(self) -> RunFigures:
        """The headline figures with everything kept."""
        reserved = self.kept_reserved
        return figures(self.kept_timeline, None if reserved is None else reserved.figures)

    @property
    def planned_figures(self) -> RunFigures:
        """The headline figures with the plan."""
        reserved = self.planned_reserved
        return figures(self.planned_timeline, None if reserved is None else reserved.figures)

    def predicted(self) -> dict[str, Any]:
        """The figures that the plan's file carries."""
        pair = (self.kept_reserved, self.planned_reserved)
        return predicted(
            self.kept_timeline, self.planned_timeline, *(None if r is None else r.figures for r in pair)
        )

    @property
    def overhead_percent(self) -> float:
        """Time that the plan adds, in percent of the step with everything kept."""
        base = self.kept_timeline.step_time_ns
        return 100.0 * (self.planned_timeline.step_time_ns - base) / base if base else 0.0


def compare(problem: Problem, plan: Plan, budget_bytes: int | None) -> Comparison:
    """Replay without and with the plan, whatever the constraints; raises PlanError if it does not fit the trace."""
    kept = problem.unconstrained.saved
    planned = problem.unconstrained.replay(plan.actions) if plan.actions else kept
    return Comparison(
        trace=problem.trace,
        plan=plan,
        problem=problem,
        kept=kept.schedule,
        kept_timeline=kept.timeline,
        planned=planned.schedule,
        planned_timeline=planned.timeline,
        budget_bytes=budget_bytes,
    )


def with_reserved(c: Comparison, question: Question | None) -> Comparison:
    """The same with the answers to a question about reserved memory; without a question nothing is added."""
    if question is None:
        return c
    kept = reserve(c.problem, c.kept, question)
    planned = kept if c.planned == c.kept else reserve(c.problem, c.planned, question)
    return replace(c, question=question, kept_reserved=kept, planned_reserved=planned)
