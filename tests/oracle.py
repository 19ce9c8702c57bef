"""Replay a schedule the slow way, from the definitions alone, to judge the engine and the schedule by.

Nothing here uses `schedule.frees` or `schedule.takes`, `simulator.core.problem` or the engine: who is alive when
is worked out again from who reads what, one step at a time, over all instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.core.schedule import Schedule
from traces.plan import RECOMPUTE, SAVE, Action
from traces.trace import EAGER, FORBIDS_RECOMPUTE, FORWARD, OPTIMIZER, VIEW, Trace


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


def check_order(trace: Trace, schedule: Schedule) -> None:
    """Every op runs once in the trace's order; only ops that ran before and may rerun run again, after forward."""
    once = [i for i, again in zip(schedule.op, schedule.recompute, strict=True) if not again]
    assert once == list(range(len(trace.ops)))
    for k, again in enumerate(schedule.recompute):
        if again:
            i = schedule.op[k]
            assert i in schedule.op[:k], "a recomputation comes before the first run"
            assert trace.ops.flags[i] & VIEW or not trace.ops.flags[i] & FORBIDS_RECOMPUTE
            assert trace.ops.phase[schedule.op[_demanding(schedule, k)]] != FORWARD


def check_policy(trace: Trace, schedule: Schedule, actions: Sequence[Action]) -> None:
    """Values live no longer than the actions allow: the point of a plan, worked out per instance.

    - a recomputed value's instance from forward is not read after forward;
    - a rebuilt instance that is not shared is read only up to the op that demanded it, one with a drop only up to
      that op.
    """
    by_storage = {a.storage: a for a in actions}
    sts = trace.storages
    forward = sum(1 for phase in trace.ops.phase if phase == FORWARD)
    for x in instances(trace, schedule):
        action = by_storage.get(x.storage)
        pinned = sts.hold[x.storage] >= forward or any(
            (trace.ops.flags[i] & EAGER or trace.ops.phase[i] == OPTIMIZER)
            and x.storage in trace.ops.reads[i]
            for i in range(forward, len(trace.ops))
        )
        if x.born < forward and trace.ops.phase[sts.producer[x.storage]] == FORWARD and not pinned:
            kept = sts.last_backward_use[x.storage] >= 0 if action is None else action.action == SAVE
            if not kept:
                assert all(k < forward for k in x.readers), f"storage {x.storage} survived forward"
        if x.born >= forward and schedule.recompute[x.born]:
            demanding = _demanding(schedule, x.born)
            last = max((x.born, *x.readers))
            if action is None or (action.action == RECOMPUTE and not action.share):
                assert last <= demanding, f"storage {x.storage} outlived the op that demanded it"
            if action is not None:
                for op in action.drop_after:
                    end = first_run(schedule, op)
                    assert not x.born <= end < last, f"storage {x.storage} outlived its drop"


def _demanding(schedule: Schedule, step: int) -> int:
    """The step of the op for whose sake a recomputation runs."""
    return next(k for k in range(step, len(schedule)) if not schedule.recompute[k])
