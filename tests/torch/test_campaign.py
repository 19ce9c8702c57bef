"""A campaign of a tiny model on the CPU from end to end, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]

# Twelve layers whose outputs (128 KiB each) outweigh all parameters (16 KiB a layer), so that budgets can be met.
NET = """
import torch
from torch import nn

def build(batch_size=512):
    layers = [m for _ in range(12) for m in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers)
    batch = torch.randn(batch_size, 64), torch.randn(batch_size, 64)
    return model, batch, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)
"""
CASES = """
[campaign]
verify-steps = 1
rounds = 1
runs = 1
memory-steps = 4
[[case]]
model = "net.py:build"
batch-size = 512
budget = ["none", "70%", "1%"]
"""


def call(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "executor", "campaign", *words, "--json"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_a_tiny_model_is_predicted_to_the_byte(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "cases.toml").write_text(CASES)
    code, answer, said = call(tmp_path, "cases.toml", "-o", "c", "--report", "page.html")
    assert code == 0, said
    assert answer["statuses"] == {"measured": 2, "infeasible": 1}
    kept, planned, refused = answer["cases"]
    for row in (kept["measurement"], planned["measurement"]):
        assert row["verified"] is True
        assert row["provenance"] == "measured-cpu"
        assert row["measured"]["peak_reserved_bytes"] is None
    # With what was measured op by op, the peak is right to the byte.
    allocated = [e for e in answer["rows"] if e["figure"] == "allocated"]
    assert {e["run"]: e["error"] for e in allocated} == {"save-all": 0.0, "plan": 0.0}
    peaks = [row["measurement"]["measured"]["peak_allocated_bytes"] for row in (kept, planned)]
    assert peaks[1] < peaks[0]
    assert peaks[1] <= planned["measurement"]["budget_bytes"]
    assert "No plan can stay" in refused["message"]
    assert "measured-cpu" in (tmp_path / "page.html").read_text(encoding="utf-8")

    again, same, said = call(tmp_path, "c")
    assert (again, same) == (code, answer), said
