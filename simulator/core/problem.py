"""One trace under constraints: the facts that no plan changes, and whatever is worked out from them once.

Whoever asks a question (a command, a study, a notebook) makes one `Problem` and hands it down. Nothing below makes
another from the trace, so what is worked out once (arrays, floors, the replay with everything saved) serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

from simulator.core.limits import NONE, Constraints
from simulator.core.selectors import resolve
from traces.trace import EAGER, FORBIDS_RECOMPUTE, FORWARD, OPTIMIZER, VIEW, Trace

if TYPE_CHECKING:
    from simulator.core.evaluator import Evaluator
    from simulator.core.replay import Replay
    from traces.plan import Action

T = TypeVar("T")


class Problem:
    """Facts about one trace that no plan changes; tuples are indexed by op id or storage id. Not to be edited.

    A storage is rebuildable if the op that produced it may run again and everything that this op reads is
    resident, rebuildable, or saved by default; so any set of candidates can be recomputed together, because
    whatever a chain meets is either a candidate itself or still there.

    Under constraints, an op that must never run again may not, and a value that must be kept is no candidate. Such
    values, and those of such ops, stay for recomputations that read them even if backward does not (`outcome.finish`
    says so in the plan).

    Attributes:
        creates: op -> the storages that it brings into being.
        is_view, may_rerun: op -> whether it is a view; whether it may run a second time.
        forward_end: the number of ops in forward.
        resident: storage -> exists throughout the step.
        saved_by_default: storage -> made in forward and read in backward, or must be kept.
        pinned: storage -> alive when forward ends for a reason outside the captured graph.
        rebuildable: storage -> can be computed again from what can be saved.
        recompute_only: storage -> rebuildable, but only recomputations would read it after forward.
        candidates: storages that a plan may recompute, in order of their production.
        transient_bytes: op -> bytes that its own run adds at most, outputs and workspace.
        created_bytes: op -> bytes of all that it creates.
    """

    def __init__(
        self, trace: Trace, constraints: Constraints = NONE, *, only: Collection[int] | None = None
    ) -> None:
        """The facts; the rest is worked out when it is first asked for.

        Args:
            trace: one training step.
            constraints: what no plan may do.
            only: candidates for recomputation, where they are fewer than the trace allows.

        Raises:
            SpecError: a constraint names nothing in this trace.
        """
        self.trace, self.constraints = trace, constraints
        self._once: dict[Hashable, object] = {}
        self._replayed: tuple[tuple[Action, ...], Replay] | None = None
        forbidden = resolve(trace, constraints)
        ops, sts = trace.ops, trace.storages
        n_ops, n_st = len(ops), len(sts)
        creates = tuple(tuple(s for s in ops.writes[i] if sts.producer[s] == i) for i in range(n_ops))
        is_view = tuple(bool(f & VIEW) for f in ops.flags)
        may_rerun = tuple(
            not f & FORBIDS_RECOMPUTE and i not in forbidden.never for i, f in enumerate(ops.flags)
        )
        first_backward = next((i for i in range(n_ops) if ops.phase[i] != FORWARD), n_ops)
        resident = tuple(p < 0 for p in sts.producer)
        read_back = tuple(
            0 <= sts.producer[s] < first_backward and sts.last_backward_use[s] >= 0 for s in range(n_st)
        )
        wanted = tuple(
            read_back[s] or (0 <= p < first_backward and (s in forbidden.keep or p in forbidden.never))
            for s, p in enumerate(sts.producer)
        )
        outside_reader = [False] * n_st
        for i in range(first_backward, n_ops):
            if ops.flags[i] & EAGER or ops.phase[i] == OPTIMIZER:
                for s in ops.reads[i]:
                    outside_reader[s] = True
        unreachable = _read_without_their_maker(trace, creates, is_view)
        pinned = tuple(
            outside_reader[s] or sts.hold[s] >= first_backward or s in unreachable for s in range(n_st)
        )
        # Without constraints first: what these save must not make more possible than without them.
        might = [False] * n_st
        rebuildable = [False] * n_st
        for i in range(first_backward):
            if not ops.flags[i] & FORBIDS_RECOMPUTE and not is_view[i]:
                natural = all(resident[s] or might[s] or read_back[s] for s in ops.reads[i])
                ok = natural and may_rerun[i]
                ok = ok and all(resident[s] or rebuildable[s] or wanted[s] for s in ops.reads[i])
                for s in creates[i]:
                    might[s] = natural
                    rebuildable[s] = ok and s not in forbidden.keep
        candidates = tuple(
            s
            for i in range(first_backward)
            for s in creates[i]
            if wanted[s] and rebuildable[s] and not pinned[s] and sts.nbytes[s] > 0
            if only is None or s in only
        )
        created_bytes = tuple(sum(sts.nbytes[s] for s in c) for c in creates)
        rise = []
        for i in range(n_ops):
            top = live = 0
            for e in ops.events[i]:
                live += e
                top = max(top, live)
            rise.append(max(top, created_bytes[i]))
        self.creates, self.is_view, self.may_rerun = creates, is_view, may_rerun
        self.forward_end = first_backward
        self.resident, self.saved_by_default, self.pinned = resident, wanted, pinned
        self.rebuildable, self.candidates = tuple(rebuildable), candidates
        self.recompute_only = tuple(
            r and not w and not p for r, w, p in zip(rebuildable, wanted, pinned, strict=True)
        )
        self.transient_bytes, self.created_bytes = tuple(rise), created_bytes

    def once(self, key: Hashable, make: Callable[[Problem], T]) -> T:
        """What `make` makes of this problem; made when it is first asked for under that key."""
        if key not in self._once:
            self._once[key] = make(self)
        return cast(T, self._once[key])

    def replay(self, actions: Iterable[Action] = ()) -> Replay:
        """What a plan's actions come to, by the exact replay; asked at once for the same ones, the same.

        Raises:
            PlanError: an action is impossible, or a chain needs an op that may not run again.
        """
        from simulator.core.replay import replay

        wanted = tuple(actions)
        if self._replayed is None or self._replayed[0] != wanted:
            self._replayed = (wanted, replay(self, wanted))
        return self._replayed[1]

    @cached_property
    def saved(self) -> Replay:
        """The step with everything saved."""
        from simulator.core.replay import replay

        return replay(self, ())

    @cached_property
    def evaluator(self) -> Evaluator:
        """The fast evaluation. Who reads its `steps` or `read_by` must do so before anybody walks another state."""
        from simulator.core.evaluator import Evaluator

        return Evaluator(self)

    @cached_property
    def floor(self) -> Floor:
        """A peak below which no plan can go, seen from one op at a time; see `Floor`."""
        return _floor(self)

    def is_evictable(self, storage: int) -> bool:
        """Whether a plan may let a storage be absent between two uses."""
        return self.rebuildable[storage] and not self.pinned[storage]

    @cached_property
    def unconstrained(self) -> Problem:
        """The same trace for a reader who knows of no constraints."""
        return Problem(self.trace) if self.constraints else self


def _read_without_their_maker(
    trace: Trace, creates: tuple[tuple[int, ...], ...], is_view: tuple[bool, ...]
) -> frozenset[int]:
    """Storages that some op of the captured graph reads without taking the value of the op that makes them.

    Nothing would say how to rebuild them for that op (it reads them through an op that overwrote them, say).
    """
    ops, producer = trace.ops, trace.storages.producer
    behind: list[set[int]] = []  # op -> the storages that its value stands for
    out: set[int] = set()
    for i in range(len(ops)):
        taken: set[int] = set()
        for j in ops.inputs[i]:
            taken |= behind[j]
        if not ops.flags[i] & EAGER:
            out.update(s for s in ops.reads[i] if producer[s] >= 0 and s not in taken)
        behind.append(taken if is_view[i] else set(creates[i]))
    return frozenset(out)


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
    gradient_bytes: int  # of the peak: gradients and other storages that no plan can release by then
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
