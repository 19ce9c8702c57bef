"""Derive from a Trace what schedules and planners ask again and again: creators, candidates, working sets."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.core.limits import NONE, Constraints
from simulator.core.selectors import resolve
from traces.trace import EAGER, FORBIDS_RECOMPUTE, FORWARD, OPTIMIZER, VIEW, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Facts about one trace that no plan changes. Tuples indexed by op id or storage id."""

    creates: tuple[tuple[int, ...], ...]  # op -> the storages that it brings into being
    is_view: tuple[bool, ...]
    may_rerun: tuple[bool, ...]
    first_backward_op: int  # number of ops in forward
    resident: tuple[bool, ...]  # storage -> exists throughout the step
    wanted: tuple[
        bool, ...
    ]  # storage -> made in forward and read in backward, or must be kept: kept by default
    pinned: tuple[bool, ...]  # storage -> alive across the turn for a reason outside the captured graph
    rebuildable: tuple[bool, ...]  # storage -> can be computed again from what can be kept
    candidates: tuple[int, ...]  # storages that a plan may recompute, in order of their production
    # op -> bytes that its own run adds at most, and all that it creates
    rise_bytes: tuple[int, ...]
    created_bytes: tuple[int, ...]
    constraints: Constraints = NONE  # what `may_rerun`, `wanted` and `candidates` obey beside the trace


def analyse(trace: Trace, constraints: Constraints = NONE) -> Graph:
    """Compute the facts of `Graph`.

    A storage is rebuildable if the op that produced it may run again and everything that this op reads is
    resident, rebuildable, or kept by default; so any set of candidates can be recomputed together, because
    whatever a chain meets is either a candidate itself or still there.

    Under constraints, an op that must never run again may not, and a value that must be kept is no candidate. Such
    values, and those of such ops, stay for recomputations that read them even if backward does not (`outcome.finish`
    says so in the plan).

    Asked again for the same trace and constraints, it gives the same graph: schedules, planners, bounds and answers
    all ask, and a front asks dozens of times.

    Raises:
        SpecError: a constraint names nothing in this trace.
    """
    for known, graph in _latest:
        if known is trace and graph.constraints == constraints:
            return graph
    graph = _analyse(trace, constraints)
    _latest[:] = [(trace, graph), *_latest[:1]]
    return graph


_latest: list[tuple[Trace, Graph]] = []  # the last two: a trace's graph with constraints, and without


def _analyse(trace: Trace, constraints: Constraints) -> Graph:
    forbidden = resolve(trace, constraints)
    ops, sts = trace.ops, trace.storages
    n_ops, n_st = len(ops), len(sts)
    creates = tuple(tuple(s for s in ops.writes[i] if sts.producer[s] == i) for i in range(n_ops))
    is_view = tuple(bool(f & VIEW) for f in ops.flags)
    may_rerun = tuple(not f & FORBIDS_RECOMPUTE and i not in forbidden.never for i, f in enumerate(ops.flags))
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
    )
    created_bytes = tuple(sum(sts.nbytes[s] for s in c) for c in creates)
    rise = []
    for i in range(n_ops):
        top = live = 0
        for e in ops.events[i]:
            live += e
            top = max(top, live)
        rise.append(max(top, created_bytes[i]))
    return Graph(
        creates=creates,
        is_view=is_view,
        may_rerun=may_rerun,
        first_backward_op=first_backward,
        resident=resident,
        wanted=wanted,
        pinned=pinned,
        rebuildable=tuple(rebuildable),
        candidates=candidates,
        rise_bytes=tuple(rise),
        created_bytes=created_bytes,
        constraints=constraints,
    )


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
    """The lowest peak that any plan could possibly have, and the op that decides it."""

    peak_bytes: int
    op: int
    resident_bytes: int  # of the peak: parameters, buffers, optimizer state, inputs
    gradient_bytes: int  # of the peak: gradients and other storages that no plan can release by then
    working_bytes: int  # of the peak: what the op itself reads, creates and uses as workspace
    brings_back: bool = (
        False  # the working bytes are what bringing back the op's inputs takes, before it runs
    )


def floor(trace: Trace, graph: Graph | None = None) -> Floor:
    """A peak below which no plan can go: at each op, what must be there while it runs, whatever was recomputed.

    Counts: resident storages; storages alive at that instant that are no candidates and that backward or a hold
    still needs; the op's own reads, outputs and workspace. Ignores: the working set of recomputation chains, and
    non-candidates that only chains need; so the best possible plan may lie above it. `simulator.bounds.lowest` goes
    on from here.
    """
    graph = graph or analyse(trace)
    if not _floors or _floors[0][0] is not trace or _floors[0][1] is not graph:
        _floors[:] = [(trace, graph, _floor(trace, graph))]
    return _floors[0][2]


_floors: list[tuple[Trace, Graph, Floor]] = []  # one: every budget of a trace asks


def _floor(trace: Trace, graph: Graph) -> Floor:
    ops, sts = trace.ops, trace.storages
    candidate = [False] * len(sts)
    for s in graph.candidates:
        candidate[s] = True
    last = list(sts.hold)
    for i in range(len(ops)):
        for s in (*ops.reads[i], *graph.creates[i]):
            last[s] = max(last[s], i)
    for s in graph.candidates:  # after its forward life a candidate need only be there when it is read
        last[s] = max(sts.last_forward_use[s], sts.producer[s])
    resident = trace.resident_bytes
    fixed = 0  # live and unavoidable
    dying: list[list[int]] = [[] for _ in range(len(ops))]
    best = Floor(peak_bytes=resident, op=-1, resident_bytes=resident, gradient_bytes=0, working_bytes=0)
    for i in range(len(ops)):
        reads = {s for s in ops.reads[i] if not graph.resident[s]}
        back = sum(sts.nbytes[s] for s in reads if candidate[s] and last[s] < i)
        inside = sum(sts.nbytes[s] for s in reads if last[s] >= i)
        total = resident + fixed + back + graph.rise_bytes[i] - _taken(trace, i, last)
        if total > best.peak_bytes:
            best = Floor(
                peak_bytes=total,
                op=i,
                resident_bytes=resident,
                gradient_bytes=fixed - inside,
                working_bytes=total - resident - fixed + inside,
            )
        for s in graph.creates[i]:
            fixed += sts.nbytes[s]
            dying[last[s]].append(s)
        for s in dying[i]:
            fixed -= sts.nbytes[s]
    return best


def _taken(trace: Trace, i: int, last: list[int]) -> int:
    """Bytes that op i need not allocate because it may take over its input's memory at its last use."""
    s = trace.ops.overwrites[i]
    return trace.storages.nbytes[s] if s >= 0 and last[s] <= i else 0
