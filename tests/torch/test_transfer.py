"""A profile filled at some batch sizes predicts another: within 1 %, for everything kept and for plans.

The real-mode trace stands for the measurement, whose peak is its own to the byte (test_peaks.py).
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if importlib.util.find_spec("torchvision") is None:  # importing it is left to Lowtide
    pytest.skip("no torchvision", allow_module_level=True)

from simulator.core.problem import Problem  # noqa: E402
from tests.torch.steps import random_actions  # noqa: E402
from tracer.build.step import load_spec  # noqa: E402
from tracer.recording import ProfileUse, record_fake, record_real  # noqa: E402
from traces.devices import device  # noqa: E402
from traces.records.trace import Trace  # noqa: E402

CPU = device("cpu")
CASES: list[tuple[str, dict[str, Any], tuple[int, ...], int]] = [
    ("bert-tiny", {"seq_len": 32, "optimizer": "none"}, (2, 4), 8),
    ("gpt2-tiny", {"seq_len": 32, "optimizer": "none"}, (2,), 6),
    ("resnet18", {"image_size": 64}, (2, 4), 8),
    ("mobilenet_v2", {"image_size": 64, "optimizer": "none"}, (2, 6), 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options", "known", "wanted"), CASES, ids=lambda x: str(x))
def test_other_batch_sizes(
    model: str, options: dict[str, Any], known: tuple[int, ...], wanted: int, tmp_path: Path
) -> None:
    path = tmp_path / "profile.parquet"
    for batch in known:
        use = ProfileUse(path=path, calibrate=True)
        record_fake(load_spec(model, {**options, "batch_size": batch}), CPU, use)
    spec = load_spec(model, {**options, "batch_size": wanted})
    real = record_real(spec, CPU, "cpu", ProfileUse(off=True), rounds=1, warmup=1)
    between = record_fake(spec, CPU, ProfileUse(path=path))
    assert between.meta.workspace["interpolated"] > between.meta.workspace.get("none", 0)
    alone = record_fake(spec, CPU, ProfileUse(path=path, calibrate=True))
    assert set(alone.meta.workspace) == {"measured"}
    plain = record_fake(spec, CPU, ProfileUse(off=True))
    for seed in range(3):
        actions = random_actions(real, random.Random(seed)) if seed else ()
        truth = peak(real, actions)
        assert peak(alone, actions) == truth
        assert abs(peak(between, actions) - truth) <= 0.01 * truth
        assert abs(peak(plain, actions) - truth) <= 0.05 * truth


def peak(trace: Trace, actions: Any) -> int:
    problem = Problem(trace)
    return problem.replay(actions).timeline.peak_allocated_bytes
