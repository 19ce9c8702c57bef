"""Campaigns: what is kept, what is a result, how errors add up, and what a page or a record must never say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import executor.campaign.bench as bench
from executor.campaign import errors
from executor.campaign.cases import Campaign, Case, Method, Step, parse_cases
from executor.campaign.errors import (
    Aggregate,
    ErrorRow,
    aggregates,
    error_rows,
    ran_out_unforeseen,
)
from executor.campaign.record import Book, Keys, Record
from executor.campaign.tables import answer, summary
from executor.cli.main import execute
from executor.measuring import Job, JobResult
from executor.verification import Verification
from tests import tiny
from traces.errors import (
    BudgetError,
    LowtideError,
    OutOfMemoryProblem,
    SpecError,
    TraceError,
    is_out_of_memory,
)
from traces.files.json_records import from_json, to_json
from traces.isolated import error_json
from traces.provenance import alloc_conf
from traces.records import store as trace_store
from traces.records.measurement import RunFigures

# w (4 bytes) is resident; x0, x1, x2 are kept for backward. While g2 runs, w, x0, x1, x2 and g2 are live: 20 bytes.
CHAIN = tiny.chain(2)
PEAK = 20
# The same, but the op that makes g2 needs 6 bytes more for a while: 26.
WITH_WORKSPACE = replace(
    CHAIN, ops=replace(CHAIN.ops, events=tuple((10, -6) if n == "g2" else () for n in CHAIN.ops.name))
)
GPU = {"gpu": "NVIDIA H200", "torch": "2.11.0"}
CPU = {"torch": "2.13.0"}


class Machine:
    """Stands for the fresh processes: traces are tiny, and measurements as the test says."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.done: list[str] = []
        self.measured: list[str] = []
        self.stop_at = -1  # the number of the measurement at which Ctrl-C comes
        self.fails: Callable[[str, str], Exception | None] = lambda what, plan: None
        self.equal = True
        self.target = "cpu"  # the entry in the device table

    def fresh(self, function: str, task: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        called = function.partition(":")[2]
        if called == "describe_device":
            environment = GPU if self.device == "cuda" else CPU
            target = "H200" if self.device == "cuda" else self.target
            return {"environment": environment, "name": "test", "memory_bytes": 1000, "target": target}
        assert called == "record_step"
        self.done.append("trace")
        root = Path(task["directory"])
        trace_store.save(CHAIN, root / "rules", force=True)
        if error := self.fails("trace", task["step"]["model"]):
            raise error
        trace_store.save(WITH_WORKSPACE, root / "calibrated", force=True)
        return {}

    def job(self, job: Job, *, timeout_s: float | None = None) -> JobResult:
        self.done.append(job.variant)
        self.measured.append(job.variant)
        if len(self.measured) == self.stop_at:
            raise KeyboardInterrupt
        if error := self.fails(job.variant, job.plan_path):
            raise error
        differs = "" if self.equal else "step 1: loss differs"
        checked = Verification(
            equal=self.equal, bit_equal=self.equal, steps=job.steps, first_difference=differs
        )
        reserved, block = (40, 30) if self.device == "cuda" else (None, None)
        return JobResult(
            figures=RunFigures(
                peak_allocated_bytes=25,
                peak_block_bytes=block,
                peak_reserved_bytes=reserved,
                step_time_ns=10,
                peaks_bytes=(30, 25, 25),
            ),
            environment=CPU,
            verification=checked if job.variant == "verify" else None,
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(bench, "run_fresh", lambda *a, **k: made.fresh(*a, **k))
    monkeypatch.setattr(bench, "run_job", lambda *a, **k: made.job(*a, **k))
    return made


TWO_MODELS = """
[defaults]
budget = ["none", "90%", "10%"]
planner = "mu-two"
[[case]]
model = ["bert-tiny", "t5-tiny"]
"""


def campaign(text: str = TWO_MODELS) -> Campaign:
    return parse_cases(tomllib.loads(text), where="cases.toml", root=Path(), name="cases")


def go(path: Path, text: str = TWO_MODELS, **choice: Any) -> Book:
    return bench.run_campaign(campaign(text), path, lambda text: None, **choice)


# ---------------------------------------------------------------------------------------------------------------------
# Running


def test_cases_of_one_step_share_its_traces_eager_and_keep_all(tmp_path: Path, machine: Machine) -> None:
    book = go(tmp_path / "c")
    # One of the two plans can be made.
    per_model = ["trace", "eager", "keep_all", "verify", "plan", "verify"]
    assert machine.done == per_model * 2
    assert [r.status for r in book.records] == ["measured", "measured", "infeasible"] * 2
    kept, planned, refused = book.records[:3]
    assert {s: f.peak_allocated_bytes for s, f in kept.predicted.items()} == {
        "rules": PEAK, "calibrated": PEAK + 6,
    }  # fmt: skip
    assert planned.budget_bytes == 23  # 90 % of 26, rounded down
    assert planned.predicted["calibrated"].peak_allocated_bytes == 22  # x0 or x1 is recomputed: 4 bytes less
    assert planned.verified is True
    assert refused.budget_bytes == 2
    assert "No plan can stay" in refused.message
    assert Book.load(tmp_path / "c" / "campaign.json") == book


@pytest.mark.parametrize("stop_at", [1, 3, 4, 5, 6, 9])
def test_an_interrupted_campaign_loses_the_running_case_alone(
    tmp_path: Path, machine: Machine, stop_at: int
) -> None:
    machine.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "c")
    # Five processes a model: eager, keep-all and its verification for the first case, the plan and its for the second.
    finished = {1: 0, 3: 0, 4: 1, 5: 1, 6: 3, 9: 4}[stop_at]
    before = Book.load(tmp_path / "c" / "campaign.json")
    assert len(before.records) == finished
    machine.stop_at, machine.measured = -1, []
    book = go(tmp_path / "c")
    assert len(book.records) == 6
    assert book.records[:finished] == before.records  # kept as they were, with their times
    # A shared step that was finished is not measured again: only the plan is.
    assert len(machine.measured) == {1: 10, 3: 10, 4: 7, 5: 7, 6: 5, 9: 2}[stop_at]
    machine.done, machine.measured = [], []
    assert go(tmp_path / "c") == book
    assert machine.done == machine.measured == []


def test_what_other_code_measured_is_kept_beside(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = go(tmp_path / "c")
    assert go(tmp_path / "c") == first
    folder = {p.name for p in (tmp_path / "c").iterdir()}
    monkeypatch.setattr(bench, "code_digest", lambda: "another")
    machine.stop_at = len(machine.measured) + 1
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "c")
    assert Book.load(tmp_path / "c" / "campaign.json").records == ()
    (kept,) = {p.name for p in (tmp_path / "c").iterdir()} - folder
    assert Book.load(tmp_path / "c" / kept) == first
    machine.stop_at = -1
    second = go(tmp_path / "c")
    assert len(second.records) == len(first.records)
    # A case that the file has no more is kept in the same way.
    one = go(tmp_path / "c", TWO_MODELS.replace(', "t5-tiny"', ""))
    assert len(one.records) == 3
    books = [Book.load(p) for p in sorted((tmp_path / "c").glob("campaign-*.json"))]
    assert len(books) == 2
    assert first in books
    assert second in books


def test_another_method_code_or_device_asks_again(tmp_path: Path, machine: Machine) -> None:
    case = Case(step=Step(model="bert-tiny"))
    keys = Keys(method=Method(), code="a", environment=CPU)
    others = (
        replace(keys, code="b"),
        replace(keys, environment={"torch": "2.12.0"}),
        replace(keys, method=Method(runs=9)),
    )
    assert len({k.of_case(case) for k in (keys, *others)}) == 4
    patient = replace(keys, method=Method(timeout_minutes=99))
    assert patient.of_case(case) == keys.of_case(case)
    planned = replace(case, budget="60%", planner="mu-two")
    assert keys.of_case(case) != keys.of_case(planned)


def test_a_device_that_the_table_lacks_must_have_a_target(tmp_path: Path, machine: Machine) -> None:
    machine.target = ""
    with pytest.raises(SpecError, match="name the entry nearest to it as target"):
        go(tmp_path / "c")
    assert go(tmp_path / "d", '[campaign]\ntarget = "t4"\n' + TWO_MODELS).records


def test_editing_the_users_file_asks_again(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("a = 1\n")
    case, keys = Case(step=Step(model=f"{file}:build")), Keys(method=Method(), code="", environment={})
    before = keys.of_case(case)
    file.write_text("a = 2\n")
    assert keys.of_case(case) != before


def test_out_of_memory_is_a_result_with_what_was_predicted(tmp_path: Path, machine: Machine) -> None:
    machine.fails = lambda what, plan: OutOfMemoryProblem("killed") if what == "plan" else None
    book = go(tmp_path / "c")
    kept, planned = book.records[:2]
    assert kept.status == "measured"
    assert (planned.status, planned.message) == ("out of memory", "killed")
    assert planned.predicted["calibrated"].peak_allocated_bytes == 22
    assert planned.measured == RunFigures()
    assert {e.run for e in error_rows([planned])} == {"eager", "keep-all"}


def test_where_keep_all_does_not_fit_its_plan_still_runs(tmp_path: Path, machine: Machine) -> None:
    def fails(what: str, plan: str) -> Exception | None:
        return OutOfMemoryProblem(f"{what} too large") if what in ("trace", "eager", "keep_all") else None

    machine.fails = fails
    kept, planned, _ = go(tmp_path / "c").records[:3]
    assert (kept.status, kept.message) == ("out of memory", "keep_all too large")
    assert "calibrated" not in kept.predicted
    assert planned.status == "measured"
    assert planned.budget_bytes == 18  # 90 % of the uncalibrated 20: there is no other trace
    assert "planned and predicted by the table of rules alone" in planned.notes


def test_a_failure_is_a_record_and_the_same_command_tries_it_again(tmp_path: Path, machine: Machine) -> None:
    machine.fails = lambda what, plan: (
        LowtideError("broken") if (what, plan) == ("trace", "t5-tiny") else None
    )
    book = go(tmp_path / "c")
    assert [r.status for r in book.records] == ["measured", "measured", "infeasible"] + ["failed"] * 3
    assert book.records[-1].message == "broken"
    assert machine.done.count("trace") == 2  # and not once for each case of the step that cannot be recorded
    machine.done = []
    assert [r.message for r in go(tmp_path / "c").records[3:]] == ["broken"] * 3
    assert machine.done == ["trace"]
    assert len(go(tmp_path / "c", only="bert").records) == 6  # what was not asked for stays as it is
    machine.fails = lambda what, plan: None
    again = go(tmp_path / "c")
    assert [r.status for r in again.records[3:]] == ["measured", "measured", "infeasible"]
    assert again.records[:3] == book.records[:3]


def test_a_defect_costs_one_case(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no ops")

    monkeypatch.setattr(bench.Forecast, "plan", broken)
    statuses = [(r.status, r.message) for r in go(tmp_path / "c").records]
    failed = ("failed", "ZeroDivisionError: no ops; please report this.")
    assert statuses == [("measured", ""), failed, failed] * 2


def test_only_runs_what_its_pattern_fits(tmp_path: Path, machine: Machine) -> None:
    assert [r.case.label for r in go(tmp_path / "c", only="t5*90%").records] == ["t5-tiny 90% mu-two"]
    with pytest.raises(SpecError, match="fits none of the 6 cases"):
        go(tmp_path / "c", only="resnet")
    assert len(go(tmp_path / "c").records) == 6


def call(*words: object) -> Result:
    return CliRunner().invoke(execute, ["campaign", *map(str, words)])


def test_a_failed_verification_is_exit_code_1_and_keeps_its_figures(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "cases.toml").write_text(TWO_MODELS)
    machine.equal = False
    result = call(tmp_path / "cases.toml", "-o", tmp_path / "c", "--json", "-q")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["statuses"] == {"verification failed": 4, "infeasible": 2}
    assert data["finished"] == data["asked"] == 6
    assert "planned steps differ from the untouched model" in result.stderr
    assert len(data["cases"]) == 6
    # A finished campaign is only reported, with the same verdict.
    assert call(tmp_path / "c", "--json").exit_code == 1
    # What it has no use for is refused, not passed over.
    refused = call(tmp_path / "c", "--only", "x")
    assert refused.exit_code == 2
    assert "--only" in refused.stderr
    assert "only reported" in refused.stderr
    machine.equal = True
    assert call(tmp_path / "cases.toml", "-o", tmp_path / "c", "-q").exit_code == 0


def test_ctrl_c_is_exit_code_130_and_the_same_command_goes_on(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "cases.toml").write_text(TWO_MODELS)
    machine.stop_at = 6
    stopped = call(tmp_path / "cases.toml", "-o", tmp_path / "c")
    assert stopped.exit_code == 130
    assert stopped.stderr.splitlines()[-1] == "Error: stopped."
    machine.stop_at = -1
    result = call(tmp_path / "cases.toml", "-o", tmp_path / "c")
    assert result.exit_code == 0
    assert "3 of 6 cases are finished and kept." in result.stderr


def test_verification_may_run_out_of_memory_where_the_measurement_does_not(
    tmp_path: Path, machine: Machine
) -> None:
    machine.device = "cuda"
    machine.fails = lambda what, plan: OutOfMemoryProblem("two models") if what == "verify" else None
    text = '[campaign]\ndevice = "cuda"\n[[case]]\nmodel = "bert-tiny"\n'
    (record,) = go(tmp_path / "c", text).records
    assert machine.done == ["trace", "eager", "keep_all", "verify"]
    assert (record.status, record.verified) == ("measured", None)
    assert "two models" in record.notes[-1]
    assert record.provenance == "measured-cuda"
    # The caching allocator rounds to 512 bytes: w, x0, x1, x2 and g2 take 5 of them, in one segment of 2 MiB.
    assert record.predicted["rules"].headline() == {
        "peak_allocated_bytes": PEAK, "peak_block_bytes": 5 * 512, "peak_reserved_bytes": 2 * 2**20,
        "step_time_ns": 6,
    }  # fmt: skip
    assert {e.figure for e in error_rows([record])} == {"allocated", "blocks", "reserved", "time"}


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def test_aggregates_against_numbers_worked_out_by_hand() -> None:
    def aggregate(*errors: float) -> Aggregate:
        rows = [
            ErrorRow(model="m", case="c", run="plan", stage="rules", figure="slow-down", predicted=e, measured=0,
                     provenance="measured-cpu")
            for e in errors
        ]  # fmt: skip
        (made,) = aggregates(rows)
        return made

    # |errors|: 0, 1, 2, 3, 10: mean 16/5, median 2; within 1: two of five, within 2: three, within 5: four.
    assert aggregate(0.0, -1.0, 2.0, -3.0, 10.0) == Aggregate(
        provenance="measured-cpu",
        figure="slow-down",
        stage="rules",
        eager=False,
        rows=5,
        mean=8 / 5,
        mape=16 / 5,
        median=2.0,
        worst_under=-3.0,
        worst_over=10.0,
        within=(40.0, 60.0, 80.0),
        under_share=40.0,
    )
    exact = aggregate(0.0, 0.0)
    assert (exact.worst_under, exact.worst_over, exact.under_share) == (None, None, 0.0)


def figures(peak: int | None, time: int | None = None, reserved: int | None = None) -> RunFigures:
    return RunFigures(peak_allocated_bytes=peak, step_time_ns=time, peak_reserved_bytes=reserved)


def record(**more: Any) -> Record:
    defaults: dict[str, Any] = {
        "case": Case(step=Step(model="m", options={"batch_size": 2}), budget="60%", planner="mu-two"),
        "key": "k",
        "status": "measured",
        "provenance": "measured-cpu",
        "environment": CPU,
        "fingerprint": "f",
        "keep_all_predicted": {"rules": figures(90, 100), "calibrated": figures(100, 120)},
        "predicted": {"rules": figures(45, 110), "calibrated": figures(50, 150)},
        "eager": figures(120, 100),
        "keep_all": figures(100, 100),
        "measured": figures(50, 120),
    }
    return Record(**{**defaults, **more})


def test_the_errors_of_one_case() -> None:
    found = {(r.run, r.stage, r.figure): r.error for r in error_rows([record()])}
    assert found == pytest.approx(
        {
            ("eager", "rules", "allocated"): -25.0,  # 90 for 120
            ("eager", "rules", "time"): 0.0,
            ("eager", "calibrated", "allocated"): 100 * (100 - 120) / 120,
            ("eager", "calibrated", "time"): 20.0,
            ("keep-all", "rules", "allocated"): -10.0,
            ("keep-all", "rules", "time"): 0.0,
            ("keep-all", "calibrated", "allocated"): 0.0,
            ("keep-all", "calibrated", "time"): 20.0,
            ("plan", "rules", "allocated"): -10.0,
            ("plan", "rules", "time"): 100 * (110 - 120) / 120,
            ("plan", "rules", "slow-down"): -10.0,  # predicted +10 %, measured +20 %: points
            ("plan", "calibrated", "allocated"): 0.0,
            ("plan", "calibrated", "time"): 25.0,
            ("plan", "calibrated", "slow-down"): 5.0,  # 150/120: +25 %, measured +20 %
        }
    )


def test_what_cases_share_counts_once() -> None:
    other = replace(record(), case=replace(record().case, budget="40%"), key="l")
    rows = error_rows([record(), other])
    assert [r.case for r in rows if (r.run, r.stage, r.figure) == ("keep-all", "rules", "allocated")] == [
        "m b2 keep-all"
    ]
    assert len([r for r in rows if (r.run, r.stage, r.figure) == ("plan", "rules", "allocated")]) == 2


def test_devices_are_never_aggregated_together() -> None:
    gpu = replace(
        record(key="g"),
        provenance="measured-cuda",
        environment=GPU,
        measured=figures(100, 120),
    )
    found = aggregates(error_rows([record(), gpu]))
    plans = {
        a.provenance: a for a in found if (a.figure, a.stage, a.eager) == ("allocated", "calibrated", False)
    }
    assert {p: (a.rows, a.worst_under) for p, a in plans.items()} == {
        "measured-cpu": (2, None),
        "measured-cuda": (2, -50.0),
    }


def test_eager_is_kept_apart_from_what_was_rewritten() -> None:
    rows = error_rows([record()])
    plain, eager = (
        {(a.figure, a.stage): a.mean for a in aggregates(rows) if a.eager == which} for which in (False, True)
    )
    assert plain["allocated", "rules"] == pytest.approx(-10.0)
    assert eager["allocated", "rules"] == pytest.approx(-25.0)


def test_an_underestimate_without_a_warning_is_told_from_one_with() -> None:
    # Uncalibrated, keep-all is 10 % too low, the plan too, and eager 25 %; calibrated, only eager (16.7 %).
    def silent(**warnings: tuple[str, ...]) -> list[tuple[str, str]]:
        made = record(keep_all_warnings=warnings, warnings=warnings)
        return [(r.run, r.stage) for r in errors.unwarned(error_rows([made]))]

    everywhere = [("eager", "rules"), ("keep-all", "rules"), ("eager", "calibrated"), ("plan", "rules")]
    assert sorted(silent()) == sorted(everywhere)
    assert silent(rules=("unknown",)) == [("eager", "calibrated")]
    assert silent(rules=("unknown",), calibrated=("eager differs",)) == []


# ---------------------------------------------------------------------------------------------------------------------
# Records


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"provenance": "measured-cuda"}, "environment says otherwise"),
        ({"environment": GPU}, "environment says otherwise"),
        ({"measured": figures(1, 1, 1)}, "reserved memory was measured on a CPU"),
        ({"provenance": "guessed"}, "none of"),
        ({"status": "fine"}, "none of"),
    ],
)
def test_a_cpus_figure_cannot_pass_for_a_gpus(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        record(**more)
    # Nor can a file that someone edited.
    data = {**to_json(record()), **{k: v for k, v in more.items() if k != "measured"}}
    if "measured" in more:
        data["measured"] = {"peak_reserved_bytes": 1}
    with pytest.raises(ValueError, match=says):
        from_json(Record, data)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"record": "sweep"}', '{"record": "campaign"}'])
def test_a_foreign_file_in_a_campaigns_place_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "campaign.json").write_text(text)
    with pytest.raises(TraceError, match=r"campaign\.json"):
        Book.of_directory(tmp_path)


@pytest.mark.parametrize("name", ["thesis.tex", "campaign.json"])
def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(TraceError, match=r"no campaign|something else"):
        Book.of_directory(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "path", [("asked",), ("records", 0, "status"), ("records", 0, "case", "step", "model"), ("method",)]
)
def test_a_campaign_with_a_piece_missing_is_refused(tmp_path: Path, path: tuple[Any, ...]) -> None:
    data = json.loads(json.dumps(book().to_json()))
    place = data
    for k in path[:-1]:
        place = place[k]
    del place[path[-1]]
    (tmp_path / "campaign.json").write_text(json.dumps(data))
    with pytest.raises(TraceError, match="malformed"):
        Book.load(tmp_path / "campaign.json")


# ---------------------------------------------------------------------------------------------------------------------
# What is shown


def book(*records: Record) -> Book:
    return Book(name="cases", method=Method(), asked=len(records) or 1, records=records or (record(),))


def many() -> Book:
    return book(
        record(),
        record(key="i", status="infeasible", message="<script>too small</script>", measured=RunFigures()),
        record(key="o", status="out of memory", message="killed", measured=RunFigures()),
        record(key="f", status="failed", message="broken", measured=RunFigures(), predicted={}),
        record(key="v", status="verification failed", verified=False, first_difference="step 1", steps=2),
    )


def test_the_json_has_every_error_and_every_record() -> None:
    found = answer(many())
    assert {"m b2 60% mu-two"} == {c["label"] for c in found["cases"]}
    assert [c["status"] for c in found["cases"]] == [r.status for r in many().records]
    errors = {(e["run"], e["figure"], e["stage"]): e["error"] for e in answer(book(record()))["rows"]}
    assert errors["plan", "allocated", "rules"] == pytest.approx(-10.0)
    assert errors["plan", "slow-down", "calibrated"] == pytest.approx(5.0)
    assert {(e["figure"], e["eager"]) for e in found["errors"]} >= {("allocated", True), ("time", False)}


def test_the_summary_names_every_case_and_what_became_of_it() -> None:
    text = summary(many())
    for words in ("too small", "killed", "broken", "verification failed", "45 (-5)", "+5.000 points"):
        assert words in text
    assert re.search(r"50 \(\+0\) +45 \(-5\) +50 +120 +NOT EQUAL: step 1", text)
    assert answer(many())["statuses"]["out of memory"] == 1


def test_the_page_is_made_from_records_alone_and_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    many().save(tmp_path / "campaign.json")
    code = (
        "import sys; from executor.cli.main import execute\n"
        "try: execute(['campaign', sys.argv[1], '--report', sys.argv[2], '-q'])\n"
        "except SystemExit as end: assert end.code == 1, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "page.html")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "No figure on this page is a GPU" in page
    assert "GPU (" not in page
    assert "<script>too small" not in page
    for words in ("out of memory", "infeasible", "broken", "NOT EQUAL"):
        assert words in page, words


def test_a_gpu_that_ran_out_although_the_prediction_fits_it_is_counted() -> None:
    """No peak was measured, so no error tells of it: 60 bytes were to be reserved of 100."""
    gone = record(
        provenance="measured-cuda",
        environment={**GPU, "memory_bytes": "100"},
        status="out of memory",
        message="killed",
        measured=RunFigures(),
        predicted={"rules": figures(50, 120, 200), "calibrated": figures(50, 120, 60)},
    )
    foreseen = replace(gone, predicted={"calibrated": figures(50, 120, 101)})
    on_a_cpu = record(status="out of memory", message="killed", measured=RunFigures())
    assert ran_out_unforeseen([gone, foreseen, on_a_cpu]) == [gone]
    assert answer(book(gone, foreseen))["ran_out_unforeseen"] == [gone.case.label]
    assert "predicted to fit, and ran out of memory" in summary(book(gone))
    assert "predicted to fit, and ran out of memory" not in summary(book(foreseen, on_a_cpu))
    pytest.importorskip("altair")
    from executor.campaign.page import campaign_page

    def shown(*records: Record) -> list[str]:
        (section,) = (s for s in campaign_page(book(*records)).sections if s.title == "Headline")
        return [b.text for b in section.blocks if b.tone == "warning" and "ran out" in b.text]

    (said,) = shown(gone, foreseen)
    assert gone.case.label in said
    assert shown(foreseen) == shown(on_a_cpu) == []


def test_a_page_of_a_gpu_says_which(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    from executor.campaign.page import campaign_page

    gpu = record(
        provenance="measured-cuda",
        environment=GPU,
        measured=replace(figures(50, 120, 70), peak_block_bytes=56),
        predicted={"calibrated": figures(50, 120, 60)},
    )
    page = campaign_page(book(gpu))
    assert page.subtitle.endswith("measured on GPU (NVIDIA H200)")
    assert not any(
        "No figure on this page" in getattr(b, "text", "") for s in page.sections for b in s.blocks
    )


# ---------------------------------------------------------------------------------------------------------------------
# Out of memory, and how long it takes


@pytest.mark.parametrize(
    ("error", "out"),
    [
        (MemoryError(), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("the sizes do not match"), False),
        (BudgetError("no plan"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error: Exception, out: bool) -> None:
    assert is_out_of_memory(error) is out
    wrapped = LowtideError("the step failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is out
    told = error_json(wrapped)
    assert told is not None
    assert told.get("out_of_memory", False) is out
    if not out and not isinstance(error, LowtideError):
        assert error_json(error) is None  # a defect, whose traceback should be seen


def test_every_stage_and_figure_has_its_label() -> None:
    rows = [
        ErrorRow(model="m", case="c", run="plan", stage=s, figure=f, predicted=1, measured=1,
                 provenance="measured-cpu")
        for s in errors.STAGE_LABELS for f in errors.FIGURES
    ]  # fmt: skip
    assert len(aggregates(rows)) == len(rows)


def test_cuda_s_own_name_of_the_allocators_settings_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `CUDAAllocatorConfig::instance` of torch 2.11 to 2.13."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert alloc_conf() == "max_split_size_mb:64"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert alloc_conf() == "expandable_segments:True"
