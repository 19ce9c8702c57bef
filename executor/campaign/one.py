"""One case of a campaign: plan, measure and verify, on what the cases of the same step share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from executor.campaign.cases import NONE, Case, Method
from executor.campaign.predict import KEEP_ALL_PLAN
from executor.campaign.record import (
    CALIBRATED,
    DONE,
    INFEASIBLE,
    NOT_EQUAL,
    OUT_OF_MEMORY,
    TRANSFERRED,
    Predictions,
    Record,
    Store,
)
from executor.campaign.record_step import UNCALIBRATED_DIR
from executor.isolated import run_fresh
from executor.measure import EAGER, KEEP_ALL, PLAN, VERIFY, Job, JobResult, run_job
from simulator.core.budget import parse_budget
from traces.devices import DEVICES
from traces.errors import OutOfMemoryProblem, SpecError
from traces.json_records import from_json, to_json
from traces.measurement import RunFigures

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run's figures and what verification said of it ({}: not asked; `not_checked`: why it could not be)."""

    figures: RunFigures
    verification: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The device, how to measure on it, and where to keep what comes out."""

    method: Method
    store: Store
    environment: Mapping[str, str]
    memory_bytes: int
    target: str
    limit_bytes: int | None  # of each measuring process

    @classmethod
    def of(cls, method: Method, found: Mapping[str, Any], store: Store) -> Bench:
        """From what the worker found out about the device.

        Raises:
            SpecError: it is not in the device table, and the campaign names no target.
        """
        target = method.target or str(found["target"])
        if not target:
            known = ", ".join(d.name for d in DEVICES if d.kind == "cuda")
            raise SpecError(
                f"{found['name']} is not in the device table; name the entry nearest to it as target in [campaign]: "
                f"{known}."
            )
        memory_bytes = int(found["memory_bytes"])
        own = {"device_name": str(found["name"]), "memory_bytes": str(memory_bytes)}
        return cls(
            method=method,
            store=store,
            environment={**found["environment"], **own},
            memory_bytes=memory_bytes,
            target=target,
            limit_bytes=parse_budget(method.memory_limit, memory_bytes) if method.memory_limit else None,
        )

    @property
    def device(self) -> str:
        return self.method.device

    def empty(self, case: Case, key: str) -> Record:
        """The record of a case of which nothing is known yet."""
        return Record(
            case=case,
            key=key,
            status=DONE,
            provenance=f"measured-{self.device.partition(':')[0]}",
            environment=self.environment,
            limit_bytes=self.limit_bytes,
        )

    def task(self, function: str, what: str, **arguments: Any) -> dict[str, Any]:
        """Call a function of this room, on the bench's device, in a fresh process; raises as `run_fresh` does."""
        return run_fresh(
            f"executor.campaign.{function}",
            {"device": self.device, **arguments},
            what=what,
            timeout_s=60.0 * self.method.timeout_minutes,
        )

    def measure(self, variant: str, plan_path: Path, progress: Progress) -> Measured:
        """Measure keep-all or the plan, and verify it.

        On the CPU one process does both, the measurement first. On CUDA the verification wants other settings of
        cuBLAS from the start, so it has a process of its own.

        Raises:
            OutOfMemoryProblem: the measurement did not fit. (A verification, which holds two models, may run out of
                memory; its place then says so.)
            LowtideError: as `run_job`.
        """
        together = self.method.verify_steps > 0 and self.device == "cpu"
        try:
            done = self.job(variant, plan_path, then_verify=together)
        except OutOfMemoryProblem:
            if not together:
                raise
            done, together = self.job(variant, plan_path), False
        if together or not self.method.verify_steps:
            return Measured(figures=done.figures, verification=done.verification or {})
        progress("    verifying")
        try:
            checked = self.job(VERIFY, plan_path).verification or {}
        except OutOfMemoryProblem as error:
            checked = {"not_checked": f"the two models that verification holds do not fit ({error})"}
        return Measured(figures=done.figures, verification=checked)

    def job(
        self, variant: str, plan_path: Path, limit_bytes: int | None = None, *, then_verify: bool = False
    ) -> JobResult:
        """Measure or verify in a fresh process; raises as `run_job` does."""
        method = self.method
        job = Job(
            variant=variant,
            plan_path=str(plan_path),
            model="",
            device=self.device,
            memory_steps=method.memory_steps,
            warmup=method.warmup,
            runs=method.runs,
            steps=method.verify_steps,
            then_verify=then_verify,
            limit_bytes=limit_bytes or self.limit_bytes or 0,
        )
        return run_job(job, timeout_s=60.0 * method.timeout_minutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """What the cases of one step share."""

    directory: str  # of its traces and its keep-all plan
    fingerprint: str
    predicted: Predictions  # everything kept
    warnings: Mapping[str, tuple[str, ...]]
    eager: RunFigures
    keep_all: Measured
    out_of_memory: Mapping[str, str]  # eager, keep_all, calibration -> what was said; only those that ran out
    notes: tuple[str, ...]


def _texts(data: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {stage: tuple(str(text) for text in texts) for stage, texts in data.items()}


def _predictions(data: Mapping[str, Any]) -> Predictions:
    return {stage: from_json(RunFigures, figures) for stage, figures in data.items()}


def shared_step(case: Case, key: str, bench: Bench, progress: Progress) -> SharedStep:
    """Trace and measure what the cases of this step share, unless an earlier case or run did.

    Raises:
        LowtideError: the step cannot be recorded or run. (That memory runs out is an answer, not an error.)
    """
    directory = bench.store.root / "traces" / key
    known = bench.store.step(key)
    if known is not None and (directory / KEEP_ALL_PLAN).is_file():
        return from_json(SharedStep, {**known, "directory": str(directory)})
    ran_out: dict[str, str] = {}
    progress("    recording the step")
    try:
        trace_step(case, directory, bench, transfer=bench.method.transfer)
    except OutOfMemoryProblem as error:
        if not (directory / UNCALIBRATED_DIR).is_dir():
            raise
        ran_out["calibration"] = str(error)
    baseline = bench.task(
        "predict:predict_step",
        "predicted the step",
        directory=str(directory),
        plan_from=bench.method.plan_from,
    )
    plan_path = directory / KEEP_ALL_PLAN
    eager, keep_all = RunFigures(), Measured(figures=RunFigures())
    progress("    measuring eager")
    try:
        eager = bench.job(EAGER, plan_path).figures
    except OutOfMemoryProblem as error:
        ran_out[EAGER] = str(error)
    progress("    measuring keep-all")
    try:
        keep_all = bench.measure(KEEP_ALL, plan_path, progress)
    except OutOfMemoryProblem as error:
        ran_out[KEEP_ALL] = str(error)
    notes = list(baseline["notes"])
    if "calibration" in ran_out:
        notes.append(f"no calibrated trace, since the step itself does not fit: {ran_out['calibration']}")
    step = SharedStep(
        directory=str(directory),
        fingerprint=str(baseline["fingerprint"]),
        predicted=_predictions(baseline["predicted"]),
        warnings=_texts(baseline["warnings"]),
        eager=eager,
        keep_all=keep_all,
        out_of_memory=ran_out,
        notes=tuple(notes),
    )
    if step.keep_all.verification.get("equal", True):  # else `--retry-failed` must find it undone
        bench.store.save_step(key, {**to_json(replace(step, directory="")), "record": "campaign step"})
    return step


def trace_step(case: Case, directory: Path, bench: Bench, *, transfer: bool) -> None:
    """Record the step's traces below `directory`, in a fresh process; raises as the process does.

    transfer: also from a calibration at half the batch size.
    """
    method = bench.method
    bench.task(
        "record_step:record_step",
        "recorded the step",
        model=case.step.model,
        options=dict(case.step.options),
        seed=method.seed,
        target=bench.target,
        directory=str(directory),
        rounds=method.rounds,
        warmup=method.trace_warmup,
        transfer=transfer,
    )


def run_case(record: Record, step: SharedStep, bench: Bench, progress: Progress) -> Record:
    """Plan, measure and verify one case.

    Raises:
        LowtideError: something went wrong that is no answer.
    """
    case = record.case
    record = replace(
        record,
        fingerprint=step.fingerprint,
        notes=step.notes,
        keep_all_predicted=step.predicted,
        keep_all_warnings=step.warnings,
        eager=step.eager,
        keep_all=step.keep_all.figures,
    )
    if case.budget == NONE:
        record = replace(record, predicted=step.predicted, warnings=step.warnings, recomputed_ops=0)
        if KEEP_ALL in step.out_of_memory:
            return replace(record, status=OUT_OF_MEMORY, message=step.out_of_memory[KEEP_ALL])
        done = step.keep_all
    else:
        plan_path = bench.store.root / "plans" / f"{record.key}.json"
        plan_path.parent.mkdir(parents=True, exist_ok=True)
        progress("    planning")
        made = bench.task(
            "predict:predict_plan",
            "planned",
            directory=str(step.directory),
            plan_from=bench.method.plan_from,
            planner=case.planner,
            budget=case.budget,
            plan_path=str(plan_path),
        )
        record = replace(record, budget_bytes=int(made["budget_bytes"]))
        if not made["feasible"]:
            return replace(record, status=INFEASIBLE, message=str(made["message"]))
        record = replace(
            record,
            predicted=_predictions(made["predicted"]),
            warnings=_texts(made["warnings"]),
            recomputed_ops=int(made["recomputed_ops"]),
        )
        progress("    measuring the plan")
        try:
            done = bench.measure(PLAN, plan_path, progress)
        except OutOfMemoryProblem as error:
            return replace(record, status=OUT_OF_MEMORY, message=str(error))
    if CALIBRATED not in record.predicted:
        known = "half the batch size" if TRANSFERRED in record.predicted else "the table of rules alone"
        record = replace(record, notes=(*record.notes, f"planned and predicted by {known}"))
    return _verified(replace(record, measured=done.figures), done.verification)


def _verified(record: Record, outcome: Mapping[str, Any]) -> Record:
    if not outcome:
        return record
    if "not_checked" in outcome:
        return replace(record, notes=(*record.notes, f"not verified: {outcome['not_checked']}"))
    equal = bool(outcome["equal"])
    return replace(
        record,
        verified=equal,
        bit_equal=bool(outcome["bit_equal"]),
        steps=int(outcome["steps"]),
        first_difference=str(outcome["first_difference"]),
        status=record.status if equal else NOT_EQUAL,
        message=record.message if equal else f"not equal to eager: {outcome['first_difference']}",
    )
