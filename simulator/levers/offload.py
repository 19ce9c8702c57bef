"""Offload: a value waits in pinned host memory between forward and backward, with copies that run beside the step.

Its copy out begins where it is made; its memory is freed where the copy is complete, and allocated again some ops
before something of backward may need it, where the copy in begins (`simulator.core.facts` has the four ops). What
comes back is for recomputations, too.

What is copied: first the values of most time to make for their bytes, and those that cannot be made again, as long as
all copies hide behind the ops and are out before the peak; then the rest, for which the step waits.

Counts: the order of the copies, the times of the trace's own ops. Ignores: that what is recomputed leaves more time for
copies in, so that they may begin earlier than they must.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Final

from simulator.core.facts import OFFLOAD, PREFETCH, RELOAD, WAIT_OUT, copy_ns, pinned_bytes
from simulator.core.limits import Levers
from simulator.core.problem import Problem
from simulator.levers.edit import Editing, Ladder, Layout, Taken, Value, new_op, users_of
from simulator.levers.pack import Packing, needed
from traces.devices import device
from traces.errors import PlanError, SpecError
from traces.records.plan import Rewrite
from traces.records.trace import ACTIVATION, BACKWARD, EAGER, EFFECT, FORWARD, RANDOM, Trace
from traces.units import show_bytes

LEAST: Final = 1 << 20  # bytes: smaller values are not worth a copy's latency
UNKNOWN: Final = 10**10  # bytes a second
SHARES: Final = 4  # of what does not hide


def offer(problem: Problem, kind: str = "offload") -> Iterator[Rewrite]:
    """The values that can be copied away, in the order of their worth, as they are placed if all are taken, at the rate
    that the trace measured or else the device table's; where neither has one, without a rate."""
    step, meta = problem.once(_Step, _Step), problem.trace.meta
    try:
        rate = meta.rates.get("host_bytes_per_s") or device(meta.target or "cpu").host_bytes_per_s
        yield from step.placed(step.ranked, rate)
    except SpecError:
        yield from (replace(r, bytes_per_s=0) for r in step.placed(step.ranked, UNKNOWN))


def ladders(problem: Problem, rewrites: Sequence[Rewrite], levers: Levers) -> Iterator[Ladder]:
    """Return sets worth a plan, of what is offered and host memory has room for, each placed for itself: half of those
    that hide, all of them, and rising numbers of the rest. Raises SpecError: nobody says how fast copies are."""
    trace, left = problem.trace, levers.host_bytes
    rate = levers.host_bytes_per_s or rewrites[0].bytes_per_s
    if not rate:
        raise SpecError(
            f"--levers offload: the device table lacks {trace.meta.target}; give --host-bandwidth, such as 25GB."
        )
    fit = []
    for s in (r.storage for r in rewrites):
        nbytes = pinned_bytes(trace.storages.nbytes[s])
        if nbytes <= left:
            left -= nbytes
            fit.append(s)
    step = problem.once(_Step, _Step)
    hidden = step.hidden(fit, rate)
    rest = [s for s in fit if s not in hidden]
    sizes = [len(hidden) + -(-len(rest) * k // SHARES) for k in range(SHARES + 1)]
    yield [step.placed([*hidden, *rest][:n], rate) for n in dict.fromkeys((len(hidden) // 2, *sizes)) if n]


def edit(editing: Editing, rewrite: Rewrite) -> None:
    """Put the four ops into the step; a value that backward no longer reads, because of a rewrite before, stays. Raises
    PlanError: it cannot be copied away, or the ops between which it waits are not there."""
    trace, s = editing.source, rewrite.storage
    known = 0 <= s < len(trace.storages)
    if why := needed(trace, s, editing.once(users_of)[1][s]) if known else "there is none":
        raise PlanError(f"storage {s} ({rewrite.op}) cannot wait in host memory: {why}.")
    if rewrite.bytes_per_s <= 0:
        raise PlanError(f"the plan says not how fast storage {s} ({rewrite.op}) is copied to host memory.")
    value, made_by = editing.value[s], editing.op[trace.storages.producer[s]]
    readers = [op for op in editing.readers(value) if op is not made_by]
    if not editing.there(made_by) or all(op.phase == FORWARD for op in readers):
        return
    packing = Packing(editing, value, "")
    stem = made_by.name, packing.suffix
    ticket = Value(name="_offloaded".join(stem), nbytes=0, dtype="uint8", shape=(0,), category=ACTIVATION)
    back = replace(value, name="_reloaded".join(stem), producer=None, hold=None)

    source = (Taken(made_by, value),)
    out = new_op(made_by, ticket.name, OFFLOAD, FORWARD, source, [ticket], flags=RANDOM)
    of_out = Taken(out, ticket)
    given = of_out, Layout(value)
    again = new_op(made_by, back.name, RELOAD, FORWARD, given, [back], events=(value.nbytes,))
    editing.insert(out, made_by, after=True)
    editing.insert(again, out, after=True)
    packing.redirect(readers, {made_by: again}, back)
    for name, target, phase, before in (
        ("_out", WAIT_OUT, FORWARD, rewrite.out_before),
        ("_prefetched", PREFETCH, BACKWARD, rewrite.in_before),
    ):
        new = new_op(made_by, name.join(stem), target, phase, (Taken(again, back), of_out), [], flags=EFFECT)
        i = place(trace, before, phase, lambda i: editing.there(editing.op[i]))
        if i >= 0:
            editing.insert(new, editing.op[i])
        else:
            last = [x for x in editing.order if x.phase == phase and not x.flags & EAGER][-1]
            editing.insert(new, last, after=True)
    editing.rates["host_bytes_per_s"] = rewrite.bytes_per_s


def place(trace: Trace, name: str, phase: str, there: Callable[[int], bool] = lambda _: True) -> int:
    """The op of the captured graph before which a rewrite puts one: that of this name, or the next that is there still;
    -1: behind the last of the phase. Raises PlanError: the step never had such an op."""
    ops = trace.ops
    begin = 0 if phase == FORWARD else trace.meta.first_backward_graph_op
    try:
        first = ops.name.index(name, begin)
        while ops.phase[first] != phase or ops.flags[first] & EAGER:
            first = ops.name.index(name, first + 1)
    except ValueError:
        raise PlanError(
            f"the plan copies a value before {name or 'an op'} of {phase}, which this step does not have."
        ) from None
    graph = (i for i in range(first, len(ops)) if ops.phase[i] == phase and not ops.flags[i] & EAGER)
    return next(filter(there, graph), -1)


class _Step:
    """One step, and when its ops run with everything saved."""

    def __init__(self, problem: Problem) -> None:
        self.trace, self.problem, ops = problem.trace, problem, problem.trace.ops
        self.start = [0, *accumulate(ops.time_ns)]
        self.graph = {
            phase: [i for i in range(len(ops)) if ops.phase[i] == phase and not ops.flags[i] & EAGER]
            for phase in (FORWARD, BACKWARD)
        }

    @cached_property
    def ranked(self) -> list[int]:
        """The values that can be copied away; first those of most time for their bytes."""
        problem, sts, ops = self.problem, self.trace.storages, self.trace.ops

        def price(s: int) -> float:
            return ops.time_ns[sts.producer[s]] / sts.nbytes[s] if problem.rebuildable[s] else float("inf")

        last = self.graph[FORWARD][-1] if self.graph[FORWARD] else -1
        users = problem.once(users_of, lambda p: users_of(p.trace))[1]
        found = [
            s
            for s in self.trace.saved
            if sts.nbytes[s] >= LEAST
            if not problem.pinned[s] and max(sts.producer[s], sts.last_forward_use[s]) < last
            if not needed(self.trace, s, users[s])
        ]
        return sorted(found, key=lambda s: (-price(s), s))

    @cached_property
    def need(self) -> list[int]:
        """Storage -> the first op of backward that may need it: which reads it, or what is made of it without a matrix
        product, and so may be recomputed; of sums of two, as residuals are, only what is made of it at once."""
        ops, sts = self.trace.ops, self.trace.storages
        read = [n if n >= 0 else len(ops) for n in sts.first_backward_use]
        need = list(read)
        for i in reversed(range(self.problem.forward_end)):
            if self.problem.may_rerun[i] and not ops.flops[i]:
                given = [s for s in ops.reads[i] if sts.producer[s] >= 0]
                uses = need if len(given) == 1 else read
                for s in given:
                    need[s] = min((need[s], *(uses[x] for x in self.problem.creates[i])))
        return need

    def hidden(self, values: Iterable[int], rate: int) -> list[int]:
        """Of values that are tried one after the other those whose copies all hide, none of them there at the peak."""
        start, saved = self.start, self.problem.saved
        peak_op = saved.schedule.op[saved.timeline.peak_step]
        later = [i for i in self.graph[BACKWARD] if i > peak_op]
        if not later:
            return []
        out_by, back_from = min(start[peak_op], start[self.graph[FORWARD][-1]]), start[later[0]]
        hidden: list[int] = []
        for s in values:
            out, back = self._copies([*hidden, s], rate)
            if max(out.values()) <= out_by and min(back.values()) >= back_from:
                hidden.append(s)
        return hidden

    def _copies(self, values: Collection[int], rate: int) -> tuple[dict[int, int], dict[int, int]]:
        """Value -> when its copy out ends, and when that in begins: each out as early as it can be, one after the
        other; each in as late as it can be, by the first need."""
        sts, start, out, back, free = self.trace.storages, self.start, dict[int, int](), dict[int, int](), 0
        for s in sorted(values, key=lambda s: (sts.producer[s], -s)):
            out[s] = free = max(free, start[sts.producer[s] + 1]) + copy_ns(sts.nbytes[s], rate)
        free = start[-1]
        for s in sorted(values, key=lambda s: (-self.need[s], s)):
            back[s] = free = min(free, start[self.need[s]]) - copy_ns(sts.nbytes[s], rate)
        return out, back

    def placed(self, values: Sequence[int], rate: int) -> tuple[Rewrite, ...]:
        """The rewrites of so many values, in the order given."""
        ops, sts, start = self.trace.ops, self.trace.storages, self.start
        forward, backward = self.graph[FORWARD], self.graph[BACKWARD]
        out, back = self._copies(values, rate)

        def out_before(s: int) -> int:
            after = max(sts.producer[s], sts.last_forward_use[s])
            at = min(bisect_left(forward, max(out[s], 0), key=start.__getitem__), len(forward) - 1)
            return forward[max(at, bisect_right(forward, after))]

        def in_before(s: int) -> int:
            return backward[max(0, bisect_right(backward, back[s], key=start.__getitem__) - 1)]

        return tuple(
            Rewrite(
                kind="offload",
                storage=s,
                op=ops.name[sts.producer[s]],
                out_before=ops.name[out_before(s)],
                in_before=ops.name[in_before(s)],
                bytes_per_s=rate,
            )
            for s in values
        )


def host_bytes(trace: Trace, rewrites: Iterable[Rewrite]) -> int:
    """Return what waits in host memory at most: all that is copied there, when forward ends."""
    return sum(pinned_bytes(trace.storages.nbytes[r.storage]) for r in rewrites if r.bytes_per_s)


def told(trace: Trace, rewrites: Sequence[Rewrite]) -> str:
    """How many values wait in host memory, and in how much of it."""
    return f"{len(rewrites)} values, {show_bytes(host_bytes(trace, rewrites))} in host memory"
