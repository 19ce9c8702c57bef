"""Offload: a value waits in pinned host memory between forward and backward, with copies that run beside the step.

Its copy out begins where it is made; its memory is freed where the copy is complete, and allocated again some ops
before something of backward may need it, where the copy in begins (`simulator.core.transfers` has the four ops). What
comes back is for recomputations, too.

What is copied: first the values of most time to make for their bytes, and those that cannot be made again, as long as
all copies hide behind the ops and are out before the peak; then the rest, for which the step waits.

Counts: the order of the copies, the times of the trace's own ops. Ignores: that what is recomputed leaves more time for
copies in, so that they may begin earlier than they must.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Final

from simulator.core.facts import Facts
from simulator.core.limits import Levers
from simulator.core.replay import replay
from simulator.core.rewrites.edit import Editing, Op, Value
from simulator.core.rewrites.pack import Packing, needed
from simulator.core.transfers import OFFLOAD, PREFETCH, RELOAD, WAIT_OUT, copy_ns, pinned_bytes
from traces.devices import device
from traces.errors import PlanError, SpecError
from traces.records.plan import EXACT, Rewrite
from traces.records.trace import ACTIVATION, BACKWARD, EAGER, EFFECT, FORWARD, RANDOM, Trace

EXACTNESS: Final = EXACT
LEAST: Final = 1 << 20  # bytes: smaller values are not worth a copy's latency
UNKNOWN: Final = 10**10  # bytes a second
SHARES: Final = 4  # of what does not hide


def offer(facts: Facts) -> Iterator[Rewrite]:
    """The values that can be copied away, in the order of their worth, as they are placed if all are taken; where the
    device table lacks the device, without a rate."""
    step = _Step(facts)
    try:
        yield from step.placed(step.ranked(), device(facts.trace.meta.target or "cpu").host_bytes_per_s)
    except SpecError:
        yield from (replace(r, bytes_per_s=0) for r in step.placed(step.ranked(), UNKNOWN))


def choices(facts: Facts, rewrites: Sequence[Rewrite], levers: Levers) -> Iterator[tuple[Rewrite, ...]]:
    """Of what is offered and host memory has room for, sets worth a plan, each placed for itself: first all that hides.

    Raises:
        SpecError: nobody says how fast copies are.
    """
    rate = levers.host_bytes_per_s or rewrites[0].bytes_per_s
    if not rate:
        raise SpecError(
            f"--levers offload: the device table lacks {facts.trace.meta.target}; give --host-bandwidth, such as 25GB."
        )
    step, left = _Step(facts), levers.host_bytes
    hidden: list[int] = []
    rest: list[int] = []
    for s in (r.storage for r in rewrites):
        nbytes = pinned_bytes(facts.trace.storages.nbytes[s])
        if nbytes <= left:
            left -= nbytes
            (hidden if step.copies([*hidden, s], rate).hide else rest).append(s)
    sizes = [len(hidden), len(hidden) // 2]
    sizes += [len(hidden) + -(-len(rest) * k // SHARES) for k in range(1, SHARES + 1)]
    for n in dict.fromkeys(sizes):
        if n:
            yield step.placed([*hidden, *rest][:n], rate)


def edit(editing: Editing, rewrite: Rewrite) -> None:
    """Put the four ops into the step; a value that backward no longer reads, because of a rewrite before, is left as it
    is.

    Raises:
        PlanError: the value is not one that can be copied away, or the ops between which it waits are not there.
    """
    trace, s = editing.source, rewrite.storage
    known = 0 <= s < len(trace.storages)
    if why := needed(trace, s) if known else "there is none":
        raise PlanError(f"storage {s} ({rewrite.op}) cannot wait in host memory: {why}.")
    if rewrite.bytes_per_s <= 0:
        raise PlanError(f"the plan says not how fast storage {s} ({rewrite.op}) is copied to host memory.")
    value, made_by = editing.value[s], editing.op[trace.storages.producer[s]]
    readers = [op for op in editing.order if value in op.reads and op is not made_by]
    if made_by not in editing.order or all(op.phase == FORWARD for op in readers):
        return
    packing = Packing(editing, value, "")
    stem = made_by.name, packing.suffix
    ticket = Value(name="_offloaded".join(stem), nbytes=0, dtype="uint8", shape=(0,), category=ACTIVATION)
    back = replace(value, name="_reloaded".join(stem), producer=None, hold=None)

    def op(
        name: str, target: str, phase: str, inputs: list[Op], reads: list[Value], flags: int, *made: Value
    ) -> Op:
        return Op(
            name=name,
            target=target,
            phase=phase,
            module=made_by.module,
            time_ns=0,
            inputs=inputs,
            reads=reads,
            writes=made,
            events=(value.nbytes,) if back in made else (),
            flags=flags,
        )

    out = op(ticket.name, OFFLOAD, FORWARD, [made_by], [value], RANDOM, ticket)
    again = op(back.name, RELOAD, FORWARD, [out], [ticket], 0, back)
    both = [again, out], [back, ticket], EFFECT
    editing.insert(out, made_by, after=True)
    editing.insert(again, out, after=True)
    packing.redirect(readers, {made_by: again}, back)
    there = editing.order.__contains__
    for name, target, phase, before in (
        ("_out", WAIT_OUT, FORWARD, rewrite.out_before),
        ("_prefetched", PREFETCH, BACKWARD, rewrite.in_before),
    ):
        new = op(name.join(stem), target, phase, *both)
        i = place(trace, before, phase, lambda i: there(editing.op[i]))
        if i >= 0:
            editing.insert(new, editing.op[i])
        else:
            last = [x for x in editing.order if x.phase == phase and not x.flags & EAGER][-1]
            editing.insert(new, last, after=True)
    editing.rates["host_bytes_per_s"] = rewrite.bytes_per_s


def place(trace: Trace, name: str, phase: str, there: Callable[[int], bool]) -> int:
    """The op of the captured graph before which a rewrite puts one: that of this name, or the next that is there still;
    -1: behind the last of the phase.

    Raises:
        PlanError: the step never had such an op.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """Where copies of some values stand."""

    out_before: dict[int, int]  # value -> op of forward
    in_before: dict[int, int]  # value -> op of backward
    hide: bool  # all of them behind the ops, and none of the values is there at the peak


class _Step:
    """One step, and when its ops run with everything saved."""

    def __init__(self, facts: Facts) -> None:
        self.trace, self.facts, ops = facts.trace, facts, facts.trace.ops
        self.start = [0, *accumulate(ops.time_ns)]
        self.graph = {
            phase: [i for i in range(len(ops)) if ops.phase[i] == phase and not ops.flags[i] & EAGER]
            for phase in (FORWARD, BACKWARD)
        }

    @cached_property
    def peak_op(self) -> int:
        found = replay(self.facts, ())
        return found.schedule.op[found.timeline.peak_step]

    def ranked(self) -> list[int]:
        """The values that can be copied away; first those of most time for their bytes."""
        facts, sts, ops = self.facts, self.trace.storages, self.trace.ops

        def price(s: int) -> float:
            return ops.time_ns[sts.producer[s]] / sts.nbytes[s] if facts.rebuildable[s] else float("inf")

        last = self.graph[FORWARD][-1] if self.graph[FORWARD] else -1
        found = [
            s
            for s in self.trace.saved
            if sts.nbytes[s] >= LEAST
            if not facts.pinned[s] and max(sts.producer[s], sts.last_forward_use[s]) < last
            if not needed(self.trace, s)
        ]
        return sorted(found, key=lambda s: (-price(s), s))

    @cached_property
    def need(self) -> list[int]:
        """Storage -> the first op of backward that may need it: which reads it, or what is made of it without a matrix
        product, and so may be recomputed; of sums of two, as residuals are, only what is made of it at once."""
        ops, sts = self.trace.ops, self.trace.storages
        read = [n if n >= 0 else len(ops) for n in sts.first_backward_use]
        need = list(read)
        for i in reversed(range(self.facts.forward_end)):
            if self.facts.may_rerun[i] and not ops.flops[i]:
                given = [s for s in ops.reads[i] if sts.producer[s] >= 0]
                uses = need if len(given) == 1 else read
                for s in given:
                    need[s] = min((need[s], *(uses[x] for x in self.facts.creates[i])))
        return need

    def copies(self, values: Collection[int], rate: int) -> _Copies:
        """Each out as early as it can be, one after the other; each in as late as it can be, by the first need."""
        sts, start = self.trace.storages, self.start
        forward, backward = self.graph[FORWARD], self.graph[BACKWARD]
        out_before, in_before, hide, free = {}, {}, True, 0
        for s in sorted(values, key=lambda s: (sts.producer[s], -s)):
            free = max(free, start[sts.producer[s] + 1]) + copy_ns(sts.nbytes[s], rate)
            after = max(sts.producer[s], sts.last_forward_use[s])
            at = min(bisect_left(forward, max(free, 0), key=start.__getitem__), len(forward) - 1)
            at = max(at, bisect_right(forward, after))
            out_before[s] = forward[at]
            hide = hide and free <= start[min(forward[at], self.peak_op)]
        free = start[-1]
        for s in sorted(values, key=lambda s: (-self.need[s], s)):
            free = min(free, start[self.need[s]]) - copy_ns(sts.nbytes[s], rate)
            at = max(0, bisect_right(backward, free, key=start.__getitem__) - 1)
            in_before[s] = backward[at]
            hide = hide and free >= start[backward[at]] and backward[at] > self.peak_op
        return _Copies(out_before=out_before, in_before=in_before, hide=hide)

    def placed(self, values: Sequence[int], rate: int) -> tuple[Rewrite, ...]:
        """The rewrites of so many values, in the order given."""
        ops, sts, copies = self.trace.ops, self.trace.storages, self.copies(values, rate)
        return tuple(
            Rewrite(
                kind="offload",
                storage=s,
                op=ops.name[sts.producer[s]],
                out_before=ops.name[copies.out_before[s]],
                in_before=ops.name[copies.in_before[s]],
                bytes_per_s=rate,
            )
            for s in values
        )
