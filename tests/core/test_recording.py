"""Recordings of real GPUs, snapshots made up for the purpose, and files that are not what they claim to be."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from simulator.allocator.caching import Allocator, Block, Pool
from simulator.allocator.replay import load_plain
from simulator.allocator.settings import LOWEST_ADDRESS, OLDER_BLOCK, OLDER_SEGMENT, as_in, parse_alloc_conf
from simulator.history.snapshot import recording_of
from tests import recordings
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


class Program:
    """A program whose allocator keeps a history, as torch's does, from `record()` on."""

    def __init__(self, torch_version: str = "2.13") -> None:
        self.torch_version = torch_version
        self.next = 0x7F0000000000
        self.allocator = Allocator(as_in(parse_alloc_conf(""), torch_version), None, self.place)
        self.live: list[Block] = []
        self.events: list[dict[str, Any]] = []

    def place(self, size: int, stream: int, expandable: bool) -> int:
        self.next += size + 4 * MIB
        return self.next - size - 4 * MIB

    def record(self) -> None:
        self.events.clear()

    def note(self, action: str, address: int, size: int) -> None:
        self.events.append(event(action, address, size, pool_id=(0, 0)))

    def malloc(self, size: int) -> None:
        seen = len(self.allocator.segment_events)
        block = self.allocator.malloc(size)
        for e in self.allocator.segment_events[seen:]:
            self.note(e.action, e.address, e.size_bytes)
        self.note("alloc", block.address, size)
        self.live.append(block)

    def free(self, k: int) -> None:
        block = self.live.pop(k)
        self.note("free_requested", block.address, block.requested)
        self.note("free_completed", block.address, block.requested)
        self.allocator.free(block)

    def snapshot(self) -> dict[str, Any]:
        heads: dict[int, Block] = {}
        for start in [*self.live, *self.allocator.small.blocks(), *self.allocator.large.blocks()]:
            while start.prev is not None:
                start = start.prev
            heads[start.address] = start
        return {
            "segments": [segment(head) for head in heads.values()],
            "device_traces": [[*self.events, {"action": "snapshot", "size": 0, "frames": []}]],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": False,
                "roundup_power2_divisions": {str(1 << k): 0 for k in range(16)},
                **({"max_cached_size": 1 << 62} if self.torch_version == "2.13" else {}),
            },
        }


def segment(head: Block) -> dict[str, Any]:
    """A segment in a snapshot, from its first block."""
    blocks, at = [], head
    while at is not None:
        state = "inactive" if at.usable else "active_allocated"
        blocks.append(block(at.address, at.size, at.requested, state))
        at = at.next
    return {
        "device": 0,
        "address": head.address,
        "total_size": sum(b["size"] for b in blocks),
        "stream": head.stream,
        "segment_type": "small" if head.pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": blocks,
    }


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


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


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
        pickle.dumps(
            {"segments": [], "device_traces": [[{"action": "free_requested", "addr": 5, "size": 1}]]}
        ),
        pickle.dumps(
            {"segments": [], "device_traces": [[{"action": ["alloc"], "addr": 1 << 70, "size": -1}]]}
        ),
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x",  # bytes of 2**62
        b"\x80\x04]r\xff\xff\xff\xff.",  # a memo of 2**32 entries: 64 GiB
        b"\x80\x04\x82\x01.",  # an extension code
        b"P1\n.",  # a persistent id
        b"\x80\x04}]]s.",  # an unhashable key
        b"\x80\x04K\x01)R.",  # calls the number 1
        b"(" * 100_000 + b"t" * 100_000 + b".",  # deep
        b"I" + b"9" * 100_000 + b"\n.",
    ],
)
def test_damaged_files_give_a_reason(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"s\.pickle"):
        recording_of(load_plain(path), str(path))
