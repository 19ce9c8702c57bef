"""Run the cases of a campaign: each traced on the device, planned, and measured as `execute` does."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from executor.campaign.cases import NONE, Campaign, Case, Method
from executor.measuring import JobResult
from executor.plans import Outcome, Settings, measure_plan
from simulator import api
from traces.errors import BudgetError, LowtideError, OutOfMemoryProblem, SpecError, TraceError
from traces.files.json_records import Form, JsonRecord, to_json
from traces.isolated import run_fresh
from traces.provenance import REHEARSED
from traces.records import store
from traces.records.measurement import Measurement

# What became of a case: the first four are answers.
DONE, ABSENT, INFEASIBLE, OUT_OF_MEMORY = "measured", "rehearsed", "infeasible", "out of memory"
NOT_EQUAL, FAILED = "verification failed", "failed"
BOOK: Final = "campaign.json"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one case."""

    case: Case
    status: str
    message: str = ""  # why, where the status is not `measured`
    measurement: Measurement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Book(JsonRecord):
    """The results of a campaign, in the order of its cases: `campaign.json`."""

    form: ClassVar = Form(
        name="campaign",
        version_key="record_version",
        version=3,
        advice="`execute campaign CASES -o DIR` writes DIR/campaign.json",
        error=TraceError,
    )
    name: str
    asked: int  # cases that were to run; more than `records` where it was stopped
    method: Method
    records: tuple[Result, ...] = ()


def record(*, case: dict[str, Any], method: dict[str, Any], path: str) -> dict[str, Any]:
    """Save the trace of a case's step, measured on the device, for a fresh process. Raises LowtideError as `trace`."""
    from tracer.api import trace

    how = {"rounds": method["rounds"], "warmup": method["trace_warmup"], "seed": method["seed"]}
    made = trace(case["model"], device=method["device"], profile=False, **how, **case["options"])
    store.save(made, path, force=True)
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The common part of one step's cases."""

    trace: Path
    failed: list[LowtideError] = field(default_factory=list)  # why there is no trace
    known: dict[str, JobResult] = field(default_factory=dict)  # eager and save-all


def run_campaign(campaign: Campaign, root: Path, say: Say, *, only: str = "") -> Book:
    """Run the cases; returns all results, which also stand in `campaign.json` in the directory, each as it is made.

    Args:
        only: a part of the label of the cases that run, with * and ? as in file names.

    Raises:
        EnvironmentProblem: no such device.
        SpecError: `only` fits no case.
        TraceError: the directory holds something already.
    """
    from tracer.step.step import check_device

    chosen = [c for c in campaign.cases if fnmatch.fnmatch(c.label.lower(), f"*{only.lower()}*")]
    if not chosen:
        raise SpecError(f"--only {only!r} fits none of the cases, such as {campaign.cases[0].label!r}.")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise TraceError(f"{root}: holds something already; give a new directory with -o.")
    check_device(campaign.method.device)
    book, steps = Book(name=campaign.name, asked=len(chosen), method=campaign.method), dict[str, _Step]()
    for number, case in enumerate(chosen, 1):
        say(f"[{number}/{len(chosen)}] {case.label}")
        step = steps.setdefault(case.step, _Step(trace=root / "traces" / str(len(steps))))
        plan = root / "plans" / f"{number}.json"
        found = _result(case, campaign.method, step, plan, lambda line: say(f"    {line}"))
        say(f"    {found.status}{': ' + found.message if found.message else ''}")
        book = replace(book, records=(*book.records, found))
        book.save(root / BOOK)
    return book


def _result(case: Case, method: Method, step: _Step, plan: Path, say: Say) -> Result:
    """Return what comes out of a case, also where it is an error."""
    try:
        found = _measured(case, method, step, plan, say)
    except LowtideError as error:
        kinds = {BudgetError: INFEASIBLE, OutOfMemoryProblem: OUT_OF_MEMORY, LowtideError: FAILED}
        status = next(status for kind, status in kinds.items() if isinstance(error, kind))
        return Result(case=case, status=status, message=str(error))
    m = found.measurement
    if m.verified is False:
        why = f"not equal to eager: {found.first_difference}"
        return Result(case=case, status=NOT_EQUAL, message=why, measurement=m)
    return Result(case=case, status=ABSENT if m.provenance == REHEARSED else DONE, measurement=m)


def _measured(case: Case, method: Method, step: _Step, plan: Path, say: Say) -> Outcome:
    """The outcome of `measure_plan`, after the step's trace was recorded in a process of its own, once a step."""
    if not step.failed and not step.trace.exists():
        say("recording the step")
        given = {"case": to_json(case), "method": to_json(method), "path": str(step.trace)}
        try:
            run_fresh("executor.campaign.run:record", given, what="recorded the step")
        except LowtideError as error:
            step.failed.append(error)
    if step.failed:
        raise step.failed[0]
    say("planning")
    made = api.plan(step.trace, None if case.budget == NONE else case.budget, planner=case.planner)
    how = {k: getattr(method, k) for k in ("device", "memory_steps", "warmup", "runs")}
    return measure_plan(made, made.save(plan), Settings(steps=method.verify_steps, **how), say, step.known)
