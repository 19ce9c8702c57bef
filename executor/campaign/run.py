"""Run a campaign: the cases of a TOML file, each traced, planned, and measured as `execute` does."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec

from executor.measuring import EAGER, KEEP_ALL, JobResult
from executor.plans import Settings, measure_plan
from simulator.core.limits import parse_budget
from simulator.planners import DEFAULT, REGISTRY
from simulator.prediction import ask as api
from simulator.studies.tracing import workers
from tracer.api import trace
from tracer.step.loop_options import AROUND_OPTIONS
from tracer.step.named.models import IMAGE_OPTIONS, SEQUENCE_OPTIONS
from tracer.step.step import check_device
from traces.errors import BudgetError, LowtideError, OutOfMemoryProblem, SpecError, TraceError
from traces.files import Form, JsonRecord, canonical_json, from_json, to_json
from traces.isolated import run_fresh
from traces.model_spec import short_name, split_reference
from traces.progress import Say, counted, counting, silent
from traces.provenance import REHEARSED
from traces.records import store
from traces.records.measurement import Measurement
from traces.shapes import MARKS

PACKAGED: Final = Path(__file__).resolve().parent
NONE: Final = "none"  # as a budget: everything saved
Count = Annotated[int, msgspec.Meta(ge=0)]
OneOrMore = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question to the machine: how much a step needs with a plan. `options` are those that `trace` takes."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: str = NONE  # `none`, or what `simulate --budget` takes
    planner: str = "save-all"

    @property
    def label(self) -> str:
        """The case in a line: `resnet50 b8 px64 amp bfloat16 60% search`."""
        options = (f"{MARKS.get(k, k.replace('_', '-') + ' ')}{v}" for k, v in sorted(self.options.items()))
        plan = "save-all" if self.budget == NONE else f"{self.budget} {self.planner}"
        return " ".join((short_name(self.model), *options, plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How the cases are traced and measured: the table [campaign]."""

    device: str = "cpu"  # unless --device says otherwise
    rounds: OneOrMore = 3  # timed rounds of the trace
    trace_warmup: Count = 1
    verify_steps: Count = 3  # 0: no verification
    memory_steps: OneOrMore = 5  # those after the first are the steady ones
    warmup: Count = 1
    runs: OneOrMore = 5  # timed steps
    seed: int = 0


def load_cases(name: str) -> tuple[Method, tuple[Case, ...]]:
    """Read, check and multiply out a cases file: its path, or the name of one that comes with Lowtide (`cpu`, `gpu`,
    `gpu-quick`). Raises SpecError if there is none, it is no TOML, or a key or value means nothing; says which case.
    """
    path = Path(name) if Path(name).is_file() else PACKAGED / f"{name.removesuffix('.toml')}.toml"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in PACKAGED.glob("*.toml")))
        raise SpecError(f"{name}: no such file of cases; give the path of a TOML file, or one of: {names}.")
    known = ("model", "budget", "planner", *IMAGE_OPTIONS, *SEQUENCE_OPTIONS, *AROUND_OPTIONS)
    place, cases = str(path), dict[str, Case]()
    try:
        data = _keys(tomllib.loads(path.read_text(encoding="utf-8")), ("campaign", "case"))
        if not isinstance(data.get("case"), list):
            raise SpecError("no cases; add a table [[case]] with a model.")
        place = f"{path}, [campaign]"
        method = from_json(Method, _keys(data.get("campaign", {}), [f.name for f in fields(Method)]))
        for number, table in enumerate(data["case"], 1):
            place = f"{path}, case {number}"
            for case in _multiplied(_keys(table, known), path.resolve().parent):
                cases.setdefault(_name(case), case)  # the same question is asked once
    except (LowtideError, ValueError) as error:  # broken TOML is one
        raise SpecError(f"{place}: {error}") from None
    return method, tuple(cases.values())


def _keys(table: Any, known: Iterable[str]) -> dict[str, Any]:
    """A table of the file by the names of options; SpecError for a key that is none of these."""
    if not isinstance(table, dict):
        raise SpecError(f"{table!r} must be a table.")
    flags = [k.replace("_", "-") for k in known]
    for key in table:
        if key not in flags:
            raise SpecError(f"unknown key {key!r}; known are {', '.join(dict.fromkeys(flags))}.")
    return {k.replace("-", "_"): v for k, v in table.items()}


def _multiplied(table: dict[str, Any], root: Path) -> Iterator[Case]:
    lists = {k: v if isinstance(v, list) else [v] for k, v in table.items()}
    if "model" not in lists or [] in lists.values():
        raise SpecError('no model (model = "resnet50" or a list of models), or an empty list.')
    budgets, planners = lists.pop("budget", [NONE]), lists.pop("planner", [DEFAULT])
    for *given, budget, planner in itertools.product(*lists.values(), budgets, planners):
        options = dict(zip(lists, given, strict=True))
        model = str(options.pop("model"))
        if planner not in REGISTRY:
            raise SpecError(f"{planner!r} is no planner; there are {', '.join(REGISTRY)}.")
        if (parts := split_reference(model)) is not None:
            model = f"{root / parts[0]}:{parts[1]}"  # paths of models are relative to the cases file
        if budget == NONE:
            yield Case(model=model, options=options)
        else:
            parse_budget(str(budget))
            yield Case(model=model, options=options, budget=str(budget), planner=planner)


# What became of a case: the first four are answers.
DONE, ABSENT, INFEASIBLE, OUT_OF_MEMORY = "measured", "rehearsed", "infeasible", "out of memory"
NOT_EQUAL, FAILED = "verification failed", "failed"
BOOK: Final = "campaign.json"


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
    how = {"rounds": method["rounds"], "warmup": method["trace_warmup"], "seed": method["seed"]}
    store.save(trace(case["model"], device=method["device"], **how, **case["options"]), path, force=True)
    return {}


def run_campaign(book: Book, cases: Sequence[Case], root: Path, say: Say, dask: str = "") -> Book:
    """Run cases; returns the book, which had no records, with their results. They also stand in `campaign.json` in the
    directory, each as it is made, and those that stand there already are not run again, except what failed. `dask`: the
    address of a Dask scheduler on whose workers the cases run, those of one step one after another.

    Raises EnvironmentProblem: there is no such device here, or no scheduler; TraceError: the directory holds something
    else, or another campaign.
    """
    order = {_name(case): number for number, case in enumerate(cases, 1)}
    root = root.absolute() if dask else root
    book = replace(book, asked=len(cases), records=_done_before(book, root, order))
    done = {_name(r.case) for r in book.records}
    todo = {order[_name(case)]: case for case in cases if _name(case) not in done}
    if todo and not dask:
        check_device(book.method.device)
    book.save(root / BOOK)
    for found in _on_workers(todo, book, root, dask) if dask else run_cases(todo, book, root, say):
        say(f"{found.case.label}: {found.status}{': ' + found.message if found.message else ''}")
        records = sorted((*book.records, found), key=lambda r: order[_name(r.case)])
        book = replace(book, records=tuple(records))
        book.save(root / BOOK)
    return book


def _name(case: Case) -> str:
    return canonical_json(to_json(case))


def _trace(case: Case, root: Path) -> Path:
    """Where the trace of a case's step is."""
    step = _name(replace(case, budget=NONE, planner=""))
    return root / "traces" / sha256(step.encode()).hexdigest()[:8]


def _done_before(book: Book, root: Path, order: Mapping[str, int]) -> tuple[Result, ...]:
    """The results in a directory that holds this campaign; none in a new one."""
    if (root / BOOK).is_file():
        before = Book.load(root / BOOK)
        if before.method == book.method and all(_name(r.case) in order for r in before.records):
            return tuple(r for r in before.records if r.status != FAILED)
    elif not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return ()
    raise TraceError(f"{root}: holds something else already; give a new directory with -o.")


def _on_workers(cases: Mapping[int, Case], book: Book, root: Path, dask: str) -> Iterator[Result]:
    """What comes out of cases on the workers of a Dask cluster, as it comes; those of a step go to one worker."""
    steps: dict[Path, dict[int, Case]] = {}
    for number, case in cases.items():
        steps.setdefault(_trace(case, root), {})[number] = case
    with counting(len(cases)) as done, workers(dask, 0) as pool:
        asked = [pool.submit(lambda of: [*run_cases(of, book, root, silent)], of) for of in steps.values()]
        for future in as_completed(asked):
            for found in future.result():
                done()
                yield found


def run_cases(cases: Mapping[int, Case], book: Book, root: Path, say: Say) -> Iterator[Result]:
    """What comes out of cases, by their numbers, one after another. Eager and save-all are measured once a step."""
    known: dict[Path, dict[str, JobResult]] = {}
    for step, m in ((_trace(r.case, root), r.measurement) for r in book.records if r.measurement):
        of = (EAGER, m.eager), (KEEP_ALL, m.keep_all)
        known[step] = {k: JobResult(figures=v, environment=dict(m.environment)) for k, v in of}
    for number, case in counted(cases.items(), lambda item: item[1].label, say):
        step, plan = _trace(case, root), root / "plans" / f"{number}.json"
        yield _result(case, book.method, step, known.setdefault(step, {}), plan, lambda s: say(f"    {s}"))


def _result(
    case: Case, method: Method, trace: Path, known: dict[str, JobResult], plan: Path, say: Say
) -> Result:
    """Return what comes out of a case, also where it is an error: what `measure_plan` finds, after the step's trace was
    recorded in a process of its own."""
    stages = counted(("the step's trace", "a plan", "by the plan"), str, say)
    try:
        next(stages)
        if not trace.exists():
            given = {"case": to_json(case), "method": to_json(method), "path": str(trace)}
            run_fresh("executor.campaign.run:record", given, what="recorded the step")
        next(stages)
        made = api.plan(trace, None if case.budget == NONE else case.budget, planner=case.planner)
        settings = from_json(Settings, {**to_json(method), "steps": method.verify_steps})
        next(stages)
        m = measure_plan(made, made.save(plan), settings, say, known)
    except LowtideError as error:
        kinds = {BudgetError: INFEASIBLE, OutOfMemoryProblem: OUT_OF_MEMORY, LowtideError: FAILED}
        status = next(status for kind, status in kinds.items() if isinstance(error, kind))
        return Result(case=case, status=status, message=str(error))
    why = f"not equal to eager: {m.first_difference}" * (m.verified is False)
    status = NOT_EQUAL if why else ABSENT if m.provenance == REHEARSED else DONE
    return Result(case=case, status=status, message=why, measurement=m)
