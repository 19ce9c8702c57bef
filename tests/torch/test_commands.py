"""Bad input to `trace` and `execute`, and what `simulate` shares with them: one clear line, an exit code, no litter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

import executor.plans as plans
import tracer.api
from executor.cli.main import execute
from executor.measuring import Job, JobResult, perform, run_job
from simulator.cli.main import main as simulate
from simulator.core.problem import Problem
from tests import tiny
from tests.commands import ROOT, call, python
from tests.torch import small_nets
from tests.torch.steps import recompute_all, recorded
from tracer.cli.main import trace
from tracer.step.step import load_spec
from traces.errors import EnvironmentProblem, OutOfMemoryProblem
from traces.records import store
from traces.records.measurement import RunFigures, Verification
from traces.records.plan import Action, Plan

MLP = small_nets.spec("mlp")
FIGURES = {"peak_allocated_bytes": 1, "peak_reserved_bytes": None, "step_time_ns": 1}


def refused(result: Result, *words: str, code: int = 2) -> None:
    """One line that starts with "Error:", nothing on stdout, the exit code."""
    assert result.exit_code == code, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, result.stderr
    assert result.stderr.splitlines()[-1] == errors[0]
    for word in words:
        assert word in errors[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory that a refused command must leave as it was."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def litter(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = recorded(load_spec(MLP)).trace
    return Plan(meta=made.meta, predicted={"plan": FIGURES, "baseline": FIGURES})


# trace


@pytest.mark.parametrize(
    ("function", "mode", "words"),
    [
        ("branching", [], ["looks at the data of a tensor", "small_nets.py", "if y.sum() > 0"]),
        ("loss_raises", ["--device", "cpu"], ["KeyError", "in loss"]),
        ("no_such_function", ["--device", "cpu"], ["no function 'no_such_function'"]),
    ],
)
def test_a_step_that_cannot_be_traced(folder: Path, function: str, mode: list[str], words: list[str]) -> None:
    """Nor measured, which begins with a trace; what else cannot: `test_capture`, `test_refusals`, `test_models`."""
    refused(call(trace, small_nets.spec(function), "-o", "out", *mode), *words)
    assert litter(folder) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["resnet999"], ["resnet999"]),
        (["resnet18", "--batch-size", "many"], ["batch-size"]),
        (["resnet18", "--target", "h9000"], ["h9000"]),
        (["resnet18", "--device", "cpu", "--target", "h100"], ["--target", "--device"]),
        (["resnet18", "--nonsense"], ["nonsense"]),
        (["show", "nowhere"], ["nowhere"]),
    ],
)
def test_what_trace_does_not_understand(folder: Path, words: list[str], says: list[str]) -> None:
    refused(call(trace, *words), *says)
    assert litter(folder) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["trace", "execute"])
def test_no_gpu(folder: Path, plan: Plan, command: str) -> None:
    if command == "trace":
        refused(call(trace, MLP, "--device", "cuda"), "--device cuda")
        assert litter(folder) == []
    else:
        plan.save("plan.json")
        refused(call(execute, "plan.json", "--trust", "--device", "cuda"), "--device cuda")
        assert litter(folder) == ["plan.json"]


def test_an_output_that_exists(folder: Path) -> None:
    assert call(trace, MLP, "-o", "out").exit_code == 0
    before = {p: p.read_bytes() for p in Path("out").iterdir()}
    refused(call(trace, MLP, "-o", "out"), "exists", "--force")
    assert {p: p.read_bytes() for p in Path("out").iterdir()} == before
    assert call(trace, MLP, "-o", "out", "--force").exit_code == 0
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("precious")
    refused(call(trace, MLP, "-o", "mine", "--force"), "not a trace")
    assert litter(folder) == ["mine", "mine/thesis.tex", "out", "out/ops.parquet", "out/storages.parquet"]


def test_an_output_in_a_place_that_is_none(folder: Path) -> None:
    Path("file").write_text("")
    result = call(trace, MLP, "-o", "file/out")
    refused(result, "file/out", "not a directory")
    assert "Capturing" not in result.stderr  # nor is anything measured whose result could not be kept
    assert litter(folder) == ["file"]


def test_json_is_one_object_on_stdout(folder: Path) -> None:
    result = call(trace, MLP, "-o", "out", "--json")
    answer = json.loads(result.stdout)
    assert answer["trace"] == "out"
    assert answer["resident_bytes"]["parameter"] == 848
    assert "Capturing" in result.stderr
    assert call(trace, MLP, "-o", "other", "--json", "-q").stderr == ""
    shown = json.loads(call(trace, "show", "out", "--json").stdout)
    assert shown["ops"] == answer["ops"]
    assert "resnet18" in json.loads(call(trace, "models", "--json").stdout)["models"]
    assert "resnet18" in call(trace, "models").stdout.split()


# Files of others and broken ones


def test_what_is_no_plan(folder: Path) -> None:
    """What a broken file is told by: `tests/core/test_plan.py`."""
    Path("plan.json").write_text("{")
    Path("out").mkdir()
    before = litter(folder)
    for given, words in (
        ("plan.json", "not a JSON file"),
        ("out", "no such plan"),
        ("none.json", "no such plan"),
    ):
        refused(call(execute, given, "--trust", "--report", "r.html", "-o", "m.json", "--json"), given, words)
    assert litter(folder) == before


def mutants(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every way of putting a value of another kind in one place of a JSON object."""
    if path:
        for wrong in (None, "x", -1, [], {}):
            yield path, wrong
    if isinstance(data, dict):
        for k, v in data.items():
            yield from mutants(v, (*path, k))
    elif isinstance(data, list) and data:
        yield from mutants(data[0], (*path, 0))


def test_a_plan_that_was_edited_is_refused_or_read_but_never_crashes(
    folder: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(given: Job) -> JobResult:
        Plan.load(given.plan_path)
        return JobResult(figures=RunFigures(peak_allocated_bytes=1, step_time_ns=1), environment={})

    monkeypatch.setattr(plans, "run_job", job)
    made = recorded(load_spec(MLP)).trace
    good = replace(plan, actions=recompute_all(Problem(made))).to_json()
    good["actions"][0]["evict_after"] = [20]
    crashes = []
    for path, wrong in mutants(good):
        data = json.loads(json.dumps(good))
        place = data
        for k in path[:-1]:
            place = place[k]
        place[path[-1]] = wrong
        Path("plan.json").write_text(json.dumps(data))
        result = call(execute, "plan.json", "--trust", "--no-verify", "--json", "-q")
        over = path == ("budget_bytes",) and wrong == -1 and "over the budget of" in result.output
        if result.exit_code not in ((1,) if over else (0, 2)) or (
            result.exception is not None and not isinstance(result.exception, SystemExit)
        ):
            crashes.append((".".join(map(str, path)), wrong, repr(result.exception)))
    assert crashes == []


# execute


def test_a_plan_for_another_model(folder: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal in a fresh process comes back as it was (`test_fresh`): here it is one in this process."""
    monkeypatch.setattr(plans, "run_job", perform)
    plan.save("plan.json")
    other = small_nets.spec("residual")
    refused(
        call(execute, "plan.json", "--model", other, "--report", "r.html", "-o", "m.json"),
        "made for another model",
    )
    assert litter(folder) == ["plan.json"]


def test_a_plan_without_a_prediction(folder: Path, plan: Plan) -> None:
    replace(plan, predicted={}).save("plan.json")
    refused(call(execute, "plan.json", "--trust"), "no prediction")


def test_a_plan_whose_model_is_gone(folder: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "run_job", perform)  # in this process
    replace(plan, meta=replace(plan.meta, model="elsewhere.py:build")).save("plan.json")
    refused(call(execute, "plan.json", "--trust"), "elsewhere.py")


def test_a_failed_verification_is_exit_code_1(
    folder: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(given: Job) -> JobResult:
        outcome = Verification(
            equal=False, bit_equal=False, steps=1, max_abs_difference={"loss": 0.5},
            first_difference="step 1: loss differs by 0.5",
        )  # fmt: skip
        return JobResult(
            figures=RunFigures(peak_allocated_bytes=1, step_time_ns=1),
            environment={},
            verification=outcome if given.variant == "verify" else None,
        )

    monkeypatch.setattr(plans, "run_job", job)
    plan.save("plan.json")
    result = call(execute, "plan.json", "--trust", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)  # the figures are printed all the same
    assert answer["verified"] is False
    assert result.stderr.splitlines()[-1].startswith("Error: the planned step does not compute")
    assert "Traceback" not in result.output


def test_a_measured_peak_over_the_budget_is_exit_code_1(
    folder: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = RunFigures(peak_allocated_bytes=1 << 20, step_time_ns=1)
    monkeypatch.setattr(plans, "run_job", lambda _: JobResult(figures=figures, environment={}))
    for budget, code in ((1 << 20, 0), ((1 << 20) - 1, 1)):
        replace(plan, budget_bytes=budget).save("plan.json")
        result = call(execute, "plan.json", "--trust", "--no-verify", "--json")
        assert result.exit_code == code
        assert json.loads(result.stdout)["within_budget"] is (code == 0)
    assert "over the budget of" in result.stderr


def test_actions_that_do_not_give_the_figures_are_refused(folder: Path, plan: Plan) -> None:
    sealed = replace(plan, actions=(Action(storage=3),)).sealed()
    replace(sealed, actions=()).save("plan.json")  # as does whoever edits the file
    refused(call(execute, "plan.json", "--trust"), "do not give its figures")
    peak = sealed.predicted["plan"]["peak_allocated_bytes"]
    figures = {**sealed.predicted["plan"], "peak_allocated_bytes": peak - 1}
    replace(sealed, predicted={**sealed.predicted, "plan": figures}).save("plan.json")
    refused(call(execute, "plan.json", "--trust"), "do not give its figures")
    Plan.load(sealed.save("plan.json")).check_seal("plan.json")


def test_a_plan_is_measured_where_nothing_else_fits(
    folder: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(given: Job) -> JobResult:
        if given.variant != "plan":
            raise OutOfMemoryProblem("out of memory: 9 GiB")
        return JobResult(figures=RunFigures(peak_allocated_bytes=1, step_time_ns=1), environment={})

    monkeypatch.setattr(plans, "run_job", job)
    plan.save("plan.json")
    result = call(execute, "plan.json", "--trust", "--report", "r.html")
    assert result.exit_code == 0, result.output
    assert "  not verified" in result.output
    answer = json.loads(call(execute, "plan.json", "--trust", "--json").stdout)
    assert answer["measured"]["peak_allocated_bytes"] == 1
    assert (answer["verified"], answer["eager"]["peak_allocated_bytes"]) == (None, None)
    assert answer["slowdown_percent"]["measured"] is None
    assert sum("ran out of memory" in text for text in answer["warnings"]) == 3


def test_a_process_that_dies_is_explained(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = tmp_path / "python"
    killer.write_text("#!/bin/sh\necho 'last words' >&2\nkill -9 $$\n")
    killer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killer))
    job = Job(
        variant="plan", plan_path="x", model="", device="cpu", memory_steps=1, warmup=0, runs=1, steps=0
    )
    with pytest.raises(EnvironmentProblem, match=r"out of memory.*last words"):
        run_job(job)


# Without torch


@pytest.mark.parametrize("command", ["trace", "execute"])
def test_a_missing_torch(
    folder: Path, plan: Plan, command: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stub = tmp_path_factory.mktemp("stub")
    (stub / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    words = (
        ["tracer", "resnet18", "-o", "out"] if command == "trace" else ["executor", "plan.json", "--trust"]
    )
    if command == "execute":
        plan.save("plan.json")
    before = litter(folder)
    done = python("-m", *words, cwd=folder, code=2, PYTHONPATH=os.pathsep.join([str(stub), str(ROOT)]))
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: torch cannot be imported")
    assert "pip install" in last
    assert litter(folder) == before


SWEEP = ("sweep", "resnet18", "--batch-sizes", "1", "--budget", "90%")


@pytest.mark.parametrize(
    "words",
    [
        (simulate, "chain", "--report", "FILE/page.html"),
        (simulate, "chain", "--report", "FOLDER"),
        (simulate, "chain", "-o", "FILE/plan.json"),
        (simulate, "chain", "-o", "FOLDER", "--force"),
        (simulate, "compare", "chain", "--budget", "90%", "--report", "FILE/page.html"),
        (simulate, "pareto", "chain", "--report", "FILE/page.html"),
        (simulate, *SWEEP, "--report", "FILE/page.html"),
        (execute, "plan.json", "-o", "FILE/m.json"),
        (execute, "plan.json", "--report", "FILE/page.html"),
        (execute, "campaign", "cpu", "--report", "FILE/page.html"),
    ],
)
def test_what_cannot_be_written_or_read_in_the_end_is_refused_before_the_work(
    words: tuple[Any, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process is started, and no trace or plan is opened: there is no `chain` and no `plan.json`."""
    (folder / "FILE").write_text("in the way")
    (folder / "FOLDER").mkdir()
    before = sorted(folder.rglob("*"))

    def forbidden(*args: object, **more: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", forbidden)
    command, *rest = words
    result = call(command, *rest)
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert "Error: " in result.stderr
    assert "no such trace" not in result.stderr
    assert "no such plan" not in result.stderr
    assert sorted(folder.rglob("*")) == before


NOISY = """
import atexit
import os
import torch
from torch import nn

print("at import")
atexit.register(lambda: os.write(1, b"at the end"))
def build():
    print("in build")
    os.write(1, b"below Python")
    os.system("echo a child")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return model, (torch.randn(4, 8), torch.randn(4, 8)), nn.functional.mse_loss, torch.optim.SGD
"""


def test_what_the_users_code_prints_does_not_break_the_answer(tmp_path: Path) -> None:
    """Nor is there more on stderr than that: torch 2.15 imports Triton, which complains of what is never collected."""
    (tmp_path / "noisy.py").write_text(NOISY)
    done = python("-m", "tracer", "noisy.py:build", "-o", "t", "--json", "-q", cwd=tmp_path)
    assert json.loads(done.stdout)["trace"] == "t"
    assert done.stderr == "at import\nin build\nbelow Pythona child\nat the end"


def test_threads_take_turns_in_capturing() -> None:
    def step(width: int) -> Any:
        batch = torch.randn(4, 8), torch.randn(4, width)
        net = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(width, width)
        )
        return tracer.api.trace(net, batch, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(step, range(3, 7)))
    assert [t.meta.fingerprint for t in made] == [step(width).meta.fingerprint for width in range(3, 7)]


@pytest.mark.parametrize("words", [(), ("export",), ("errors",)])
@pytest.mark.usefixtures("by_rules")
def test_code_that_only_a_plan_names_does_not_run(
    folder: Path, plan: Plan, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan or a trace that somebody sent: its Python file would note that it ran."""
    Path("theirs.py").write_text(
        "import pathlib\npathlib.Path('ran').touch()\ndef build(batch_size=2): ...\n"
    )
    replace(plan, meta=replace(plan.meta, model="theirs.py:build")).save("plan.json")
    sent = tiny.chain(2)
    store.save(replace(sent, meta=replace(sent.meta, model="theirs.py:build")), "sent")
    given = [*words, *(("sent", "-o", "errors.json") if "errors" in words else ("plan.json",))]
    refused(call(execute, *given), "theirs.py:build", "--trust", "--model")
    assert not Path("ran").exists()
    monkeypatch.setattr(plans, "run_job", perform)  # in this process
    call(execute, *given, "--trust")
    assert Path("ran").exists()
