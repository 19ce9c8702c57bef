"""The paths that wait for a GPU run on the null driver: the tests marked `gpu`, and what they ask of values."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from executor.cli.main import execute
from simulator.core.problem import Problem
from simulator.planners.outcome import Infeasible
from simulator.prediction import ask as api
from tests.commands import python
from tests.torch.steps import plan_of, recompute_all
from tracer import trace
from tracer.rehearsal import run_on_null_driver
from traces.devices import device
from traces.provenance import ABSENT, MEASURED_CUDA, NAME, REHEARSED

pytestmark = pytest.mark.rehearsal
ROOT = Path(__file__).resolve().parents[2]
GPU_TESTS = ROOT / "tests" / "gpu" / "test_gpu.py"
TREE = ast.parse(GPU_TESTS.read_text(encoding="utf-8")).body
MODELS = next(ast.literal_eval(n.value) for n in TREE if isinstance(n, ast.AnnAssign) and n.value)
WANT_A_GPU = [
    name
    for n in TREE
    if isinstance(n, ast.FunctionDef) and "gpu" in (decorators := ast.dump(ast.List(n.decorator_list)))
    for name in ([f"{n.name}[{m}]" for m in MODELS] if "MODELS" in decorators else [n.name])
]
STEP = """
import torch
from torch import nn

def build(batch_size=8192):
    torch.empty(2**27)  # which a model that is moved to the GPU would not leave there
    net = nn.Sequential(nn.Linear(1024, 4096), nn.Dropout(), nn.GELU(), nn.Linear(4096, 1024))
    return net, torch.randn(batch_size, 1024), lambda y: y.pow(2).mean(), torch.optim.AdamW(net.parameters())
"""


def on_h100(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "executor", "rehearse", "--gpu", "h100", "--", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", WANT_A_GPU)
def test_the_tests_that_want_a_gpu_pass_there(name: str) -> None:
    done = on_h100(
        ROOT, "python", "-m", "pytest", f"{GPU_TESTS}::{name}", "-m", "gpu", "-q", "-p", "no:cacheprovider"
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d passed", done.stdout)
    assert "skipped" not in done.stdout


def test_a_verification_runs_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(STEP.replace("8192", "256"))
    found = trace(f"{tmp_path}/net.py:build", target="h100")
    path = plan_of(found, *recompute_all(Problem(found))).save(tmp_path / "plan.json")
    job = {
        "plan_path": str(path), "device": "cuda", "steps": 2, "variant": "verify", "memory_steps": 3, "warmup": 1,
        "runs": 2,
    }  # fmt: skip
    verified = run_on_null_driver("executor.measuring:do", job, device("h100"), what="verified")
    assert verified["verification"]["steps"] == 2


@pytest.mark.slow
def test_a_measurement_gives_no_times(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(STEP)
    given = on_h100(tmp_path, "trace", "net.py:build", "--device", "cuda", "-o", "t", "-q")
    assert given.returncode == 0, given.stderr
    peak = api.problem_of(tmp_path / "t").saved.timeline.peak_allocated_bytes
    with pytest.raises(Infeasible) as refused_budget:
        api.plan(tmp_path / "t", 1)
    lowest = refused_budget.value.figures["lowest_peak_bytes"]  # cuBLAS's buffers, which 2.11 holds, raise it
    budget = (peak + lowest) // 2
    python("-m", "simulator", "t", "--budget", budget, "-o", "plan.json", "-q", cwd=tmp_path)
    done = on_h100(
        tmp_path,
        "execute",
        "plan.json",
        "--trust",
        "--device",
        "cuda",
        "--memory-steps",
        "3",
        "-o",
        "m.json",
        "-q",
    )
    assert done.returncode == 0, done.stderr
    assert REHEARSED in done.stdout
    assert "measured" not in done.stdout.lower().replace(MEASURED_CUDA, "")
    told = json.loads((tmp_path / "m.json").read_text())
    assert told["environment"]["gpu"] == "H100 (rehearsed)"
    assert told["measured"]["step_time_ns"] is None
    assert not told["measured"]["times_ns"]
    for key in ("peak_allocated_bytes", "peak_block_bytes", "peak_reserved_bytes"):
        assert told["predicted"][key] == pytest.approx(told["measured"][key], rel=0.005), key


def test_what_is_made_to_show_measurements_is_refused_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, f"H100{ABSENT}")
    refused = CliRunner().invoke(execute, ["plan.json", "--report", str(tmp_path / "x.html")])
    assert refused.exit_code == 2, refused.output
    assert "not there" in refused.stderr
