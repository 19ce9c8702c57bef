"""The planners' inner loop: the peak and the time of a plan, thousands of times in a row.

The same answer as `schedule.build` followed by `engine.run`, to the byte and the nanosecond, from arrays of ints in
which views have been dissolved: an op refers straight to the storages behind the views that it takes. What a plan
cannot change (everything that backward itself makes) is summed up once. The loop itself is in `simulator.kernels.walk`.

Counts and ignores: what `simulator.core.problem` counts and ignores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import numpy as np
from numpy.typing import NDArray

from simulator.core.facts import RELOAD, transfer_ns
from simulator.core.problem import Problem
from simulator.kernels.walk import (
    FORBIDDEN,
    FULL,
    OPS_ROW,
    STORAGES_ROW,
    Choice,
    Packed,
    Work,
    pack_lists,
    steps,
    walk,
)
from traces.errors import PlanError
from traces.records.plan import RECOMPUTE, SAVE, Action


@dataclass(slots=True, kw_only=True)
class State:
    """The decisions of a plan, by storage id; made by `Evaluator.state` and edited in place by planners.

    `saved` says which storages are saved from forward to backward, `retained` which are retained once they have come
    back (arrays of 0 and 1); `evictions` maps the position of an op to the storages, saved or not, evicted after it.
    """

    saved: NDArray[np.uint8]
    retained: NDArray[np.uint8]
    evictions: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def copy(self) -> State:
        return State(saved=self.saved.copy(), retained=self.retained.copy(), evictions=dict(self.evictions))


class Evaluator:
    """One trace in the form that `walk` needs. Positions number the ops that are left when views are dissolved."""

    facts: Packed
    _work: Work

    def __init__(self, problem: Problem) -> None:
        trace = problem.trace
        ops, sts = trace.ops, trace.storages
        n_st, forward_end = len(sts), problem.forward_end
        made_forward = [0 <= p < forward_end for p in sts.producer]
        # A view costs nothing and creates nothing. Only a backward view of a forward value matters: it demands it.
        chosen = [
            i
            for i in range(len(ops))
            if not problem.is_view[i] or (i >= forward_end and any(made_forward[s] for s in ops.reads[i]))
        ]
        self.trace, self.problem = trace, problem
        self.op_id = chosen
        self.forward = sum(1 for i in chosen if i < forward_end)
        self.nbytes = list(sts.nbytes)
        # A copy from host memory takes no time of its own where it is hidden, which only the first can be.
        copies = {i: transfer_ns(trace, i) for i in chosen if ops.target[i] == RELOAD}
        self.time_ns = [0 if problem.is_view[i] else copies.get(i, ops.time_ns[i]) for i in chosen]
        self.base_time_ns = trace.time_ns - sum(copies.values())
        self.may_rerun = [problem.may_rerun[i] for i in chosen]
        self.last_backward_use = list(sts.last_backward_use)
        self.position = position = {i: k for k, i in enumerate(chosen)}
        # The last chosen op at or before each op.
        self.before = list(accumulate((position.get(i, -1) for i in range(len(ops))), max))
        self.producer = [position[p] if p >= 0 else -1 for p in sts.producer]
        self.creates = [tuple(s for s in problem.creates[i] if made_forward[s]) for i in chosen]
        self.reads = [tuple(s for s in ops.reads[i] if made_forward[s]) for i in chosen]
        self.needs = _dissolve_views(problem, chosen, made_forward)

        last = self._last_uses(made_forward)
        self.last_forward = [a for a, _ in last]
        self._takeovers(made_forward, last)
        self.made_forward = [s for s in range(n_st) if made_forward[s]]
        self.resident_bytes = trace.resident_bytes
        self.born = [0] * self.forward  # bytes that each op of forward makes
        for s in self.made_forward:
            self.born[self.producer[s]] += self.nbytes[s]
        stays = np.array(problem.saved_by_default, np.uint8) | np.array(problem.pinned, np.uint8)
        self._saved_by_default = np.array(made_forward, np.uint8) & stays
        self._saved_by_default[list(problem.reloaded)] = 0
        self._pack()

    def _last_uses(self, made_forward: list[bool]) -> list[tuple[int, bool]]:
        """Where each storage ends if nothing but the trace itself decides, holds beyond forward set apart.

        By storage: the position, and whether a view comes last there (then the op at that position has ended, and
        cannot take the memory over).
        """
        before, sts = self.before, self.trace.storages
        end = list(map(max, sts.producer, sts.last_forward_use))  # op
        for i in range(self.problem.forward_end, len(self.trace.ops)):
            for s in (*self.trace.ops.reads[i], *self.problem.creates[i]):
                end[s] = end[s] if made_forward[s] else i
        self.hold = [-1] * len(sts)  # position of a hold beyond forward, for storages that forward makes
        self.hold_after = [False] * len(sts)
        for s, h in enumerate(sts.hold):
            if h < 0 or sts.producer[s] < 0:
                continue
            if before[h] < self.forward or not made_forward[s]:
                end[s] = max(end[s], h)
            else:
                self.hold[s], self.hold_after[s] = before[h], h not in self.position
        return [(before[i], i not in self.position) if i >= 0 else (-1, False) for i in end]

    def _takeovers(self, made_forward: list[bool], last: list[tuple[int, bool]]) -> None:
        """Return what each op adds, leaves and frees as far as the trace decides it, and what it may take over."""
        problem, ops, sts = self.problem, self.trace.ops, self.trace.storages
        self.rise = [problem.transient_bytes[i] for i in self.op_id]
        self.settled = [0] * len(self.op_id)  # bytes
        self.overwrites = [-1] * len(self.op_id)  # storages whose takeover depends on the plan
        for s, producer in enumerate(sts.producer):
            if producer >= problem.forward_end:
                self.settled[self.producer[s]] += sts.nbytes[s]
                self.settled[last[s][0]] -= sts.nbytes[s]
        for k, i in enumerate(self.op_id):
            s = ops.overwrites[i]
            if s < 0 or problem.resident[s] or s in problem.creates[i]:
                continue
            if made_forward[s]:
                self.overwrites[k] = s
            elif last[s] == (k, False):
                self.rise[k] -= sts.nbytes[s]
        # In forward: whether the op at the storage's last use takes it over, if it ends there.
        self.forward_take = [-1] * len(sts)
        for k in range(self.forward):
            s = self.overwrites[k]
            if s >= 0 and last[s] == (k, False):
                self.forward_take[s] = k

    def state(self) -> State:
        """The state that saves everything."""
        retained = np.zeros_like(self._saved_by_default)
        retained[list(self.problem.reloaded)] = 1
        return State(saved=self._saved_by_default.copy(), retained=retained)

    def actions(self, state: State) -> list[Action]:
        """The actions that a state means."""
        problem, candidates = self.problem, self.problem.candidate_set
        evicted_after: dict[int, list[int]] = {}
        for k, evicted in sorted(state.evictions.items()):
            for s in evicted:
                evicted_after.setdefault(s, []).append(self.op_id[k])
        out = []
        for s in self.made_forward:
            after, retain = tuple(evicted_after.get(s, ())), bool(state.retained[s])
            again = s in candidates and not state.saved[s]
            if again or (after and (s in candidates or s in problem.reloaded)):
                recipe = SAVE if s in candidates and not again else RECOMPUTE
                out.append(Action(storage=s, recipe=recipe, retain=retain, evict_after=after))
            elif problem.saved_by_default[s] or problem.pinned[s]:
                continue
            elif state.saved[s]:
                out.append(Action(storage=s, recipe=SAVE, retain=retain or not after, evict_after=after))
            elif state.retained[s] and problem.rebuildable[s]:
                out.append(Action(storage=s, evict_after=after))  # a link that stays once it is rebuilt
        return out

    def cost(self, state: State) -> tuple[int, int]:
        """(peak bytes, time) of a plan. Raises PlanError if a chain needs an op that may not run again."""
        peak_bytes, added_ns, _, _ = self.walk(state)
        return peak_bytes, self.base_time_ns + added_ns

    def walk(self, state: State) -> tuple[int, int, int, int]:
        """(peak, added time, peak step, steps with those of forward); raises PlanError as `cost` does."""
        flat = [(k, s) for k, each in sorted(state.evictions.items()) for s in each]
        at, evicted = (np.array([pair[k] for pair in flat], np.int32) for k in (0, 1))
        choice = Choice(state.saved, state.retained, at, evicted)
        while True:
            found = walk(self.facts, choice, self._work)
            if found[0] >= 0:
                return found
            if found[0] == FORBIDDEN:
                raise PlanError(f"op {found[1]} needs op {found[2]} again, which may not run a second time.")
            assert found[0] == FULL
            self.work_space(2 * len(self._work.peak_bytes) - self.forward)

    def sequence(self, steps: int) -> NDArray[np.int32]:
        """Return the op of each step after forward, of the walk before, of so many steps; ~op if it runs again."""
        return cast("NDArray[np.int32]", self._work.op[self.forward : steps].copy())

    def peaks(self, steps: int) -> NDArray[np.int64]:
        """Return the most that is allocated while each of so many steps runs, of the walk before."""
        return cast("NDArray[np.int64]", self._work.peak_bytes[:steps].copy())

    def read_by(self, positions: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Storage -> whether one of these ops reads it."""
        runs = np.zeros(len(self.op_id), np.bool_)
        runs[positions] = True
        out = np.zeros(len(self.nbytes), np.bool_)
        at = self.facts.ops["reads_at"]
        out[self.facts.ids[at[0] : at[-1]][np.repeat(runs, np.diff(at))]] = True
        return out

    def work_space(self, count: int) -> Work:
        """Return what `kernels.walk` works in, with room for so many steps at least, and leaves its steps in."""
        if len(self._work.peak_bytes) < count:
            self._work = self._work._replace(**steps(count, len(self.op_id)))
        return self._work

    def _pack(self) -> None:
        """The lists above as the tables that the kernels read, and their work space."""
        n_op, n_st, forward = len(self.op_id), len(self.nbytes), self.forward
        ops, storages = np.zeros(n_op + 1, OPS_ROW), np.zeros(n_st, STORAGES_ROW)
        made = sorted(self.made_forward, key=lambda s: (self.producer[s], s))
        starts, ids = pack_lists(self.needs, self.reads, self.creates, [made])
        ops["needs_at"], ops["reads_at"], ops["creates_at"], (made_at, _) = starts
        ops["id"][:n_op] = self.op_id
        for name in ("time_ns", "overwrites", "may_rerun"):
            ops[name][:n_op] = getattr(self, name)
        storages["producer"] = np.array(self.producer, np.int32).astype(np.uint32)
        storages["last_backward"] = self.last_backward_use
        for name in ("nbytes", "last_forward", "hold", "hold_after", "forward_take"):
            storages[name] = getattr(self, name)
        self.facts = Packed(
            forward=forward,
            resident_bytes=self.resident_bytes,
            made_at=int(made_at),
            ops=ops,
            storages=storages,
            ids=ids,
            transient_bytes=np.array(self.rise, np.int64),
            adds_bytes=np.array([*self.born, *self.settled[forward:]], np.int64),
        )
        self._work = Work(
            present=np.empty(n_st, np.uint8),
            last=np.empty(n_st, np.int32),
            first_end=np.empty(n_st, np.int32),
            demanded=np.empty(n_st, np.int32),
            visited=np.empty(n_op, np.int32),
            step_of=np.empty(n_op, np.int32),
            stack=np.empty(max(2 * starts[0][-1] + n_op + 1, n_st), np.int32),
            **steps(forward + 2 * n_op + 1, n_op),
        )


def evaluator_of(problem: Problem) -> Evaluator:
    """The evaluator of a problem, made once. Who reads its steps must do so before anybody walks another state."""
    return problem.once(evaluator_of, Evaluator)


def without(evictions: dict[int, tuple[int, ...]], storage: int) -> dict[int, tuple[int, ...]]:
    """Return the same evictions, but for one storage."""
    if not any(storage in e for e in evictions.values()):
        return evictions
    left = {k: tuple(s for s in e if s != storage) for k, e in evictions.items()}
    return {k: e for k, e in left.items() if e}


def _dissolve_views(problem: Problem, chosen: list[int], made_forward: list[bool]) -> list[tuple[int, ...]]:
    """For each chosen op, the storages from forward that it takes, in the order in which a chain rebuilds them."""
    trace = problem.trace
    ops = trace.ops
    behind: dict[int, tuple[int, ...]] = {}  # view op -> the storages that its value stands for

    def taken(i: int) -> tuple[int, ...]:
        reads = ops.reads[i]
        out: dict[int, None] = {}
        for j in ops.inputs[i]:
            if problem.is_view[j]:
                out.update(dict.fromkeys(behind[j]))
            else:
                out.update(dict.fromkeys(s for s in problem.creates[j] if made_forward[s] and s in reads))
        return tuple(out)

    for i in range(len(ops)):
        if problem.is_view[i]:
            behind[i] = taken(i)
    return [taken(i) for i in chosen]
