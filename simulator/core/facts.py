"""Work out what a trace says whatever the plan: what may go, may run again, and what each op adds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Final, Self, TypeVar, cast

from traces.records.trace import EAGER, FORBIDS_RECOMPUTE, FORWARD, OPTIMIZER, VIEW, Trace

T = TypeVar("T")


class Facts:
    """Facts about one trace that no plan changes; tuples are indexed by op id or storage id. Not to be edited.

    A storage is rebuildable if the op that produced it may run again and everything that this op reads is
    resident, rebuildable, or saved by default; so any set of candidates can be recomputed together, because
    whatever a chain meets is either a candidate itself or still there. Nor may anything have changed, before its last
    use, that such ops read: a parameter that is stepped in backward.

    Attributes:
        creates: op -> the storages that it brings into being.
        is_view, may_rerun: op -> whether it is a view; whether it may run a second time.
        forward_end: the number of ops in forward.
        resident: storage -> exists throughout the step.
        saved_by_default: storage -> made in forward and read in backward.
        pinned: storage -> alive when forward ends for a reason outside the captured graph.
        rebuildable: storage -> can be computed again from what can be saved.
        recompute_only: storage -> rebuildable, but only recomputations would read it after forward.
        reloaded: what comes back from host memory whatever the plan; backward reads it, and nothing saves it.
        candidates: storages that a plan may recompute, in order of their production.
        transient_bytes: op -> bytes that its own run adds at most, outputs and workspace.
        asks_again: op -> whether a library serves it that asks for a workspace in each thread: in backward's once more.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._once: dict[Hashable, object] = {}
        ops, sts = trace.ops, trace.storages
        n_ops, n_st = len(ops), len(sts)
        creates = tuple(tuple(s for s in ops.writes[i] if sts.producer[s] == i) for i in range(n_ops))
        is_view = tuple(bool(f & VIEW) for f in ops.flags)
        may_rerun = tuple(not f & FORBIDS_RECOMPUTE for f in ops.flags)
        forward_end = next((i for i in range(n_ops) if ops.phase[i] != FORWARD), n_ops)
        resident = tuple(p < 0 for p in sts.producer)
        in_forward = tuple(0 <= p < forward_end for p in sts.producer)
        saved_by_default = tuple(in_forward[s] and sts.last_backward_use[s] >= 0 for s in range(n_st))
        outside = (i for i in range(forward_end, n_ops) if ops.flags[i] & EAGER or ops.phase[i] == OPTIMIZER)
        stays = {s for i in outside for s in ops.reads[i]}
        stays |= _read_without_their_maker(trace, creates, is_view)
        pinned = tuple(s in stays or sts.hold[s] >= forward_end for s in range(n_st))
        rebuildable = [False] * n_st
        # The first op after forward that overwrites a storage: from there on nothing that read it can be made again.
        until = [n_ops] * n_st
        for i in reversed(range(forward_end, n_ops)):
            for s in ops.writes[i]:
                until[s] = i
        for i in range(forward_end):
            if may_rerun[i] and not is_view[i]:
                ok = all(resident[s] or rebuildable[s] or saved_by_default[s] for s in ops.reads[i])
                read = (until[s] for s in ops.reads[i] if resident[s] or rebuildable[s])
                end = min(read, default=n_ops)
                for s in creates[i]:
                    rebuildable[s] = ok and sts.last_backward_use[s] <= end
                    until[s] = end
        copies = (i for i in range(forward_end) if ops.target[i] == RELOAD)
        reloaded = frozenset(s for i in copies for s in creates[i] if saved_by_default[s])
        candidates = tuple(
            s
            for made in creates[:forward_end]
            for s in made
            if saved_by_default[s] and rebuildable[s] and not pinned[s] and sts.nbytes[s] > 0
            if s not in reloaded
        )
        created_bytes = tuple(sum(sts.nbytes[s] for s in c) for c in creates)
        self.creates, self.is_view, self.may_rerun = creates, is_view, may_rerun
        self.forward_end = forward_end
        self.resident, self.saved_by_default, self.pinned = resident, saved_by_default, pinned
        self.rebuildable, self.candidates, self.reloaded = tuple(rebuildable), candidates, reloaded
        self.candidate_set = frozenset(candidates)
        of = zip(rebuildable, saved_by_default, pinned, strict=True)
        self.recompute_only = tuple(again and not (saved or stays) for again, saved, stays in of)
        asked = trace.meta.rerun_workspaces
        self.asks_again = tuple(x in asked and not view for view, x in zip(is_view, ops.target, strict=True))
        highest = (max(accumulate(e), default=0) for e in ops.events)
        self.transient_bytes = tuple(map(max, created_bytes, highest))

    def once(self, key: Hashable, make: Callable[[Self], T]) -> T:
        """Return what `make` makes of these facts; made when it is first asked for under that key."""
        if key not in self._once:
            self._once[key] = make(self)
        return cast(T, self._once[key])


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


# Copies to and from host memory: the ops that ask for them, and what they take.
#
# A copy runs beside the ops, on one of two more resources: out to host memory, and in from it. Each does one copy after
# the other, in the order in which the schedule asks for them, and none begins before the step that asks for it.
#
# - `OFFLOAD` makes a ticket of a value, and its copy out begins.
# - `RELOAD` makes the value of its ticket: at first it hands on the memory that is there; run again, it allocates, and
#   the copy in begins.
# - `WAIT_OUT`, which reads the value and its ticket, waits until the copy out is complete: then the memory is freed.
# - `PREFETCH` reads the value so that it is reloaded there; what else reads it waits for its copy in.
#
# Counts: the bytes by one rate, and a latency for each copy. Ignores: that ops slow down while memory is copied, and
# that both directions together may be slower. On a CPU nothing runs beside: a copy takes its time where it begins.

OFFLOAD: Final = "lowtide.offload.default"
RELOAD: Final = "lowtide.reload.default"
WAIT_OUT: Final = "lowtide.wait_out.default"
PREFETCH: Final = "lowtide.prefetch.default"
LATENCY_NS: Final = 15_000  # until a copy begins: a rule of thumb, not measured here


def copy_ns(nbytes: int, bytes_per_s: int) -> int:
    """The time that a copy takes either way."""
    return LATENCY_NS - (-nbytes * 10**9 // bytes_per_s)


def pinned_bytes(nbytes: int) -> int:
    """The host memory that a copy takes: torch's allocator of pinned memory rounds up to a power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


def transfer_ns(trace: Trace, op: int) -> int:
    """The time of the copy that an `OFFLOAD` or `RELOAD` asks for."""
    ids = trace.ops.reads[op] if trace.ops.target[op] == OFFLOAD else trace.ops.writes[op]
    return copy_ns(trace.storages.nbytes[ids[0]], trace.meta.rates["host_bytes_per_s"])


def waiting_ns(trace: Trace, op: Sequence[int], duration_ns: Sequence[int]) -> int:
    """How long the steps of a schedule wait for copies out."""
    steps = zip(op, duration_ns, strict=True)
    return sum(ns for i, ns in steps if trace.ops.target[i] in (OFFLOAD, WAIT_OUT))
