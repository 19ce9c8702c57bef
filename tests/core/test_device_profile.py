"""Device profiles: what is saved comes back, newer measurements win, and bad files are refused with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import traces.files
from traces.errors import TraceError
from traces.records import device_profile as store
from traces.records.device_profile import DeviceProfile, Entry, Identity, LibraryWorkspace

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = Identity(
    device="NVIDIA H200", kind="cuda", target="H200", torch_version="2.13.0", flags={"benchmark": "False"}
)


def entry(*events: int, time_ns: int = 5) -> Entry:
    return Entry(
        events=events, time_ns=time_ns, samples=3,
        provenance="measured-cuda",
    )  # fmt: skip


def profile(**entries: Entry) -> DeviceProfile:
    return DeviceProfile(
        identity=IDENTITY,
        entries=entries,
        workspaces=(LibraryWorkspace(nbytes=32 << 20, op="aten.mm.default"),),
    )


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    made = profile(a=entry(64, 16, -64), b=entry())
    assert DeviceProfile.load(made.save(tmp_path / "deep" / "p.json")) == made
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["p.json"]


def test_the_same_profile_makes_the_same_bytes(tmp_path: Path) -> None:
    one = profile(a=entry(4), b=entry(8))
    two = profile(b=entry(8), a=entry(4))
    assert one.save(tmp_path / "1").read_bytes() == two.save(tmp_path / "2").read_bytes()


def test_newer_measurements_win(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    store.add_to(path, profile(a=entry(4), b=entry(8)))
    whole = store.add_to(path, replace(profile(b=entry(16), c=entry(32)), workspaces=()))
    assert {k: e.events for k, e in whole.entries.items()} == {"a": (4,), "b": (16,), "c": (32,)}
    assert whole.workspaces == profile().workspaces
    assert DeviceProfile.load(path) == whole


@pytest.mark.parametrize(("first", "second"), [(100, 9_000), (9_000, 100)])
def test_times_of_a_busy_machine_do_not_stay(first: int, second: int) -> None:
    both = profile(a=entry(4, time_ns=first)).merged(profile(a=entry(8, time_ns=second)))
    assert both.entries["a"] == entry(8, time_ns=100)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (replace(IDENTITY, device="NVIDIA L40S"), "device 'NVIDIA H200' and 'NVIDIA L40S'"),
        (replace(IDENTITY, torch_version="2.12.0"), "torch '2.13.0' and '2.12.0'"),
        (replace(IDENTITY, flags={"benchmark": "True"}), "benchmark False and True"),
    ],
)
def test_measurements_of_different_things_are_not_merged(other: Identity, named: str, tmp_path: Path) -> None:
    path = profile(a=entry(4)).save(tmp_path / "p.json")
    before = path.read_bytes()
    with pytest.raises(TraceError, match=named):
        store.add_to(path, DeviceProfile(identity=other, entries={"a": entry(8)}))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"entries": {"a": {"events": [4, -8, 4]}}}, "frees more than it has allocated"),
        ({"entries": {"a": {"time_ns": -1}}}, "-1 ns"),
        ({"entries": {"a": {"samples": 0}}}, "0 samples"),
        ({"entries": {"a": {"provenance": "guessed"}}}, "provenance 'guessed'"),
        ({"entries": {"a": {"samples": "many"}}}, r"Expected `int`.*entries"),
        ({"workspaces": [{"nbytes": 0, "op": "x"}]}, "has no bytes"),
        ({"identity": {"device": "NVIDIA H200 (rehearsed)"}}, "nothing on it is a measurement"),
        ({"identity": {"flags": None}}, r"Expected `object`.*identity\.flags"),
        ({"record": "trace"}, "holds no profile"),
        ({"profile_version": 9}, "profile version 9"),
    ],
)
def test_a_file_that_says_what_cannot_be_is_refused(
    changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    def merged(into: Any, new: Any) -> Any:
        both = isinstance(into, dict) and isinstance(new, dict)
        return {**into, **{k: merged(into.get(k), v) for k, v in new.items()}} if both else new

    path = profile(a=entry(4)).save(tmp_path / "p.json")
    path.write_text(json.dumps(merged(json.loads(path.read_text()), changed)))
    with pytest.raises(TraceError, match=reason):
        DeviceProfile.load(path)


def test_a_crash_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = profile(a=entry(4)).save(tmp_path / "p.json")
    before = path.read_bytes()

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(traces.files, "canonical_json", fail)
    with pytest.raises(KeyboardInterrupt):
        profile(a=entry(8)).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_where_profiles_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.cache_directory() == tmp_path / "lowtide"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.cache_directory() == tmp_path / "home" / ".cache" / "lowtide"
    names = {replace(IDENTITY, flags={"benchmark": b}).file_name for b in ("True", "False")}
    assert len(names) == 2
    assert all(n.startswith("nvidia-h200-torch2.13.0-") for n in names)


def test_processes_that_measure_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    """Four processes add ten calls each to one file: it can be read in the end, and holds the last call of one."""
    path = tmp_path / "p.json"
    code = """
import sys
from tests.core.test_device_profile import entry, profile
from pathlib import Path
from traces.records.device_profile import add_to
for k in range(10):
    add_to(Path(sys.argv[1]), profile(**{f"{sys.argv[2]}{k}": entry(4)}))
"""
    started = [subprocess.Popen([sys.executable, "-c", code, str(path), name], cwd=ROOT) for name in "abcd"]
    assert [p.wait() for p in started] == [0] * 4
    there = set(DeviceProfile.load(path).entries)
    everything = {f"{name}{k}" for name in "abcd" for k in range(10)}
    assert there <= everything
    assert any(f"{name}9" in there for name in "abcd")
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
