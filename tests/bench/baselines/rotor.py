"""The optimal plan for a heterogeneous chain of blocks: rotor's dynamic programme.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory" (2019), as in the package rotor. Forward is a chain of stages;
C(s, t, m) is the least forward time to bring stages s..t through backward in m bytes when the input of s is there:

    C(s, s, m) = F(s)                                                      if full(s) <= m
    C(s, t, m) = min of  F(s) + C(s+1, t, m - full(s))                                        (keep all of s)
                 and     F(s..k-1) + C(k, t, m - border(k-1)) + C(s, k-1, m)   over s < k <= t   (keep the input of k)

with full(s) all that backward wants of s, and border(s) what s hands to s+1. m is cut into `SLOTS` parts. Each m has
its own best recursion, which becomes actions: a value is kept, or shared and dropped after the op that starts a pass in
which the recursion does not keep it, so that it is made more than once. The fastest that fits in the replay is the
plan.

Stages: the repeated blocks and the runs of ops between them; in a model without blocks its modules in order, and
without modules its ops.

Counts: in the choice among recursions, the exact peak and time. Ignores: in the programme itself, the memory of
backward (gradients, workspaces) and of stages while they run. Left out of rotor: a value kept from forward cannot be
freed and made again later; values that a stage hands further than to the next are always kept; random ops' values too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from simulator.core.evaluator import Evaluator, State
from simulator.core.limits import DEFAULTS, Limits
from simulator.core.problem import Problem
from simulator.planners.outcome import finish, refuse
from simulator.planners.segments import block_paths
from traces.errors import PlanError
from traces.records.plan import SAVE, Action, Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAME: Final = "rotor"
SLOTS: Final = 200
MOST_STAGES: Final = (
    100  # longer chains have neighbours joined, so that the programme takes about a second at most
)


def plan(problem: Problem, budget_bytes: int, limits: Limits = DEFAULTS) -> Plan:
    """The fastest of rotor's recursions that fits in the replay; everything kept if that fits.

    Raises:
        BudgetError: none does.
    """
    evaluator = Evaluator(problem)
    best: tuple[int, tuple[Action, ...]] | None = None
    lowest, time_ns = evaluator.cost(evaluator.state())
    if lowest <= budget_bytes:
        best = (time_ns, ())
    else:
        chain = Chain(problem, evaluator)
        for state in chain.states():
            try:
                peak, time_ns = evaluator.cost(state)
            except PlanError:
                continue
            lowest = min(lowest, peak)
            if peak <= budget_bytes and (best is None or time_ns < best[0]):
                best = (time_ns, chain.actions(state))
    if best is None:
        raise refuse(problem, NAME, budget_bytes, lowest)
    return finish(problem, NAME, budget_bytes, best[1])


def stages_of(problem: Problem) -> list[int]:
    """The stage of each op of forward: runs of one block, numbered in order, so that stages never go back."""
    trace = problem.trace
    paths = trace.ops.module[: problem.forward_end]
    blocks = block_paths(paths) or {p: p for p in paths if p}
    out: list[int] = []
    seen: dict[str, int] = {}
    at = ""
    number = -1
    for i, path in enumerate(paths):
        name = blocks.get(path, "") if blocks else str(i)
        # A view, or an op of a block that began earlier, goes with the stage that is running.
        if number < 0 or (name != at and name not in seen and not problem.is_view[i]):
            number += 1
            at = name
            if name:
                seen[name] = number
        elif name != at and not name and problem.creates[i] and at:
            number += 1
            at = ""
        out.append(number)
    count = number + 1
    return [n * MOST_STAGES // count for n in out] if count > MOST_STAGES else out


@dataclass(slots=True, kw_only=True)
class Stage:
    """One stage: forward time, and the storages that a plan can release or keep."""

    time_ns: int = 0
    inside: list[int] = field(default_factory=list)  # that backward wants, but for those in `border`
    border: list[int] = field(default_factory=list)  # that the next stage reads
    full_bytes: int = 0  # of what backward wants, and the border
    border_bytes: int = 0
    # Positions of ops of backward: the first that needs any of `inside`, the first that needs anything.
    first_inside: int = -1
    first: int = -1


class Chain:
    """A trace as a chain of stages."""

    def __init__(self, problem: Problem, evaluator: Evaluator) -> None:
        trace = problem.trace
        self.evaluator, self.problem = evaluator, problem
        sts, ops, turn = trace.storages, trace.ops, problem.forward_end
        stage = stages_of(problem)
        self.stages = [Stage() for _ in range(max(stage, default=-1) + 1)]
        furthest = [-1] * len(sts)  # the last stage of forward that reads a storage
        for i in range(turn):
            self.stages[stage[i]].time_ns += 0 if problem.is_view[i] else ops.time_ns[i]
            for s in ops.reads[i]:
                furthest[s] = max(furthest[s], stage[i])
        candidates = frozenset(problem.candidates)
        self.saved_always: list[int] = []
        for i in range(turn):
            for s in problem.creates[i]:
                mine = self.stages[stage[i]]
                link = problem.rebuildable[s] and not problem.saved_by_default[s] and not problem.pinned[s]
                if furthest[s] > stage[i] + 1:
                    if not problem.saved_by_default[s] and not problem.pinned[s]:
                        self.saved_always.append(s)
                elif furthest[s] == stage[i] + 1 and (s in candidates or link):
                    mine.border.append(s)
                elif s in candidates:
                    mine.inside.append(s)
        needing: dict[int, list[int]] = {}  # storage -> positions of the ops of backward that take it
        for k in range(evaluator.forward, len(evaluator.op_id)):
            for s in evaluator.needs[k]:
                needing.setdefault(s, []).append(k)
        for mine in self.stages:
            mine.border_bytes = sum(sts.nbytes[s] for s in mine.border)
            mine.full_bytes = mine.border_bytes + sum(sts.nbytes[s] for s in mine.inside)
            inside = [k for s in mine.inside for k in needing.get(s, ())]
            anything = [*inside, *(k for s in mine.border for k in needing.get(s, ()))]
            mine.first_inside = min(inside, default=-1)
            mine.first = min(anything, default=-1)

    def states(self) -> list[State]:
        """The states of all different recursions, from most memory to least."""
        n = len(self.stages)
        if not n:
            return []
        total = sum(x.full_bytes for x in self.stages)
        slot = max(1, -(-total // SLOTS))
        choice, cost = self._solve(slot)
        out: list[State] = []
        seen: set[tuple[object, ...]] = set()
        for m in range(SLOTS, -1, -1):
            if not np.isfinite(cost[0, n - 1, m]):
                continue
            passes: list[tuple[int, int, bool, bool]] = []
            self._unroll(choice, slot, 0, n - 1, m, -1, passes)
            key = tuple(passes)
            if key not in seen:
                seen.add(key)
                out.append(self._state(passes))
        return out

    def _solve(self, slot: int) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
        """For all s, t, m: the best first move (0: keep all of s; k - s > 0: keep the input of k) and its time."""
        n = len(self.stages)
        full = [-(-x.full_bytes // slot) for x in self.stages]
        border = [-(-x.border_bytes // slot) for x in self.stages]
        before = np.concatenate([[0], np.cumsum([x.time_ns for x in self.stages])]).astype(float)
        cost = np.full((n, n, SLOTS + 1), np.inf)
        choice = np.full((n, n, SLOTS + 1), -1, np.int16)

        def less(row: NDArray[np.float64], by: int) -> NDArray[np.float64]:
            out = np.full(SLOTS + 1, np.inf)
            if by <= SLOTS:
                out[by:] = row[: SLOTS + 1 - by]
            return out

        for length in range(n):
            for s in range(n - length):
                t = s + length
                forward = before[s + 1] - before[s]
                if length == 0:
                    best = np.full(SLOTS + 1, np.inf)
                    best[full[s] :] = forward
                else:
                    best = forward + less(cost[s + 1, t], full[s])
                pick = np.where(np.isfinite(best), 0, -1).astype(np.int16)
                for k in range(s + 1, t + 1):
                    other = before[k] - before[s] + less(cost[k, t], border[k - 1]) + cost[s, k - 1]
                    better = other < best
                    best = np.where(better, other, best)
                    pick[better] = k - s
                cost[s, t], choice[s, t] = best, pick
        return choice, cost

    def _unroll(
        self,
        choice: NDArray[np.int16],
        slot: int,
        s: int,
        t: int,
        m: int,
        trigger: int,
        passes: list[tuple[int, int, bool, bool]],
    ) -> None:
        """The passes of a recursion as (stage, the op that starts it, whether all of it is kept, its border)."""
        todo = [(s, t, m, trigger)]
        while todo:
            s, t, m, trigger = todo.pop()
            jump = int(choice[s, t, m])
            if jump == 0:
                passes.append((s, trigger, True, True))
                if s < t:
                    todo.append((s + 1, t, m - -(-self.stages[s].full_bytes // slot), trigger))
                continue
            k = s + jump
            passes.extend((x, trigger, False, x == k - 1) for x in range(s, k))
            todo.append((s, k - 1, m, self._trigger(s, k - 1)))
            todo.append((k, t, m - -(-self.stages[k - 1].border_bytes // slot), trigger))

    def _trigger(self, s: int, t: int) -> int:
        """The op of backward that makes stages s..t run again: the first that needs anything but the border of t."""
        first = [self.stages[t].first_inside, *(x.first for x in self.stages[s:t])]
        return min((k for k in first if k >= 0), default=-1)

    def _state(self, passes: list[tuple[int, int, bool, bool]]) -> State:
        state = self.evaluator.state()
        drops: dict[int, list[int]] = {}
        for s in self.saved_always:
            state.saved[s] = 1
        for x, trigger, everything, border in passes:
            stage = self.stages[x]
            for s, keep in (
                *((s, everything) for s in stage.inside),
                *((s, everything or border) for s in stage.border),
            ):
                if trigger < 0:
                    state.saved[s] = keep
                    state.retained[s] = not keep
                elif not keep:
                    drops.setdefault(trigger, []).append(s)
        state.evictions = {k: tuple(v) for k, v in drops.items()}
        return state

    def actions(self, state: State) -> tuple[Action, ...]:
        """The actions that a state means."""
        after: dict[int, list[int]] = {}
        for k, dropped in sorted(state.evictions.items()):
            for s in dropped:
                after.setdefault(s, []).append(self.evaluator.op_id[k])
        out = []
        wanted = self.problem.saved_by_default
        for stage in self.stages:
            for s in (*stage.inside, *stage.border):
                if not state.saved[s]:
                    out.append(Action(storage=s, evict_after=tuple(sorted(set(after.get(s, ()))))))
                elif not wanted[s]:
                    out.append(Action(storage=s, recipe=SAVE))
        return (*out, *(Action(storage=s, recipe=SAVE) for s in self.saved_always))
