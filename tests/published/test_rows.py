"""What others measured on GPUs, predicted on a laptop: to the byte where the loop is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tracer.build.step import load_spec  # noqa: E402
from tracer.recording import ProfileUse, record_fake  # noqa: E402
from traces.devices import device  # noqa: E402

MODELS = Path(__file__).with_name("models.py")
# Recordings of a public project (Wedsonlin/assignment2-systems, results/medium_*_training_memory_snapshot.pickle; torch
# 2.11, a GPU whose cuBLAS takes 8,519,680 bytes), in requested bytes; and what its loop held beside the step that
# `build()` describes: the batch of a warm-up, and the logits, which have a name until the next iteration's.
PUBLISHED = {
    "wed128": (7_013_335_044, 40_960, 20_480_000),
    "wed256": (9_103_544_320, 81_920, 0),
    "wed512": (12_426_629_128, 163_840, 40_960_000),
    "wed1024": (24_207_167_496, 327_680, 81_920_000),
}
HIGH = pytest.mark.xfail(
    strict=True, reason="47,742,976 bytes (0.2 %) are counted too many; why is not known yet"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=HIGH) if n == "wed1024" else n for n in PUBLISHED])
def test_steps_of_a_course(name: str) -> None:
    measured, warm_up, logits = PUBLISHED[name]
    trace: Any = record_fake(load_spec(f"{MODELS}:{name}"), device("a100-80"), ProfileUse(off=True))
    assert trace.meta.untouched_peak_bytes == measured - warm_up - logits
