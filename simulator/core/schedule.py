"""Turn a Trace and a Plan into a Schedule: the exact order in which ops run, run again, and storages are released.

This is the one object with two readers: `simulator.core.replay` walks it to predict memory and time, and the executor
rewrites the model's graphs from it. Whatever a plan means is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from simulator.core.problem import Problem
from traces.errors import PlanError
from traces.plan import RECOMPUTE, SAVE, Action
from traces.trace import FLAG_NAMES, FORBIDS_RECOMPUTE, VIEW, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Steps in execution order, as columns; every tuple has one entry a step."""

    op: tuple[int, ...]  # the op that runs
    recompute: tuple[bool, ...]  # whether it ran before
    binds: tuple[tuple[int, ...], ...]  # storages that now exist (again) because of this step
    frees: tuple[tuple[int, ...], ...]  # storages released when the step has ended
    takes: tuple[int, ...]  # the storage whose memory the output takes over in place (it is in `frees`); -1

    def __len__(self) -> int:
        return len(self.op)

    @property
    def recomputed_ops(self) -> tuple[int, ...]:
        """The op of every recompute step, views included."""
        return tuple(o for o, r in zip(self.op, self.recompute, strict=True) if r)


def rerun_workspace_bytes(trace: Trace, schedule: Schedule) -> int:
    """What libraries keep because of the ops that a schedule runs again, beside what they keep in any case.

    The most that any of them asks for. A view runs nothing, so asks for nothing.
    """
    wanted, target, flags = trace.meta.rerun_workspaces, trace.ops.target, trace.ops.flags
    if not wanted:
        return 0
    again = (o for o in schedule.recomputed_ops if not flags[o] & VIEW)
    return max((wanted.get(target[o], 0) for o in again), default=0)


def check_actions(problem: Problem, actions: Iterable[Action]) -> dict[int, Action]:
    """The actions by storage id.

    Raises:
        PlanError: an action names a storage twice, one that does not exist, or one that cannot have it.
    """
    trace = problem.trace
    candidates = set(problem.candidates)
    by_storage: dict[int, Action] = {}
    for a in actions:
        if not 0 <= a.storage < len(trace.storages):
            raise PlanError(
                f"the plan names storage {a.storage}, and the trace has {len(trace.storages)}; "
                "it belongs to another trace."
            )
        name = trace.storages.name[a.storage]
        if a.storage in by_storage:
            raise PlanError(f"the plan names storage {a.storage} ({name}) twice.")
        if a.action == RECOMPUTE and a.storage not in candidates and not problem.recompute_only[a.storage]:
            raise PlanError(
                f"storage {a.storage} ({name}) cannot be recomputed: {why_not(problem, a.storage)}."
            )
        if a.action == SAVE and (
            problem.resident[a.storage] or trace.storages.producer[a.storage] >= problem.forward_end
        ):
            raise PlanError(f"storage {a.storage} ({name}) cannot be saved: forward does not make it.")
        if a.action == SAVE and a.drop_after:
            raise PlanError(f"storage {a.storage} ({name}) is saved and cannot be dropped in between.")
        if a.action not in (RECOMPUTE, SAVE):
            raise PlanError(f"storage {a.storage} ({name}): unknown action {a.action!r}.")
        by_storage[a.storage] = a
    return by_storage


def why_not(problem: Problem, storage: int) -> str:
    """In words, why a storage is no candidate for recomputation."""
    trace = problem.trace
    producer = trace.storages.producer[storage]
    if producer < 0:
        return "it exists throughout the step"
    if producer >= problem.forward_end:
        return "backward makes it"
    if problem.pinned[storage]:
        return "code outside the captured graph holds it"
    flags = trace.ops.flags[producer] & FORBIDS_RECOMPUTE
    if flags:
        return f"its op {trace.ops.name[producer]} is marked " + ", ".join(
            n for b, n in FLAG_NAMES.items() if flags & b
        )
    if problem.constraints and problem.unconstrained.rebuildable[storage]:
        return "a constraint forbids it"
    if trace.storages.nbytes[storage] == 0 and problem.saved_by_default[storage]:
        return "it is empty"
    return f"its op {trace.ops.name[producer]} depends on a value that is random and not kept"


def build(problem: Problem, actions: Iterable[Action] = ()) -> Schedule:
    """Turn actions into a schedule.

    Ops keep the order of the trace. Just before a backward op that takes a value which is no longer there, the ops
    that rebuild it run again, each once, in the order of a depth-first walk from the op's inputs; a view is rebuilt
    with its base and costs nothing. Every storage is released after its last reader, or after its hold.

    Raises:
        PlanError: an action is impossible, or a chain needs an op that may not run again.
    """
    trace = problem.trace
    ops, sts = trace.ops, trace.storages
    n_ops, n_st = len(ops), len(sts)
    by_storage = check_actions(problem, actions)

    there = list(problem.resident)  # storage -> an instance exists and may be read
    instance = [-1] * n_st  # storage -> id of its current instance
    owner: list[int] = []  # instance -> storage
    last_step: list[int] = []  # instance -> last step that needs it
    # op -> instances that its value was made from, for views (None: never made)
    made_from: list[tuple[int, ...] | None] = [None] * n_ops

    drops_after: dict[int, list[int]] = {}
    for a in by_storage.values():
        for c in a.drop_after:
            drops_after.setdefault(c, []).append(a.storage)
    rebuilt: list[int] = []  # storages bound on behalf of the current backward op

    def shared(s: int) -> bool:
        return s in by_storage and by_storage[s].share

    out_op: list[int] = []
    out_recompute: list[bool] = []
    out_binds: list[tuple[int, ...]] = []

    def emit(i: int, again: bool, binds: tuple[int, ...]) -> None:
        step = len(out_op)
        for s in ops.reads[i]:
            if not there[s]:
                raise PlanError(
                    f"op {i} ({ops.name[i]}) reads storage {s} ({sts.name[s]}), which is not there: it takes no "
                    "value from the op that makes it, so nothing says how to rebuild it."
                )
        out_op.append(i)
        out_recompute.append(again)
        out_binds.append(binds)
        for s in ops.reads[i]:
            if instance[s] >= 0:
                last_step[instance[s]] = step
        for s in binds:
            instance[s] = len(owner)
            owner.append(s)
            last_step.append(step)
            there[s] = True
        if problem.is_view[i]:
            made_from[i] = tuple(instance[s] for s in ops.reads[i])

    def missing(i: int, consumer: int) -> bool:
        """Whether the value of op i, as `consumer` reads it, is not there."""
        if problem.is_view[i]:
            if not all(there[s] for s in ops.reads[i]):
                return True
            return made_from[i] != tuple(instance[s] for s in ops.reads[i])
        reads = ops.reads[consumer]
        return any(s in reads and not there[s] for s in problem.creates[i])

    def rebuild_inputs(c: int) -> None:
        # First see all that is missing, then run it: an op from which two things are wanted runs once.
        order: list[int] = []
        demanded: set[int] = set()
        visited: set[int] = set()
        stack = [(j, c, False) for j in reversed(ops.inputs[c])]
        while stack:
            i, consumer, expanded = stack.pop()
            if expanded:
                order.append(i)
                continue
            if not missing(i, consumer):
                continue
            if not problem.is_view[i]:
                demanded.update(s for s in problem.creates[i] if s in ops.reads[consumer])
            if i in visited:
                continue
            visited.add(i)
            if not problem.may_rerun[i] and not problem.is_view[i]:
                flags = ", ".join(n for b, n in FLAG_NAMES.items() if ops.flags[i] & b & FORBIDS_RECOMPUTE)
                raise PlanError(
                    f"op {c} ({ops.name[c]}) needs op {i} ({ops.name[i]}) again, which "
                    + (
                        "a constraint forbids."
                        if problem.constraints and not flags
                        else f"is marked {flags}."
                    )
                )
            stack.append((i, consumer, True))
            stack.extend((j, i, False) for j in reversed(ops.inputs[i]))
        for i in order:
            binds = tuple(
                s
                for s in problem.creates[i]
                if not there[s] and (s in demanded or (shared(s) and sts.last_backward_use[s] > c))
            )
            emit(i, True, binds)
            rebuilt.extend(binds)

    for i in range(problem.forward_end):
        emit(i, False, problem.creates[i])
    for s in range(n_st):
        if there[s] and not problem.resident[s]:
            action = by_storage.get(s)
            kept = problem.saved_by_default[s] if action is None else action.action == SAVE
            there[s] = kept or problem.pinned[s]
    for c in range(problem.forward_end, n_ops):
        rebuilt.clear()
        rebuild_inputs(c)
        emit(c, False, problem.creates[c])
        for s in rebuilt:
            if not shared(s):
                there[s] = False
        for s in drops_after.get(c, ()):
            there[s] = False

    frees: list[list[int]] = [[] for _ in out_op]
    step_of_op = [0] * n_ops
    for step, (i, again) in enumerate(zip(out_op, out_recompute, strict=True)):
        if not again:
            step_of_op[i] = step
    current: dict[int, int] = {}
    for inst, s in enumerate(owner):
        first = s not in current
        current[s] = inst
        end = last_step[inst]
        if sts.hold[s] >= 0 and first:
            end = max(end, step_of_op[sts.hold[s]])
        frees[end].append(s)
    takes = [-1] * len(out_op)
    for step, i in enumerate(out_op):
        s = ops.overwrites[i]
        if s >= 0 and s in frees[step] and s not in out_binds[step]:
            takes[step] = s
    return Schedule(
        op=tuple(out_op),
        recompute=tuple(out_recompute),
        binds=tuple(out_binds),
        frees=tuple(tuple(sorted(f)) for f in frees),
        takes=tuple(takes),
    )
