"""Run the outstanding cases of a campaign on a device, each measurement in a process of its own.

What the cases of one step share (its traces, eager, and the rewritten step with everything saved) is a record too: the
one that a case without a budget has.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from executor.campaign import record as records
from executor.campaign.cases import NONE, Campaign, Case, Method, Step, digest
from executor.campaign.predict import KEEP_ALL_PLAN, Forecast
from executor.campaign.record import BOOK, RETRIED, Book, Keys, Record, code_digest
from executor.isolated import run_fresh
from executor.measuring import EAGER, KEEP_ALL, PLAN, VERIFY, Job, JobResult, run_job
from simulator.core.budget import parse_budget
from traces.devices import devices
from traces.errors import BudgetError, OutOfMemoryProblem, SpecError
from traces.files.json_records import to_json
from traces.provenance import REHEARSED, provenance_of

Progress = Callable[[str], None]
# Of a step's record, what those of its cases with a budget have too.
SHARED: Final = (
    "fingerprint", "notes", "keep_all_predicted", "eager_predicted", "keep_all_warnings", "eager", "keep_all",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The device, how to measure on it, and where to put what comes out."""

    method: Method
    root: Path
    keys: Keys
    target: str  # the device's entry in the device table
    progress: Progress
    steps: dict[str, Record] = field(default_factory=dict)  # that this run looked at, failed ones too

    @classmethod
    def open(cls, method: Method, root: Path, progress: Progress) -> Bench:
        """Look at the device; errors as of `run_campaign`, and SpecError if nobody knows a target for it."""
        progress(f"Looking at the device {method.device} ...")
        call, what = "executor.campaign.record_step:describe_device", "looked at the device"
        found = run_fresh(call, {"device": method.device}, what=what)
        target = method.target or str(found["target"])
        if not target:
            known = ", ".join(d.name for d in devices() if d.kind == "cuda")
            raise SpecError(
                f"{found['name']} is not in the device table; name the entry nearest to it as target in [campaign]: "
                f"{known}."
            )
        own = {"device_name": str(found["name"]), "memory_bytes": str(found["memory_bytes"])}
        keys = Keys(method=method, code=code_digest(), environment={**found["environment"], **own})
        return cls(method=method, root=root, keys=keys, target=target, progress=progress)

    @property
    def rehearsed(self) -> bool:
        return provenance_of(self.method.device) == REHEARSED

    def empty(self, case: Case) -> Record:
        """The record of a case of which nothing is known yet."""
        return Record(
            case=case,
            key=self.keys.of_case(case),
            status=records.DONE_ABSENT if self.rehearsed else records.DONE,
            provenance=provenance_of(self.method.device),
            environment=self.keys.environment,
        )

    def traces(self, step: Step) -> Path:
        """Where the step's traces stand, once they are recorded."""
        return self.root / "traces" / self.keys.of_case(step.keep_all)

    def trace(self, step: Step) -> str:
        """Record the step's traces in a fresh process; returns why there is no calibrated one ("": there is). Raises
        LowtideError if the step cannot be recorded. (That memory runs out while it is calibrated is an answer.)
        """
        directory = self.traces(step)
        given = {"step": to_json(step), "method": to_json(self.method), "target": self.target}
        self.progress("    recording the step")
        call, what = "executor.campaign.record_step:record_step", "recorded the step"
        try:
            seconds = 60.0 * self.method.timeout_minutes
            run_fresh(call, {**given, "directory": str(directory)}, what=what, timeout_s=seconds)
        except OutOfMemoryProblem as error:
            if not (directory / records.RULES).is_dir():
                raise
            return str(error)
        return ""

    def forecast(self, step: Step) -> Forecast:
        """What can be predicted from the step's traces."""
        return Forecast.load(self.traces(step), self.method.device)

    def step(self, step: Step) -> Record:
        """The step's record with everything saved, made unless an earlier case or run did."""
        case = step.keep_all
        key = self.keys.of_case(case)
        if key not in self.steps:
            self.steps[key] = self.answered(case, self._keep_all)
        return self.steps[key]

    def answered(self, case: Case, answer: Callable[[Record], Record]) -> Record:
        """What is made of a case's empty record, whatever happens but Ctrl-C."""
        record, begin = self.empty(case), time.perf_counter()
        try:
            record = answer(record)
        except Exception as error:
            record = record.failed(error)
        seconds = round(time.perf_counter() - begin, 2)
        return replace(record, seconds=seconds, finished=datetime.now(UTC).isoformat(timespec="seconds"))

    def _keep_all(self, record: Record) -> Record:
        step = record.case.step
        uncalibrated = self.trace(step)
        forecast = self.forecast(step)
        notes = list(forecast.notes)
        plan_path = forecast.keep_all().save(self.traces(step) / KEEP_ALL_PLAN)
        predicted, warnings = forecast.predicted()
        if uncalibrated:
            notes.append(f"no calibrated trace, since the step itself does not fit: {uncalibrated}")
        self.progress("    measuring eager")
        try:
            record = replace(record, eager=self.job(EAGER, plan_path).figures)
        except OutOfMemoryProblem as error:
            notes.append(f"the untouched model ran out of memory: {error}")
        record = replace(
            record,
            fingerprint=forecast.base.trace.meta.fingerprint,
            notes=tuple(notes),
            keep_all_predicted=predicted,
            eager_predicted=forecast.untouched(),
            keep_all_warnings=warnings,
            predicted=predicted,
            warnings=warnings,
            recomputed_ops=0,
        )
        record = self.measured(record, KEEP_ALL, plan_path)
        return replace(record, keep_all=record.measured)

    def case(self, case: Case) -> Record:
        """The record of a case: with a budget, planned, measured and verified beside its step with everything saved."""
        step = self.step(case.step)
        return step if case.budget == NONE else self.answered(case, lambda empty: self._planned(empty, step))

    def _planned(self, record: Record, step: Record) -> Record:
        case = record.case
        if step.status == records.FAILED:
            return replace(record, status=records.FAILED, message=step.message)
        record = replace(record, **{name: getattr(step, name) for name in SHARED})
        self.progress("    planning")
        forecast = self.forecast(case.step)
        budget_bytes = parse_budget(case.budget, forecast.base.saved.timeline.peak_allocated_bytes)
        record = replace(record, budget_bytes=budget_bytes)
        try:
            made = forecast.plan(case.planner, budget_bytes)
        except BudgetError as error:
            return replace(record, status=records.INFEASIBLE, message=str(error))
        predicted, warnings = forecast.predicted(made.plan)
        ops = made.planned.timeline.recomputed_ops
        record = replace(record, predicted=predicted, warnings=warnings, recomputed_ops=ops)
        return self.measured(record, PLAN, made.plan.save(self.root / "plans" / f"{record.key}.json"))

    def measured(self, record: Record, variant: str, plan_path: Path) -> Record:
        """The record with what a run of keep-all or of the plan showed, or that it did not fit, and its verification,
        which holds two models and may run out of memory where the measurement does not."""
        self.progress(f"    measuring {variant}")
        try:
            record = replace(record, measured=self.job(variant, plan_path).figures)
        except OutOfMemoryProblem as error:
            return replace(record, status=records.OUT_OF_MEMORY, message=str(error))
        if records.CALIBRATED not in record.predicted:
            record = record.noted("planned and predicted by the table of rules alone")
        if not self.method.verify_steps or self.rehearsed:
            return record
        self.progress("    verifying")
        try:
            checked = self.job(VERIFY, plan_path).verification
        except OutOfMemoryProblem as error:
            two = "the two models that verification holds do not fit"
            return record.noted(f"{variant.replace('_', '-')} was not verified: {two} ({error})")
        assert checked is not None
        if not checked.equal:
            record = replace(
                record, status=records.NOT_EQUAL, message=f"not equal to eager: {checked.first_difference}"
            )
        return replace(
            record,
            verified=checked.equal,
            bit_equal=checked.bit_equal,
            steps=checked.steps,
            first_difference=checked.first_difference,
        )

    def job(self, variant: str, plan_path: Path) -> JobResult:
        """Measure or verify in a fresh process; raises as `run_job` does."""
        method = self.method
        job = Job(
            variant=variant,
            plan_path=str(plan_path),
            device=method.device,
            memory_steps=method.memory_steps,
            warmup=method.warmup,
            runs=method.runs,
            steps=method.verify_steps,
        )
        return run_job(job, timeout_s=60.0 * method.timeout_minutes)


def run_campaign(campaign: Campaign, root: Path, progress: Progress, *, only: str = "") -> Book:
    """Run what has no answer yet in the directory; returns all records, which also stand in its `campaign.json`.

    Cases of the same step run one after the other and share what they can. Ctrl-C loses the running case alone.

    Args:
        only: a part of the label of the cases that run, with * and ? as in file names.

    Raises:
        EnvironmentProblem: no such device.
        SpecError: `only` fits no case.
        TraceError: the directory holds something else than a campaign.
    """
    cases = campaign.cases
    chosen = [c for c in cases if fnmatch.fnmatch(c.label.lower(), f"*{only.lower()}*")]
    if not chosen:
        raise SpecError(f"--only {only!r} fits none of the {len(cases)} cases, such as {cases[0].label!r}.")
    earlier = Book.of_directory(root)
    bench = Bench.open(campaign.method, root, progress)
    keys = {bench.keys.of_case(case): case for case in cases}
    made = {r.key: r for r in earlier.records} if earlier else {}
    if earlier and not made.keys() <= keys.keys():
        aside = earlier.save(root / f"campaign-{digest(sorted(made))}.json")
        progress(
            "What this directory holds was made in part by other code, versions or another device, or for other cases. "
            f"It is kept in {aside}, which `execute campaign` reports like any other."
        )
    queue = [k for k, c in keys.items() if c in chosen and (k not in made or made[k].status in RETRIED)]
    made = {k: made[k] for k in keys if k in made and k not in queue}
    for k, record in made.items():
        if record.status not in RETRIED and (root / "traces" / k / KEEP_ALL_PLAN).is_file():
            bench.steps[k] = record

    def save() -> Book:
        found = tuple(made[k] for k in keys if k in made)
        book = Book(name=campaign.name, method=campaign.method, asked=len(cases), records=found)
        book.save(root / BOOK)
        return book

    save()
    if finished := len(chosen) - len(queue):
        progress(f"{finished} of {len(chosen)} cases are finished and kept.")
    steps = list(dict.fromkeys(keys[k].step.label for k in queue))
    queue.sort(key=lambda k: steps.index(keys[k].step.label))  # as in the file, but a step's cases together
    for number, key in enumerate(queue):
        progress(f"[{number + 1}/{len(queue)}] {keys[key].label}")
        record = made[key] = bench.case(keys[key])
        save()
        progress(f"    {record.status}{': ' + record.message if record.message else ''}")
    return save()
