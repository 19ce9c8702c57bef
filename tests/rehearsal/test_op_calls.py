"""What the rules say that ops allocate inside on a GPU, against torch's own code on the null driver, call by call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tracer.costs.rules_cuda.workspaces import TABLE
from tracer.rehearsal import run_on_null_driver
from traces.devices import device
from traces.records.events import replayed, that_stay

pytestmark = pytest.mark.rehearsal
ROOM_BYTES = 1 << 42  # in which every call fits
LEAST_CALLS = 15_000
LEAST_SHARE = 0.75  # of the rules, that some call meets
BOTH_FORMATS = (
    "one channel or one pixel: torch asks in which memory format it lies, and shape and strides say both"
)
# Ops of which some calls are known to be told wrongly.
KNOWN = {
    **dict.fromkeys(
        (
            "aten._adaptive_avg_pool2d_backward.default", "aten.avg_pool2d_backward.default",
            "aten.max_pool2d_with_indices_backward.default", "aten._upsample_nearest_exact2d.default",
            "aten.convolution_backward.default",
        ),
        BOTH_FORMATS,
    ),
    **dict.fromkeys(("aten.any.dim", "aten.all.dim"), "a byte, of a tensor of one element"),
    "aten.any.default": "a byte, of a tensor of one element",
    "aten.all.default": "a byte, of a tensor of one element",
    "aten.amax.default": "of a dimension that is expanded and reduced",
    "aten.amin.default": "of a dimension that is expanded and reduced",
    "aten.argmax.default": "what can be seen as one row without a copy is not told apart",
    "aten._fused_rms_norm_backward.default": "torch 2.11 adds up short rows in another way",
}  # fmt: skip
MOST_KNOWN = 15


def peak(events: Iterable[int]) -> int:
    """The most bytes that are alive at once."""
    live = most = 0
    for event in events:
        live += event
        most = max(most, live)
    return most


def in_order(events: Sequence[int]) -> list[int]:
    """The requests, block by block; what is given back in one go in any order."""
    asks: list[int] = []
    left = [size for size, positions in that_stay(events).items() for _ in positions]
    replayed(left, events, range(len(left)), asks)
    turns = itertools.groupby(asks, key=lambda n: n < 0)
    return [n for frees, of in turns for n in (sorted(of) if frees else of)]


@pytest.mark.parametrize("gpu", ["t4", "a100-80", "l4", "h100", "b200"])
def test_the_rules_tell_what_torch_allocates_inside_its_ops(gpu: str) -> None:
    answer = run_on_null_driver(
        "tests.rehearsal.op_calls:rows",
        {"gpu": gpu},
        replace(device(gpu), memory_bytes=ROOM_BYTES),
        what="called ops",
    )
    rows: list[dict[str, Any]] = [r for r in answer["rows"] if r["told"] is not None]
    met = {rule.name for r in rows if (rule := TABLE.rule_for(r["op"]))}
    wrong = [r for r in rows if peak(r["told"]) != peak(r["found"])]
    disordered = [r for r in rows if in_order(r["told"]) != in_order(r["found"])]
    # A rule that does not leave what the op leaves is not used; nothing may hide behind that.
    unused = [r for r in rows if sum(r["told"]) != sum(r["found"])]
    assert len(rows) > LEAST_CALLS
    assert len(met) > len(TABLE.rules) * LEAST_SHARE
    assert [r for r in wrong if r["op"] not in KNOWN] == []
    assert len(wrong) <= MOST_KNOWN
    assert len(disordered) < len(rows) / 150  # most are 16 bytes of a flash attention's seed
    assert len(unused) < len(rows) / 500
    assert not [text for text in answer["refused"] if "null driver" in text]
