"""Turn a plan and many small changes of it into the peak and the time of each: the evaluation of local search.

`Flips(evaluator, state)` walks the plan once; each change is then worked out from what differs (see
`simulator.kernels.flip`), which costs a few microseconds where a whole evaluation costs tens. The answers are those of
`Evaluator.cost` on the changed state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.kernels.flip import GIVEN_UP, flip_each
from simulator.kernels.flip_index import BLOCK, index
from simulator.kernels.walk import FORBIDDEN
from traces.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from simulator.core.evaluator import Evaluator, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """One entry a change: what the changed plan costs; IMPOSSIBLE where it needs an op that may not run again."""

    peak_bytes: NDArray[np.int64]
    time_ns: NDArray[np.int64]


IMPOSSIBLE = 1 << 62  # as peak and as time: over any budget


class Flips:
    """A walked plan. It is not changed by tries; to move on, change the state and make another.

    A flip s >= 0 of a storage keeps it if it is not kept, and the other way round; ~s does the same with sharing.
    """

    def __init__(self, evaluator: Evaluator, state: State) -> None:
        """Walk the plan; raises PlanError as `Evaluator.cost` does."""
        self.evaluator, self.state = evaluator, state.copy()
        self.peak_bytes, added_ns, _, steps = evaluator.walk(self.state)
        self.time_ns = evaluator.base_time_ns + added_ns
        self.given_up = 0  # how many changes were evaluated as a whole
        if not state.drops:
            self._index(steps)

    def each(self, storages: Sequence[int] | NDArray[np.int32]) -> Costs:
        """What each of these flips by itself makes of the plan."""
        flips = np.ascontiguousarray(storages, np.int32)
        return self._try(flips, np.arange(len(flips) + 1, dtype=np.int32))

    def groups(self, groups: Sequence[Sequence[int]]) -> Costs:
        """What each group of flips, made together, makes of the plan."""
        at = np.zeros(len(groups) + 1, np.int32)
        np.cumsum([len(g) for g in groups], out=at[1:])
        return self._try(np.array([s for g in groups for s in g], np.int32), at)

    def _try(self, flips: NDArray[np.int32], at: NDArray[np.int32]) -> Costs:
        n = len(at) - 1
        peaks, times = np.full(n, GIVEN_UP, np.int64), np.zeros(n, np.int64)
        if not self.state.drops:
            flip_each(
                self.evaluator.forward, self.evaluator.facts, self._base, self._work, flips, at, peaks, times
            )
            times += self.time_ns
            impossible = peaks == FORBIDDEN
            peaks[impossible] = times[impossible] = IMPOSSIBLE
        for g in np.flatnonzero(peaks == GIVEN_UP).tolist():
            self.given_up += 1
            peaks[g], times[g] = self._whole(flips[at[g] : at[g + 1]].tolist())
        return Costs(peak_bytes=peaks, time_ns=times)

    def _whole(self, flips: list[int]) -> tuple[int, int]:
        state = self.state.copy()
        for s in flips:
            if s >= 0:
                state.there[s] ^= 1
            else:
                state.share[~s] ^= 1
        try:
            return self.evaluator.cost(state)
        except PlanError:
            return IMPOSSIBLE, IMPOSSIBLE

    def _index(self, steps: int) -> None:
        ev, state = self.evaluator, self.state
        n_op, n_st = len(ev.op_id), len(state.there)
        seq, levels = ev.steps(steps)
        op = np.where(seq < 0, ~seq, seq)
        needs_at, _, reads_at, _, creates_at = ev.facts[:5]
        read_step = np.empty(int(np.diff(reads_at)[op].sum()), np.int32)
        looks = np.diff(needs_at)[op] + np.where(seq < 0, np.diff(creates_at)[op], 0)
        touch = np.empty(int(looks.sum()), np.int32)
        segment_at = np.zeros(n_op - ev.forward + 1, np.int32)
        segment = np.zeros((1 + bool(ev.rerun_bytes), n_op - ev.forward + 2), np.int64)
        segment_of = np.empty(steps, np.int32)
        bound, bound_at = np.empty(n_st, np.int32), np.empty(n_st, np.int32)
        read_at, touch_at = np.empty(n_st + 1, np.int32), np.empty(n_st + 1, np.int32)
        highest = np.empty(-(-(ev.forward + steps) // BLOCK), np.int64)
        index(
            ev.forward, ev.facts, state.there, state.share, seq, levels[0], steps, segment_at, segment, segment_of,
            bound, bound_at, read_at, read_step, touch_at, touch, highest,
        )  # fmt: skip
        self._base = (
            state.there, state.share, seq, levels[0], levels[1], segment_at, segment, segment_of, bound, bound_at,
            read_at, read_step, touch_at, touch, highest, ev.held, ev.taken_over,
        )  # fmt: skip
        self._work = (state.there.copy(), state.share.copy(), bound.copy(), *_space(ev, steps))


def _space(evaluator: Evaluator, steps: int) -> tuple[NDArray[Any], ...]:
    """Work space, shared by all `Flips` of an evaluator."""
    room = steps // 8 + 64  # beyond that a whole walk is as quick
    space: tuple[NDArray[Any], ...] = evaluator.flip_space
    if not space or space[-2].shape[1] < room:
        n_op, n_st = len(evaluator.op_id), len(evaluator.nbytes)
        space = (
            np.zeros(2, np.int64),
            np.empty((6, n_st + 64), np.int32),
            np.zeros((4, n_st), np.int64),
            np.zeros((2, n_op), np.int64),
            *evaluator.chain_space(),
            np.empty(2 * n_st + 1024, np.int64),
            np.empty((4, room), np.int32),
            np.empty((3, room), np.int64),
            np.empty((3, min(2 * n_st + 64, 1 << 20)), np.int64),  # `changes` numbers them in 20 bits
        )
        evaluator.flip_space = space
    return space
