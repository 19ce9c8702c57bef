"""One trace under constraints: the facts that no plan changes, and whatever is worked out from them once.

Whoever asks a question (a command, a study, a notebook) makes one `Problem` and hands it down. Nothing below makes
another from the trace, so what is worked out once (arrays, floors, the replay with everything saved) serves all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from simulator.core.facts import Facts
from simulator.core.limits import NONE, Constraints
from simulator.core.replay import Replay, replay
from traces.records.plan import Action
from traces.records.trace import EAGER, Trace


class Problem(Facts):
    """The facts about one trace, with the replay of plans and the floor."""

    def __init__(
        self, trace: Trace, constraints: Constraints = NONE, *, only: Collection[int] | None = None
    ) -> None:
        """See `Facts`."""
        super().__init__(trace, constraints, only=only)
        self._replayed: tuple[tuple[Action, ...], Replay] | None = None

    def replay(self, actions: Iterable[Action] = ()) -> Replay:
        """What a plan's actions come to, by the exact replay; asked at once for the same ones, the same.

        Raises:
            PlanError: an action is impossible, or a chain needs an op that may not run again.
        """
        wanted = tuple(actions)
        if self._replayed is None or self._replayed[0] != wanted:
            self._replayed = (wanted, replay(self, wanted))
        return self._replayed[1]

    @cached_property
    def saved(self) -> Replay:
        """The step with everything saved."""
        return replay(self, ())

    @cached_property
    def floor(self) -> Floor:
        """A peak below which no plan can go, seen from one op at a time; see `Floor`."""
        return _floor(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A peak below which no plan can go, and the op that decides it: what must be there while it runs.

    Counts: resident storages; storages alive at that instant that are no candidates and that backward or a hold
    still needs; the op's own reads, outputs and workspace. Ignores: the working set of recomputation chains, and
    non-candidates that only chains need; so the best possible plan may lie above it. `simulator.bounds.lowest` goes
    on from here.
    """

    peak_bytes: int
    op: int
    resident_bytes: int  # of the peak: parameters, buffers, optimizer state, inputs
    gradient_bytes: int  # of the peak: gradients and other storages that no plan can free by then
    working_bytes: int  # of the peak: what the op itself reads, creates and uses as workspace
    brings_back: bool = (
        False  # the working bytes are what bringing back the op's inputs takes, before it runs
    )


def _floor(problem: Problem) -> Floor:
    trace = problem.trace
    ops, sts = trace.ops, trace.storages
    evictable = [problem.is_evictable(s) for s in range(len(sts))]  # need only be there when it is read
    last = list(sts.hold)
    for i in range(len(ops)):
        for s in (*ops.reads[i], *problem.creates[i]):
            eager = i < problem.forward_end and ops.flags[i] & EAGER
            if not evictable[s] or eager or s in problem.creates[i]:
                last[s] = max(last[s], i)
    resident = trace.resident_bytes
    fixed = 0  # live and unavoidable
    dying: list[list[int]] = [[] for _ in range(len(ops))]
    best = Floor(peak_bytes=resident, op=-1, resident_bytes=resident, gradient_bytes=0, working_bytes=0)
    for i in range(len(ops)):
        reads = {s for s in ops.reads[i] if not problem.resident[s]}
        back = sum(sts.nbytes[s] for s in reads if evictable[s] and last[s] < i)
        inside = sum(sts.nbytes[s] for s in reads if last[s] >= i)
        total = resident + fixed + back + problem.transient_bytes[i] - _taken(trace, i, last)
        if total > best.peak_bytes:
            best = Floor(
                peak_bytes=total,
                op=i,
                resident_bytes=resident,
                gradient_bytes=fixed - inside,
                working_bytes=total - resident - fixed + inside,
            )
        for s in problem.creates[i]:
            fixed += sts.nbytes[s]
            dying[last[s]].append(s)
        for s in dying[i]:
            fixed -= sts.nbytes[s]
    return best


def _taken(trace: Trace, i: int, last: list[int]) -> int:
    """Bytes that op i need not allocate because it may take over its input's memory at its last use."""
    s = trace.ops.overwrites[i]
    return trace.storages.nbytes[s] if s >= 0 and last[s] <= i else 0
