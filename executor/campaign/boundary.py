"""Where a model stops to fit a memory limit: predicted for every batch size, and tried at the border.

Tried are the largest batch size that is predicted to fit and the next larger one. On CUDA the process gets a share of
the device of that size, and fits if it trains without running out of memory. On the CPU, where no allocator reserves
anything, it fits if the measured peak is not above the limit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from executor.campaign.bench import Bench
from executor.campaign.cases import NONE, Case, Step
from executor.campaign.record import INFEASIBLE, Record, Trial
from executor.campaign.record_step import CALIBRATED_DIR
from executor.measure import EAGER, PLAN
from simulator.core.budget import parse_budget
from traces.errors import OutOfMemoryProblem
from traces.measurement import RunFigures


def run_boundary(case: Case, bench: Bench) -> Record:
    """Predict every batch size and try those on both sides of the predicted boundary.

    Raises:
        LowtideError: a step cannot be recorded, planned or run for another reason than memory.
    """
    record = bench.empty(case)
    limit_bytes = parse_budget(case.limit, bench.memory_bytes)
    trials: list[Trial] = []
    plans: list[Path | None] = []
    for size in case.batch_sizes:
        bench.progress(f"    predicting batch size {size}")
        step = _sized(case, size)
        if not (bench.traces(step) / CALIBRATED_DIR).is_dir():
            bench.trace(step, transfer=False)  # the calibration decides
        trial, plan = bench.forecast(step).trial(size, case.planner, limit_bytes)
        trials.append(trial)
        plans.append(bench.store.plan(f"{record.key}-b{size}", plan) if plan is not None else None)
    last = max((k for k, t in enumerate(trials) if t.predicted_fits), default=-1)
    for k in (last, last + 1):
        if 0 <= k < len(trials) and (path := plans[k]) is not None:
            bench.progress(f"    trying batch size {trials[k].batch_size}")
            trials[k] = _try(trials[k], path, case, limit_bytes, bench)
    record = replace(record, limit_bytes=limit_bytes, trials=tuple(trials))
    if all(t.fits is None for t in trials):
        return replace(record, status=INFEASIBLE, message=f"no plan for any batch size: {trials[0].message}")
    return record


def _sized(case: Case, size: int) -> Step:
    return replace(case.step, options={**case.step.options, "batch_size": size})


def _try(trial: Trial, plan_path: Path, case: Case, limit_bytes: int, bench: Bench) -> Trial:
    measured = RunFigures()
    if case.planner == NONE and not bench.cuda:
        # The limit changes nothing here, so what a case of this step measured will do.
        known = bench.store.record(bench.keys.of_step(_sized(case, trial.batch_size)), "steps")
        measured = known.eager if known is not None else measured
    if measured.peak_allocated_bytes is None:
        variant = EAGER if case.planner == NONE else PLAN
        try:
            measured = bench.job(variant, plan_path, limit_bytes if bench.cuda else 0).figures
        except OutOfMemoryProblem as error:
            return replace(trial, fits=False, message=str(error))
    peak_bytes = measured.peak_allocated_bytes
    assert peak_bytes is not None
    return replace(trial, measured=measured, fits=bench.cuda or peak_bytes <= limit_bytes)
