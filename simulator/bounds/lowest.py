"""A peak below which no plan can go, certified: what each op reads must be brought back somehow.

The argument
------------
`Problem.floor` looks at one op at a time: what must be there while it runs. This module asks as well how what it reads
came to be there. Take a plan within the budget B, an op u of backward, and the set S of storages made in forward that
u reads. Just before u runs, all of S is in memory, beside what is in memory there whatever the plan (*base*). Go back
in time from there:

- Either nothing of S was made in the gap between the op before u and u. Then S was in memory while that op ran, so
  the bytes of S that the op's own need does not include fit beside that need; and the same question arises one gap
  earlier, for the same S.
- Or some op q ran again in the gap and made a part of S; take the last such run. While it ran, the rest of S and all
  that q reads were in memory, with what q adds, less what it takes over: base and that must be within B. And before
  it, the set (S without what q makes) with all that q reads was in memory: the same question for that set.

Every plan within B leads back in this way to the end of forward with a set that fits there. So if no path of this
kind exists, no plan exists. Sets are followed until a path is found or none is left; what would take too long counts
as found. The floor is the largest B that is ruled out, plus one byte.

This is a pebble game played backwards on sets of values (Sethi 1975; for one op at a time, `Problem.floor` is its
first move).

Counts: at each run in a gap, the bytes that must be there in every plan, the op's reads, its outputs and workspace,
and the rest of the set that it helps to bring together. Ignores: what is saved for later ops, and time.
"""

from __future__ import annotations

from itertools import accumulate

from simulator.bounds.instants import Instants
from simulator.core.problem import Floor

MOST_STATES = 300  # of one question: (set, gap) pairs followed
MOST_WORK = 100_000  # of one trace
State = tuple[
    frozenset[int], int
]  # storages that are all in memory at the start of a gap, and the op after the gap


class Pebbles:
    """Whether what ops of backward read can be brought together within a budget, for one trace."""

    def __init__(self, instants: Instants) -> None:
        self.instants = instants
        self.left = MOST_WORK
        turn = instants.turn
        # Op -> what is in memory in the gap before it, whatever the plan.
        self.base_bytes = instants.sure_bytes
        # Op -> what is in memory while it runs, whatever the plan; in forward all of it is that of the turn.
        at_turn = self.base_bytes[turn]
        self.need_bytes = [at_turn] * turn + instants.unavoidable_bytes[turn:]
        # Op -> the most that one op between the turn and the gap before it needs.
        self.most_bytes = [0, *accumulate(self.need_bytes, max)]
        self._dead: tuple[int, set[State]] = (0, set())  # sets that the budget rules out

    def possible(self, op: int, budget_bytes: int) -> bool:
        """Whether nothing shows that what `op` reads cannot be brought together within the budget."""
        if self.instants.brought_bytes[op] + self.most_bytes[op] <= budget_bytes:  # stays from the turn on
            self.left -= 1
            return True
        if self._dead[0] != budget_bytes:
            self._dead = (budget_bytes, set())
        dead = self._dead[1]
        first = (frozenset(s for s in self.instants.trace.ops.reads[op] if not self.instants.sure(s, op)), op)
        if first in dead:
            return False
        seen, stack = {first}, [first]
        while stack:
            state = stack.pop()
            self.left -= 1
            if self._fits_from_the_turn(state, budget_bytes) or len(seen) > MOST_STATES or self.left < 0:
                return True
            for before in (*self._made_last(state, budget_bytes), *self._carried(state, budget_bytes)):
                if before not in seen and before not in dead:
                    seen.add(before)
                    stack.append(before)
        dead |= seen
        return False

    def _fits_from_the_turn(self, state: State, budget_bytes: int) -> bool:
        """Whether the whole set can stay from the turn on, even if no op between needs any of it itself."""
        storages, gap = state
        nbytes = self.instants.trace.storages.nbytes
        return sum(nbytes[s] for s in storages) + self.most_bytes[gap] <= budget_bytes

    def _carried(self, state: State, budget_bytes: int) -> list[State]:
        """The set one gap earlier, if it can be in memory while the op between runs."""
        storages, gap = state
        trace, ran = self.instants.trace, gap - 1
        if ran < self.instants.turn:
            return []
        reads = trace.ops.reads[ran]
        extra = sum(
            trace.storages.nbytes[s]
            for s in storages
            if trace.ops.overwrites[ran] == s or (s not in reads and self.instants.forced_until[s] < ran)
        )
        if extra + self.need_bytes[ran] > budget_bytes:
            return []
        return [(frozenset(s for s in storages if not self.instants.sure(s, ran)), ran)]

    def _made_last(self, state: State, budget_bytes: int) -> list[State]:
        """What was in memory before the last op that ran again in the gap and made a part of the set."""
        storages, gap = state
        trace, problem = self.instants.trace, self.instants.problem
        out: list[State] = []
        for q in sorted({trace.storages.producer[s] for s in storages}):
            if not problem.may_rerun[q]:
                continue
            rest = storages.difference(problem.creates[q])
            before = rest.union(s for s in trace.ops.reads[q] if not self.instants.sure(s, gap))
            taken = trace.ops.overwrites[q]
            rise = problem.transient_bytes[q]
            if taken in before and taken not in rest:
                rise -= trace.storages.nbytes[taken]
            held = sum(trace.storages.nbytes[s] for s in before)
            if self.base_bytes[gap] + held + rise <= budget_bytes:
                out.append((before, gap))
        return out


def lowest(instants: Instants) -> Floor:
    """The highest floor that can be shown, with the op that decides it.

    Where it is higher than `Problem.floor`, its `working_bytes` are what bringing back the op's inputs takes at once,
    beside `resident_bytes` and `gradient_bytes`.
    """
    trace, problem = instants.trace, instants.problem
    best = problem.floor
    pebbles = Pebbles(instants)
    later = range(instants.turn, len(trace.ops))
    for op in sorted(later, key=lambda i: (-pebbles.need_bytes[i], i)):
        if pebbles.left < 0:
            break
        if pebbles.possible(op, best.peak_bytes):
            continue
        impossible, possible = best.peak_bytes, max(instants.peaks)
        while possible - impossible > 1:
            middle = (impossible + possible) // 2
            if pebbles.possible(op, middle):
                possible = middle
            else:
                impossible = middle
        resident = trace.resident_bytes
        stays = pebbles.base_bytes[op] - resident
        best = Floor(
            peak_bytes=possible,
            op=op,
            resident_bytes=resident,
            gradient_bytes=stays,
            working_bytes=possible - resident - stays,
            brings_back=True,
        )
    return best
