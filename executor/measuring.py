"""Measure a training step in a fresh process: peak memory by the allocator's own account, and step time.

Three variants, each in a process of its own: the untouched model in the ordinary loop (eager), the rewritten graphs
with an empty plan (keep_all), and the plan, whose steps are timed in turns with save-all's. On the CPU the peak is the
running sum of the allocator's events as the profiler records them, from before the model is built; on CUDA it is the
caching allocator's statistics. On a GPU that is not there (a rehearsal) all of it runs, and there are no times.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from traces.errors import PlanError, SpecError
from traces.files import from_json
from traces.isolated import run_fresh
from traces.progress import counting
from traces.provenance import ALLOC_CONF, REHEARSED, alloc_conf, provenance_of
from traces.records.measurement import RunFigures, Verification, steady
from traces.records.plan import Plan

EAGER: Final = "eager"
KEEP_ALL: Final = "keep_all"
PLAN: Final = "plan"
VERIFY: Final = "verify"
_TAKEN: Final = 3  # a gradient scaler must take so many steps that the optimizer's memory is in the figures
_PATIENCE: Final = 40  # iterations that it may skip while it looks for its scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to measure."""

    device: str = "cpu"
    steps: int = 10  # of the verification; 0: none
    memory_steps: int = 5  # iterations whose peak is measured
    warmup: int = 2  # iterations before those that are timed
    runs: int = 10  # iterations that are timed
    model: str = ""  # what to build if not what the plan names


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Settings):
    """The task of one fresh process."""

    variant: str
    plan_path: str
    beside: bool = False  # time the save-all step in turns with the plan's
    alloc_conf: str = ""  # for CUDA's allocator, unless the environment says something itself


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The answer of a process."""

    figures: RunFigures
    environment: dict[str, str]
    verification: Verification | None = None


Once = Callable[[], bool]  # one training step; whether a gradient scaler took it
Prepare = Callable[[], tuple[Once, Callable[[], Once]]]  # a step; what makes the save-all step on its model


def run_job(job: Job) -> JobResult:
    """Run a job in a fresh process and wait for it; raises as `run_fresh` does."""
    env = {}
    if job.device.startswith("cuda") and job.variant == VERIFY:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if job.device.startswith("cuda") and job.alloc_conf and not alloc_conf():
        env |= dict.fromkeys(ALLOC_CONF, job.alloc_conf)
    what = f"measured {job.variant}"
    data = run_fresh("executor.measuring:do", asdict(job), what=what, environment=env)
    return from_json(JobResult, data)


def do(**fields: Any) -> dict[str, Any]:
    """A job's fields -> its result's, for a fresh process."""
    return asdict(perform(Job(**fields)))


def perform(job: Job) -> JobResult:
    """Do a job in this process (which should be fresh)."""
    from executor.training.module import apply_plan
    from executor.verifying import verify
    from tracer.environment import environment
    from tracer.precision.policy import scale_of
    from tracer.step.loop import run_step
    from tracer.step.step import load_spec

    rehearsed = provenance_of(job.device) == REHEARSED
    if rehearsed:  # what is timed runs, once
        job = replace(job, warmup=0, runs=1)
    plan = Plan.load(job.plan_path)
    build = load_spec(job.model or plan.meta.model, dict(plan.meta.options), seed=plan.meta.seed)
    if job.variant == VERIFY:
        outcome = verify(build, plan, job.device, job.steps)
        return JobResult(figures=RunFigures(), environment=environment(job.device), verification=outcome)

    def prepare() -> tuple[Once, Callable[[], Once]]:
        step = build(job.device)
        model: Any = step.model
        if job.variant != EAGER:
            model = apply_plan(model, plan if job.variant == PLAN else replace(plan, actions=(), rewrites=()))

        def run(model: Any) -> bool:
            before = scale_of(step.scaler)
            run_step(step, model, step.optimizer)
            done()
            return scale_of(step.scaler) >= before

        return partial(run, model), lambda: partial(run, kept_all(model, plan))

    measure = _measure_cuda if job.device.startswith("cuda") else _measure_cpu
    with counting(job.memory_steps + (job.warmup + job.runs) * (1 + job.beside)) as done:
        figures = measure(prepare, job)
    if rehearsed:
        figures = replace(figures, step_time_ns=None, times_ns=(), keep_all_times_ns=())
    return JobResult(figures=figures, environment=environment(job.device))


def kept_all(model: Any, plan: Plan) -> Any:
    """A copy of the model on the same parameters and buffers, by the plan's graphs with everything saved."""
    from executor.training.module import apply_plan

    known: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return apply_plan(copy.deepcopy(model, known), replace(plan, actions=(), rewrites=()))


def _measure_cpu(prepare: Prepare, job: Job) -> RunFigures:
    from tracer.measure.probes import cpu_loop

    with cpu_loop() as loop:
        once, keep_all = prepare()

        def iterate() -> bool:
            with loop.iteration():
                return once()

        _enough(iterate, job.memory_steps)
    figures = RunFigures(peak_allocated_bytes=max(steady(loop.peaks)), peaks_bytes=tuple(loop.peaks))
    return _with_times(figures, once, keep_all, job, lambda: None)


def _enough(iterate: Callable[[], bool], least: int) -> None:
    """Iterate `least` times, and further while a gradient scaler skips steps; SpecError if it skips too many."""
    wanted = min(_TAKEN, least)
    k = taken = 0
    while k < least or taken < wanted:
        if k >= least + _PATIENCE:
            raise SpecError(
                f"the gradient scaler skipped {k - taken} of {k} steps, since gradients overflowed; give the scaler a "
                "lower init_scale, or the optimizer a lower learning rate."
            )
        taken += iterate()
        k += 1


def _measure_cuda(prepare: Prepare, job: Job) -> RunFigures:
    import torch

    once, keep_all = prepare()
    gc.collect()
    # The model was built on the GPU, which leaves cached what its initialisers freed; one moved there leaves nothing.
    torch.cuda.empty_cache()
    peaks, blocks, reserved = [], [], []

    def iterate() -> bool:
        torch.cuda.reset_peak_memory_stats()
        taken = once()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        # What was asked for, as on the CPU and as the simulator sums it; the blocks handed out are larger.
        peaks.append(stats["requested_bytes.all.peak"])
        blocks.append(stats["allocated_bytes.all.peak"])
        reserved.append(stats["reserved_bytes.all.current"])
        return taken

    _enough(iterate, job.memory_steps)
    last_reserved = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
    figures = RunFigures(
        peak_allocated_bytes=max(steady(peaks)),
        peak_block_bytes=max(steady(blocks)),
        peak_reserved_bytes=last_reserved,
        peaks_bytes=tuple(peaks),
        reserved_bytes=tuple(reserved),
    )
    return _with_times(figures, once, keep_all, job, torch.cuda.synchronize)


def _with_times(
    figures: RunFigures, once: Once, keep_all: Callable[[], Once], job: Job, wait: Callable[[], object]
) -> RunFigures:
    """The figures with the times of steps, each from and to where the device has done all that was asked of it.

    A machine's speed drifts by more than a plan costs; the k-th times of a plan and of save-all are a moment apart.
    """
    steps = [once, *([keep_all()] if job.beside else [])]
    times: list[list[int]] = [[], []]
    for _ in range(job.warmup + job.runs):
        for step, taken in zip(steps, times, strict=False):
            wait()
            begin = time.perf_counter_ns()
            step()
            wait()
            taken.append(time.perf_counter_ns() - begin)
    of_plan, beside = (tuple(taken[job.warmup :]) for taken in times)
    return replace(
        figures, step_time_ns=int(statistics.median(of_plan)), times_ns=of_plan, keep_all_times_ns=beside
    )


def predicted_figures(plan: Plan, which: str) -> RunFigures:
    """The plan's own prediction: "baseline" (everything kept) or "plan". Raises PlanError if the plan carries none."""
    data: Any = plan.predicted.get(which)
    try:
        return from_json(RunFigures, {k: data[k] for k in RunFigures().headline() if k in data})
    except (TypeError, ValueError) as error:
        raise PlanError(f"the plan carries no prediction ({error}); make it again with `simulate`.") from None
