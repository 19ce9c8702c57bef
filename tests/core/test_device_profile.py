"""Device profiles: what is saved comes back, newer measurements win, and bad files are refused with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import traces.files.parquet
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
    assert store.load(store.save(made, tmp_path / "deep" / "p.parquet")) == made
    assert store.load_identity(tmp_path / "deep" / "p.parquet") == IDENTITY
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["p.parquet"]


def test_the_same_profile_makes_the_same_bytes(tmp_path: Path) -> None:
    one = profile(a=entry(4), b=entry(8))
    two = profile(b=entry(8), a=entry(4))
    assert store.save(one, tmp_path / "1").read_bytes() == store.save(two, tmp_path / "2").read_bytes()


def test_newer_measurements_win(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    store.add_to(path, profile(a=entry(4), b=entry(8)))
    whole = store.add_to(path, replace(profile(b=entry(16), c=entry(32)), workspaces=()))
    assert {k: e.events for k, e in whole.entries.items()} == {"a": (4,), "b": (16,), "c": (32,)}
    assert whole.workspaces == profile().workspaces
    assert store.load(path) == whole


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
    path = store.save(profile(a=entry(4)), tmp_path / "p.parquet")
    before = path.read_bytes()
    with pytest.raises(TraceError, match=named):
        store.add_to(path, DeviceProfile(identity=other, entries={"a": entry(8)}))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (profile(a=entry(4, -8, 4)), "frees more than it has allocated"),
        (profile(a=entry(4, time_ns=-1)), "-1 ns"),
        (profile(a=replace(entry(4), samples=0)), "0 samples"),
        (profile(a=replace(entry(4), provenance="guessed")), "provenance 'guessed'"),
        (replace(profile(), workspaces=(LibraryWorkspace(nbytes=0, op="x"),)), "has 0 bytes"),
    ],
)
def test_a_profile_that_says_what_cannot_be_is_refused(
    bad: DeviceProfile, reason: str, tmp_path: Path
) -> None:
    path = store.save(bad, tmp_path / "p.parquet")
    with pytest.raises(TraceError, match=reason):
        store.load(path)


def _rewritten(path: Path, change: dict[str, object]) -> None:
    table = pq.ParquetFile(path).read()
    header = json.loads(table.schema.metadata[traces.files.parquet.META_KEY]) | change
    metadata = {traces.files.parquet.META_KEY: json.dumps(header).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"record": "trace"}, "does not describe a device profile"),
        ({"profile_version": 9}, "profile version 9"),
        ({"device": 3}, "whose measurements"),
        ({"flags": None}, "whose measurements"),
        ({"workspaces": [{"nbytes": "many"}]}, "malformed workspaces"),
    ],
)
def test_a_foreign_header_is_refused(change: dict[str, object], reason: str, tmp_path: Path) -> None:
    path = store.save(profile(a=entry(4)), tmp_path / "p.parquet")
    _rewritten(path, change)
    with pytest.raises(TraceError, match=reason):
        store.load(path)


def test_files_that_are_no_profile_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="missing"):
        store.load(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(TraceError, match="cannot be read as Parquet"):
        store.load(tmp_path / "text")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "plain")
    with pytest.raises(TraceError, match="not one of Lowtide's"):
        store.load(tmp_path / "plain")


def test_a_crash_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.save(profile(a=entry(4)), tmp_path / "p.parquet")
    before = path.read_bytes()

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(traces.files.parquet, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        store.save(profile(a=entry(8)), path)
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
    path = tmp_path / "p.parquet"
    code = """
import sys
from tests.core.test_device_profile import entry, profile
from traces.records.device_profile import add_to
for k in range(10):
    add_to(sys.argv[1], profile(**{f"{sys.argv[2]}{k}": entry(4)}))
"""
    started = [subprocess.Popen([sys.executable, "-c", code, str(path), name], cwd=ROOT) for name in "abcd"]
    assert [p.wait() for p in started] == [0] * 4
    there = set(store.load(path).entries)
    everything = {f"{name}{k}" for name in "abcd" for k in range(10)}
    assert there <= everything
    assert any(f"{name}9" in there for name in "abcd")
    assert [p.name for p in tmp_path.iterdir()] == ["p.parquet"]
