"""Run the outstanding cases of a campaign on a device: predicted, then measured, each time in a process of its own.

What is predicted comes from a step's traces, by stage of what is known: `rules`, all that a laptop can know, and
`calibrated`, workspaces and times measured on the device, op by op. What the cases of one step share (traces, eager,
and the rewritten step with everything saved) is a record too: the one that a case without a budget has.
"""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from executor.campaign import record as records
from executor.campaign.cases import NONE, Campaign, Case, Method, Step, digest
from executor.campaign.record import BOOK, CALIBRATED, RETRIED, RULES, STAGES, Book, Keys, Record, code_digest
from executor.measuring import EAGER, KEEP_ALL, PLAN, VERIFY, Job, JobResult, run_job
from simulator.allocator.device_fit import Setting
from simulator.allocator.settings import as_in, parse_alloc_conf
from simulator.core.budget import parse_budget
from simulator.core.limits import DEFAULTS
from simulator.core.problem import Problem
from simulator.prediction.planning import completed, plan_for
from simulator.prediction.step import Prediction, predict, untouched_fit
from simulator.prediction.warnings import text, warnings
from traces.devices import devices
from traces.errors import BudgetError, LowtideError, OutOfMemoryProblem, SpecError
from traces.files.json_records import to_json
from traces.isolated import run_fresh
from traces.provenance import REHEARSED, alloc_conf, provenance_of
from traces.records import store
from traces.records.plan import Plan

Progress = Callable[[str], None]
KEEP_ALL_PLAN: Final = "keep-all.json"
# Of a step's record, what those of its cases with a budget have too.
SHARED: Final = (
    "fingerprint", "notes", "keep_all_predicted", "eager_predicted", "keep_all_warnings", "eager", "keep_all",
)  # fmt: skip


# In processes of their own


def describe_device(*, device: str) -> dict[str, Any]:
    """The device of a campaign: its name, its memory, its entry in the device table ("": none), its environment."""
    from tracer.costs.profiles import board_of, processor
    from tracer.environment import environment
    from tracer.step.step import check_device

    check_device(device)
    name, target = processor(), "cpu"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.startswith("cuda"):
        import torch

        memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
        name = torch.cuda.get_device_name(device)
        target = board_of(name)
    return {"environment": environment(device), "name": name, "memory_bytes": memory_bytes, "target": target}


def record_step(
    *, step: dict[str, Any], method: dict[str, Any], target: str, directory: str
) -> dict[str, Any]:
    """Save the traces of a step below a directory, the cheapest first: those that are there stand also where a later
    one fails, as it does where the device's memory does not suffice. User's device profiles are neither read nor
    written. Raises LowtideError as `trace` would; OutOfMemoryError of torch, from what runs.
    """
    from tracer.recording import ProfileUse, record_drafted, record_real
    from tracer.step.step import load_spec
    from traces.devices import device as device_entry

    build = load_spec(step["model"], step["options"], seed=method["seed"])
    entry, off, root = device_entry(target), ProfileUse(off=True), Path(directory)
    fake, trace = record_drafted(build, entry, off)
    store.save(trace, root / RULES, force=True)
    how = {"rounds": method["rounds"], "warmup": method["trace_warmup"]}
    trace = record_real(build, entry, method["device"], off, **how, fake=fake)
    store.save(trace, root / CALIBRATED, force=True)
    return {}


# What is predicted


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step's traces by stage, and the one that plans are made from, which knows most."""

    stages: Mapping[str, Problem]
    base: Problem
    setting: Setting  # of this environment's allocator, in the trace's torch; none on the CPU

    @classmethod
    def load(cls, directory: Path, device: str) -> Forecast:
        """From the traces that stand below the directory, in so far as they do."""
        there = [stage for stage in STAGES if (directory / stage).is_dir()]
        stages = {stage: Problem(store.load(str(directory / stage))) for stage in there}
        base, setting = stages[there[-1]], Setting()
        if device.startswith("cuda"):
            conf = alloc_conf()
            settings = as_in(parse_alloc_conf(conf), base.trace.meta.torch_version)
            setting = Setting(settings=settings, alloc_conf=conf)
        return cls(stages, base, setting)

    def is_base(self, problem: Problem) -> bool:
        """Whether the base's plans are plans for a stage: the same ops and storages, by the same ids."""
        a, b = problem.trace, self.base.trace
        return a.meta.graph_fingerprint == b.meta.graph_fingerprint and a.ops.target == b.ops.target

    def judged(self, plan: Plan | None = None) -> dict[str, Prediction]:
        """By stage, the step with everything saved and with what a plan changes and recomputes, which is judged only
        where the graph is that of the base: a laptop's of a GPU's step may be another."""
        if plan is None:
            return {stage: predict(p, self.setting) for stage, p in self.stages.items()}
        return {
            stage: predict(
                p, self.setting, Plan(meta=p.trace.meta, actions=plan.actions, rewrites=plan.rewrites)
            )
            for stage, p in self.stages.items()
            if self.is_base(p)
        }

    def plan(self, planner: str, budget_bytes: int) -> Prediction:
        """The step with the plan for a budget; raises BudgetError if there is none."""
        # No other settings are tried: the runs have the environment's.
        here = replace(self.setting, asked=True)
        return plan_for(self.base, planner, DEFAULTS, here, budget_bytes=budget_bytes)


def told(judged: Mapping[str, Prediction]) -> tuple[records.Predictions, dict[str, tuple[str, ...]]]:
    """By stage, the figures with the plan, and what `simulate` would say of them, but for what stands beside all of
    their kind."""
    said = {s: tuple(text(w) for w in warnings(c)) for s, c in judged.items()}
    return {s: c.planned_figures for s, c in judged.items()}, said


# The cases


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
        call, what = "executor.campaign.bench:describe_device", "looked at the device"
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

    def traces(self, step: Step) -> Path:
        """Where the step's traces stand, once they are recorded."""
        return self.root / "traces" / self.keys.of_case(step.keep_all)

    def trace(self, step: Step) -> tuple[str, ...]:
        """Record the step's traces in a fresh process; returns what must be said if there is no calibrated one. Raises
        LowtideError if the step cannot be recorded. (That memory runs out while it is calibrated is an answer.)
        """
        directory = self.traces(step)
        given = {"step": to_json(step), "method": to_json(self.method), "target": self.target}
        self.progress("    recording the step")
        call, what = "executor.campaign.bench:record_step", "recorded the step"
        try:
            seconds = 60.0 * self.method.timeout_minutes
            run_fresh(call, {**given, "directory": str(directory)}, what=what, timeout_s=seconds)
        except OutOfMemoryProblem as error:
            if not (directory / RULES).is_dir():
                raise
            return (f"no calibrated trace, since the step itself does not fit: {error}",)
        return ()

    def case(self, case: Case) -> Record:
        """The record of a case: with a budget, planned, measured and verified beside its step with everything saved,
        whose record is made unless an earlier case or run did."""
        key = self.keys.of_case(case.step.keep_all)
        if key not in self.steps:
            self.steps[key] = self.answered(case.step.keep_all, self._keep_all)
        step = self.steps[key]
        return step if case.budget == NONE else self.answered(case, lambda empty: self._planned(empty, step))

    def answered(self, case: Case, answer: Callable[[Record], Record]) -> Record:
        """What is made of a case's empty record, whatever happens but Ctrl-C."""
        begin = time.perf_counter()
        record = Record(
            case=case,
            key=self.keys.of_case(case),
            status=records.DONE_ABSENT if self.rehearsed else records.DONE,
            provenance=provenance_of(self.method.device),
            environment=self.keys.environment,
        )
        try:
            record = answer(record)
        except LowtideError as error:
            record = replace(record, status=records.FAILED, message=str(error))
        except Exception as error:
            why = f"{type(error).__name__}: {error}; please report this."
            record = replace(record, status=records.FAILED, message=why)
        seconds = round(time.perf_counter() - begin, 2)
        return replace(record, seconds=seconds, finished=datetime.now(UTC).isoformat(timespec="seconds"))

    def _keep_all(self, record: Record) -> Record:
        step = record.case.step
        notes = self.trace(step)
        forecast = Forecast.load(self.traces(step), self.method.device)
        if not all(map(forecast.is_base, forecast.stages.values())):
            other = (
                "the uncalibrated trace has another graph than the device's, so plans cannot be judged on it"
            )
            notes = (other, *notes)
        judged = forecast.judged()
        plan_path = completed([*judged.values()][-1]).plan.save(self.traces(step) / KEEP_ALL_PLAN)
        predicted, said = told(judged)
        self.progress("    measuring eager")
        try:
            record = replace(record, eager=self.job(EAGER, plan_path).figures)
        except OutOfMemoryProblem as error:
            notes = (*notes, f"the untouched model ran out of memory: {error}")
        record = replace(
            record,
            fingerprint=forecast.base.trace.meta.fingerprint,
            notes=notes,
            keep_all_predicted=predicted,
            eager_predicted={s: untouched_fit(c).figures(c.trace.time_ns) for s, c in judged.items()},
            keep_all_warnings=said,
            predicted=predicted,
            warnings=said,
            recomputed_ops=0,
        )
        record = self.measured(record, KEEP_ALL, plan_path)
        return replace(record, keep_all=record.measured)

    def _planned(self, record: Record, step: Record) -> Record:
        case = record.case
        if step.status == records.FAILED:
            return replace(record, status=records.FAILED, message=step.message)
        record = replace(record, **{name: getattr(step, name) for name in SHARED})
        self.progress("    planning")
        forecast = Forecast.load(self.traces(case.step), self.method.device)
        budget_bytes = parse_budget(case.budget, forecast.base.saved.timeline.peak_allocated_bytes)
        record = replace(record, budget_bytes=budget_bytes)
        try:
            made = forecast.plan(case.planner, budget_bytes)
        except BudgetError as error:
            return replace(record, status=records.INFEASIBLE, message=str(error))
        predicted, said = told(forecast.judged(made.plan))
        ops = made.planned.timeline.recomputed_ops
        record = replace(record, predicted=predicted, warnings=said, recomputed_ops=ops)
        return self.measured(record, PLAN, made.plan.save(self.root / "plans" / f"{record.key}.json"))

    def measured(self, record: Record, variant: str, plan_path: Path) -> Record:
        """The record with what a run of keep-all or of the plan showed, or that it did not fit, and its verification,
        which holds two models and may run out of memory where the measurement does not."""
        self.progress(f"    measuring {variant}")
        try:
            record = replace(record, measured=self.job(variant, plan_path).figures)
        except OutOfMemoryProblem as error:
            return replace(record, status=records.OUT_OF_MEMORY, message=str(error))
        by_rules = "planned and predicted by the table of rules alone"
        if CALIBRATED not in record.predicted and by_rules not in record.notes:
            record = replace(record, notes=(*record.notes, by_rules))
        if not self.method.verify_steps or self.rehearsed:
            return record
        self.progress("    verifying")
        try:
            checked = self.job(VERIFY, plan_path).verification
        except OutOfMemoryProblem as error:
            two = "the two models that verification holds do not fit"
            note = f"{variant.replace('_', '-')} was not verified: {two} ({error})"
            return replace(record, notes=(*record.notes, note))
        assert checked is not None
        return replace(
            record,
            status=record.status if checked.equal else records.NOT_EQUAL,
            message="" if checked.equal else f"not equal to eager: {checked.first_difference}",
            verified=checked.equal,
            bit_equal=checked.bit_equal,
            steps=checked.steps,
            first_difference=checked.first_difference,
        )

    def job(self, variant: str, plan_path: Path) -> JobResult:
        """Measure or verify in a fresh process; raises as `run_job` does."""
        m = self.method
        job = Job(
            variant=variant,
            plan_path=str(plan_path),
            device=m.device,
            memory_steps=m.memory_steps,
            warmup=m.warmup,
            runs=m.runs,
            steps=m.verify_steps,
        )
        return run_job(job, timeout_s=60.0 * m.timeout_minutes)


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
