"""Verify and measure a plan: eager, save-all and the plan, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from executor.matching import check_alloc_conf, check_kind, times_apply
from executor.measuring import (
    EAGER,
    KEEP_ALL,
    PLAN,
    VERIFY,
    Job,
    JobResult,
    Settings,
    predicted_figures,
    run_job,
)
from tracer.step.step import check_device
from traces.errors import OutOfMemoryProblem
from traces.progress import Say, counted
from traces.provenance import REHEARSED, provenance_of
from traces.records.measurement import Measurement, RunFigures, Verification
from traces.records.plan import Plan
from traces.records.trace import TraceMeta

if TYPE_CHECKING:
    import torch
    from torch import nn


TOLD: Final = {
    VERIFY: "verifying against the untouched model",
    EAGER: "measuring eager",
    KEEP_ALL: "measuring save-all",
    PLAN: "measuring the plan",
}


def measure_plan(
    plan: Plan,
    path: Path,
    settings: Settings,
    progress: Say,
    known: dict[str, JobResult] | None = None,
) -> Measurement:
    """Verify and measure one plan, which stands in the file `path`.

    Args:
        known: what eager and save-all gave for another plan of the same step, which are then not measured again; gets
            what they give now.

    Raises:
        PlanError: the plan's actions do not give its figures, or it belongs to another graph than the model's.
        EnvironmentProblem: no such device, the environment sets the allocator otherwise, or a process died.
        OutOfMemoryProblem: the plan ran out of memory. (That eager, save-all or the verification did is a warning.)
    """
    plan.check_seal(path)
    check_kind(plan.meta, settings.device)
    check_device(settings.device)
    check_alloc_conf(plan.meta, settings.device)
    predicted, baseline = predicted_figures(plan, "plan"), predicted_figures(plan, "baseline")

    def job(variant: str, **how: Any) -> JobResult:
        conf = plan.meta.alloc_conf
        return run_job(Job(variant=variant, plan_path=str(path), alloc_conf=conf, **asdict(settings), **how))

    warnings = [str(text) for text in plan.predicted.get("warnings", ())]

    provenance, results = provenance_of(settings.device), {} if known is None else known
    wanted = [v for v in (EAGER, KEEP_ALL) if v not in results]
    if settings.steps and provenance != REHEARSED:  # where nothing is computed
        wanted.insert(0, VERIFY)
    for variant in counted([*wanted, PLAN], TOLD.__getitem__, progress):
        beside = variant == PLAN and results[KEEP_ALL].figures.peak_allocated_bytes is not None
        try:
            results[variant] = job(variant, beside=beside)
        except OutOfMemoryProblem as error:
            if variant == PLAN:  # maybe save-all's step fits in a process of its own alone
                results[PLAN] = job(PLAN)
                continue
            # Often a plan is made because that does not fit.
            warnings.append(f"{TOLD[variant]} ran out of memory: {error}")
            results[variant] = JobResult(figures=RunFigures(), environment={})
    of_plan, done = results.pop(PLAN), results.pop(VERIFY, None)  # of this plan alone
    verification = done and done.verification
    environment = of_plan.environment
    told = other_threads(plan.meta, environment)
    if told:
        warnings.append(told)
    if told or not times_apply(plan.meta, settings.device, environment.get("gpu", "")):
        # Another device's times say nothing about this one's.
        predicted, baseline = replace(predicted, step_time_ns=None), replace(baseline, step_time_ns=None)
    checked = verification or Verification(equal=False, bit_equal=False, steps=0)
    return Measurement(
        model=plan.meta.model,
        options=dict(plan.meta.options),
        planner=plan.planner,
        budget_bytes=plan.budget_bytes,
        budget_of=plan.budget_of,
        warnings=tuple(warnings),
        fingerprint=plan.meta.fingerprint,
        device=settings.device,
        provenance=provenance,
        environment={**environment, "trace": f"{plan.meta.mode}, times of {plan.meta.target}"},
        predicted=predicted,
        measured=of_plan.figures,
        keep_all_predicted=baseline,
        keep_all=results[KEEP_ALL].figures,
        eager=results[EAGER].figures,
        verified=checked.equal if verification else None,
        max_abs_difference=checked.max_abs_difference,
        steps=settings.steps if verification else 0,
        bit_equal=checked.bit_equal if verification else None,
        first_difference=checked.first_difference,
        verification_note=checked.note,
    )


def other_threads(meta: TraceMeta, environment: Mapping[str, str]) -> str:
    """Return what must be said where a CPU's trace was measured with other threads than the step; "": nothing."""
    now = environment.get("threads", "")
    if not meta.threads or not now or str(meta.threads) == now or meta.device != "cpu":
        return ""
    return (
        f"The trace's times were measured with {meta.threads} threads and the step ran with {now}, so no time is "
        f"predicted for it, and what ops allocate inside may differ; set OMP_NUM_THREADS={meta.threads}, or trace "
        "again."
    )


def verify(
    plan: Plan | str | Path,
    model: nn.Module | str | None = None,
    batch: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str | None = None,
    *,
    device: str = "cpu",
    steps: int = 10,
) -> Verification:
    """Train twice from one state, untouched and by the plan, and compare every tensor after every step.

        verify(found, net, (x, y), F.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.1))
        verify("plan.json")

    In this process, on copies: the objects in hand stay as they are. `execute` does the same in a fresh process.

    Args:
        plan: or the file of one.
        model: of a plan for a model in hand, that and what `trace` was given with it. Otherwise what to build if not
            what the plan names.
        device: "cpu" or "cuda".
        steps: how many are compared.

    Raises:
        SpecError: the plan is of a model in hand, and none is given.
        PlanError: the plan is of another step.
    """
    from executor.verifying import verify as compare
    from tracer.api import in_hand, left_as_found
    from tracer.step.step import load_spec

    if isinstance(plan, str | Path):
        plan = Plan.load(Path(plan))
    options = dict(plan.meta.options)
    if model is None or isinstance(model, str):
        build = load_spec(model or plan.meta.model, options, seed=plan.meta.seed)
    else:
        build = in_hand(model, batch, loss, optimizer, {}, options, plan.meta.seed)
    with left_as_found():
        return compare(build, plan, device, steps)
