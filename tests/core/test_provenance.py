"""What was rehearsed passes nowhere for what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from executor.cli.main import execute
from tests import tiny
from traces.provenance import ABSENT, MEASURED_CPU, MEASURED_CUDA, NAME, REHEARSED, alloc_conf, provenance_of
from traces.records.measurement import Measurement, RunFigures

MEMORY = RunFigures(peak_allocated_bytes=5, peak_block_bytes=6, peak_reserved_bytes=7)
TIMED = replace(MEMORY, step_time_ns=1)
GPU, ABSENT_GPU = {"gpu": "NVIDIA H200"}, {"gpu": f"H200{ABSENT}"}


def measurement(**more: Any) -> Measurement:
    given: dict[str, Any] = dict.fromkeys(("measured", "keep_all", "eager"), MEMORY)
    given |= {"device": "cuda", "provenance": REHEARSED, "environment": ABSENT_GPU}
    return tiny.measurement(TIMED, **(given | more))


def test_a_rehearsal_is_known_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    assert provenance_of("cpu") == MEASURED_CPU
    assert provenance_of("cuda:0") == MEASURED_CUDA
    monkeypatch.setenv(NAME, f"H200{ABSENT}")
    assert (provenance_of("cpu"), provenance_of("cuda")) == (MEASURED_CPU, REHEARSED)


@pytest.mark.parametrize("more", [
    {"provenance": MEASURED_CUDA},
    {"environment": GPU},
    {"measured": TIMED},
    {"keep_all": replace(MEMORY, times_ns=(1, 2))},
    {"verified": True},
])  # fmt: skip
def test_figures_of_a_gpu_that_is_not_there_are_memory_alone(more: dict[str, Any]) -> None:
    assert measurement().measured.step_time_ns is None
    with pytest.raises(ValueError, match=r"provenance|not there"):
        measurement(**more)


def test_pages_take_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, f"H200{ABSENT}")
    for words in (["plan.json"], ["campaign", "cpu"]):
        done = CliRunner().invoke(execute, [*words, "--report", str(tmp_path / "x.html")])
        assert done.exit_code == 2
        assert "not there" in done.output


def test_a_command_on_the_null_driver_takes_its_own_options() -> None:
    done = CliRunner().invoke(execute, ["rehearse", "--gpu", "h100", "--json", "--", "execute", "plan.json"])
    assert done.exit_code == 2
    assert "so --json must follow" in done.output


def test_cuda_s_own_name_of_the_allocators_settings_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `CUDAAllocatorConfig::instance` of torch 2.11 to 2.13."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert alloc_conf() == "max_split_size_mb:64"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert alloc_conf() == "expandable_segments:True"
