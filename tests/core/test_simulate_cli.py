"""`simulate` as a user types it: what stands on stdout and stderr, the exit code, and what is left on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import Result

from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.planners import REGISTRY, plan_with
from simulator.prediction.ask import Question
from simulator.studies import tracing
from simulator.studies.sweep import Sweep, sweep
from tests.commands import simulate
from tests.synthetic import resnet
from tests.tiny import chain, trace
from traces.errors import LowtideError
from traces.progress import silent
from traces.records.measurement import RunFigures
from traces.records.plan import Plan
from traces.records.store import load, save

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(resnet((1, 2, 2, 1), batch=64, side=64), tmp_path_factory.mktemp("traces") / "small")


def no_traceback(result: Result) -> None:
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output


def test_a_plan_within_the_budget_as_json(network: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    result = simulate("--budget", "60%", network, "-o", output, "--json")  # options may come first
    assert result.exit_code == 0
    answer = json.loads(result.stdout)  # one object and nothing else
    assert (answer["trace"], answer["planner"], answer["feasible"]) == (str(network), "search", True)
    plan = Plan.load(output)
    assert (plan.budget_bytes, plan.meta) == (answer["budget_bytes"], load(network).meta)


def test_a_plan_to_read(network: Path, tmp_path: Path) -> None:
    output = tmp_path / "my plan.json"
    result = simulate(network, "--budget", "60%", "-v", "-o", output)
    assert result.exit_code == 0
    for part in ("peak", "time", "activation", "At the peak, while ", f"Next: execute '{output}'"):
        assert part in result.stdout
    assert "planning" in result.stderr
    short = simulate(network, "--budget", "60%", "-q")
    assert not short.stderr
    assert "At the peak" not in short.stdout


def test_without_a_budget_the_step_is_simulated_as_it_is(network: Path) -> None:
    assert json.loads(simulate(network, "--json").stdout)["plan"]["overhead_percent"] == 0
    assert "with everything saved" in simulate(network).stdout


def test_a_step_without_memory_or_ops_is_answered(tmp_path: Path) -> None:
    empty = save(trace([]), tmp_path / "empty")
    for words in (("--json",), ("--budget", "1", "--json"), ()):
        done = simulate(empty, *words)
        assert done.exit_code == 0, done.output
    front = simulate("pareto", empty, "--json", "-q")
    assert front.exit_code == 0, front.output
    assert json.loads(front.stdout)["smallest_peak_bytes"] == 0


def test_a_budget_that_cannot_be_met(network: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    words = (network, "--budget", "1%", "--device-memory", "1GiB", "-o", output)
    result = simulate(*words, "--json")
    assert (result.exit_code, result.stderr.count("Error: "), output.exists()) == (1, 1, False)
    device = json.loads(result.stdout)["device_memory"]
    assert (device["usable_bytes"], device["baseline_fits"], device["plan_fits"]) == (1 << 30, True, None)
    to_read = simulate(*words)
    assert (to_read.exit_code, to_read.stdout) == (1, "")
    assert "no plan at all can go below" in to_read.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no such trace directory"),
        (["nowhere", "--budget", "abc"], "budget 'abc'"),  # before it is opened
        (["T", "--bugdet", "60%"], "No such option"),
        (["T", "more"], "unexpected extra argument"),
        (["DAMAGED", "--budget", "60%"], "cannot be read as Parquet"),
        (["--json"], "Missing argument"),
        ([""], "Missing argument"),
    ],
)
def test_wrong_words(words: Sequence[str], message: str, network: Path, tmp_path: Path) -> None:
    damaged = save(chain(2), tmp_path / "t")
    (damaged / "ops.parquet").write_bytes(b"PAR1 was here")
    result = simulate(*({"T": network, "DAMAGED": damaged}.get(w, w) for w in words))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not result.stdout
    no_traceback(result)


def test_an_existing_plan_is_replaced_only_by_force(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "plan.json"
    output.write_text("mine")

    def planned(*args: object) -> None:
        raise AssertionError("planned before looking at -o")

    with monkeypatch.context() as patch:
        patch.setattr("simulator.planners.plan_with", planned)
        result = simulate(network, "--budget", "60%", "-o", output)
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert output.read_text() == "mine"
    assert simulate(network, "--budget", "60%", "-o", output, "--force").exit_code == 0
    assert Plan.load(output).planner == "search"


def test_planners_are_listed() -> None:
    result = simulate("planners")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(REGISTRY)
    assert list(json.loads(simulate("planners", "--json").stdout)) == list(REGISTRY)


def test_help_that_cannot_be_written_is_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "simulator", "--help"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (2, b"Error: No space left on device; name another path.\n")


# Sweeps. `trace` is replaced by a function that writes a small network's trace.


class Tracer:
    """Stands for the `trace` process; remembers its command lines."""

    def __init__(self, failing: int = 0) -> None:
        self.commands: list[list[str]] = []
        self.failing = failing

    def __call__(self, function: str, given: dict[str, list[str]], **options: object) -> None:
        command = given["words"]
        self.commands.append(command)
        assert (function, bool(options["kept"])) == ("tracer.cli.main:answer", True)
        size, out = (command[command.index(word) + 1] for word in ("--batch-size", "-o"))
        if self.failing == int(size):
            raise LowtideError("no such model.")
        save(resnet((1, 1), batch=16 * int(size), side=32), out, force=True)


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    tracer = Tracer()
    monkeypatch.setattr(tracing, "run_fresh", tracer)
    return tracer


def swept(directory: Path, *sizes: int, budget: str = "80%") -> Sweep:
    asked = Question(budget=budget, planner="mu-two")
    return sweep(tracing.Traced(model="m", directory=directory), sizes or (4, 8), asked, silent)


def ensure(directory: Path, model: str = "m", *words: str) -> Path:
    made = tracing.Traced(model=model, directory=directory, words=words)
    made.each([4], silent)
    return made.path(4)


def test_a_sweep_traces_and_plans_every_batch_size(tracer: Tracer, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    words = ["sweep", "m", "--batch-sizes", "32,64", "--budget", "85%", "-o", directory, "--seq-len", 7]
    result = simulate(*words, "--target", "h200", "--optimizer", "adam", "--image-size", "32", "--json")
    assert result.exit_code == 0, result.output
    options = ["--seq-len", "7", "--target", "h200", "--optimizer", "adam", "--image-size", "32"]
    done = Sweep.load(directory / "sweep.json")
    assert sorted(tracer.commands) == [
        ["m", *options, *f"--force --batch-size {row.batch_size} -o {directory / row.trace_path} -q".split()]
        for row in done.rows
    ]
    assert json.loads(result.stdout) == json.loads(json.dumps(done.to_json()))
    assert [row.batch_size for row in done.rows] == [32, 64]
    for row in done.rows:
        of = load(directory / row.trace_path)
        plan = Plan.load(directory / row.plan_path)
        assert row.feasible
        assert plan.meta == of.meta
        assert row.plan.peak_allocated_bytes is not None
        assert row.plan.peak_allocated_bytes <= row.budget_bytes
        assert sum(row.breakdown_plan.values()) == row.plan.peak_allocated_bytes
        assert sum(row.breakdown_baseline.values()) == row.baseline.peak_allocated_bytes
        assert (row.ops, row.storages) == (len(of.ops), len(of.storages))
    assert "32" in simulate(*words).stdout


def test_a_trace_is_used_again_only_if_the_same_command_made_it(
    tracer: Tracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(*words: str, model: str = "m") -> int:
        before = len(tracer.commands)
        ensure(tmp_path, model, *words)
        return len(tracer.commands) - before

    assert [runs(), runs(), runs("--seq-len", "8"), runs()] == [1, 0, 1, 0]
    (ensure(tmp_path) / "ops.parquet").write_bytes(b"")
    assert [runs(), runs()] == [1, 0]
    source = tmp_path / "train.py"
    for text, made in (("one", 1), ("one", 0), ("two", 1)):
        source.write_text(text)
        assert runs(model=f"{source}:build") == made
    monkeypatch.setattr(tracing, "version", lambda name: "another")
    assert runs() == 1


def test_a_batch_size_that_does_not_fit_is_a_row(tracer: Tracer, tmp_path: Path) -> None:
    small, large = swept(tmp_path, 4, 64, budget="40MiB").rows
    assert small.feasible
    assert not large.feasible
    assert "No plan can stay within" in large.message or "found no plan" in large.message
    assert large.plan == RunFigures()
    words = ["sweep", "m", "--batch-sizes", "4,64", "--budget", "40MiB", "-o", tmp_path]
    result = simulate(*words)
    assert result.exit_code == 0
    assert "does not fit" in result.stdout


def test_a_plan_of_an_earlier_sweep_does_not_survive_a_failed_budget(tracer: Tracer, tmp_path: Path) -> None:
    swept(tmp_path)
    assert (tmp_path / "plan-b4.json").exists()
    swept(tmp_path, budget="1%")
    assert not (tmp_path / "plan-b4.json").exists()


def test_a_sweep_of_which_nothing_fits_exits_with_1(tracer: Tracer, tmp_path: Path) -> None:
    result = simulate("sweep", "m", "--batch-sizes", "4,8", "--budget", "1%", "-o", tmp_path, "--json")
    assert result.exit_code == 1
    assert [row["feasible"] for row in json.loads(result.stdout)["rows"]] == [False, False]
    assert "no batch size fits" in result.stderr


def test_a_tracer_that_fails_is_quoted(tracer: Tracer, tmp_path: Path) -> None:
    tracer.failing = 8
    result = simulate("sweep", "m", "--batch-sizes", "4,8", "--budget", "90%", "-o", tmp_path)
    assert result.exit_code == 2
    assert "batch 8 could not be traced: no such model." in result.stderr
    tracer.failing = 4
    assert (
        simulate("sweep", "m", "--batch-sizes", "4", "--budget", "90%", "-o", tmp_path / "new").exit_code == 2
    )
    assert not (tmp_path / "new").exists()
    tracer.failing = 8
    no_traceback(result)
    with pytest.raises(LowtideError):
        swept(tmp_path)


def test_what_a_sweep_decides_itself_does_not_go_to_trace(tracer: Tracer, tmp_path: Path) -> None:
    words = ["--batch-sizes", "4", "--budget", "90%", "-o", tmp_path / "s"]
    for others, says in ((["m", "--batch-size", "8"], "decides this itself"), (["--amp", "m"], "first word")):
        result = simulate("sweep", *others, *words)
        assert result.exit_code == 2
        assert says in result.stderr
    assert not tracer.commands


@pytest.mark.parametrize("sizes", ["", "8,", "0", "-4", "8,x", "8,8", "8.5"])
def test_bad_batch_sizes(sizes: str) -> None:
    result = simulate("sweep", "m", "--batch-sizes", sizes, "--budget", "60%")
    assert result.exit_code == 2
    assert "--batch-sizes" in result.stderr


def test_limits_reach_the_planner(tracer: Tracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def spy(name: str, problem: Problem, budget_bytes: int, limits: Limits) -> Plan:
        seen.append((limits.seconds, limits.seed))
        return plan_with(name, problem, budget_bytes, limits)

    monkeypatch.setattr("simulator.prediction.ask.plan_with", spy)
    words = ["--budget", "90%", "--seconds", "1.5", "--seed", "3"]
    directory = save(chain(9, size=100), tmp_path / "t")
    assert simulate(directory, *words).exit_code == 0
    assert simulate("sweep", "m", "--batch-sizes", "4", *words, "-o", tmp_path / "s").exit_code == 0
    assert seen == [(1.5, 3), (1.5, 3)]
    assert simulate(directory, "--seconds", "-1").exit_code == 2
