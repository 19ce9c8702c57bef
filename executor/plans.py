"""One plan -> a Measurement: verify, then run eager, keep-all and the plan, each in a fresh process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from executor.matching import check_alloc_conf, check_kind, times_apply
from executor.measuring import (
    EAGER,
    KEEP_ALL,
    PLAN,
    VERIFY,
    Job,
    JobResult,
    predicted_figures,
    run_job,
)
from executor.verification import Verification
from tracer.build.step import check_device
from traces.errors import OutOfMemoryProblem
from traces.provenance import REHEARSED, provenance_of
from traces.records.measurement import Measurement, RunFigures
from traces.records.plan import Plan
from traces.records.trace import TraceMeta

UNVERIFIED: Final = "the verification"  # begins a warning of one that was to be and is not


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to measure."""

    device: str = "cpu"
    steps: int = 10  # of the verification; 0: none
    memory_steps: int = 5
    warmup: int = 2
    runs: int = 10
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A measurement and what the report and the exit code need beside it."""

    plan_path: str
    plan: Plan
    measurement: Measurement
    verification: Verification | None = None
    curve: tuple[tuple[int, int], ...] = ()

    @property
    def first_difference(self) -> str:
        return self.verification.first_difference if self.verification else ""


def measure_plan(path: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Verify and measure one plan.

    Raises:
        PlanError: the file is no plan, its actions do not give its figures, or it belongs to another graph than the
            model's (a plan from a laptop's trace applies on a GPU as long as the model's graph has the same structure
            there, and a plan for a GPU's graph does not run on the CPU).
        EnvironmentProblem: no such device, the environment sets the allocator otherwise, or a process died.
        OutOfMemoryProblem: the plan ran out of memory. (That eager, keep-all or the verification did is a warning.)
    """
    plan = Plan.load(path)
    plan.check_seal(path)
    check_kind(plan.meta, settings.device)
    check_device(settings.device)
    check_alloc_conf(plan.meta, settings.device)
    predicted, baseline = predicted_figures(plan, "plan"), predicted_figures(plan, "baseline")

    unchecked = True

    def job(variant: str) -> JobResult:
        nonlocal unchecked
        check, unchecked = unchecked, False
        conf = plan.meta.alloc_conf
        return run_job(
            Job(variant=variant, plan_path=str(path), alloc_conf=conf, check=check, **asdict(settings))
        )

    warnings = [str(text) for text in plan.predicted.get("warnings", ())]

    def if_it_fits(variant: str, what: str) -> JobResult:
        """What is beside the plan: often a plan is made because that does not fit."""
        try:
            return job(variant)
        except OutOfMemoryProblem as error:
            warnings.append(f"{what} ran out of memory: {error}")
            return JobResult(figures=RunFigures(), environment={})

    verification = None
    provenance = provenance_of(settings.device)
    if settings.steps and provenance != REHEARSED:  # where nothing is computed
        progress(f"Verifying {settings.steps} steps against the untouched model ...")
        verification = if_it_fits(VERIFY, f"{UNVERIFIED}, which takes two models at once,").verification
    results = {}
    for variant, label in ((EAGER, "eager"), (KEEP_ALL, "keep-all")):
        progress(f"Measuring {label} on {settings.device} ...")
        results[variant] = if_it_fits(variant, f"{label}, which is not measured,")
    progress(f"Measuring the plan on {settings.device} ...")
    results[PLAN] = job(PLAN)
    told = other_threads(plan.meta, results[PLAN].environment)
    if told:
        warnings.append(told)
    if told or not times_apply(plan.meta, settings.device, results[PLAN].environment.get("gpu", "")):
        # Another device's times say nothing about this one's.
        predicted, baseline = replace(predicted, step_time_ns=None), replace(baseline, step_time_ns=None)
    measurement = Measurement(
        model=plan.meta.model,
        options=dict(plan.meta.options),
        planner=plan.planner,
        budget_bytes=plan.budget_bytes,
        budget_of=plan.budget_of,
        warnings=tuple(warnings),
        fingerprint=plan.meta.fingerprint,
        device=settings.device,
        provenance=provenance,
        environment={**results[PLAN].environment, "trace": f"{plan.meta.mode}, times of {plan.meta.target}"},
        predicted=predicted,
        measured=results[PLAN].figures,
        keep_all_predicted=baseline,
        keep_all=results[KEEP_ALL].figures,
        eager=results[EAGER].figures,
        verified=None if verification is None else verification.equal,
        max_abs_difference={} if verification is None else verification.max_abs_difference,
        steps=settings.steps if verification is not None else 0,
    )
    return Outcome(
        plan_path=str(path),
        plan=plan,
        measurement=measurement,
        verification=verification,
        curve=results[PLAN].curve,
    )


def other_threads(meta: TraceMeta, environment: Mapping[str, str]) -> str:
    """What must be said where a CPU's trace was measured with other threads than the step; "": nothing."""
    now = environment.get("threads", "")
    if not meta.threads or not now or str(meta.threads) == now or meta.device != "cpu":
        return ""
    return (
        f"The trace's times were measured with {meta.threads} threads and the step ran with {now}, so no time is "
        f"predicted for it, and what ops allocate inside may differ; set OMP_NUM_THREADS={meta.threads}, or trace "
        "again."
    )
