"""What `trace` does with device profiles: fills one, uses it, says so, and refuses one of another device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.torch import small_nets  # noqa: E402
from tests.torch.steps import build_of  # noqa: E402
from tracer.costs.profiles import (  # noqa: E402
    board_of,
    find,
    identity_here,
    identity_wanted,
    mismatch,
)
from tracer.record.step import trace_step  # noqa: E402
from tracer.recording import ProfileUse, record_fake, record_real, sources_text  # noqa: E402
from tracer.step.step import BuildStep, load_spec  # noqa: E402
from traces.devices import device  # noqa: E402
from traces.errors import EnvironmentProblem, TraceError  # noqa: E402
from traces.records import device_profile as store  # noqa: E402
from traces.records.device_profile import DeviceProfile, Entry, LibraryWorkspace  # noqa: E402
from traces.records.trace import TraceMeta  # noqa: E402

CPU = device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lowtide"


def net(batch_size: int) -> BuildStep:
    return load_spec(small_nets.spec("residual"), {"batch_size": batch_size})


def test_a_real_trace_fills_the_profile_and_a_fake_one_uses_it(cache: Path) -> None:
    said: list[str] = []
    real = record_real(net(2), CPU, "cpu", ProfileUse(), said.append, rounds=1, warmup=1)
    (path,) = cache.glob("*.json")
    assert str(path) in said[-1]
    fake = record_fake(net(2), CPU, ProfileUse(), said.append)
    assert fake.ops.events == real.ops.events
    assert set(fake.meta.workspace) == {"measured"}
    assert f"(profile {path})" in said[-1]
    without = record_fake(net(2), CPU, ProfileUse(off=True), said.append)
    assert "measured" not in without.meta.workspace
    assert "0 measured" in said[-1]


def test_no_profile_is_filled_where_none_is_wanted(cache: Path) -> None:
    record_real(net(2), CPU, "cpu", ProfileUse(off=True), rounds=1, warmup=1)
    assert not cache.exists()


def test_measurements_are_added_to_those_that_are_there(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "mine.profile.json"
    measured(net(2), path)
    before = DeviceProfile.load(path)
    assert all(
        isinstance(e, Entry) and e.samples and e.provenance == "measured-cpu" for e in before.entries.values()
    )
    measured(net(4), path)
    after = DeviceProfile.load(path)
    assert set(before.entries) < set(after.entries)
    assert set(record_fake(net(2), CPU, ProfileUse(path=path)).meta.workspace) == {"measured"}
    assert not cache.exists()


def measured(build: BuildStep, path: Path) -> None:
    record_real(build, CPU, "cpu", ProfileUse(path=path), rounds=1, warmup=1)


def _changed(path: Path, **change: object) -> Path:
    profile = DeviceProfile.load(path)
    return replace(profile, identity=replace(profile.identity, **change)).save(path)  # type: ignore[arg-type]


def test_a_profile_of_another_device_is_refused_and_of_other_flags_warned_about(tmp_path: Path) -> None:
    path = DeviceProfile(identity=identity_here("cpu")).save(tmp_path / "p.profile.json")
    _changed(path, flags={**identity_here("cpu").flags, "threads": "96"})
    said: list[str] = []
    record_fake(net(2), CPU, ProfileUse(path=path), said.append)
    assert any("threads was 96" in line for line in said)
    _changed(path, device="another processor")
    with pytest.raises(TraceError, match="another processor"):
        record_fake(net(2), CPU, ProfileUse(path=path))
    with pytest.raises(TraceError, match="another processor"):
        record_real(net(2), CPU, "cpu", ProfileUse(path=path))
    with pytest.raises(TraceError, match="no such profile"):
        record_fake(net(2), CPU, ProfileUse(path=tmp_path / "none.profile.json"))


def test_profiles_that_do_not_fit_are_passed_over(cache: Path) -> None:
    want = identity_wanted(CPU)
    assert find(want) is None
    path = DeviceProfile(identity=want).save(cache / want.file_name)
    found = find(want)
    assert found is not None
    assert found.path == path
    _changed(path, torch_version="1.9.1")
    assert find(want) is None
    path.write_text("damaged")
    broken = find(want)
    assert broken is not None
    assert "left out" in broken.warning
    assert broken.profile.entries == {}


def test_a_damaged_file_does_not_hide_a_good_one(cache: Path) -> None:
    want = identity_wanted(device("h200"))
    cache.mkdir(parents=True)
    (cache / "a-damaged.profile.json").write_text("damaged")
    have = replace(want, device="NVIDIA H200")
    good = DeviceProfile(identity=have).save(cache / "b-good.profile.json")
    found = find(want)
    assert found is not None
    assert found.path == good
    assert "a-damaged" in found.warning
    assert "left out" in found.warning


def test_a_damaged_profile_is_refused_before_anything_is_measured(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its merge would fail after minutes of measuring, and the trace with it."""
    cache.mkdir(parents=True)
    (cache / identity_here("cpu").file_name).write_text("damaged")
    monkeypatch.setattr("tracer.recording.measure", lambda *a, **k: pytest.fail("measured"))
    with pytest.raises(TraceError, match="not a JSON file"):
        record_real(net(2), CPU, "cpu", ProfileUse())


def test_a_profile_that_cannot_take_more_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = DeviceProfile(identity=identity_here("cpu")).save(tmp_path / "p.profile.json")
    _changed(path, flags={**identity_here("cpu").flags, "threads": "96"})
    monkeypatch.setattr("tracer.recording.measure", lambda *a, **k: pytest.fail("measured"))
    with pytest.raises(TraceError, match=r"p\.profile.json: .*threads 96 and "):
        record_real(net(2), CPU, "cpu", ProfileUse(path=path))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="not a directory"):
        record_real(net(2), CPU, "cpu", ProfileUse(path=tmp_path / "file" / "p.profile.json"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cache_that_cannot_be_written_costs_no_trace(
    cache: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A home directory may be read-only, as in containers, or full."""
    if when == "before":
        cache.parent.write_text("no directory")
    else:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store.DeviceProfile, "save", full)
    said: list[str] = []
    assert record_real(net(2), CPU, "cpu", ProfileUse(), said.append, rounds=1).meta.mode == "real"
    assert sum("warning: the device profile" in line for line in said) == 1


def test_tf32_is_set_before_a_gpu_s_profile_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else measurements with TF32 would go to the file of those without."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    seen: list[bool] = []

    def identity(device: str) -> None:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        raise EnvironmentProblem("no GPU")

    monkeypatch.setattr("tracer.recording.identity_here", identity)
    build = load_spec(small_nets.spec("residual"), {"batch_size": 2, "tf32": True})
    try:
        with pytest.raises(EnvironmentProblem):
            record_real(build, device("h200"), "cuda", ProfileUse())
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags
    assert seen == [True]


def test_a_gpu_s_profile_serves_a_laptop(cache: Path) -> None:
    want = identity_wanted(device("h200"))
    have = replace(want, device="NVIDIA H200")
    DeviceProfile(identity=have).save(cache / have.file_name)
    assert find(want) is not None
    assert find(identity_wanted(device("l40s"))) is None
    assert "it is of NVIDIA H200" in mismatch(have, identity_wanted(device("l40s")))
    assert "benchmark was True" in mismatch(replace(have, flags={**have.flags, "benchmark": "True"}), want)
    assert find(identity_wanted(device("h200"), tf32=True)) is None
    assert "tf32_matmul was False and is True" in mismatch(have, identity_wanted(device("h200"), tf32=True))
    patch = replace(have, torch_version=".".join([*want.torch_version.split(".")[:2], "99"]))
    assert mismatch(patch, want) == ""


@pytest.mark.parametrize(
    ("name", "board"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090 Ti", ""),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""),
        ("Tesla T4", "T4"),
        ("Some Other GPU", ""),
        # The same chips at other clocks: whoever wants their figures nearly right names the entry.
        ("NVIDIA A100 80GB PCIe", ""),
        ("NVIDIA H100 NVL", ""),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", ""),
        ("NVIDIA GH200 480GB", ""),
    ],
)
def test_boards_by_the_driver_s_name(name: str, board: str) -> None:
    assert board_of(name) == board


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
    assert TraceMeta.from_json(good).rates == {"op_ns": 3}
    with pytest.raises(ValueError, match="rates"):
        TraceMeta.from_json({**good, "rates": {"op_ns": "3"}})


def test_words_about_sources() -> None:
    trace = record_fake(net(2), CPU, ProfileUse(off=True))
    trace = replace(trace, meta=replace(trace.meta, workspace={"measured": 3, "approximate": 2, "none": 1}))
    assert sources_text(trace, "") == (
        "Allocations inside the 6 computing ops: 3 measured, 2 approximate, by a few rules, "
        "1 by what they return alone."
    )


def test_a_loss_that_makes_tensors_is_recorded_on_fake_tensors_as_it_runs() -> None:
    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        wanted = torch.nn.functional.one_hot(t, 3).float()
        return (torch.tensor([1.0, 2.0, 0.5]) * (y - wanted).square()).mean()

    def make() -> tuple[object, ...]:
        return torch.nn.Linear(4, 3), (torch.randn(5, 4), torch.randint(3, (5,))), loss, None

    build = build_of(make)
    real = record_real(build, CPU, "cpu", ProfileUse(off=True), rounds=1, warmup=1)
    fake = record_fake(build, CPU, ProfileUse(off=True))
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
    real = record_real(build, CPU, "cpu", ProfileUse(off=True), rounds=1, warmup=1)
    fake = record_fake(build, CPU, ProfileUse(off=True))
    assert real.ops.target == fake.ops.target
    # A gradient in its weight's own format is taken as it is; in another it would be copied into that.
    assert not any("new_empty_strided" in target for target in fake.ops.target)
