"""The JSON object that `simulate TRACE --json` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from simulator.allocator.device_fit import DeviceFit
from simulator.bounds.bound import Bound
from simulator.core.replay import Replay, peak_by_category
from simulator.planners.outcome import Infeasible
from simulator.prediction.levers import host_bytes
from simulator.prediction.loop_peaks import planned_peaks, untouched_peaks
from simulator.prediction.step import Prediction
from simulator.prediction.warnings import provenance, texts
from simulator.studies.shapes import OverShapes
from traces.records.measurement import RunFigures
from traces.records.plan import ALLOCATED
from traces.records.trace import Trace

NO_BUDGET: Final = "without a budget nothing bounds the added time from below"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan within the budget."""

    planned: Prediction  # under the settings that the plan carries
    asked: Prediction  # the step under the settings that it was asked about
    trace_name: str
    solve_seconds: float
    bound: Bound | None = None  # of the budget, if there is one
    shapes: OverShapes | None = None  # what the plan needs at other sizes, if that was asked
    left_out: str = ""  # in words, what the levers could do and may not

    @property
    def gap_points(self) -> float | None:
        """The plan's overhead minus the certified bound, in percent of the step with everything saved."""
        times = self.planned.planned.timeline.step_time_ns, self.planned.saved.timeline.step_time_ns
        return None if self.bound is None else self.bound.gap_points(*times)

    def to_json(self) -> dict[str, Any]:
        c = self.planned
        return {
            **_question(c, self.trace_name, c.plan.planner, self.solve_seconds, self.bound),
            "feasible": c.planned_fit.fits is not False,
            "budget_bytes": c.budget_bytes,
            "budget_of": c.plan.budget_of,
            "gap_points": self.gap_points,
            "device_memory": _device(c.saved_fit, c.planned_fit),
            "untouched": untouched_peaks(self.asked).to_json(),
            "baseline": _run(c.trace, c.saved, c.saved_fit),
            "plan": {
                **_run(c.step.trace, c.planned, c.planned_fit),
                "overhead_percent": c.overhead_percent,
                "recomputed_ops": c.planned.timeline.recomputed_ops,
                "recomputed_storages": len(c.plan.recomputed),
                "recipes": c.plan.by_recipe,
                **_rewritten(c),
                **({"ahead_bytes": c.plan.ahead_bytes} if c.plan.ahead_bytes else {}),
                **planned_peaks(c).parts(),
            },
            **({} if self.shapes is None else {"shapes": self.shapes.to_json()}),
            **({"warnings": [*texts(c), self.left_out]} if self.left_out else {}),
        }


def _rewritten(c: Prediction) -> dict[str, Any]:
    """How the step itself is changed, and what that means for its gradients; nothing where it is not."""
    rewrites = [{"kind": r.kind, "op": r.op, "number": r.number, "error": r.error} for r in c.plan.rewrites]
    copied = host_bytes(c.trace, c.plan)
    told = {"rewrites": rewrites, "exactness": c.plan.exactness} if rewrites else {}
    return told | ({"host_bytes": copied} if copied else {})


def refusal(
    trace_name: str,
    saved: Prediction,
    planner: str,
    error: Infeasible,
    solve_seconds: float,
    bound: Bound | None = None,
    budget_of: str = ALLOCATED,
) -> dict[str, Any]:
    """What is printed when no plan fits: the same keys, the plan's figures empty, and why."""
    return {
        **_question(saved, trace_name, planner, solve_seconds, bound),
        "feasible": False,
        "budget_of": budget_of,
        "device_memory": _device(saved.saved_fit, None),
        "untouched": untouched_peaks(saved).to_json(),
        "baseline": _run(saved.trace, saved.saved, saved.saved_fit),
        "plan": {**RunFigures().headline(), "overhead_percent": None, "recomputed_ops": None},
        "message": str(error),
        **error.figures,
    }


def _question(
    c: Prediction, trace_name: str, planner: str, solve_seconds: float, bound: Bound | None
) -> dict[str, Any]:
    meta = c.trace.meta
    return {
        "trace": trace_name,
        "model": meta.model,
        "batch_size": meta.batch_size,
        "target": meta.target,
        "fingerprint": meta.fingerprint,
        "provenance": provenance(meta),
        "alloc_conf": c.setting.alloc_conf,
        "planner": planner,
        "solve_seconds": round(solve_seconds, 3),
        "bound": bound.to_json() if bound else {"overhead_percent": None, "reason": NO_BUDGET},
        "gap_points": None,
        "warnings": list(texts(c)),
    }


def _run(trace: Trace, replay: Replay, fit: DeviceFit) -> dict[str, Any]:
    return {
        **fit.figures(replay.timeline.step_time_ns).headline(),
        "allocator": fit.allocator(),
        "peak_by_category": peak_by_category(trace, replay.schedule, replay.timeline),
    }


def _device(saved: DeviceFit, planned: DeviceFit | None) -> dict[str, Any] | None:
    """What the device has, and whether both runs fit; `planned` is None where there is no plan."""
    if saved.device is None:
        return None
    return {
        **saved.device.to_json(),
        "baseline_fits": saved.fits,
        "plan_fits": planned and planned.fits,
        "left_bytes": planned and planned.left_bytes,
        "baseline_retries_a_step": saved.retries_a_step,
        "plan_retries_a_step": planned and planned.retries_a_step,
    }
