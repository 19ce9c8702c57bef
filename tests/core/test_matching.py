"""Whether the environment's allocator settings are the plan's."""

from __future__ import annotations

import pytest

from executor.matching import check_alloc_conf, times_apply
from traces.errors import EnvironmentProblem
from traces.records.trace import TraceMeta


@pytest.mark.parametrize(
    ("planned", "environment", "device", "refused"),
    [
        ("expandable_segments:True", "", "cuda", False),  # the process that measures gets the plan's
        ("expandable_segments:True", "expandable_segments:True", "cuda:1", False),
        ("expandable_segments:True", " expandable_segments:True ,", "cuda", False),
        ("expandable_segments:True", "max_split_size_mb:64", "cuda", True),
        ("expandable_segments:True", "expandable_segments:True,large_segment_size_mb:12", "cuda", True),
        ("expandable_segments:True", "max_split_size_mb:64", "cpu", False),
        ("", "max_split_size_mb:64", "cuda", False),
    ],
)
def test_other_allocator_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch, planned: str, environment: str, device: str, refused: bool
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", environment)
    meta = TraceMeta(model="m", alloc_conf=planned)
    if refused:
        with pytest.raises(EnvironmentProblem, match="unset PYTORCH_ALLOC_CONF"):
            check_alloc_conf(meta, device)
    else:
        check_alloc_conf(meta, device)


@pytest.mark.parametrize(
    ("mode", "target", "device", "gpu", "applies"),
    [
        ("real", "cpu", "cpu", "", True),
        ("fake", "cpu", "cpu", "", True),
        ("fake", "H200", "cpu", "", False),
        ("fake", "cpu", "cuda", "NVIDIA H200", False),
        ("fake", "H200", "cuda", "NVIDIA H200", True),
        ("fake", "H200", "cuda:1", "NVIDIA H200", True),
        ("fake", "H200", "cuda", "NVIDIA H100 80GB HBM3", False),
        ("real", "NVIDIA H200", "cuda", "NVIDIA H200", True),
        ("real", "NVIDIA A100-SXM4-80GB", "cuda", "NVIDIA H200", False),
    ],
)
def test_times_are_set_beside_those_of_the_same_device_alone(
    mode: str, target: str, device: str, gpu: str, applies: bool
) -> None:
    assert times_apply(TraceMeta(model="m", mode=mode, target=target), device, gpu) is applies
