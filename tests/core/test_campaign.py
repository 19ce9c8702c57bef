"""Campaigns: what a file of cases means, what becomes of each case, and what is shown of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from executor.campaign import run
from executor.campaign.page import answer
from executor.campaign.run import PACKAGED, Book, Case, Method, load_cases, run_campaign
from executor.cli.main import execute
from executor.measuring import JobResult
from executor.plans import Settings
from tests import tiny
from tests.commands import call
from traces.errors import LowtideError, OutOfMemoryProblem, SpecError, TraceError
from traces.progress import silent
from traces.records import store
from traces.records.measurement import Measurement, RunFigures
from traces.records.plan import Plan

CASE = Case(model="bert-tiny")
CHAIN = tiny.chain(2)  # of 20 bytes; a plan can do with 16
TWO_MODELS = """
[campaign]
runs = 7
[[case]]
model = ["bert-tiny", "t5-tiny"]
budget = ["none", "90%", "10%"]
planner = "mu-two"
"""


# Cases


def cases(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "cases.toml"
    file.write_text(text)
    return file


def test_lists_are_multiplied_out(tmp_path: Path) -> None:
    method, made = load_cases(
        str(
            cases(
                tmp_path,
                TWO_MODELS + '[[case]]\nmodel = "net.py:build"\nbatch-size = [8, 16]\nbudget = "2GiB"\n'
                'planner = ["search", "sqrt-n"]\namp = "bfloat16"\n[[case]]\nmodel = "bert-tiny"\n',
            )
        )
    )
    assert method == Method(runs=7)
    assert [c.label for c in made] == [
        *(f"{m} {b}" for m in ("bert-tiny", "t5-tiny") for b in ("save-all", "90% mu-two", "10% mu-two")),
        *(f"net amp bfloat16 b{n} 2GiB {planner}" for n in (8, 16) for planner in ("search", "sqrt-n")),
    ]  # and what is asked twice, once
    assert made[0] == Case(model="bert-tiny")
    assert made[-1].model == f"{tmp_path}/net.py:build"
    assert made[-1].options == {"batch_size": 16, "amp": "bfloat16"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[case]\n", "cases.toml: Expected"),
        ("", "no cases"),
        ("case = 3\n", "no cases"),
        ("[[case]]\nbatch-size = 8\n", "case 1: no model"),
        ('[[case]]\nmodel = "resnet18"\nbatch-sizes = 8\n', "unknown key 'batch-sizes'"),
        (
            '[[case]]\nmodel = "resnet18"\n[[case]]\nmodel = "resnet18"\nbudget = "much"\n',
            "case 2: budget 'much'",
        ),
        ('[[case]]\nmodel = "resnet18"\nbudget = []\n', "an empty list"),
        ('[[case]]\nmodel = "resnet18"\nplanner = "best"\n', "'best' is no planner"),
        (
            '[campaign]\nruns = "5"\n[[case]]\nmodel = "resnet18"\n',
            r"\[campaign\]: Expected `int`, got `str`",
        ),
        ('[other]\n[[case]]\nmodel = "resnet18"\n', "unknown key 'other'"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        load_cases(str(cases(tmp_path, text)))


def test_the_packaged_cases_can_be_read_by_their_name() -> None:
    for path in PACKAGED.glob("*.toml"):
        method, made = load_cases(path.stem)
        assert len(made) >= 9
        assert method.device == {"cpu": "cpu", "gpu": "cuda"}[path.stem.partition("-")[0]]
    with pytest.raises(SpecError, match="cpu, gpu"):
        load_cases("tpu")


# Running


@dataclass
class Machine:
    """Stands for the processes that record and measure: `fails` has what fails, by model or by what is done."""

    fails: dict[str, BaseException] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    equal: bool = True

    def fresh(self, function: str, given: Mapping[str, Any], *, what: str) -> dict[str, Any]:
        self.done.append("trace")
        if error := self.fails.get(given["case"]["model"]):
            raise error
        store.save(CHAIN, given["path"])
        return {}

    def measure(
        self, plan: Plan, path: Path, how: Settings, say: Any, known: dict[str, JobResult]
    ) -> Measurement:
        assert Plan.load(path) == plan
        self.done.append("plan" if plan.actions else "save-all")
        if error := self.fails.get(self.done[-1]):
            raise error
        known.setdefault("eager", JobResult(figures=RunFigures(), environment={"times": str(len(self.done))}))
        predicted = int(plan.predicted["plan"]["peak_allocated_bytes"])
        found = RunFigures(peak_allocated_bytes=predicted + 4, step_time_ns=10)
        return tiny.measurement(
            found, budget_bytes=plan.budget_bytes, device=how.device, environment=known["eager"].environment,
            predicted=RunFigures(peak_allocated_bytes=predicted, step_time_ns=6), verified=self.equal,
            keep_all_predicted=RunFigures(step_time_ns=5), keep_all=RunFigures(step_time_ns=10),
            first_difference="" if self.equal else "step 1: loss differs",
        )  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(run, "run_fresh", made.fresh)
    monkeypatch.setattr(run, "measure_plan", made.measure)
    monkeypatch.setattr(run, "check_device", lambda device: None)
    return made


def go(tmp_path: Path) -> Book:
    method, asked = load_cases(str(cases(tmp_path, TWO_MODELS)))
    return run_campaign(Book(name="cases", method=method), asked, tmp_path / "c", silent)


def test_cases_of_one_step_share_its_trace_and_eager(tmp_path: Path, machine: Machine) -> None:
    book = go(tmp_path)
    assert machine.done == ["trace", "save-all", "plan"] * 2
    assert [r.status for r in book.records] == ["measured", "measured", "infeasible"] * 2
    kept, planned, refused = book.records[:3]
    assert kept.measurement is not None
    assert planned.measurement is not None
    assert kept.measurement.environment == planned.measurement.environment == {"times": "2"}
    assert planned.measurement.budget_bytes == 18
    assert "No plan can stay" in refused.message
    assert Book.load(tmp_path / "c" / "campaign.json") == book
    assert go(tmp_path) == book  # nothing is left to do
    assert machine.done == ["trace", "save-all", "plan"] * 2
    with pytest.raises(TraceError, match="holds something else already"):
        run_campaign(replace(book, method=Method(runs=8)), [CASE], tmp_path / "c", silent)
    (tmp_path / "c" / "campaign.json").unlink()
    with pytest.raises(TraceError, match="holds something else already"):
        go(tmp_path)


def test_two_functions_of_one_file_are_two_steps(tmp_path: Path, machine: Machine) -> None:
    method, asked = load_cases(
        str(cases(tmp_path, '[[case]]\nmodel = ["net.py:a", "net.py:b"]\nbudget = "90%"\n'))
    )
    run_campaign(Book(name="cases", method=method), asked, tmp_path / "c", silent)
    assert machine.done == ["trace", "plan"] * 2


def test_what_fails_is_a_record_and_what_does_not_fit_an_answer(tmp_path: Path, machine: Machine) -> None:
    machine.fails = {"t5-tiny": LowtideError("broken"), "plan": OutOfMemoryProblem("killed")}
    found = [(r.status, r.message) for r in go(tmp_path).records]
    assert found[:2] == [("measured", ""), ("out of memory", "killed")]
    assert found[3:] == [("failed", "broken")] * 3


def test_a_stopped_campaign_keeps_what_it_measured(tmp_path: Path, machine: Machine) -> None:
    machine.fails = {"plan": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path)
    assert len(Book.load(tmp_path / "c" / "campaign.json").records) == 1
    machine.fails, machine.done = {"t5-tiny": LowtideError("broken")}, []
    assert [r.status for r in go(tmp_path).records] == ["measured", "measured", "infeasible", *["failed"] * 3]
    assert machine.done == ["plan", "trace", "trace", "trace"]  # with the trace and eager's figures of before
    machine.fails = {}
    book = go(tmp_path)  # what failed is tried again
    assert [r.status for r in book.records] == ["measured", "measured", "infeasible"] * 2
    assert {m.environment["times"] for r in book.records[:3] if (m := r.measurement)} == {"2"}


# What is shown


def test_errors_are_signed_and_a_slow_down_s_is_in_points(tmp_path: Path, machine: Machine) -> None:
    told = answer(go(tmp_path))
    of = {"bert-tiny save-all": "save-all", "bert-tiny 90% mu-two": "plan"}
    rows = {(of[r["case"]], r["figure"]): r["error"] for r in told["rows"] if r["model"] == "bert-tiny"}
    assert rows == {
        ("save-all", "allocated"): pytest.approx(-100 * 4 / 24),
        ("plan", "allocated"): pytest.approx(-100 * 4 / 20),
        ("save-all", "time"): -40.0,
        ("plan", "time"): -40.0,
        ("plan", "slow-down"): pytest.approx(20.0),
    }
    (of_time,) = [e for e in told["errors"] if e["figure"] == "time"]
    assert of_time == {
        "figure": "time", "rows": 4, "mean": -40.0, "median": 40.0, "worst_under": -40.0,
        "worst_over": None,
    }  # fmt: skip


def test_a_failed_verification_is_exit_code_1_and_keeps_its_figures(tmp_path: Path, machine: Machine) -> None:
    machine.equal = False
    result = call(execute, "campaign", cases(tmp_path, TWO_MODELS), "-o", tmp_path / "c", "--json", "-q")
    assert result.exit_code == 1
    said = "4 of 6 cases: verification failed; bert-tiny save-all: not equal to eager: step 1"
    assert said in result.stderr
    data = json.loads(result.stdout)
    assert data["statuses"] == {"verification failed": 4, "infeasible": 2}
    assert len(data["cases"]) == data["asked"] == 6
    assert data["cases"][0]["measurement"]["measured"]["peak_allocated_bytes"] == 24


def test_the_page_says_what_the_records_do(tmp_path: Path, machine: Machine) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    machine.fails = {"t5-tiny": LowtideError("<script>broken")}
    words = (cases(tmp_path, TWO_MODELS), "-o", tmp_path / "c", "--report", tmp_path / "page.html")
    told = call(execute, "campaign", *words)
    assert told.exit_code == 2
    assert "bert-tiny save-all" in told.stdout
    assert "3 of 6 cases: failed; t5-tiny save-all: <script>broken" in told.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>broken" not in page
    assert all(words in page for words in ("infeasible", "broken", "measured on CPU"))
