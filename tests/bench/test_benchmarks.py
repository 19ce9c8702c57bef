"""Each benchmark runs on something small and prints one JSON value; `pytest -m bench tests/bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.bench
@pytest.mark.parametrize(
    ("name", "words", "keys"),
    [
        ("solve", ["resnet18", "--budgets", "80%"], {"gap_points", "solve_seconds"}),
        ("planning", ["bert-base", "--budgets", "80%", "--runs", "1"], {"beside_alone", "processor_s"}),
        ("commands", ["--only", "simulate", "--runs", "1"], {"processor_s", "wall_s"}),
    ],
)
def test_a_benchmark_runs_alone(name: str, words: list[str], keys: set[str], tmp_path: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("needs torch")
    command = [sys.executable, "-m", f"tests.bench.{name}", *words, "--json", "--cache", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert keys <= {*(data[0] if isinstance(data, list) else data)}
