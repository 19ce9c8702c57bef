"""Recordings of real GPUs, snapshots made up for the purpose, and files that are not what they claim to be."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from simulator.allocator.caching import Block, Pool
from simulator.allocator.replay import load_plain
from simulator.allocator.settings import LOWEST_ADDRESS, OLDER_BLOCK, OLDER_SEGMENT
from simulator.history.export import _Film
from simulator.history.snapshot import recording_of
from tests import recordings, tiny
from traces.errors import TraceError

MIB = 1 << 20


@pytest.mark.parametrize("name", recordings.NAMES)
def test_real_recordings_replay_to_the_byte(name: str) -> None:
    recorded = recordings.Recorded(name)
    recorded.play()
    found = recorded.allocator
    assert (found.peak_reserved, found.reserved) == recorded.peaks()
    wanted = [e.size_bytes for e in recorded.events if e.action == "segment_alloc"]
    assert [e.size_bytes for e in found.segment_events if e.action == "segment_alloc"] == wanted
    # Where one of them began, what lay behind some blocks was their own, which only its addresses tell.
    assert recorded.same_addresses == recorded.allocations or name == "transformer-medium-ctx512-training"


# Snapshots --------------------------------------------------------------------------------------------------------


def event(action: str, address: int, size: int, frames: Any = None, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames or [], **more}


def block(address: int, size: int, requested: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state}


class Program(_Film):
    """A program whose allocator keeps a history, as torch's does, from `record()` on."""

    def __init__(self) -> None:
        super().__init__(None, tiny.chain(1), None, ())  # type: ignore[arg-type]

    def record(self) -> None:
        self.events.clear()

    def malloc(self, size: int) -> None:  # type: ignore[override]
        super().malloc(size, 0, [])

    def free(self, k: int) -> None:  # type: ignore[override]
        super().free([*self.live.values()][k][0], 0)

    def snapshot(self) -> dict[str, Any]:  # type: ignore[override]
        return super().snapshot("")


def write(path: Path, data: object) -> Path:
    path.write_bytes(pickle.dumps(data))
    return path


@pytest.mark.parametrize("before", ["a block", "a block that is freed", "a cached segment"])
def test_a_history_that_begins_midway_is_known_as_such(before: str) -> None:
    p = Program()
    p.malloc(30 * MIB)
    if before == "a cached segment":
        p.free(0)
    p.record()
    p.malloc(MIB)
    if before == "a block that is freed":
        p.free(0)
    recording = recording_of(p.snapshot(), "made up")
    assert recording.midway
    assert (
        len(recording.events)
        == 1 + (before != "a cached segment") + 2 * (before == "a block that is freed") + 1
    )


def halves_and_whole() -> dict[str, Any]:
    """30 and 30 MiB are freed, then 60 are wanted: 120 MiB in fixed segments, 60 in one that grows."""
    p = Program()
    p.malloc(30 * MIB)
    p.malloc(30 * MIB)
    p.free(0)
    p.free(0)
    p.malloc(60 * MIB)
    return p.snapshot()


# Hostile and damaged files ----------------------------------------------------------------------------------------

SEGMENT = {"action": "segment_alloc", "addr": 0, "size": 1 << 21, "stream": 0}
RECORDED = {"segments": [{"address": 0, "total_size": 1 << 21}], "device_traces": [[SEGMENT]]}


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def doubled(times: int) -> list[object]:
    """A list that is as large as 2 to the `times` if its shared parts are walked, and small in memory."""
    out: list[object] = []
    for _ in range(times):
        out = [out, out]
    return out


def test_free_blocks_at_one_address_have_an_order() -> None:
    """A recording that says of two segments that they begin at one place must not stop the replay."""
    for ties in (LOWEST_ADDRESS, OLDER_BLOCK, OLDER_SEGMENT):
        pool = Pool(False, ties)
        first, second = Block(0, 512, 0, pool), Block(0, 512, 0, pool)
        for block in (first, second):
            pool.insert(block)
            block.mapped = False
            pool.insert(block)
        assert [b for *_, b in pool.free[0]] == [b for *_, b in pool.unmapped[0]] == [first, second]


def test_a_hostile_pickle_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = write(tmp_path / "s.pickle", {"segments": [], "device_traces": [[Hostile(mark)]]})
    with pytest.raises(TraceError, match=r"mkdir.*plain data only"):
        recording_of(load_plain(path), str(path))
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle at all",
        b"\x80\x04",
        pickle.dumps({"segments": []})[:-3],
        pickle.dumps([1, 2, 3]),
        pickle.dumps({"segments": 3, "device_traces": []}),
        pickle.dumps({"segments": []}),
        pickle.dumps({"segments": [], "device_traces": [[]]}),
        pickle.dumps({"segments": [5], "device_traces": [[{"action": "alloc", "addr": 0, "size": 1}]]}),
        pickle.dumps({"segments": [], "device_traces": [[7]]}),
        pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": "x", "size": 1}]]}),
        pickle.dumps({"segments": [], "device_traces": [[{"action": "free_requested", "size": 1}]]}),
        pickle.dumps({"segments": [], "device_traces": [[{"action": ["alloc"], "addr": 2**70, "size": -1}]]}),
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x",  # bytes of 2**62
        b"\x80\x04]r\xff\xff\xff\xff.",  # a memo of 2**32 entries: 64 GiB
        b"\x80\x04\x82\x01.",  # an extension code
        b"P1\n.",  # a persistent id
        b"\x80\x04}]]s.",  # an unhashable key
        b"\x80\x04K\x01)R.",  # calls the number 1
        b"(" * 100_000 + b"t" * 100_000 + b".",  # deep
        b"I" + b"9" * 100_000 + b"\n.",
        pickle.dumps({**RECORDED, "device_traces": [[{**SEGMENT, "addr": 10**4000, "size": 10**4000}]]}),
        pickle.dumps({**RECORDED, "device_traces": [[{**SEGMENT, "size": 1 << 63}]]}),
        pickle.dumps({**RECORDED, "segments": doubled(60)}),
    ],
)
def test_damaged_files_give_a_reason(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"s\.pickle: (not a memory snapshot|.*damaged)"):
        recording_of(load_plain(path), str(path))
