"""Replay a schedule the slow way, from the definitions alone, to judge the engine and the schedule by.

Nothing here uses `schedule.frees` or `schedule.takes`, `simulator.core.problem` or the engine: who is alive when
is worked out again from who reads what, one step at a time, over all instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.core.schedule import Schedule
from traces.records.plan import SAVE, Action
from traces.records.trace import BACKWARD, EAGER, FORBIDS_RECOMPUTE, FORWARD, OPTIMIZER, VIEW, Trace


@dataclass(frozen=True)
class Instance:
    """One stretch of time during which a storage exists: bound by step `born`, released after step `end`."""

    storage: int
    born: int
    end: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Truth:
    peak_bytes: list[int]  # while each step runs
    live_bytes: list[int]  # after it
    time_ns: int


def instances(trace: Trace, schedule: Schedule) -> list[Instance]:
    """Every instance; asserts that no step reads a storage that does not exist."""
    sts = trace.storages
    out = []
    n = len(schedule)
    for s in range(len(sts)):
        if sts.producer[s] < 0:
            continue
        births = [k for k in range(n) if s in schedule.binds[k]]
        for number, born in enumerate(births):
            until = births[number + 1] if number + 1 < len(births) else n
            readers = tuple(k for k in range(born + 1, until) if s in trace.ops.reads[schedule.op[k]])
            end = max((born, *readers))
            if number == 0 and sts.hold[s] >= 0:
                end = max(end, first_run(schedule, sts.hold[s]))
            out.append(Instance(s, born, end, readers))
        read = [k for k in range(n) if s in trace.ops.reads[schedule.op[k]]]
        assert all(any(b < k for b in births) for k in read), f"storage {s} is read before it exists"
    return out


def first_run(schedule: Schedule, op: int) -> int:
    return next(k for k in range(len(schedule)) if schedule.op[k] == op and not schedule.recompute[k])


def replay(trace: Trace, schedule: Schedule) -> Truth:
    """Live bytes by summing, at every step, over every instance that exists then."""
    sts, ops = trace.storages, trace.ops
    resident = sum(b for b, p in zip(sts.nbytes, sts.producer, strict=True) if p < 0)
    all_instances = instances(trace, schedule)
    peaks, live, time_ns = [], [], 0
    for k in range(len(schedule)):
        i = schedule.op[k]
        before = sum(sts.nbytes[x.storage] for x in all_instances if x.born < k <= x.end)
        after = sum(sts.nbytes[x.storage] for x in all_instances if x.born <= k < x.end)
        created = sum(sts.nbytes[s] for s in ops.writes[i] if sts.producer[s] == i)
        rise = created
        for n in range(len(ops.events[i])):
            rise = max(rise, sum(ops.events[i][: n + 1]))
        taken = sum(
            sts.nbytes[x.storage]
            for x in all_instances
            if x.storage == ops.overwrites[i] and x.born < k and x.end == k
        )
        peaks.append(resident + before + rise - taken)
        live.append(resident + after)
        if not (schedule.recompute[k] and ops.flags[i] & VIEW):
            time_ns += ops.time_ns[i]
    return Truth(peaks, live, time_ns)


def forward_ops(trace: Trace) -> int:
    return sum(1 for phase in trace.ops.phase if phase == FORWARD)


def check_order(trace: Trace, schedule: Schedule) -> None:
    """Every op runs once in the trace's order; only ops that ran before and may rerun run again, for a captured op."""
    once = [i for i, again in zip(schedule.op, schedule.recompute, strict=True) if not again]
    assert once == list(range(len(trace.ops)))
    for k, again in enumerate(schedule.recompute):
        if again:
            i = schedule.op[k]
            assert i in schedule.op[:k], "a recomputation comes before the first run"
            is_view = trace.ops.flags[i] & VIEW
            assert is_view or i < forward_ops(trace), "an op of backward runs again"
            assert is_view or not trace.ops.flags[i] & FORBIDS_RECOMPUTE
            wants = schedule.op[_demanding(schedule, k)]
            assert not trace.ops.flags[wants] & EAGER, "code outside the captured graph has an op run again"
    inside = [k for k in range(len(schedule)) if schedule.op[_demanding(schedule, k)] < forward_ops(trace)]
    assert inside == list(range(schedule.forward_steps))


def check_policy(trace: Trace, schedule: Schedule, actions: Sequence[Action]) -> None:
    """Values live exactly as long as the actions say, worked out per instance: not longer, and not shorter.

    An instance is *over* once an op has run that ends it: one of `evict_after`; for what is not saved, its last use in
    forward; for what came back and is not retained, the op that it came back for. No op reads an instance that is
    over, and a storage that a chain wanted comes back only if its instance before is over.
    """
    by_storage = {a.storage: a for a in actions}
    before: dict[int, Instance] = {}
    for x in sorted(instances(trace, schedule), key=lambda x: x.born):
        end = _ended_by(trace, schedule, by_storage.get(x.storage), x)
        last = max((_demanding(schedule, k) for k in x.readers), default=-1)
        assert last <= end, f"storage {x.storage} was read when it should be absent"
        if x.storage in before:
            old = before[x.storage]
            over = _ended_by(trace, schedule, by_storage.get(x.storage), old)
            assert over < _demanding(schedule, x.born), f"storage {x.storage} came back while it was there"
            assert schedule.recompute[x.born]
        before[x.storage] = x


def _ended_by(trace: Trace, schedule: Schedule, action: Action | None, x: Instance) -> int:
    """The step of the op that ends an instance; beyond all steps if none does."""
    sts, forward = trace.storages, forward_ops(trace)
    producer = sts.producer[x.storage]
    ends = [len(schedule)]
    demanding = _demanding(schedule, x.born)
    if producer >= forward:
        return ends[0]
    pinned = sts.hold[x.storage] >= forward or any(
        (trace.ops.flags[i] & EAGER or trace.ops.phase[i] == OPTIMIZER) and x.storage in trace.ops.reads[i]
        for i in range(forward, len(trace.ops))
    )
    by_default = pinned or any(
        x.storage in trace.ops.reads[i]
        for i in range(forward, len(trace.ops))
        if trace.ops.phase[i] == BACKWARD
    )
    saved = by_default if action is None else action.recipe == SAVE or pinned
    if not saved and schedule.op[demanding] < forward:
        readers = [i for i in range(forward) if x.storage in trace.ops.reads[i]]
        ends.append(max(demanding, first_run(schedule, max((producer, *readers)))))
    if schedule.recompute[x.born] and (action is None or not action.retain):
        ends.append(demanding)
    if action is not None:
        ends += [k for op in action.evict_after if (k := first_run(schedule, op)) >= demanding]
    return min(ends)


def _demanding(schedule: Schedule, step: int) -> int:
    """The step of the op for whose sake a step runs: itself, or the next that is no recomputation."""
    return next(k for k in range(step, len(schedule)) if not schedule.recompute[k])
