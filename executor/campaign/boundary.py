"""Where a model stops to fit a memory limit: predicted for every batch size, and tried at the border.

Tried are the largest batch size that is predicted to fit and the next larger one. On CUDA the process gets a share of
the device of that size, and fits if it trains without running out of memory. On the CPU, where no allocator reserves
anything, it fits if the measured peak is not above the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from executor.campaign.cases import NONE, Case, Step
from executor.campaign.one import Bench, trace_step
from executor.campaign.record import INFEASIBLE, Keys, Record, Trial
from executor.campaign.record_step import CALIBRATED_DIR, UNCALIBRATED_DIR
from executor.measure import EAGER, PLAN
from simulator.core.budget import parse_budget
from traces.errors import OutOfMemoryProblem
from traces.json_records import from_json
from traces.measurement import RunFigures

Progress = Callable[[str], None]


def run_boundary(record: Record, keys: Keys, bench: Bench, progress: Progress) -> Record:
    """Predict every batch size and try those on both sides of the predicted boundary.

    Raises:
        LowtideError: a step cannot be recorded, planned or run for another reason than memory.
    """
    case = record.case
    limit_bytes = parse_budget(case.limit, bench.memory_bytes)
    trials: list[Trial] = []
    plans: dict[int, Path] = {}
    for size in case.batch_sizes:
        progress(f"    predicting batch size {size}")
        trial, plan_path = _predict(case, size, limit_bytes, record.key, keys, bench)
        trials.append(trial)
        if plan_path is not None:
            plans[size] = plan_path
    fitting = [k for k, t in enumerate(trials) if t.predicted_fits]
    last = fitting[-1] if fitting else -1
    for k in (last, last + 1):
        if 0 <= k < len(trials) and trials[k].batch_size in plans:
            progress(f"    trying batch size {trials[k].batch_size}")
            trials[k] = _try(trials[k], plans[trials[k].batch_size], case, limit_bytes, keys, bench)
    tried = [t for t in trials if t.fits is not None]
    record = replace(record, limit_bytes=limit_bytes, trials=tuple(trials))
    if not tried:
        return replace(record, status=INFEASIBLE, message=f"no plan for any batch size: {trials[0].message}")
    return record


def _predict(
    case: Case, size: int, limit_bytes: int, key: str, keys: Keys, bench: Bench
) -> tuple[Trial, Path | None]:
    """The prediction for one batch size, and the plan that would be run (None: there is none)."""
    sized = _sized(case, size)
    directory = bench.store.root / "traces" / keys.of_step(sized)
    if not (directory / CALIBRATED_DIR).is_dir():
        try:
            trace_step(sized, directory, bench, transfer=False)  # the calibration decides
        except OutOfMemoryProblem:
            if not (directory / UNCALIBRATED_DIR).is_dir():
                raise
    plan_path = bench.store.root / "plans" / f"{key}-b{size}.json"
    plan_path.parent.mkdir(parents=True, exist_ok=True)
    made = bench.task(
        "predict:predict_fit",
        "predicted whether the step fits",
        directory=str(directory),
        plan_from=bench.method.plan_from,
        planner=case.planner,
        limit_bytes=limit_bytes,
        plan_path=str(plan_path),
    )
    trial = Trial(
        batch_size=size,
        predicted=from_json(RunFigures, made["predicted"]),
        predicted_fits=bool(made["fits"]),
        message=str(made["message"]),
    )
    return trial, plan_path if made["planned"] else None


def _sized(case: Case, size: int) -> Case:
    """The case of one batch size by itself."""
    return Case(step=Step(model=case.step.model, options={**case.step.options, "batch_size": size}))


def _try(trial: Trial, plan_path: Path, case: Case, limit_bytes: int, keys: Keys, bench: Bench) -> Trial:
    cuda = bench.device.startswith("cuda")
    variant = EAGER if case.planner == NONE else PLAN
    measured = RunFigures()
    if (
        variant == EAGER and not cuda
    ):  # where the limit changes nothing, what a case of this step measured will do
        known = bench.store.step(keys.of_step(_sized(case, trial.batch_size)))
        measured = from_json(RunFigures, known["eager"]) if known is not None else measured
    if measured.peak_allocated_bytes is None:
        try:
            measured = bench.job(variant, plan_path, limit_bytes if cuda else None).figures
        except OutOfMemoryProblem as error:
            return replace(trial, fits=False, message=str(error))
    peak_bytes = measured.peak_allocated_bytes
    assert peak_bytes is not None
    return replace(trial, measured=measured, fits=cuda or peak_bytes <= limit_bytes)
