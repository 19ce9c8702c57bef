"""What an op's events say of blocks, held against what they must come to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from traces.records.events import replayed, that_stay

DRAWS = st.lists(st.tuples(st.booleans(), st.sampled_from((4, 8)), st.integers(0, 3)), min_size=1, max_size=9)


@given(DRAWS)
def test_each_block_is_given_back_once_or_holds_an_output(draws: list[tuple[bool, int, int]]) -> None:
    events, there = [], []
    for frees, size, which in draws:
        if frees and there:
            events.append(-there.pop(which % len(there)))
        else:
            events.append(size)
            there.append(size)
    nbytes = dict(enumerate(there))
    asks: list[int] = []
    made = replayed(nbytes, events, list(nbytes), asks)
    blocks = [n for n in asks if n > 0]
    gone = [~n for n in asks if n < 0]
    assert len({*gone}) == len(gone)
    assert {*range(len(blocks))} - {*gone} == {*made.values()}
    assert [blocks[made[s]] for s in nbytes] == there
    assert [n if n > 0 else -blocks[~n] for n in asks] == events


def test_a_block_that_is_given_back_before_another_of_its_size_comes_does_not_stay() -> None:
    # A copy of 8 bytes, a result of 8 bytes once that is gone: the result stays.
    assert that_stay((8, -8, 8)) == {8: [2]}
    assert that_stay((8, 8, -8)) == {8: [0]}
    assert that_stay((8, -8, 8, 8, -8)) == {8: [2]}
    assert that_stay((-8, 8)) == {8: [1]}  # what is not its own is given back first
