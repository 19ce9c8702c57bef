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
    from simulator.allocator.question import Question
    from simulator.studies.prediction import Comparison

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
    from simulator.core.problem import Problem
    from simulator.studies.planning import keep_all, planned

    traces = load_traces(Path(directory))
    base = base_trace(traces, plan_from)
    question = question_of(device, base)
    problem = Problem(base)
    whole = keep_all(problem, question).kept_timeline.peak_allocated_bytes
    budget_bytes = parse_budget(budget, whole)
    try:
        made = planned(problem, planner, budget_bytes=budget_bytes, question=question)
    except BudgetError as error:
        return {"feasible": False, "budget_bytes": budget_bytes, "message": str(error)}
    made.plan.save(plan_path)
    return {
        "feasible": True,
        "budget_bytes": budget_bytes,
        "message": "",
        **_told(stages(traces, base, made.plan.actions, device)),
        "recomputed_ops": made.planned_timeline.recomputed_ops,
    }


def predict_fit(
    *, directory: str, device: str, plan_from: str, planner: str, limit_bytes: int, plan_path: str
) -> dict[str, Any]:
    """Whether a step fits a limit, untouched (planner `none`) or with a plan for it; saves the plan that is run."""
    from simulator.allocator.caching import OutOfMemory
    from simulator.allocator.reserved import reserved_peak
    from simulator.core.problem import Problem
    from simulator.studies.planning import planned
    from simulator.studies.untouched import untaken, untouched

    base = base_trace(load_traces(Path(directory)), plan_from)
    question = question_of(device, base)
    plan, message = _keep_all(base, device), ""
    if planner != NONE:
        try:
            # On CUDA the limit is of what the allocator reserves.
            of = ALLOCATED if question is None else RESERVED
            plan = planned(
                Problem(base), planner, budget_bytes=limit_bytes, budget_of=of, question=question
            ).plan
        except BudgetError as error:
            return {"fits": False, "predicted": asdict(RunFigures()), "message": str(error), "planned": False}
    plan.save(plan_path)
    made = judged(base, plan.actions, device)
    schedule, figures = made.planned, made.planned_figures
    if planner == NONE:  # the graph with everything kept may need less than the untouched model, or more
        schedule = untaken(made)
        figures = replace(untouched(made).figures, step_time_ns=figures.step_time_ns)
    assert figures.peak_allocated_bytes is not None
    fits = figures.peak_allocated_bytes <= limit_bytes
    if question is not None:
        try:
            reserved_peak(made.problem, schedule, question.settings, device_memory_bytes=limit_bytes)
        except OutOfMemory as error:
            fits, message = False, str(error)
    return {"fits": fits, "predicted": asdict(figures), "message": message, "planned": True}


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
) -> dict[str, Comparison]:
    """What each stage predicts for the step with these actions, which were chosen on `base`.

    A plan is judged only on the same graph: where a laptop's graph of a GPU's step differs from the GPU's, the
    stages that have no more than that are left out.
    """
    return {
        stage: judged(trace, actions, device)
        for stage, trace in traces.items()
        if not actions or same_graph(trace, base)
    }


def _told(predictions: dict[str, Comparison]) -> dict[str, Any]:
    """By stage, the figures and what `simulate` would say beside them."""
    from simulator.studies.warnings import warnings

    return {
        "predicted": {stage: asdict(made.planned_figures) for stage, made in predictions.items()},
        "warnings": {stage: list(warnings(made)) for stage, made in predictions.items()},
    }


def judged(trace: Trace, actions: tuple[Action, ...], device: str) -> Comparison:
    """The replays with everything kept and with these actions; on CUDA through the caching allocator as well.

    Raises:
        PlanError: the actions do not fit the trace.
    """
    from simulator.core.problem import Problem
    from simulator.studies.prediction import compare, with_reserved

    return with_reserved(
        compare(Problem(trace), Plan(meta=trace.meta, actions=actions), None), question_of(device, trace)
    )


def question_of(device: str, trace: Trace) -> Question | None:
    """The settings of this environment's allocator, in the trace's torch; None on the CPU, which has none."""
    from simulator.allocator.question import Question
    from simulator.allocator.settings import as_in, parse_alloc_conf

    if not device.startswith("cuda"):
        return None
    text = alloc_conf()
    settings = as_in(parse_alloc_conf(text), trace.meta.torch_version)
    return Question(alloc_conf=text, settings=settings, asked=False)


def _keep_all(trace: Trace, device: str) -> Plan:
    """The plan that keeps everything, with the prediction that a plan file must carry."""
    from simulator.studies.warnings import answered

    made = answered(judged(trace, (), device)).plan
    return replace(made, planner="save-all")
