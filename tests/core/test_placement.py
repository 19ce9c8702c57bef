"""Offsets planned offline: live blocks never overlap, and the pool is no smaller than what is live."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.allocator import placement
from simulator.allocator.placement import ALIGN_BYTES, Lifetimes, Placement, lifetimes, place
from simulator.allocator.requests import Requests, requests_of
from simulator.core.problem import Problem
from simulator.core.schedule import build
from tests.strategies import traces_with_actions
from tests.tiny import bwd, fwd, trace
from traces.records.plan import Action
from traces.records.trace import Trace

B = ALIGN_BYTES


@st.composite
def blocks(draw: st.DrawFn, most: int = 14) -> Lifetimes:
    count = draw(st.integers(0, most))
    begins = [draw(st.integers(0, 12)) for _ in range(count)]
    return Lifetimes(
        sizes=tuple(B * draw(st.integers(1, 9)) for _ in begins),
        begins=tuple(begins),
        ends=tuple(b + draw(st.integers(1, 8)) for b in begins),
        resident_bytes=B * draw(st.integers(0, 3)),
    )


def live_bytes(of: Lifetimes, at: int) -> int:
    there = (n for n, b, e in zip(of.sizes, of.begins, of.ends, strict=True) if b <= at < e)
    return of.resident_bytes + sum(there)


def drawn_blocks(seed: int) -> Lifetimes:
    """40 blocks, about 8 of them there at once."""
    draw = random.Random(seed)
    rows = [(B * draw.randint(1, 40), b := draw.randint(0, 60), b + draw.randint(1, 25)) for _ in range(40)]
    sizes, begins, ends = zip(*rows, strict=True)
    return Lifetimes(sizes=sizes, begins=begins, ends=ends)


def check(found: Placement) -> None:
    """No two blocks that are there at once share a byte, none lies on a resident, and the pool is what they say."""
    of = found.blocks
    rows = list(zip(found.offsets, of.sizes, of.begins, of.ends, strict=True))
    for k, (offset, size, begin, end) in enumerate(rows):
        assert offset >= of.resident_bytes
        for other, its_size, its_begin, its_end in rows[:k]:
            if begin < its_end and its_begin < end:
                assert offset + size <= other or other + its_size <= offset
    assert found.pool_bytes == max((o + n for o, n, _, _ in rows), default=of.resident_bytes)
    assert found.pool_bytes >= of.peak_bytes


@settings(max_examples=400, deadline=None)
@given(blocks())
def test_live_blocks_never_overlap(of: Lifetimes) -> None:
    check(place(of))


@settings(max_examples=200, deadline=None)
@given(blocks())
def test_the_peak_is_the_most_that_is_there_at_once(of: Lifetimes) -> None:
    assert of.peak_bytes == max(live_bytes(of, at) for at in range(22))


def least_pool(of: Lifetimes) -> int:
    """By trying every order, each block at the lowest free offset: some order of these gives the least pool."""
    rows = list(zip(of.sizes, of.begins, of.ends, strict=True))
    best = sum(of.sizes) + of.resident_bytes
    for order in permutations(rows):
        placed: list[tuple[int, int, int, int]] = []
        for size, begin, end in order:
            there = sorted((o, o + n) for o, n, b, e in placed if b < end and begin < e)
            offset = of.resident_bytes
            for low, high in there:
                if low - offset >= size:
                    break
                offset = max(offset, high)
            placed.append((offset, size, begin, end))
        best = min(best, max((o + n for o, n, _, _ in placed), default=of.resident_bytes))
    return best


@settings(max_examples=60, deadline=None)
@given(blocks(most=5))
def test_against_every_order_of_a_few_blocks(of: Lifetimes) -> None:
    """No pool is below the least one; with up to three blocks it is that one."""
    found, least = place(of).pool_bytes, least_pool(of)
    assert found >= least
    if len(of.sizes) <= 3:
        assert found == least


def test_where_the_caching_allocator_fragments() -> None:
    """Blocks a 2, b 2, then both go, then c 4: c lies where a and b were, in a pool of 4 and the resident 1."""
    asked = Requests(
        residents=(5,), blocks=(0, 1, ~0, ~1, 2), sizes=(2 * B, 2 * B - 1, 0, 0, 4 * B), once=(), count=3
    )
    of = lifetimes(asked)
    assert of == Lifetimes(sizes=(2 * B, 2 * B, 4 * B), begins=(0, 1, 4), ends=(2, 3, 5), resident_bytes=B)
    found = place(of)
    assert sorted(found.offsets[:2]) == [B, 3 * B]
    assert found.offsets[2] == B
    assert (found.pool_bytes, found.fragmentation) == (5 * B, 0.0)


def test_what_is_asked_once_is_there_throughout() -> None:
    asked = Requests(residents=(B,), blocks=(0, ~0), sizes=(B, 0), once=((1, 3 * B),), count=1)
    assert lifetimes(asked).resident_bytes == 4 * B


def test_a_gap_is_filled_best_fit() -> None:
    """Largest first: a 5 below, b 4 above it, c 3 on top; once b is gone, d 2 fits where b was, not on top."""
    of = Lifetimes(sizes=(5 * B, 4 * B, 3 * B, 2 * B), begins=(0, 0, 0, 2), ends=(4, 2, 4, 4))
    found = place(of)
    assert found.offsets == (0, 5 * B, 9 * B, 5 * B)
    assert found.fragmentation == 0


@settings(max_examples=150, deadline=None)
@given(traces_with_actions())
def test_any_schedule_can_be_placed(drawn: tuple[Trace, tuple[Action, ...]]) -> None:
    of, actions = drawn
    check(place(lifetimes(requests_of(Problem(of), build(Problem(of), actions)))))


def test_a_step_by_hand() -> None:
    """w 1 stays. x 3 and g 3: g is made while x is there, so 7 in all, as many as are there at once."""
    of = trace([fwd({"x": 3 * B}, "w"), bwd({"g": 3 * B}, "x")], {"w": B})
    found = place(lifetimes(requests_of(Problem(of), build(Problem(of)))))
    assert (found.pool_bytes, found.blocks.peak_bytes) == (7 * B, 7 * B)


def test_what_lies_too_high_is_placed_again_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    of = drawn_blocks(2)
    found = place(of)
    check(found)
    monkeypatch.setattr(placement, "PATIENCE", 0)
    assert found.fragmentation < 0.06 < 0.09 < place(of).fragmentation


def test_a_late_gain_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these blocks the sixth order made from the fixed ones gains 4 %, and the twentieth another one."""
    of = drawn_blocks(117)
    found = place(of)
    check(found)
    monkeypatch.setattr(placement, "PATIENCE", 12)
    assert found.fragmentation < 0.021 < 0.03 < place(of).fragmentation


@pytest.mark.parametrize(("seed", "gains_until"), [(6, 0), (117, 20)])
def test_no_more_orders_are_tried_where_none_gains(
    monkeypatch: pytest.MonkeyPatch, seed: int, gains_until: int
) -> None:
    tried = 0
    real = placement._placed

    def counted(*of: Any) -> Any:
        nonlocal tried
        tried += 1
        return real(*of)

    monkeypatch.setattr(placement, "_placed", counted)
    assert place(drawn_blocks(seed)).fragmentation > placement.CLOSE
    assert tried == 5 + gains_until + placement.PATIENCE
