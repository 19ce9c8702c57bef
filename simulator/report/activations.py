"""Turn a Trace and its schedules into the rows that people ask for: activations, recomputations, modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from simulator.core.graph import Graph, analyse
from simulator.core.schedule import Schedule
from simulator.core.timeline import Timeline
from traces.trace import ACTIVATION, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """One storage that forward makes and backward reads, with everything kept. Uses are op ids; -1: none."""

    storage: int
    nbytes: int
    producer: int
    first_forward_use: int
    last_forward_use: int
    first_backward_use: int
    last_backward_use: int
    idle_ns: int  # from the end of its last forward use (or producer) to the start of its first backward use
    recompute_ns: int | None  # its own op and the links before it; None: it may not be recomputed
    links: int  # ops beside its own that would have to run


def activations(trace: Trace, graph: Graph | None = None) -> tuple[Activation, ...]:
    """The static analysis of every storage that is kept from forward for backward, largest first.

    Counts: the op times of the trace in its order, with everything kept; for the recompute cost, the
    producing op and each op before it whose output backward does not keep. Ignores: that several
    recomputations can share their links, and that a plan may have released what a chain starts from.
    """
    graph = graph or analyse(trace)
    ops, sts = trace.ops, trace.storages
    begin, now = [], 0
    for t in ops.time_ns:
        begin.append(now)
        now += t
    candidates = set(graph.candidates)
    out = []
    for s in range(len(sts)):
        if not graph.wanted[s] or sts.category[s] != ACTIVATION or not sts.nbytes[s]:
            continue
        chain = _chain(trace, graph, s) if s in candidates else None
        rest = max(sts.last_forward_use[s], sts.producer[s])
        out.append(
            Activation(
                storage=s,
                nbytes=sts.nbytes[s],
                producer=sts.producer[s],
                first_forward_use=sts.first_forward_use[s],
                last_forward_use=sts.last_forward_use[s],
                first_backward_use=sts.first_backward_use[s],
                last_backward_use=sts.last_backward_use[s],
                idle_ns=begin[sts.first_backward_use[s]] - begin[rest] - ops.time_ns[rest],
                recompute_ns=None if chain is None else sum(ops.time_ns[i] for i in chain),
                links=0 if chain is None else len(chain) - 1,
            )
        )
    return tuple(sorted(out, key=lambda a: (-a.nbytes, a.storage)))


def _chain(trace: Trace, graph: Graph, storage: int) -> frozenset[int]:
    """The ops that rebuild a storage from what is kept by default; views cost nothing and are left out."""
    chain: set[int] = set()
    stack = [trace.storages.producer[storage]]
    while stack:
        i = stack.pop()
        if i in chain:
            continue
        chain.add(i)
        stack += [
            trace.storages.producer[s]
            for s in trace.ops.reads[i]
            if not graph.resident[s] and not graph.wanted[s] and not graph.pinned[s]
        ]
    return frozenset(chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """One op that a schedule runs again, and what this costs."""

    op: int
    storages: tuple[int, ...]  # what it rebuilds
    nbytes: int  # of one rebuild, all storages together
    times: int
    time_ns: int  # all runs together
    link: bool  # True: no storage of its own is evicted; it runs because others need its output


def recomputations(
    trace: Trace, schedule: Schedule, timeline: Timeline, evicted: Iterable[int]
) -> tuple[Recomputation, ...]:
    """Every op that runs again and takes time, the costliest first; the times sum to the overhead."""
    chosen = frozenset(evicted)
    times: dict[int, int] = {}
    total: dict[int, int] = {}
    rebuilt: dict[int, set[int]] = {}
    for step, (op, again) in enumerate(zip(schedule.op, schedule.recompute, strict=True)):
        if again and (timeline.duration_ns[step] or schedule.binds[step]):
            times[op] = times.get(op, 0) + 1
            total[op] = total.get(op, 0) + timeline.duration_ns[step]
            rebuilt.setdefault(op, set()).update(schedule.binds[step])
    return tuple(
        Recomputation(
            op=op,
            storages=tuple(sorted(rebuilt[op])),
            nbytes=sum(trace.storages.nbytes[s] for s in rebuilt[op]),
            times=times[op],
            time_ns=total[op],
            link=chosen.isdisjoint(rebuilt[op]),
        )
        for op in sorted(times, key=lambda op: (-total[op], op))
    )


def by_module(trace: Trace, rows: Iterable[Recomputation], *, most: int = 24) -> dict[str, tuple[int, int]]:
    """Recompute time and rebuilt bytes by module path, cut at the depth that leaves at most `most` groups.

    When even the first level has more, the cheapest are gathered under `other modules`.
    """
    rows = list(rows)
    paths = {r.op: tuple(trace.ops.module[r.op].split(".")) for r in rows}
    depth = max((len(p) for p in paths.values()), default=1)
    while depth > 1 and len({p[:depth] for p in paths.values()}) > most:
        depth -= 1
    groups: dict[str, tuple[int, int]] = {}
    for r in rows:
        name = ".".join(paths[r.op][:depth]) or "(no module)"
        time_ns, nbytes = groups.get(name, (0, 0))
        groups[name] = (time_ns + r.time_ns, nbytes + r.nbytes * r.times)
    ranked = sorted(groups.items(), key=lambda item: (-item[1][0], item[0]))
    out = dict(ranked[: most - 1 if len(ranked) > most else most])
    rest = ranked[len(out) :]
    if rest:
        out["other modules"] = (sum(v[0] for _, v in rest), sum(v[1] for _, v in rest))
    return out
