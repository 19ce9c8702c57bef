"""One trace, and the exact replay of its plans: what is allocated at every step, how long each takes.

Whoever asks a question (a command, a study, a notebook) makes one `Problem` and hands it down. Nothing below makes
another from the trace, so what is worked out once (arrays, floors, the replay with everything saved) serves all.

A step has two instants. While it runs, its outputs and its workspace are allocated and its inputs are still there;
when it has ended, the workspace is gone and the storages that nobody needs any more are freed.

Counts: every storage of the trace once, however many views it has; the measured allocations inside each op; how long
a step waits for copies to and from host memory, which run beside (`core.facts`). Ignores:
rounding and fragmentation of the device's allocator, and library workspaces that outlive an op.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice

from simulator.core.facts import OFFLOAD, PREFETCH, RELOAD, WAIT_OUT, Facts, transfer_ns
from simulator.core.schedule import Schedule, build
from traces.records.plan import Action
from traces.records.trace import CATEGORIES, COMMUNICATION, RANK, VIEW, WORKSPACE, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The memory and time that a schedule takes, step by step, as columns; peaks and totals are derived.

    `peak_bytes[k]` is the most that is allocated while step k runs, `live_bytes[k]` what is left when it has ended.
    """

    op: tuple[int, ...]
    recompute: tuple[bool, ...]
    start_ns: tuple[int, ...]
    duration_ns: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    live_bytes: tuple[int, ...]
    resident_bytes: int

    @property
    def peak_allocated_bytes(self) -> int:
        return max(self.peak_bytes, default=self.resident_bytes)

    @property
    def peak_step(self) -> int:
        """The first step at which the peak is reached; -1 for an empty schedule."""
        return self.peak_bytes.index(self.peak_allocated_bytes) if self.peak_bytes else -1

    @property
    def step_time_ns(self) -> int:
        return sum(self.duration_ns)

    @property
    def recomputed_ops(self) -> int:
        """Recompute steps that take time: views run again at no cost and are not counted."""
        return sum(1 for r, d in zip(self.recompute, self.duration_ns, strict=True) if r and d)


def run(facts: Facts, schedule: Schedule) -> Timeline:
    """Replay a schedule; the result has one entry a step."""
    trace = facts.trace
    ops, nbytes = trace.ops, trace.storages.nbytes
    live, waits = trace.resident_bytes, stalls(trace, schedule)
    duration, peaks, after = [], [], []
    for step, i in enumerate(schedule.op):
        taken = nbytes[schedule.takes[step]] if schedule.takes[step] >= 0 else 0
        peaks.append(live + facts.transient_bytes[i] - taken)
        for s in schedule.binds[step]:
            live += nbytes[s]
        for s in schedule.frees[step]:
            live -= nbytes[s]
        after.append(live)
        own_ns = 0 if schedule.recompute[step] and facts.is_view[i] else ops.time_ns[i]
        duration.append(own_ns + waits.get(step, 0))
    return Timeline(
        op=schedule.op,
        recompute=schedule.recompute,
        start_ns=tuple(accumulate(duration, initial=0))[:-1],
        duration_ns=tuple(duration),
        peak_bytes=tuple(peaks),
        live_bytes=tuple(after),
        resident_bytes=trace.resident_bytes,
    )


def stalls(trace: Trace, schedule: Schedule) -> dict[int, int]:
    """How long steps wait before they run for copies to and from host memory (`core.facts`), by step, in ns."""
    ops, beside = trace.ops, trace.meta.device != "cpu"
    if OFFLOAD not in ops.target:
        return {}
    now = out_free = in_free = 0
    is_out: dict[int, int] = {}  # ticket -> when its copy is in host memory
    is_in: dict[int, int] = {}  # value -> when its latest copy is back
    waits: dict[int, int] = {}
    for step, i in enumerate(schedule.op):
        target, again, until = ops.target[i], schedule.recompute[step], now
        if target == OFFLOAD:
            out_free = is_out[ops.writes[i][0]] = max(now, out_free) + transfer_ns(trace, i)
            until = until if beside else out_free
        elif target == RELOAD and again:
            begins = max(now, in_free, is_out[ops.reads[i][0]])
            in_free = is_in[ops.writes[i][0]] = begins + transfer_ns(trace, i)
            until = until if beside else in_free
        elif target == WAIT_OUT:
            until = max(is_out.get(s, 0) for s in ops.reads[i])
        elif target != PREFETCH and not ops.flags[i] & VIEW:
            until = max((is_in.get(s, 0) for s in ops.reads[i]), default=0)
        if until > now:
            waits[step], now = until - now, until
        now += 0 if again and ops.flags[i] & VIEW else ops.time_ns[i]
    return waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A plan's schedule and what it comes to."""

    schedule: Schedule
    timeline: Timeline


def holdings(trace: Trace, schedule: Schedule, step: int) -> list[int]:
    """The storages that are allocated while `step` runs, its outputs included, largest first."""
    sts = trace.storages
    there = {s for s, p in enumerate(sts.producer) if p < 0} | schedule.made_by(step)
    there.discard(schedule.takes[step])
    # A recompute step also makes the outputs that nobody asked for, beside those of the same id that are there.
    created = [s for s in trace.ops.writes[schedule.op[step]] if sts.producer[s] == schedule.op[step]]
    return sorted((s for s in (*there, *created) if sts.nbytes[s]), key=lambda s: (-sts.nbytes[s], s))


def by_category(trace: Trace, schedule: Schedule, timeline: Timeline) -> Iterator[dict[str, int]]:
    """Bytes by category while each step runs; they sum to the step's `peak_bytes` exactly.

    Workspace is what the running op uses beyond its outputs.
    """
    sts = trace.storages
    live = dict.fromkeys(categories_of(trace), 0)
    for s, p in enumerate(sts.producer):
        if p < 0:
            live[sts.category[s]] += sts.nbytes[s]
    for step, op in enumerate(schedule.op):
        now, taken = dict(live), schedule.takes[step]
        for s in trace.ops.writes[op]:
            if sts.producer[s] == op:
                now[sts.category[s]] += sts.nbytes[s]
        if taken >= 0:
            now[sts.category[taken]] -= sts.nbytes[taken]
        now[WORKSPACE] += timeline.peak_bytes[step] - sum(now.values())
        yield now
        for s in schedule.binds[step]:
            live[sts.category[s]] += sts.nbytes[s]
        for s in schedule.frees[step]:
            live[sts.category[s]] -= sts.nbytes[s]


def peak_by_category(trace: Trace, schedule: Schedule, timeline: Timeline) -> dict[str, int]:
    """The peak by category, in the order of CATEGORIES; of a step without ops, nothing."""
    found = islice(by_category(trace, schedule, timeline), max(0, timeline.peak_step), None)
    return next(found, dict.fromkeys(categories_of(trace), 0))


def categories_of(trace: Trace) -> list[str]:
    """The categories that a trace's answers name; what is gathered and reduced only of a rank's."""
    return [c for c in CATEGORIES if c != COMMUNICATION or trace.meta.device == RANK]


class Problem(Facts):
    """The facts about one trace, with the replay of plans."""

    _replayed: tuple[tuple[Action, ...], Replay] | None = None  # what was asked last

    def replay(self, actions: Iterable[Action] = ()) -> Replay:
        """Return what a plan's actions come to, by the exact replay; asked at once for the same ones, the same. Raises
        PlanError if an action is impossible, or a chain needs an op that may not run again.
        """
        wanted = tuple(actions)
        if self._replayed is None or self._replayed[0] != wanted:
            schedule = build(self, wanted)
            self._replayed = (wanted, Replay(schedule=schedule, timeline=run(self, schedule)))
        return self._replayed[1]

    @cached_property
    def saved(self) -> Replay:
        return self.replay()
