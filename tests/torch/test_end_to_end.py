"""trace, simulate and execute of a real model, one after another; execute's runs are in fresh processes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from executor.campaign.run import BOOK, DONE, FAILED, NONE, Book, Case, Method, run_campaign
from executor.cli.main import execute
from simulator.cli.main import main as simulate
from tests.torch import small_nets
from tracer.cli.main import trace

if importlib.util.find_spec("torchvision") is None:  # importing it is left to Lowtide
    pytest.skip("no torchvision", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("forked")
FIGURES = {"peak_allocated_bytes", "peak_reserved_bytes", "step_time_ns"}


# Twelve layers whose outputs (128 KiB each) outweigh all parameters (16 KiB a layer): a plan lowers the peak.
NET = """
import torch
from torch import nn

def build(batch_size=512):
    layers = [m for _ in range(12) for m in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers)
    batch = torch.randn(batch_size, 64), torch.randn(batch_size, 64)
    return model, batch, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)
"""


def call(command: Any, *words: str) -> dict[str, Any]:
    """The object that a command prints with --json, and nothing else."""
    done = CliRunner().invoke(command, [*words, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


# So many images with sides of 64 that activations outweigh the optimizer's temporaries.
RESNET = ("--batch-size", "24", "--image-size", "64", "--optimizer", "sgd")


@pytest.mark.parametrize(
    ("model", "options", "budget"),
    [
        ("net.py:build", ("--batch-size", "512"), "80%"),
        pytest.param("resnet18", RESNET, "93%", marks=pytest.mark.slow),
    ],
)
def test_from_a_model_to_its_measured_peak(
    model: str, options: tuple[str, ...], budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if model.startswith("net.py"):
        (tmp_path / "net.py").write_text(NET)
    traced = call(trace, model, *options, "--device", "cpu", "--rounds", "1", "-o", "trace")
    assert traced["meta"]["mode"] == "real"
    planned = call(simulate, "trace", "--budget", budget, "-o", "plan.json", "--report", "plan.html")
    assert {"trace", "planner", "feasible", "budget_bytes", "solve_seconds", "gap_points"} <= set(planned)
    assert planned["feasible"] is True
    for key in ("baseline", "plan"):
        assert set(planned[key]) >= FIGURES
    assert {"overhead_percent", "recomputed_ops"} <= set(planned["plan"])
    assert "overhead_percent" in planned["bound"]

    answer = call(
        execute, "plan.json", "--trust", "--report", "error.html", "-o", "measurement.json",
        "--steps", "2", "--memory-steps", "3", "--warmup", "0", "--runs", "1",
    )  # fmt: skip
    for key in ("predicted", "measured", "error_percent", "eager", "keep_all"):
        assert set(answer[key]) >= {*FIGURES, "peak_block_bytes"}, key
    assert answer["verified"] is True
    assert answer["bit_equal"] is True
    assert {"loss", "gradients", "buffers"} <= set(answer["max_abs_difference"])
    assert set(answer["max_abs_difference"].values()) == {0.0}
    assert answer["device"] == "cpu"
    assert answer["steps"] == 2
    assert answer["predicted"]["peak_allocated_bytes"] == planned["plan"]["peak_allocated_bytes"]
    assert answer["error_percent"]["peak_allocated_bytes"] == 0.0
    assert answer["keep_all_error_percent"]["peak_allocated_bytes"] == 0.0
    assert answer["within_budget"] is True
    measured = answer["measured"]["peak_allocated_bytes"]
    assert measured < answer["keep_all"]["peak_allocated_bytes"]
    assert answer["keep_all"]["peak_allocated_bytes"] <= answer["eager"]["peak_allocated_bytes"]

    for page in ("plan.html", "error.html"):
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert text.lstrip().lower().startswith("<!doctype html>")
        assert model.partition(".")[0] in text
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(("net.py", "__pycache__"))) == [
        "error.html", "measurement.json", "plan.html", "plan.json", "trace"
    ]  # fmt: skip


CASES = """
[campaign]
verify-steps = 1
rounds = 1
runs = 1
memory-steps = 4
[[case]]
model = "net.py:build"
budget = ["none", "70%", "1%"]
"""


@pytest.mark.slow
def test_a_campaign_of_a_tiny_model_is_predicted_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "cases.toml").write_text(CASES)
    answer = call(execute, "campaign", "cases.toml", "-o", "c", "--report", "page.html")
    assert answer["statuses"] == {"measured": 2, "infeasible": 1}
    kept, planned, refused = answer["cases"]
    for row in (kept["measurement"], planned["measurement"]):
        assert row["verified"] is True
        assert row["provenance"] == "measured-cpu"
        assert row["measured"]["peak_reserved_bytes"] is None
    # With what was measured op by op, the peak is right to the byte.
    allocated = [e for e in answer["rows"] if e["figure"] == "allocated"]
    assert [e["error"] for e in allocated] == [0.0, 0.0]
    peaks = [row["measurement"]["measured"]["peak_allocated_bytes"] for row in (kept, planned)]
    assert peaks[1] < peaks[0]
    assert peaks[1] <= planned["measurement"]["budget_bytes"]
    assert "No plan can stay" in refused["message"]
    assert "measured on CPU" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_two_workers_measure_a_campaign_and_one_that_was_stopped_goes_on(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    method = Method(rounds=1, verify_steps=1, memory_steps=2, runs=1)
    asked = [
        *(
            Case(model=f"{small_nets.__file__}:{net}", budget=budget)
            for net in ("mlp", "residual")
            for budget in (NONE, "99%")
        ),
        Case(model="no_such_model"),
    ]
    said: list[str] = []
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        for some in (asked[:1], asked):
            book = run_campaign(
                Book(name="c", method=method), some, tmp_path / "c", said.append, cluster.scheduler_address
            )
    assert [r.case for r in book.records] == asked
    assert [r.status for r in book.records[::2]] == [DONE, DONE, FAILED]
    assert len(said) == 5  # no case was measured twice
    for record in book.records[:-1]:
        if (m := record.measurement) is not None:
            assert m.bit_equal
            assert m.measured.peak_allocated_bytes == m.predicted.peak_allocated_bytes
    assert Book.load(tmp_path / "c" / BOOK) == book
