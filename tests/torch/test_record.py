"""What a recorded step says of itself, and that fake tensors record what runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.torch import small_nets
from tests.torch.steps import build_of
from tracer.costs.rows import LibraryWorkspace
from tracer.record.step import trace_step
from tracer.recording import record_fake, record_real
from tracer.step.step import BuildStep, load_spec
from traces.devices import device
from traces.files import from_json
from traces.records.trace import TraceMeta

CPU = device("cpu")


def net(batch_size: int) -> BuildStep:
    return load_spec(small_nets.spec("residual"), {"batch_size": batch_size})


def test_library_workspaces_are_storages_that_are_always_there() -> None:
    draft = trace_step(net(2), CPU)
    trace = draft.trace
    kept = (
        LibraryWorkspace(nbytes=32 << 20, op="aten.mm.default"),
        LibraryWorkspace(nbytes=8, op="aten.bmm.default"),
    )
    made = draft.finish(workspaces=kept)
    assert made.resident_bytes == trace.resident_bytes + (32 << 20) + 8
    assert draft.finish(workspaces=kept[:1]).resident_bytes == trace.resident_bytes + (32 << 20)
    assert draft.finish(workspaces=()) == trace
    assert made.meta.fingerprint == trace.meta.fingerprint


def test_a_record_names_torch_with_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that was installed as 2.11.0 may hold the build 2.11.0+cu130."""
    from importlib import metadata

    from tracer import environment

    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(environment, "_version", environment._version.__wrapped__)
    assert environment.versions()["torch"] == str(torch.__version__)
    assert environment.versions()["transformers"] == "1.0"


def test_rates_of_another_kind_are_no_header() -> None:
    good = TraceMeta(model="m", rates={"op_ns": 3}).to_json()
    assert from_json(TraceMeta, good).rates == {"op_ns": 3}
    with pytest.raises(ValueError, match="rates"):
        from_json(TraceMeta, {**good, "rates": {"op_ns": "3"}})


def test_a_loss_that_makes_tensors_is_recorded_on_fake_tensors_as_it_runs() -> None:
    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        wanted = torch.nn.functional.one_hot(t, 3).float()
        return (torch.tensor([1.0, 2.0, 0.5]) * (y - wanted).square()).mean()

    def make() -> tuple[object, ...]:
        return torch.nn.Linear(4, 3), (torch.randn(5, 4), torch.randint(3, (5,))), loss, None

    build = build_of(make)
    real = record_real(build, CPU, "cpu", rounds=1, warmup=1)
    fake = record_fake(build, CPU)
    assert real.ops.target == fake.ops.target
    assert "aten.scatter_.value" in real.ops.target  # not the comparison that one_hot makes of fake tensors
    # The weights of the classes are there from where they are made, and not before: 3 floats.
    i = fake.ops.target.index("aten.lift_fresh.default")
    (weights,) = fake.ops.writes[i]
    assert (fake.storages.producer[weights], fake.storages.nbytes[weights]) == (i, 12)
    assert "constant" not in fake.storages.name


CHANNELS_LAST = """
import torch
from torch import nn


def build(batch_size: int = 2):
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2)
    layers = first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.Flatten(), nn.Linear(128, 5)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    images = torch.randn(batch_size, 3, 8, 8).to(memory_format=torch.channels_last)
    return model, (images, torch.randint(5, (batch_size,))), nn.functional.cross_entropy, None
"""


def test_a_model_in_channels_last_is_so_on_fake_tensors_too(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(CHANNELS_LAST)
    build = load_spec(f"{tmp_path}/net.py:build")
    real = record_real(build, CPU, "cpu", rounds=1, warmup=1)
    fake = record_fake(build, CPU)
    assert real.ops.target == fake.ops.target
    # A gradient in its weight's own format is taken as it is; in another it would be copied into that.
    assert not any("new_empty_strided" in target for target in fake.ops.target)
