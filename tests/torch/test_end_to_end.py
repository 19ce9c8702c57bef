"""trace, simulate and execute of a real model in fresh processes, as a user types them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("torchvision") is None:  # importing it is left to Lowtide
    pytest.skip("no torchvision", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {"peak_allocated_bytes", "peak_reserved_bytes", "step_time_ns"}


def call(folder: Path, module: str, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", module, *words, "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)  # exactly one object
    assert isinstance(answer, dict)
    return answer


# So many images with sides of 64 that activations outweigh the optimizer's temporaries: a plan lowers the peak.
@pytest.mark.parametrize(
    ("model", "images"), [("squeezenet1_1", 8), pytest.param("resnet18", 24, marks=pytest.mark.slow)]
)
def test_from_a_model_s_name_to_its_measured_peak(model: str, images: int, tmp_path: Path) -> None:
    options = ("--batch-size", str(images), "--image-size", "64", "--optimizer", "sgd")
    traced = call(tmp_path, "tracer", model, *options, "--device", "cpu", "--rounds", "1", "-o", "trace")
    assert traced["meta"]["mode"] == "real"
    planned = call(
        tmp_path, "simulator", "trace", "--budget", "93%", "-o", "plan.json", "--report", "plan.html"
    )
    assert {"trace", "planner", "feasible", "budget_bytes", "solve_seconds", "gap_points"} <= set(planned)
    assert planned["feasible"] is True
    for key in ("baseline", "plan"):
        assert set(planned[key]) >= FIGURES
    assert {"overhead_percent", "recomputed_ops"} <= set(planned["plan"])
    assert "overhead_percent" in planned["bound"]

    answer = call(
        tmp_path, "executor", "plan.json", "--report", "error.html", "-o", "measurement.json",
        "--steps", "2", "--memory-steps", "3", "--warmup", "0", "--runs", "1",
    )  # fmt: skip
    for key in ("predicted", "measured", "error_percent", "eager", "keep_all"):
        assert set(answer[key]) == {*FIGURES, "peak_block_bytes"}, key
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
        assert model in text
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "error.html", "measurement.json", "plan.html", "plan.json", "trace"
    ]  # fmt: skip
