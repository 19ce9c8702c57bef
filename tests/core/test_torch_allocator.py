"""The simulated allocator beside torch's own: programs that four releases of it ran, with what they recorded.

`tests/standin` made the files in `tests/data/allocator/torch-*.pickle.gz`: the allocator's own code served random
programs on a stand-in for the CUDA driver, which hands out addresses and no memory. No GPU was involved. Each program
has its settings, the device's memory, its operations with where torch put each block, torch's statistics after each,
and the snapshot that torch took in the end, of a history that begins with the program or midway, which is refused.
"""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest

from simulator.allocator.caching import Allocator, Block, OutOfMemory
from simulator.allocator.replay import peak_reserved
from simulator.allocator.settings import as_in, parse_alloc_conf
from simulator.history.snapshot import recording_of
from tests.streams import StreamAllocator
from traces.errors import TraceError

MIB = 1 << 20
DATA = Path(__file__).parents[1] / "data" / "allocator"
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.15.0")
TOTAL_BYTES = 80 << 30  # what the stand-in says that the device has; how much it gives differs
RANGES_FROM, SEGMENTS_FROM = 0x300000000000, 0x7F0000000000


def programs(version: str) -> list[dict[str, Any]]:
    """Those in torch's own pool."""
    return [p for p in all_programs(version) if p["conf"] != "pools"]


def all_programs(version: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pickle.loads(
        gzip.decompress((DATA / f"torch-{version}.pickle.gz").read_bytes())
    )
    return found


class Driver:
    """Hands out the lowest free addresses, in steps of 2 MiB, as the stand-in does."""

    def __init__(self) -> None:
        self.allocator: Allocator | None = None
        self.taken: list[tuple[int, int]] = []
        self.seen = 0

    def place(self, size: int, stream: int, expandable: bool) -> int:
        a = self.allocator
        assert a is not None
        gone = {e.address for e in a.segment_events[self.seen :] if e.action == "segment_free"}
        self.seen = len(a.segment_events)
        ranges = {b.origin for p in (a.small, a.large) for row in p.unmapped.values() for *_, b in row}
        self.taken = [t for t in self.taken if t[0] not in gone and (t[0] >= SEGMENTS_FROM or t[0] in ranges)]
        at = RANGES_FROM if expandable else SEGMENTS_FROM
        room = -(-size // (2 * MIB)) * 2 * MIB
        for start, length in sorted(self.taken):
            if start + length > at:
                if start >= at + room:
                    break
                at = start + length
        self.taken.append((at, room))
        return at


def first_difference(program: dict[str, Any], version: str) -> str | None:
    """Run a program on the simulated allocator; where it first differs from torch, in address or statistics."""
    settings = as_in(parse_alloc_conf(program["conf"]), version)
    driver = Driver()
    a = driver.allocator = StreamAllocator(settings, program["limit"] or program["memory"], driver.place)
    a.range_bytes = TOTAL_BYTES * 9 // 8  # the stand-in has less than it says
    live: dict[int, Block] = {}
    for k, (op, figures) in enumerate(zip(program["ops"], program["figures"], strict=True)):
        match op:
            case ("alloc", number, size, stream, address):
                live[number] = a.malloc(size, stream)
                if live[number].address != address:
                    return f"operation {k}: {op} landed at {live[number].address}"
            case ("oom", size, stream):
                with pytest.raises(OutOfMemory):
                    a.malloc(size, stream)
            case ("free", number):
                a.free(live.pop(number))
            case ("record", number, stream):
                a.record_stream(live[number], stream)
            case ("done", stream):
                a.stream_done(stream)
            case ("empty",):
                a.release_cached()
            case _:
                for stream in list(a.waiting):
                    a.stream_done(stream)
        retries, _ = program["base"]
        reserved, allocated, _, requested, all_retries, _ = figures
        mine = (a.reserved, a.allocated, a.requested, a.num_alloc_retries + retries)
        if mine != (reserved, allocated, requested, all_retries):
            return f"operation {k}: {op}: {mine}, torch has {figures}"
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_every_block_lands_where_torch_put_it(version: str) -> None:
    # A limit of the process's own is like a device of that size, but for what is collected below it.
    run = [p for p in programs(version) if p["ops"] and not (p["limit"] and "garbage" in p["conf"])]
    assert len(run) >= 18
    assert len({p["conf"] for p in run}) == 9
    for p in run:
        assert first_difference(p, version) is None, (p["seed"], p["conf"])


def test_the_versions_take_different_blocks() -> None:
    """Which is why the version matters: by another's rule, programs land elsewhere."""
    for version, other in (("2.11.0", "2.12"), ("2.12.1", "2.13"), ("2.13.0", "2.11"), ("2.11.0", "2.13")):
        assert any(first_difference(p, other) for p in programs(version) if p["ops"]), (version, other)


@pytest.mark.parametrize("version", VERSIONS)
def test_recordings_replay_to_torchs_own_figures(version: str) -> None:
    replayed = others = 0
    for p in programs(version):
        where = (p["seed"], p["conf"])
        try:
            recording = recording_of(p["snapshot"], f"{where}")
        except TraceError:  # what was freed when it began is not given back yet
            others += 1
            continue
        assert recording.settings.ties == as_in(recording.settings, version).ties, where
        others += recording.midway
        replayed += not recording.midway
        if (
            not recording.midway and "garbage" not in p["conf"]
        ):  # collected below a limit of the process's own
            assert peak_reserved(recording, recording.settings) == p["peaks"]["reserved"], where
    assert replayed >= 13
    assert replayed + others >= 22


def test_private_pools_are_refused() -> None:
    p = next(p for p in all_programs("2.13.0") if p["conf"] == "pools")
    with pytest.raises(TraceError, match="2 private pools"):
        recording_of(p["snapshot"], "s")


# Files ------------------------------------------------------------------------------------------------------------


def test_the_first_device_of_several() -> None:
    first, _, second = programs("2.13.0")[:3]
    for s in second["snapshot"]["segments"]:
        s["device"] = 2
    data = first["snapshot"] | {
        "segments": first["snapshot"]["segments"] + second["snapshot"]["segments"],
        "device_traces": [first["snapshot"]["device_traces"][0], [], second["snapshot"]["device_traces"][0]],
        "something new": [{"of": b"a later version"}],
    }
    recording = recording_of(data, "s")
    assert peak_reserved(recording, recording.settings) == first["peaks"]["reserved"]


@pytest.mark.parametrize("drop", ["free_requested", "free_completed"])
def test_a_history_with_actions_left_out_is_refused(drop: str) -> None:
    p = programs("2.13.0")[0]
    trace = p["snapshot"]["device_traces"][0]
    p["snapshot"]["device_traces"][0] = [e for e in trace if e["action"] != drop]
    with pytest.raises(TraceError, match="lacks events"):
        recording_of(p["snapshot"], "s")
