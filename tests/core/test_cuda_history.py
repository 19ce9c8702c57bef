"""The CUDA allocator's history cut into ops, on histories written by hand (this needs no GPU)."""

from __future__ import annotations

from typing import Any

import pytest

from tracer.costs.rows import LibraryWorkspace
from tracer.measure.cuda_history import MARK_BYTES, OpWindow, read_history
from traces.errors import TraceError


def alloc(addr: int, size: int) -> list[dict[str, Any]]:
    return [{"action": "alloc", "addr": addr, "size": size, "stream": 0, "time_us": 0}]


def free(addr: int, size: int) -> list[dict[str, Any]]:
    actions = ("free_requested", "free_completed")
    return [{"action": action, "addr": addr, "size": size, "stream": 0} for action in actions]


def mark(addr: int) -> list[dict[str, Any]]:
    return alloc(addr, MARK_BYTES) + free(addr, MARK_BYTES)


def segment(addr: int) -> list[dict[str, Any]]:
    return [{"action": "segment_alloc", "addr": addr, "size": 2 << 20, "stream": 0}]


def window(before: int, after: int, *outputs: int, target: str = "aten.mm.default") -> OpWindow:
    return OpWindow(target, before, after, frozenset(outputs))


def test_what_lies_between_the_markers_is_the_op_s() -> None:
    history = (
        alloc(0x900, 4096)  # before the first op: the batch
        + mark(0x100)
        + segment(0x10000)  # no memory of the op's: the allocator asks the device
        + alloc(0x200, 1000) + alloc(0x400, 300) + free(0x400, 300)
        + mark(0x400)  # the freed block serves as the marker
        + free(0x900, 4096)  # after the op: its input is dropped
        + mark(0x100)
        + alloc(0x600, 64) + free(0x200, 1000)  # the second op frees what the first left
        + mark(0x200)
    )  # fmt: skip
    read = read_history(history, [window(0x100, 0x400, 0x200), window(0x100, 0x200, 0x600)])
    assert read == ([(1000, 300, -300), (64, -1000)], ())


def test_what_no_op_returns_and_nobody_frees_is_a_library_s() -> None:
    history = (
        mark(1) + alloc(0x200, 32 << 20) + alloc(0x300, 512) + alloc(0x800, 99) + mark(1)
        + mark(1) + alloc(0x400, 512) + free(0x800, 99) + mark(1)
        + free(0x300, 512)
    )  # fmt: skip
    read = read_history(history, [window(1, 1, 0x300), window(1, 1, 0x400, target="aten.add.Tensor")])
    # 0x300 and 0x400 are outputs; 0x800 was freed by the next op; 32 MiB stay.
    assert read[1] == (LibraryWorkspace(nbytes=32 << 20, op="aten.mm.default"),)


def test_an_address_that_comes_back_does_not_hide_a_workspace() -> None:
    history = mark(1) + alloc(7, 50) + free(7, 50) + alloc(7, 60) + mark(1)
    read = read_history(history, [window(1, 1)])
    assert read == ([(50, -50, 60)], (LibraryWorkspace(nbytes=60, op="aten.mm.default"),))


def test_an_op_s_own_small_block_is_no_marker() -> None:
    """The op allocates as many bytes as a marker, but keeps them for a while."""
    history = mark(1) + alloc(1, MARK_BYTES) + alloc(2, 8) + free(1, MARK_BYTES) + mark(1)
    assert read_history(history, [window(1, 1, 2)])[0] == [(MARK_BYTES, 8, -MARK_BYTES)]


def test_a_history_that_is_cut_off_is_refused() -> None:
    history = mark(1) + alloc(2, 8) + mark(1)
    with pytest.raises(TraceError, match=r"does not show op 1 \(aten.add.Tensor\)"):
        read_history(history, [window(1, 1, 2), window(1, 3, target="aten.add.Tensor")])
