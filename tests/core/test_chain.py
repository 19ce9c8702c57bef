"""What must run again for an op, on a net small enough to say it by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.kernels.compiled import compiled
from simulator.kernels.records import OP, STORAGE, Packed, Work, pack_lists, steps
from simulator.kernels.walk import chain

# Op 0 makes storage 0; op 1 makes 1 from 0; op 2 makes 2 from 0 and 1; op 3 makes 3 from 2 and 1; op 4 needs 3 and 2.
NEEDS = ((), (0,), (0, 1), (2, 1), (3, 2))
C = 4


@compiled
def walked(c: int, present: Any, facts: Any, work: Any, checked: bool) -> Any:
    """A kernel that does nothing else."""
    return chain(c, 0, present, facts, work, checked)


def find(there: list[int], may_rerun: list[int] | None = None) -> tuple[int, list[int], list[int]]:
    """What it returns, the ops in their order, and the storages that are demanded."""
    ops, storages = np.zeros(6, OP), np.zeros(4, STORAGE)
    (ops["needs_at"],), ids = pack_lists(NEEDS)
    ops["may_rerun"][:5] = 1 if may_rerun is None else may_rerun
    storages["producer"] = range(4)
    none = np.zeros(0, np.int32)
    facts = Packed(4, 0, len(ids), ops, storages, ids, none, none)
    work = Work(
        present=np.zeros(4, np.uint8),
        last=none,
        first_end=none,
        demanded=np.full(4, -1, np.int32),
        visited=np.full(5, -1, np.int32),
        step_of=none,
        stack=np.zeros(32, np.int32),
        **steps(0, 5),
    )
    n = walked(C, np.array(there, np.uint8), facts, work, may_rerun is not None)
    return n, [~b for b in work.op[: max(n, 0)].tolist()], np.flatnonzero(work.demanded == C).tolist()


def test_nothing_is_missing() -> None:
    assert find([0, 0, 1, 1]) == (0, [], [])


def test_each_op_runs_once_and_after_what_it_needs() -> None:
    # 3 needs 2, which needs 0 and 1; and 1 needs 0 again, which is on its way.
    assert find([0, 0, 0, 0]) == (4, [0, 1, 2, 3], [0, 1, 2, 3])


def test_what_is_there_ends_the_walk() -> None:
    assert find([0, 1, 0, 0]) == (3, [0, 2, 3], [0, 2, 3])
    assert find([0, 0, 1, 0]) == (3, [0, 1, 3], [0, 1, 3])  # 0 for 1 alone, and 1 for 3 alone


def test_an_op_that_may_not_run_again_is_named() -> None:
    n, _, _ = find([0, 0, 0, 0], may_rerun=[1, 0, 1, 1, 1])
    assert n == ~1
    assert find([0, 1, 0, 0], may_rerun=[1, 0, 1, 1, 1])[0] == 3  # it need not run again
    assert find([0, 0, 0, 0])[0] == 4  # nobody asks
