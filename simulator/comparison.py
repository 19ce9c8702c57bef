"""Turn a Trace and a Plan into two replays of the step: everything kept, and with the plan."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.engine import run
from simulator.graph import Graph, analyse
from simulator.schedule import Schedule, build
from simulator.timeline import Timeline
from traces.plan import Plan
from traces.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One trace replayed with everything kept and with a plan."""

    trace: Trace
    plan: Plan
    graph: Graph
    kept: Schedule
    kept_timeline: Timeline
    planned: Schedule
    planned_timeline: Timeline
    budget_bytes: int | None

    @property
    def overhead_percent(self) -> float:
        """Time that the plan adds, in percent of the step with everything kept."""
        base = self.kept_timeline.step_time_ns
        return 100.0 * (self.planned_timeline.step_time_ns - base) / base if base else 0.0


def compare(trace: Trace, plan: Plan, budget_bytes: int | None) -> Comparison:
    """Replay a trace without and with the plan; raises PlanError if the plan does not fit the trace."""
    graph = analyse(trace)
    kept, planned = build(trace, (), graph), build(trace, plan.actions, graph)
    return Comparison(
        trace=trace,
        plan=plan,
        graph=graph,
        kept=kept,
        kept_timeline=run(trace, kept, graph),
        planned=planned,
        planned_timeline=run(trace, planned, graph),
        budget_bytes=budget_bytes,
    )
