"""Check that a trace's tables agree with each other, before anybody reckons with them."""

from __future__ import annotations

from collections.abc import Iterator

from traces.errors import TraceError
from traces.records.trace import CATEGORIES, FLAG_NAMES, MOST, PHASES, VIEW, Trace, aliases_of, uses_of


def validate(trace: Trace) -> Trace:
    """Return the same trace; raises TraceError, which names the row, if its tables contradict each other.

    Checked: every id is in range; no op reads or writes a storage or takes a value that does not exist yet, nor
    names a storage twice; every produced storage is written by its producer, which is no view; sizes and times are
    not negative, and their sums fit 64 bits with room to spare; the phases stand in order, but for what the header
    has within backward; the measured events of an op sum to what it leaves behind; first and last uses of what the step
    makes are its readers, and views its aliases; flags are known ones; the header's rows exist.
    """
    for check in (_storages, _sums, _ops, _values, _uses, _header):
        for problem in check(trace):
            raise TraceError(problem)
    return trace


def _storages(trace: Trace) -> Iterator[str]:
    ops, sts = trace.ops, trace.storages
    for s, producer in enumerate(sts.producer):
        if sts.nbytes[s] < 0:
            yield f"storages: storage {s} has the negative size {sts.nbytes[s]}."
        if sts.category[s] not in CATEGORIES:
            yield f"storages: storage {s} has the unknown category {sts.category[s]!r}."
        if not -1 <= producer < len(ops):
            yield f"storages: storage {s} names op {producer}, which does not exist."
        if producer >= 0 and s not in ops.writes[producer]:
            yield f"storages: storage {s} says that op {producer} produced it, but that op does not write it."
        if not -1 <= sts.hold[s] < len(ops):
            yield f"storages: storage {s} is held by op {sts.hold[s]}, which does not exist."
        if any(n < 0 for n in sts.shape[s]):
            yield f"storages: storage {s} has the shape {sts.shape[s]}."


def _sums(trace: Trace) -> Iterator[str]:
    for what, total in (("sizes", sum(trace.storages.nbytes)), ("times", sum(trace.ops.time_ns))):
        if total > MOST:
            yield f"the {what} sum to {total}, more than can be reckoned with."


def _ops(trace: Trace) -> Iterator[str]:
    """Check what stands in one row by itself, and the order of the phases."""
    ops, n_storages = trace.ops, len(trace.storages)
    rank = {p: i for i, p in enumerate(PHASES)}
    last = 0
    for i, phase in enumerate(ops.phase):
        if phase not in rank:
            yield f"ops: op {i} has the unknown phase {phase!r}."
        if rank[phase] < last and not (rank[phase] and trace.meta.within_backward):
            yield f"ops: op {i} ({phase}) stands after an op of a later phase."
        last = rank[phase]
        if ops.time_ns[i] < 0:
            yield f"ops: op {i} takes the negative time {ops.time_ns[i]} ns."
        if ops.flops[i] < 0 or ops.bytes_moved[i] < 0:
            yield f"ops: op {i} has {ops.flops[i]} FLOPs and moves {ops.bytes_moved[i]} bytes."
        if not 0 <= ops.flags[i] <= sum(FLAG_NAMES):
            yield f"ops: op {i} has the unknown flags {ops.flags[i]}."
        for j in ops.inputs[i]:
            if not 0 <= j < i:
                yield f"ops: op {i} takes the value of op {j}, which does not run before it."
        for verb, named in (("reads", ops.reads[i]), ("writes", ops.writes[i])):
            if len(set(named)) != len(named):
                yield f"ops: op {i} ({ops.name[i]}) {verb} a storage twice."
            for s in named:
                if not 0 <= s < n_storages:
                    yield f"ops: op {i} {verb} storage {s}, which does not exist."
        if not -1 <= ops.overwrites[i] < n_storages:
            yield f"ops: op {i} overwrites storage {ops.overwrites[i]}, which does not exist."


def _values(trace: Trace) -> Iterator[str]:
    """Check that what an op reads and writes is there when it runs, and that it makes what its events leave behind."""
    ops, sts = trace.ops, trace.storages
    for i, name in enumerate(ops.name):
        for s in ops.writes[i]:
            if sts.producer[s] > i:
                yield f"ops: op {i} ({name}) writes storage {s}, which op {sts.producer[s]} makes only later."
            if sts.producer[s] == i and ops.flags[i] & VIEW:
                yield f"ops: op {i} ({name}) is a view, and makes storage {s}."
        for s in ops.reads[i]:
            if sts.producer[s] >= i:
                yield (
                    f"ops: op {i} ({name}) reads storage {s}, which op {sts.producer[s]} produces only later; record "
                    "the trace again."
                )
        created_bytes = sum(sts.nbytes[s] for s in ops.writes[i] if sts.producer[s] == i)
        if ops.events[i] and sum(ops.events[i]) != created_bytes:
            yield (
                f"ops: op {i} ({name}) leaves {sum(ops.events[i])} bytes by its events and {created_bytes} by its "
                "storages."
            )


def _uses(trace: Trace) -> Iterator[str]:
    ops, sts = trace.ops, trace.storages
    for column, uses in uses_of(ops, len(sts)).items():
        for s, (told, use) in enumerate(zip(getattr(sts, column), uses, strict=True)):
            if told != use and sts.producer[s] >= 0:  # a library uses its workspace without reading it
                yield (
                    f"storages: storage {s} ({sts.name[s]}) has the {column.replace('_', ' ')} {told}, and by the ops "
                    f"that read it is {use}."
                )
            if not -1 <= told < len(ops):
                yield f"storages: storage {s} is used by op {told}, which does not exist."
    for s, (said, views) in enumerate(zip(sts.aliases, aliases_of(ops, len(sts)), strict=True)):
        if said != views:
            yield f"storages: storage {s} has the aliases {said}, and the views of it are {views}."


def _header(trace: Trace) -> Iterator[str]:
    forward, backward = trace.meta.forward_ops, trace.meta.first_backward_graph_op
    end = backward
    for first, count in trace.meta.within_backward:
        if first < end or count < 1 or first + count > len(trace.ops):
            yield f"header: {count} ops from {first} on are none that stand among backward's."
        end = first + count
    if not 0 <= forward <= backward <= len(trace.ops):
        yield f"header: forward ends at op {forward} and backward begins at op {backward} of {len(trace.ops)}."
