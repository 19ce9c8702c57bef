"""What a campaign predicts from a step's traces, stage by stage of what is known: everything saved, and with a plan.

The stages, each with what the one before it has:

    rules        workspaces by the table of rules, resident ones included: all that a laptop can know (uncalibrated)
    transferred  workspaces and times interpolated from the same step at half the batch size, measured on the device
    calibrated   workspaces and times measured on the device, op by op
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor.campaign.cases import CALIBRATED as FROM_CALIBRATED
from executor.campaign.cases import NONE
from executor.campaign.record import CALIBRATED, RULES, TRANSFERRED
from executor.campaign.record_step import CALIBRATED_DIR, TRANSFERRED_DIR, UNCALIBRATED_DIR
from traces.alloc_conf import alloc_conf
from traces.errors import BudgetError
from traces.measurement import RunFigures
from traces.plan import ALLOCATED, RESERVED, Action, Plan
from traces.trace import Trace

if TYPE_CHECKING:
    from simulator.allocator.device import DeviceMemory
    from simulator.allocator.device_fit import Setting
    from simulator.studies.prediction import Prediction

KEEP_ALL_PLAN = "keep-all.json"


def predict_step(*, directory: str, device: str, plan_from: str) -> dict[str, Any]:
    """The keep-all predictions of a step, and its keep-all plan, saved below `directory`."""
    traces = load_traces(Path(directory))
    base = base_trace(traces, plan_from)
    _keep_all(base, device).save(Path(directory) / KEEP_ALL_PLAN)
    notes = []
    if not same_graph(traces[RULES], base):
        notes.append(
            "the uncalibrated trace has another graph than the device's, so plans cannot be judged on it"
        )
    return {
        **_told(stages(traces, base, (), device)),
        "fingerprint": base.meta.fingerprint,
        "notes": notes,
    }


def predict_plan(
    *, directory: str, device: str, plan_from: str, planner: str, budget: str, plan_path: str
) -> dict[str, Any]:
    """Plan for a budget and predict; saves the plan, or says why there is none."""
    from simulator.core.budget import parse_budget
    from simulator.core.limits import DEFAULTS
    from simulator.core.problem import Problem
    from simulator.studies.planning import plan_for

    traces = load_traces(Path(directory))
    base = base_trace(traces, plan_from)
    setting = setting_for(device, base)
    problem = Problem(base)
    budget_bytes = parse_budget(budget, problem.saved.timeline.peak_allocated_bytes)
    try:
        made = plan_for(problem, planner, DEFAULTS, setting, budget_bytes=budget_bytes)
    except BudgetError as error:
        return {"feasible": False, "budget_bytes": budget_bytes, "message": str(error)}
    made.plan.save(plan_path)
    return {
        "feasible": True,
        "budget_bytes": budget_bytes,
        "message": "",
        **_told(stages(traces, base, made.plan.actions, device)),
        "recomputed_ops": made.planned.timeline.recomputed_ops,
    }


def predict_fit(
    *, directory: str, device: str, plan_from: str, planner: str, limit_bytes: int, plan_path: str
) -> dict[str, Any]:
    """Whether a step fits a limit, untouched (planner `none`) or with a plan for it; saves the plan that is run."""
    from simulator.allocator.device import CPU, CUDA, DeviceMemory
    from simulator.core.limits import DEFAULTS
    from simulator.core.problem import Problem
    from simulator.studies.planning import plan_for
    from simulator.studies.prediction import untouched_fit

    base = base_trace(load_traces(Path(directory)), plan_from)
    setting = setting_for(device, base)
    plan, problem = _keep_all(base, device), Problem(base)
    if planner != NONE:
        try:
            # On CUDA the limit is of what the allocator reserves.
            of = ALLOCATED if setting.settings is None else RESERVED
            made = plan_for(problem, planner, DEFAULTS, setting, budget_bytes=limit_bytes, budget_of=of)
            plan = made.plan
        except BudgetError as error:
            return {"fits": False, "predicted": asdict(RunFigures()), "message": str(error), "planned": False}
    plan.save(plan_path)
    kind = CPU if setting.settings is None else CUDA
    limited = judged(
        base, plan.actions, device, DeviceMemory(name="the limit", kind=kind, memory_bytes=limit_bytes)
    )
    free = judged(base, plan.actions, device)
    if planner == NONE:  # the graph with everything saved may need less than the untouched model, or more
        fit, figures = untouched_fit(limited), untouched_fit(free).figures(free.saved.timeline.step_time_ns)
    else:
        fit, figures = limited.planned_fit, free.planned_figures
    message = "" if fit.reserved is None else fit.out_of_memory
    return {"fits": bool(fit.fits), "predicted": asdict(figures), "message": message, "planned": True}


def load_traces(directory: Path) -> dict[str, Trace]:
    """The traces that stand there, by the stage that they make possible."""
    from traces.store import load

    found = {}
    stages = ((RULES, UNCALIBRATED_DIR), (TRANSFERRED, TRANSFERRED_DIR), (CALIBRATED, CALIBRATED_DIR))
    for stage, name in stages:
        if (directory / name).is_dir():
            found[stage] = load(str(directory / name))
    return found


def base_trace(traces: dict[str, Trace], plan_from: str) -> Trace:
    """The trace that plans are made from: of those that are wanted and there, the one that knows most."""
    wanted = (CALIBRATED, TRANSFERRED, RULES) if plan_from == FROM_CALIBRATED else (RULES,)
    return next(traces[stage] for stage in wanted if stage in traces)


def same_graph(a: Trace, b: Trace) -> bool:
    """Whether a plan for one is a plan for the other: the same ops and storages, by the same ids."""
    return a.meta.graph_fingerprint == b.meta.graph_fingerprint and a.ops.target == b.ops.target


def stages(
    traces: dict[str, Trace], base: Trace, actions: tuple[Action, ...], device: str
) -> dict[str, Prediction]:
    """What each stage predicts for the step with these actions, which were chosen on `base`.

    A plan is judged only on the same graph: where a laptop's graph of a GPU's step differs from the GPU's, the
    stages that have no more than that are left out.
    """
    return {
        stage: judged(trace, actions, device)
        for stage, trace in traces.items()
        if not actions or same_graph(trace, base)
    }


def _told(predictions: dict[str, Prediction]) -> dict[str, Any]:
    """By stage, the figures and what `simulate` would say beside them, but for what stands beside all of their kind."""
    from simulator.studies.warnings import STANDING, text, warnings

    return {
        "predicted": {stage: asdict(made.planned_figures) for stage, made in predictions.items()},
        "warnings": {
            stage: [text(w) for w in warnings(made) if w.code not in STANDING]
            for stage, made in predictions.items()
        },
    }


def judged(
    trace: Trace, actions: tuple[Action, ...], device: str, memory: DeviceMemory | None = None
) -> Prediction:
    """The replays with everything saved and with these actions; on CUDA through the caching allocator as well.

    Raises:
        PlanError: the actions do not fit the trace.
    """
    from simulator.core.problem import Problem
    from simulator.studies.prediction import predict

    setting = replace(setting_for(device, trace), device=memory)
    return predict(Problem(trace), setting, Plan(meta=trace.meta, actions=actions))


def setting_for(device: str, trace: Trace) -> Setting:
    """The settings of this environment's allocator, in the trace's torch; none on the CPU, which has no such."""
    from simulator.allocator.device_fit import Setting
    from simulator.allocator.settings import as_in, parse_alloc_conf

    if not device.startswith("cuda"):
        return Setting()
    conf = alloc_conf()
    settings = as_in(parse_alloc_conf(conf), trace.meta.torch_version)
    return Setting(settings=settings, alloc_conf=conf)


def _keep_all(trace: Trace, device: str) -> Plan:
    """The plan that keeps everything, with the prediction that a plan file must carry."""
    from simulator.studies.planning import completed

    made = completed(judged(trace, (), device)).plan
    return replace(made, planner="save-all")
