"""Turn a Trace and a set of actions into a peak and a time, thousands of times in a row: the planners' inner loop.

The same answer as `schedule.build` followed by `engine.run`, to the byte and the nanosecond, from plain lists of
ints in which views have been dissolved: an op refers straight to the storages behind the views that it takes. What
a plan cannot change (everything that backward itself makes) is summed up once.

Counts and ignores: what `simulator.engine` counts and ignores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from simulator.graph import Graph, analyse
from traces.errors import PlanError
from traces.plan import SAVE, Action
from traces.trace import Trace


@dataclass(slots=True, kw_only=True)
class State:
    """What a plan decides, by storage id; made by `Evaluator.state` and edited in place by planners.

    `there` says which storages are kept from forward to backward, `share` which recomputed ones stay, and `drops`
    maps the position of an op to the storages dropped after it.
    """

    there: bytearray
    share: bytearray
    drops: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def copy(self) -> State:
        return State(there=bytearray(self.there), share=bytearray(self.share), drops=dict(self.drops))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One evaluation. Steps are numbered as the schedule's, views left out: forward first, recomputations included."""

    peak_bytes: int
    time_ns: int
    peak_step: int  # the first step at the peak; -1: nothing runs
    seq: list[int]  # position of the op of every step after forward
    again: list[bool]  # whether that step is a recomputation
    peaks: list[int]  # the most that is allocated while each step runs, forward included


class Evaluator:
    """One trace in the form that `evaluate` needs. Positions number the ops that are left when views are dissolved."""

    def __init__(self, trace: Trace, graph: Graph | None = None) -> None:
        graph = graph or analyse(trace)
        ops, sts = trace.ops, trace.storages
        n_st, turn = len(sts), graph.first_backward_op
        made_forward = [0 <= p < turn for p in sts.producer]
        # A view costs nothing and creates nothing. Only a backward view of a forward value matters: it demands it.
        chosen = [
            i
            for i in range(len(ops))
            if not graph.is_view[i] or (i >= turn and any(made_forward[s] for s in ops.reads[i]))
        ]
        self.trace, self.graph = trace, graph
        self.op_id = chosen
        self.forward = sum(1 for i in chosen if i < turn)
        self.nbytes = list(sts.nbytes)
        self.time_ns = [0 if graph.is_view[i] else ops.time_ns[i] for i in chosen]
        self.base_time_ns = trace.time_ns
        self.may_rerun = [graph.may_rerun[i] for i in chosen]
        self.last_backward_use = list(sts.last_backward_use)
        position = {i: k for k, i in enumerate(chosen)}
        self.position = position
        before, k = [], -1  # the last chosen op at or before each op
        for i in range(len(ops)):
            k = position.get(i, k)
            before.append(k)
        self.before = before
        self.producer = [position[p] if p >= 0 else -1 for p in sts.producer]
        self.creates = [tuple(s for s in graph.creates[i] if made_forward[s]) for i in chosen]
        self.reads = [tuple(s for s in ops.reads[i] if made_forward[s]) for i in chosen]
        self.needs = _dissolve_views(trace, graph, chosen, made_forward)
        self.needs_reversed = [tuple(reversed(n)) for n in self.needs]

        # Where each storage ends if nothing but the trace itself decides: position, and whether a view comes last
        # there (then the op at that position has ended, and cannot take the memory over).
        last = [(-1, False)] * n_st
        for i in range(len(ops)):
            at = (before[i], i not in position)
            for s in (*ops.reads[i], *graph.creates[i]):
                if i < turn or not made_forward[s]:
                    last[s] = max(last[s], at)
        self.hold = [-1] * n_st  # position of a hold beyond forward, for storages that forward makes
        self.hold_after = [False] * n_st
        for s in range(n_st):
            h = sts.hold[s]
            if h < 0 or sts.producer[s] < 0:
                continue
            if before[h] < self.forward or not made_forward[s]:
                last[s] = max(last[s], (before[h], h not in position))
            else:
                self.hold[s], self.hold_after[s] = before[h], h not in position
        self.last_forward = [a for a, _ in last]

        self.rise = [graph.rise_bytes[i] for i in chosen]
        # What the trace alone decides: bytes that each op leaves behind or releases.
        self.settled = [0] * len(chosen)
        self.overwrites = [-1] * len(chosen)  # storages whose takeover depends on the plan
        for s in range(n_st):
            if sts.producer[s] >= turn:
                self.settled[self.producer[s]] += sts.nbytes[s]
                self.settled[last[s][0]] -= sts.nbytes[s]
        for k, i in enumerate(chosen):
            s = ops.overwrites[i]
            if s < 0 or graph.resident[s]:
                continue
            if not made_forward[s]:
                if last[s] == (k, False) and s not in graph.creates[i]:
                    self.rise[k] -= sts.nbytes[s]
            elif s not in graph.creates[i]:
                self.overwrites[k] = s
        self.taken_over = [False] * n_st
        for s in self.overwrites:
            if s >= 0:
                self.taken_over[s] = True
        # In forward: whether the op at the storage's last use takes it over, if it ends there.
        self.forward_take = [-1] * n_st
        for k in range(self.forward):
            s = self.overwrites[k]
            if s >= 0 and last[s] == (k, False):
                self.forward_take[s] = k
        self.made_forward = [s for s in range(n_st) if made_forward[s]]
        self.resident_bytes = trace.resident_bytes
        # Forward, with every storage released after its last forward use.
        born = [0] * self.forward
        for s in self.made_forward:
            born[self.producer[s]] += self.nbytes[s]
        self.born = born

    def state(self, actions: Iterable[Action] = ()) -> State:
        """The state that a plan's actions mean; everything kept without any."""
        graph = self.graph
        there = bytearray(len(self.nbytes))
        share = bytearray(len(self.nbytes))
        drops: dict[int, tuple[int, ...]] = {}
        for s in self.made_forward:
            there[s] = graph.wanted[s] or graph.pinned[s]
        for a in actions:
            there[a.storage] = a.action == SAVE or graph.pinned[a.storage]
            share[a.storage] = a.share
            for c in a.drop_after:
                if c >= graph.first_backward_op:
                    k = max(self.before[c], self.forward - 1)
                    drops[k] = (*drops.get(k, ()), a.storage)
        return State(there=there, share=share, drops=drops)

    def evaluate(self, state: State) -> Result:
        """Peak and time of a plan.

        Raises:
            PlanError: a chain needs an op that may not run again.
        """
        nbytes, reads, needs, taken_over = self.nbytes, self.reads, self.needs, self.taken_over
        share, drops = state.share, state.drops
        n_forward = self.forward
        there = bytearray(state.there)
        # the current instance: 0 none after forward, 1 the one from forward, 2 a rebuilt one
        instance = bytearray(state.there)
        last = [-1] * len(nbytes)  # the last step after forward that reads the current instance
        seq: list[int] = []
        again: list[bool] = []
        freed: list[int] = []
        gained: list[int] = []
        step_of = [-1] * len(self.op_id)
        ended: set[tuple[int, int]] = set()
        added_ns = 0
        for s in drops.get(n_forward - 1, ()):
            there[s] = 0
        for c in range(n_forward, len(self.op_id)):
            rebuilt: list[int] = []
            for s in needs[c]:
                if not there[s]:
                    break
            else:
                s = -1
            if s >= 0:
                order, demanded = self._chain(c, there)
                after = self.op_id[c]
                for b in order:
                    step = len(seq)
                    bound = 0
                    for x in reads[b]:
                        last[x] = step
                    for x in self.creates[b]:
                        if there[x] or not (
                            x in demanded or (share[x] and self.last_backward_use[x] > after)
                        ):
                            continue
                        if instance[x] == 2:
                            freed[last[x]] += nbytes[x]
                            if taken_over[x]:
                                ended.add((last[x], x))
                        instance[x] = 2
                        last[x] = step
                        there[x] = 1
                        rebuilt.append(x)
                        bound += nbytes[x]
                    seq.append(b)
                    again.append(True)
                    freed.append(0)
                    gained.append(bound)
                    added_ns += self.time_ns[b]
            step_of[c] = step = len(seq)
            for x in reads[c]:
                last[x] = step
            seq.append(c)
            again.append(False)
            freed.append(0)
            gained.append(self.settled[c])
            for x in rebuilt:
                if not share[x]:
                    there[x] = 0
            if c in drops:
                for x in drops[c]:
                    there[x] = 0

        ends = [0] * n_forward  # bytes that each op of forward releases
        take = [0] * n_forward  # bytes that it takes over
        first: list[tuple[int, int]] = []  # instances from forward: storage, last read after forward
        for s in self.made_forward:
            if instance[s] == 2:
                freed[last[s]] += nbytes[s]
                if taken_over[s]:
                    ended.add((last[s], s))
            elif instance[s]:
                first.append((s, last[s]))
            if not state.there[s]:
                first.append((s, -1))
        for s, end in first:
            takeable = True
            if self.hold[s] >= 0:
                held = step_of[self.hold[s]]
                if held > end or (held == end and self.hold_after[s]):
                    end, takeable = held, not self.hold_after[s]
            if end >= 0:
                freed[end] += nbytes[s]
                if takeable and taken_over[s]:
                    ended.add((end, s))
            else:
                ends[self.last_forward[s]] += nbytes[s]
                if self.forward_take[s] >= 0:
                    take[self.forward_take[s]] += nbytes[s]

        live = self.resident_bytes
        peaks: list[int] = []
        rise = self.rise
        for k in range(n_forward):
            peaks.append(live + rise[k] - take[k])
            live += self.born[k] - ends[k]
        for k, plus, minus in zip(seq, gained, freed, strict=True):
            peaks.append(live + rise[k])
            live += plus - minus
        for step, s in ended:
            if self.overwrites[seq[step]] == s:
                peaks[n_forward + step] -= nbytes[s]
        peak = max(peaks, default=self.resident_bytes)
        return Result(
            peak_bytes=peak,
            time_ns=self.base_time_ns + added_ns,
            peak_step=peaks.index(peak) if peaks else -1,
            seq=seq,
            again=again,
            peaks=peaks,
        )

    def _chain(self, c: int, there: bytearray) -> tuple[list[int], set[int]]:
        """The ops that must run again just before position c, in order, and the storages demanded of them."""
        producer, needs_reversed = self.producer, self.needs_reversed
        demanded: set[int] = set()
        visited: set[int] = set()
        order: list[int] = []
        stack = [s for s in needs_reversed[c] if not there[s]]
        while stack:
            x = stack.pop()
            if x < 0:
                order.append(~x)
                continue
            demanded.add(x)
            b = producer[x]
            if b in visited:
                continue
            visited.add(b)
            if not self.may_rerun[b]:
                raise PlanError(
                    f"op {self.op_id[c]} needs op {self.op_id[b]} again, which may not run a second time."
                )
            stack.append(~b)
            stack.extend(s for s in needs_reversed[b] if not there[s])
        return order, demanded


def _dissolve_views(
    trace: Trace, graph: Graph, chosen: list[int], made_forward: list[bool]
) -> list[tuple[int, ...]]:
    """For each chosen op, the storages from forward that it takes, in the order in which a chain rebuilds them."""
    ops = trace.ops
    behind: dict[int, tuple[int, ...]] = {}  # view op -> the storages that its value stands for

    def taken(i: int) -> tuple[int, ...]:
        reads = ops.reads[i]
        out: dict[int, None] = {}
        for j in ops.inputs[i]:
            if graph.is_view[j]:
                out.update(dict.fromkeys(behind[j]))
            else:
                out.update(dict.fromkeys(s for s in graph.creates[j] if made_forward[s] and s in reads))
        return tuple(out)

    for i in range(len(ops)):
        if graph.is_view[i]:
            behind[i] = taken(i)
    return [taken(i) for i in chosen]
