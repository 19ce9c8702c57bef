"""What a campaign predicts from a step's traces, stage by stage of what is known: everything saved, and with a plan.

The stages, each with what the one before it has:

    rules       workspaces by the table of rules, resident ones included: all that a laptop can know (uncalibrated)
    calibrated  workspaces and times measured on the device, op by op
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from executor.campaign.record import RULES, STAGES, Predictions
from simulator.allocator.device_fit import Setting
from simulator.allocator.settings import as_in, parse_alloc_conf
from simulator.core.limits import DEFAULTS
from simulator.core.problem import Problem
from simulator.prediction.planning import completed, plan_for
from simulator.prediction.step import Prediction, predict, untouched_fit
from simulator.prediction.warnings import STANDING, text, warnings
from traces.provenance import alloc_conf
from traces.records import store
from traces.records.plan import Plan
from traces.records.trace import Trace

KEEP_ALL_PLAN: Final = "keep-all.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A step's traces by stage, and the one that plans are made from, which knows most."""

    stages: Mapping[str, Problem]
    base: Problem
    device: str

    @classmethod
    def load(cls, directory: Path, device: str) -> Forecast:
        """From the traces that stand below the directory, in so far as they do."""
        made = [stage for stage in STAGES if (directory / stage).is_dir()]
        stages = {stage: Problem(store.load(str(directory / stage))) for stage in made}
        return cls(stages=stages, base=list(stages.values())[-1], device=device)

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be said of the graphs."""
        if same_graph(self.stages[RULES].trace, self.base.trace):
            return ()
        return (
            "the uncalibrated trace has another graph than the device's, so plans cannot be judged on it",
        )

    def setting(self) -> Setting:
        """The settings of this environment's allocator, in the trace's torch; none on the CPU, which has no such."""
        if not self.device.startswith("cuda"):
            return Setting()
        conf = alloc_conf()
        settings = as_in(parse_alloc_conf(conf), self.base.trace.meta.torch_version)
        return Setting(settings=settings, alloc_conf=conf)

    def judged(self, problem: Problem, plan: Plan | None = None) -> Prediction:
        """The replays of a stage with everything saved and with what a plan changes and recomputes."""
        actions, rewrites = ((), ()) if plan is None else (plan.actions, plan.rewrites)
        made = Plan(meta=problem.trace.meta, actions=actions, rewrites=rewrites)
        return predict(problem, self.setting(), made)

    def predicted(self, plan: Plan | None = None) -> tuple[Predictions, Mapping[str, tuple[str, ...]]]:
        """By stage, the figures and what `simulate` would say beside them, but for what stands beside all of their
        kind.

        A plan is judged only on the same graph: where a laptop's graph of a GPU's step differs from the GPU's, the
        stages that have no more than that are left out.
        """
        made = {
            stage: self.judged(problem, plan)
            for stage, problem in self.stages.items()
            if plan is None or same_graph(problem.trace, self.base.trace)
        }
        return {stage: p.planned_figures for stage, p in made.items()}, {
            stage: tuple(text(w) for w in warnings(p) if w.code not in STANDING) for stage, p in made.items()
        }

    def untouched(self) -> Predictions:
        """By stage, the figures of the untouched loop."""
        return {
            stage: untouched_fit(self.judged(problem)).figures(problem.trace.time_ns)
            for stage, problem in self.stages.items()
        }

    def keep_all(self) -> Plan:
        """The plan that saves everything, with the prediction that a plan file must carry."""
        return replace(completed(self.judged(self.base)).plan, planner="save-all")

    def plan(self, planner: str, budget_bytes: int) -> Prediction:
        """The step with the plan for a budget; raises BudgetError if there is none."""
        # No other settings are tried: the runs have the environment's.
        here = replace(self.setting(), asked=True)
        return plan_for(self.base, planner, DEFAULTS, here, budget_bytes=budget_bytes)


def same_graph(a: Trace, b: Trace) -> bool:
    """Whether a plan for one is a plan for the other: the same ops and storages, by the same ids."""
    return a.meta.graph_fingerprint == b.meta.graph_fingerprint and a.ops.target == b.ops.target
