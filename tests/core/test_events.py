"""What an op's events say of blocks, held against what they must come to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from traces.records.trace import OwnEvents, replayed, that_stay

DRAWS = st.lists(st.tuples(st.booleans(), st.sampled_from((4, 8)), st.integers(0, 3)), min_size=1, max_size=9)


@given(DRAWS)
def test_each_block_is_given_back_once_or_holds_an_output(draws: list[tuple[bool, int, int]]) -> None:
    own, wanted = OwnEvents(), []
    there: dict[int, int] = {}  # the blocks by number, each with its bytes
    for frees, size, which in draws:
        if frees and there:
            block = sorted(there)[which % len(there)]
            del there[block]
            own.free(block)
            wanted.append(~block)
        else:
            block = sum(1 for n in wanted if n > 0)
            there[block] = size
            own.allocate(block, size)
            wanted.append(size)
    asks: list[int] = []
    made = replayed(there, own.events, list(there), asks)
    assert asks == wanted  # the very blocks, not others of their size
    assert made == {block: block for block in there}


def test_a_block_that_is_given_back_before_another_of_its_size_comes_does_not_stay() -> None:
    # A copy of 8 bytes, a result of 8 bytes once that is gone: the result stays.
    assert that_stay((8, -8, 8)) == {8: [2]}
    assert that_stay((8, 8, -8)) == {8: [0]}
    assert that_stay((8, -8, 8, 8, -8)) == {8: [2]}
    assert that_stay((8, 8, 0, -8)) == {8: [1]}  # of two the older one goes
    assert that_stay((-8, 8)) == {8: [1]}  # what is not its own is given back first
