"""Run the cases of a campaign: each traced on the device, planned, and measured as `execute` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from executor.campaign.cases import NONE, Case, Method
from executor.measuring import JobResult
from executor.plans import Settings, measure_plan
from simulator.prediction import ask as api
from traces.errors import BudgetError, LowtideError, OutOfMemoryProblem, TraceError
from traces.files import Form, JsonRecord, to_json
from traces.isolated import run_fresh
from traces.provenance import REHEARSED
from traces.records import store
from traces.records.measurement import Measurement

# What became of a case: the first four are answers.
DONE, ABSENT, INFEASIBLE, OUT_OF_MEMORY = "measured", "rehearsed", "infeasible", "out of memory"
NOT_EQUAL, FAILED = "verification failed", "failed"
BOOK: Final = "campaign.json"

Say = Callable[[str], None]
Known = dict[
    str, dict[str, JobResult] | LowtideError
]  # by step: eager and save-all, or why there is no trace


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
    asked: int = 0  # cases that were to run; more than `records` where it was stopped
    method: Method
    records: tuple[Result, ...] = ()


def record(*, case: dict[str, Any], method: dict[str, Any], path: str) -> dict[str, Any]:
    """Save the trace of a case's step, measured on the device, for a fresh process. Raises LowtideError as `trace`."""
    from tracer.api import trace

    how = {"rounds": method["rounds"], "warmup": method["trace_warmup"], "seed": method["seed"]}
    made = trace(case["model"], device=method["device"], **how, **case["options"])
    store.save(made, path, force=True)
    return {}


def run_campaign(book: Book, cases: Sequence[Case], root: Path, say: Say) -> Book:
    """Run cases; returns the book with their results, which also stand in `campaign.json` in the directory, each as it
    is made.

    Args:
        book: without records.

    Raises:
        EnvironmentProblem: no such device.
        TraceError: the directory holds something already.
    """
    from tracer.step.step import check_device

    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise TraceError(f"{root}: holds something already; give a new directory with -o.")
    check_device(book.method.device)
    book = replace(book, asked=len(cases))
    steps = {step: root / "traces" / str(k) for k, step in enumerate(dict.fromkeys(c.step for c in cases))}
    known: Known = {}
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] {case.label}")
        plan = root / "plans" / f"{number}.json"
        found = _result(case, book.method, steps[case.step], known, plan, lambda line: say(f"    {line}"))
        say(f"    {found.status}{': ' + found.message if found.message else ''}")
        book = replace(book, records=(*book.records, found))
        book.save(root / BOOK)
    return book


def _result(case: Case, method: Method, trace: Path, known: Known, plan: Path, say: Say) -> Result:
    """Return what comes out of a case, also where it is an error."""
    try:
        m = _measured(case, method, trace, known, plan, say)
    except LowtideError as error:
        kinds = {BudgetError: INFEASIBLE, OutOfMemoryProblem: OUT_OF_MEMORY, LowtideError: FAILED}
        status = next(status for kind, status in kinds.items() if isinstance(error, kind))
        return Result(case=case, status=status, message=str(error))
    if m.verified is False:
        why = f"not equal to eager: {m.first_difference}"
        return Result(case=case, status=NOT_EQUAL, message=why, measurement=m)
    return Result(case=case, status=ABSENT if m.provenance == REHEARSED else DONE, measurement=m)


def _measured(case: Case, method: Method, trace: Path, known: Known, plan: Path, say: Say) -> Measurement:
    """What `measure_plan` finds, after the step's trace was recorded in a process of its own, once a step."""
    if case.step not in known:
        say("recording the step")
        given = {"case": to_json(case), "method": to_json(method), "path": str(trace)}
        try:
            run_fresh("executor.campaign.run:record", given, what="recorded the step")
            known[case.step] = {}
        except LowtideError as error:
            known[case.step] = error
    beside = known[case.step]
    if isinstance(beside, LowtideError):
        raise beside
    say("planning")
    made = api.plan(trace, None if case.budget == NONE else case.budget, planner=case.planner)
    how = {k: getattr(method, k) for k in ("device", "memory_steps", "warmup", "runs")}
    return measure_plan(made, made.save(plan), Settings(steps=method.verify_steps, **how), say, beside)
