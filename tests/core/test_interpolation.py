"""Costs at a size that was not measured, from sizes that were."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.costs import interpolation
from tracer.costs.interpolation import Estimate, Index
from tracer.costs.signature import Signature, TensorSpec
from traces.records.device_profile import Entry


def conv_key(batch: int, channels: int = 8) -> str:
    """x[batch, channels, 4, 4] by w[channels, channels, 3, 3]: 64 * batch * channels and 36 * channels^2 bytes."""
    x = TensorSpec(shape=(batch, channels, 4, 4), stride=(16 * channels, 16, 4, 1), dtype="float32")
    w = TensorSpec(shape=(channels, channels, 3, 3), stride=(9 * channels, 9, 3, 1), dtype="float32")
    return Signature(target="aten.conv.default", args=(x, w, None), outputs=(x,)).key


def entry(*events: int, time_ns: int = 100) -> Entry:
    return Entry(
        target="aten.conv.default", shapes="", events=events, time_ns=time_ns, samples=1, provenance=""
    )


def measured(batch: int) -> Entry:
    """A copy of the input (512 * batch), of the weight (2304), the output, and a scratch of 128 + 32 * batch."""
    x, w, scratch = 512 * batch, 2304, 128 + 32 * batch
    return entry(x, w, x, scratch, -scratch, -w, -x, time_ns=1000 + 10 * batch)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_two_measured_sizes_give_every_other(a: int, b: int, wanted: int) -> None:
    if len({a, b, wanted}) < 3:
        return
    index = Index([(conv_key(a), measured(a)), (conv_key(b), measured(b))])
    assert index.estimate(conv_key(wanted)) == Estimate(
        events=measured(wanted).events, time_ns=measured(wanted).time_ns
    )


def test_one_measured_size_gives_others_in_proportion() -> None:
    index = Index([(conv_key(4), measured(4))])
    found = index.estimate(conv_key(8))
    assert found is not None
    # The weight's copy stays; the unknown scratch, 128 + 32 * 4 = 256 bytes, is taken to double.
    assert found.events == (4096, 2304, 4096, 512, -512, -2304, -4096)
    assert found.time_ns == 2 * 1040


def test_what_calling_an_op_takes_does_not_grow() -> None:
    """Of 1040 ns 600 are the call: 600 + 440 * 8 / 4. An op that took less is all call."""
    index = Index([(conv_key(4), measured(4))])
    for call_ns, time_ns in ((600, 600 + 880), (5000, 1040)):
        found = index.estimate(conv_key(8), call_ns=call_ns)
        assert found is not None
        assert found.time_ns == time_ns


def test_a_rule_decides_what_of_one_measured_size_stays() -> None:
    """512 bytes of result and 40 of scratch at batch 2: at 4 the scratch may be 40 or 80, and nothing else."""
    index = Index([(conv_key(2), entry(1024, 40, -40))])
    asked = {
        rule: index.estimate(conv_key(4), rule) for rule in (None, (2048, 40, -40), (2048, 48, -48), (2048,))
    }
    assert {rule: found and found.events for rule, found in asked.items()} == {
        None: (2048, 80, -80),
        (2048, 40, -40): (2048, 40, -40),
        (2048, 48, -48): (2048, 80, -80),
        (2048,): (2048, 80, -80),
    }


def test_a_size_that_does_not_scale_in_step_is_not_estimated() -> None:
    """More channels: shapes double, the weight's bytes grow fourfold."""
    index = Index([(conv_key(4, 8), measured(4)), (conv_key(4, 16), measured(4))])
    assert index.estimate(conv_key(4, 32)) is None
    assert index.estimate(conv_key(8, 32)) is None
    assert Index([(conv_key(4, 8), measured(4))]).estimate(conv_key(4, 16)) is None


def test_points_with_other_patterns_are_not_joined() -> None:
    """The library took another kernel at batch 8: two events more. Either alone may speak, the nearer one does."""
    index = Index([(conv_key(2), entry(1024)), (conv_key(8), entry(4096, 64, -64))])
    found = index.estimate(conv_key(4))
    assert found is not None
    assert found.events == (2048,)
    signs = Index([(conv_key(2), entry(10, -10, 1024)), (conv_key(8), entry(40, 4096, -40))])
    far = signs.estimate(conv_key(6))
    assert far is not None
    assert far.events == (30, 3072, -30)


def test_neighbours_on_both_sides_come_first() -> None:
    """Affine between 2 and 8; the point at 64 lies on another line."""
    index = Index([(conv_key(b), entry(512 * b, n, -n)) for b, n in ((2, 20), (8, 80), (64, 1000))])
    found = index.estimate(conv_key(4))
    assert found is not None
    assert found.events == (2048, 40, -40)


def test_near_neighbours_come_before_far_ones() -> None:
    """Kernels change with the size: 8 lies in the middle of 2 and 14, but nearer to 7 and 10."""
    scratch = {2: 20, 7: 700, 10: 1000, 14: 20}
    index = Index([(conv_key(b), entry(512 * b, n, -n)) for b, n in scratch.items()])
    found = index.estimate(conv_key(8))
    assert found is not None
    assert found.events == (4096, 800, -800)


def test_a_call_that_was_measured_itself_joins_nothing() -> None:
    """Its own entry is asked for first, and here only if that did not describe the step."""
    assert Index([(conv_key(4), measured(4))]).estimate(conv_key(4)) is None


def test_many_measured_calls_of_one_op_do_not_slow_it_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,000 calls each pair would be 2 million; on one line with the wanted one lie the 4 batch sizes alone."""
    index = Index([(conv_key(b, c), measured(b)) for b in (1, 2, 4, 8) for c in range(8, 4008, 8)])
    joined: list[int] = []
    lines = interpolation._lines

    def on_lines(points: Any, wanted: Any) -> Any:
        found = lines(points, wanted)
        joined.extend(len(line) * (len(line) - 1) // 2 for line in found.values())
        return found

    monkeypatch.setattr(interpolation, "_lines", on_lines)
    assert index.estimate(conv_key(16, 800)) is not None
    assert sum(joined) < 10_000


def test_a_convolution_is_not_joined_across_torch_s_choice_of_a_kernel() -> None:
    def key(batch: int) -> str:
        return conv_key(batch).replace("aten.conv.", "aten.convolution.")

    index = Index([(key(b), measured(b)) for b in (4, 8, 16, 20)])
    assert index.estimate(key(12)) is not None
    assert index.estimate(key(32)) is not None
    assert index.estimate(key(1)) is None
    few = Index([(key(b), measured(b)) for b in (4, 8)])
    assert few.estimate(key(12)) is not None
    assert few.estimate(key(16)) is None


def test_another_op_says_nothing() -> None:
    assert Index([(conv_key(4), measured(4))]).estimate("aten.mm.default(4) -> ") is None
