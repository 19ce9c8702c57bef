"""A peak below which no plan can go, certified: what each op reads must be brought back somehow.

The argument
------------
`Instants.floor` looks at one op at a time: what must be there while it runs. This module asks as well how what it reads
came to be there. Take a plan within the budget B, an op u of backward, and the set S of storages made in forward that
u reads. Just before u runs, all of S is in memory, beside what is in memory there whatever the plan (*base*). Go back
in time from there:

- Either nothing of S was made in the gap between the op before u and u. Then S was in memory while that op ran, so
  the bytes of S that the op's own need does not include fit beside that need; and the same question arises one gap
  earlier, for the same S.
- Or some op q ran again in the gap and made a part of S; take the last such run. While it ran, the rest of S and all
  that q reads were in memory, with what q adds, less what it takes over: base and that must be within B. And before
  it, the set (S without what q makes) with all that q reads was in memory: the same question for that set.

Every plan within B leads back in this way to the end of forward with a set that fits there. As `schedule.build` runs
an op at most once in a gap, the ops that ran later in it are no way back any more. So the least B that some way back
allows is a floor; it is found by following the sets that need least first (a shortest path whose length is its greatest
need). Where that would take too long, the floor is what the sets not yet followed need at least.

This is a pebble game played backwards on sets of values (Sethi 1975; for one op at a time, `Instants.floor` is its
first move).

Counts: at each run in a gap, the bytes that must be there in every plan, the op's reads, its outputs and workspace,
and the rest of the set that it helps to bring together. Ignores: what is saved for later ops, and time.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate
from typing import Final

from simulator.bounds.instants import Floor, Instants

MOST_STATES: Final = 300  # of one question: states seen
MOST_WORK: Final = 20_000  # of one trace: on 26 traces no question after the third raised the floor
CLOSE_STATES: Final = 60_000  # of one trace, where the floor decides
# Storages that are all in memory in a gap, the op after the gap, and the ops that ran again later in the gap.
State = tuple[frozenset[int], int, frozenset[int]]
END: Final[State] = (frozenset(), -1, frozenset())


class Pebbles:
    """What bringing together what ops of backward read takes at least, for one trace."""

    def __init__(self, instants: Instants) -> None:
        self.instants = instants
        turn = instants.turn
        # Op -> what is in memory in the gap before it, whatever the plan.
        self.base_bytes = instants.sure_bytes
        # Op -> what is in memory while it runs, whatever the plan; in forward all of it is that of the turn.
        at_turn = self.base_bytes[turn]
        self.need_bytes = [at_turn] * turn + instants.unavoidable_bytes[turn:]
        # Op -> the most that one op between the turn and the gap before it needs.
        self.most_bytes = [0, *accumulate(self.need_bytes, max)]

    def least_bytes(self, op: int, known_bytes: int, most_states: int) -> tuple[int, int]:
        """A budget below which what `op` reads cannot be brought together, at least `known_bytes`; states seen."""
        reads = self.instants.trace.ops.reads[op]
        first = (frozenset(s for s in reads if not self.instants.sure(s, op)), op, frozenset[int]())
        seen, end_bytes = {first}, 1 << 62
        heap = [(known_bytes, 0, first)]  # of what is needed equally, the newest first
        while heap:
            least_bytes, _, state = heappop(heap)
            if state is END or len(seen) > most_states:
                return least_bytes, len(seen)
            stays_bytes = self._from_the_turn(state)
            ways = [(stays_bytes, END)] if stays_bytes < end_bytes else []
            end_bytes = min(end_bytes, stays_bytes)
            for need_bytes, before in (*ways, *self._made_last(state), *self._carried(state)):
                if before is END or before not in seen:
                    seen.add(before)
                    heappush(heap, (max(least_bytes, need_bytes), -len(seen), before))
        raise AssertionError("the whole set can stay from the turn on, at a price")

    def _from_the_turn(self, state: State) -> int:
        """What it takes that the whole set stays from the turn on, even if no op between needs any of it itself."""
        storages, gap, _ = state
        nbytes = self.instants.trace.storages.nbytes
        return sum(nbytes[s] for s in storages) + self.most_bytes[gap]

    def _carried(self, state: State) -> list[tuple[int, State]]:
        """The set one gap earlier, and what it takes that it is in memory while the op between runs."""
        storages, gap, _ = state
        trace, ran = self.instants.trace, gap - 1
        if ran < self.instants.turn:
            return []
        reads = trace.ops.reads[ran]
        extra = sum(
            trace.storages.nbytes[s]
            for s in storages
            if trace.ops.overwrites[ran] == s or (s not in reads and self.instants.forced_until[s] < ran)
        )
        before = frozenset(s for s in storages if not self.instants.sure(s, ran))
        return [(extra + self.need_bytes[ran], (before, ran, frozenset()))]

    def _made_last(self, state: State) -> list[tuple[int, State]]:
        """What was there before the last op that ran again in the gap and made a part of the set; what that took."""
        storages, gap, later = state
        trace, problem = self.instants.trace, self.instants.problem
        out: list[tuple[int, State]] = []
        for q in sorted({trace.storages.producer[s] for s in storages} - later):
            if not problem.may_rerun[q]:
                continue
            rest = storages.difference(problem.creates[q])
            before = rest.union(s for s in trace.ops.reads[q] if not self.instants.sure(s, gap))
            taken = trace.ops.overwrites[q]
            rise = problem.transient_bytes[q]
            if taken in before and taken not in rest:
                rise -= trace.storages.nbytes[taken]
            held = sum(trace.storages.nbytes[s] for s in before)
            out.append((self.base_bytes[gap] + held + rise, (before, gap, later | {q})))
        return out


def above(instants: Instants, peak_bytes: int, *, close: bool = False) -> bool:
    """Whether the floor that `lowest` shows is above a peak; quicker than the floor itself."""
    return instants.floor.peak_bytes > peak_bytes or any(_raised(instants, peak_bytes, close))


def lowest(instants: Instants, *, close: bool = False) -> Floor:
    """The highest floor that can be shown, with the op that decides it.

    Where it is higher than `Instants.floor`, its `working_bytes` are what bringing back the op's inputs takes at once,
    beside `resident_bytes` and `gradient_bytes`.

    Args:
        instants: of the trace.
        close: follow more sets, of the ops that need most; that takes about a second.
    """
    best, resident = instants.floor, instants.trace.resident_bytes
    for peak_bytes, op in _raised(instants, best.peak_bytes, close):
        stays = instants.sure_bytes[op] - resident
        best = Floor(
            peak_bytes=peak_bytes,
            op=op,
            resident_bytes=resident,
            gradient_bytes=stays,
            working_bytes=peak_bytes - resident - stays,
            brings_back=True,
        )
    return best


def _raised(instants: Instants, known_bytes: int, close: bool) -> Iterator[tuple[int, int]]:
    """Ever higher floors above what is known, and the op of each."""
    pebbles, left = Pebbles(instants), CLOSE_STATES if close else MOST_WORK
    for op in sorted(
        range(instants.turn, len(pebbles.need_bytes)), key=lambda i: (-pebbles.need_bytes[i], i)
    ):
        if instants.brought_bytes[op] + pebbles.most_bytes[op] <= known_bytes:  # stays from the turn on
            continue
        if left <= 0:
            return
        least_bytes, seen = pebbles.least_bytes(op, known_bytes, left if close else MOST_STATES)
        left -= seen
        if least_bytes > known_bytes:
            known_bytes = least_bytes
            yield known_bytes, op
