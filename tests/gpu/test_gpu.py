"""The three commands and a campaign on a GPU: `python -m pytest -m gpu` (a few minutes; skipped without one).

On the null driver (`execute rehearse --gpu h100 -- python -m pytest -m gpu`) they ask the same of memory; values and
times are a GPU's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import python
from tests.torch.conftest import call
from traces.devices import board_of
from traces.provenance import MEASURED_CUDA, REHEARSED, rehearsing

# A convnet, and transformers with and without dropout; small, so that all of it takes minutes.
MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"batch_size": 32, "image_size": 96},
    "bert-tiny": {"batch_size": 16, "seq_len": 128, "optimizer": "sgd"},
    "gpt2-tiny": {"batch_size": 8, "seq_len": 128, "amp": "bfloat16"},
}


def options(model: str) -> list[str]:
    return [w for k, v in MODELS[model].items() for w in (f"--{k.replace('_', '-')}", str(v))]


def executed(folder: Path) -> dict[str, Any]:
    """What `execute` says of the plan there. Where it runs a linear layer again, torch 2.11 asks for a second buffer of
    cuBLASLt: 1 MiB over the budget, which is not predicted, and exit code 1."""
    words = ("plan.json", "--trust", "--device", "cuda", "--steps", "3", "--runs", "5", "--json")
    done = python("-m", "executor", *words, cwd=folder, code=None)
    assert done.returncode == 0 or (done.returncode == 1 and torch.__version__.startswith("2.11."))
    found: dict[str, Any] = json.loads(done.stdout)
    over = found["measured"]["peak_allocated_bytes"] - found["budget_bytes"]
    assert over <= (1 << 20 if done.returncode else 0)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_a_plan_is_exact_and_its_peak_as_predicted(model: str, tmp_path: Path) -> None:
    call(tmp_path, "tracer", model, *options(model), "--device", "cuda", "-o", "t")
    planned = call(tmp_path, "simulator", "t", "--budget", "97%", "-o", "plan.json")
    assert planned["feasible"]
    done = executed(tmp_path)
    assert done["verified"] is (None if rehearsing() else True)
    assert (done["measured"]["step_time_ns"] is None) == rehearsing()
    assert done["provenance"] == (REHEARSED if rehearsing() else MEASURED_CUDA)
    assert abs(done["error_percent"]["peak_allocated_bytes"]) <= 1.0
    assert done["measured"]["peak_reserved_bytes"] >= done["measured"]["peak_allocated_bytes"]


@pytest.mark.gpu
def test_copies_to_host_memory_beside_the_step_change_no_bit(tmp_path: Path) -> None:
    target = board_of(torch.cuda.get_device_name()) or "h100"
    step = ("bert-base", "--batch-size", "4", "--seq-len", "512")
    call(tmp_path, "tracer", *step, "--target", target, "-o", "t")
    planned = call(tmp_path, "simulator", "t", "--budget", "80%", "--levers", "offload", "-o", "plan.json")
    assert planned["plan"]["host_bytes"] > 1 << 28
    done = executed(tmp_path)
    assert done["verified"] is (None if rehearsing() else True)
    assert abs(done["error_percent"]["peak_allocated_bytes"]) <= 1.0


@pytest.mark.gpu
def test_a_campaign(tmp_path: Path) -> None:
    (tmp_path / "cases.toml").write_text(
        '[campaign]\ndevice = "cuda"\nrounds = 2\nruns = 3\nverify-steps = 2\n'
        '[[case]]\nmodel = "bert-tiny"\nbatch-size = 16\nseq-len = 128\nbudget = ["none"]\n'
    )
    answer = call(tmp_path, "executor", "campaign", "cases.toml", "-o", "out")
    assert [r["status"] for r in answer["cases"]] == ["rehearsed" if rehearsing() else "measured"]
