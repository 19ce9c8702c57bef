"""Schedule: the exact order in which a planned step runs its ops, runs some again, and frees storages.

This is the one object with two readers: `simulator.core.problem` walks it to predict memory and time, and the executor
rewrites the model's graphs from it. Whatever a plan means is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulator.core.facts import Facts
from traces.errors import PlanError
from traces.records.plan import RECOMPUTE, SAVE, Action
from traces.records.trace import EAGER, FLAG_NAMES, FORBIDS_RECOMPUTE, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Steps in execution order, as columns; every tuple has one entry a step.

    A step runs an op: for the first time, or to bring back what was evicted. What it frees goes when it has ended.
    """

    op: tuple[int, ...]  # the op that runs
    recompute: tuple[bool, ...]  # whether it ran before
    binds: tuple[tuple[int, ...], ...]  # storages that now exist (again) because of this step
    frees: tuple[tuple[int, ...], ...]  # storages freed when the step has ended
    takes: tuple[int, ...]  # the storage whose memory the output takes over in place (it is in `frees`); -1
    forward_steps: int  # so many steps are forward's: its ops, and those that it runs again

    def __len__(self) -> int:
        return len(self.op)

    @property
    def recomputed_ops(self) -> tuple[int, ...]:
        """The op of every recompute step, views included."""
        return tuple(o for o, r in zip(self.op, self.recompute, strict=True) if r)

    def made_by(self, step: int) -> set[int]:
        """The storages made by the steps before this one that are still there when it begins."""
        there: set[int] = set()
        for binds, frees in zip(self.binds[:step], self.frees[:step], strict=True):
            there.update(binds)
            there.difference_update(frees)
        return there


def check_actions(facts: Facts, actions: Iterable[Action]) -> dict[int, Action]:
    """The actions by storage id. Raises PlanError if an action names a storage twice, a storage or an op that does not
    exist, or what cannot be.
    """
    trace = facts.trace
    by_storage: dict[int, Action] = {}
    for a in actions:
        if not 0 <= a.storage < len(trace.storages):
            raise PlanError(
                f"the plan names storage {a.storage}, and the trace has {len(trace.storages)}; "
                "it belongs to another trace."
            )
        name = f"storage {a.storage} ({trace.storages.name[a.storage]})"
        if a.storage in by_storage:
            raise PlanError(f"the plan names {name} twice.")
        if a.recipe not in (SAVE, RECOMPUTE):
            raise PlanError(f"{name}: unknown recipe {a.recipe!r}.")
        if a.recipe == SAVE and not 0 <= trace.storages.producer[a.storage] < facts.forward_end:
            raise PlanError(f"{name} cannot be saved: forward does not make it.")
        rebuilt = facts.recompute_only[a.storage] or a.storage in facts.reloaded
        if (a.recipe != SAVE or a.evict_after) and not (rebuilt or a.storage in facts.candidate_set):
            raise PlanError(f"{name} cannot be recomputed: {why_not(facts, a.storage)}.")
        _check_evictions(facts, a, name)
        by_storage[a.storage] = a
    return by_storage


def _check_evictions(facts: Facts, action: Action, name: str) -> None:
    """Refuse to evict in forward what the user's own code reads or holds there: nothing would bring it back."""
    trace, s = facts.trace, action.storage
    for c in action.evict_after:
        if not 0 <= c < len(trace.ops):
            raise PlanError(
                f"the plan evicts {name} after op {c}, and the trace has {len(trace.ops)}; it belongs to another trace."
            )
        later = (i for i in range(c + 1, facts.forward_end) if trace.ops.flags[i] & EAGER)
        outside = trace.storages.hold[s] > c or any(s in trace.ops.reads[i] for i in later)
        if c < facts.forward_end and outside:
            raise PlanError(
                f"{name} cannot be evicted after op {c} ({trace.ops.name[c]}): code outside the captured graph "
                "holds it beyond."
            )


def why_not(facts: Facts, storage: int) -> str:
    """In words, why a storage is no candidate for recomputation."""
    trace = facts.trace
    producer = trace.storages.producer[storage]
    if not 0 <= producer < facts.forward_end:
        return "forward does not make it"
    if facts.pinned[storage]:
        return "code outside the captured graph holds it"
    if marks := _marks(trace, producer):
        return f"its op {trace.ops.name[producer]} is marked {marks}"
    return "it is empty, or made from what is random and not saved, or from a parameter stepped before"


def _marks(trace: Trace, op: int) -> str:
    """The flags that forbid an op to run again, in words."""
    return ", ".join(n for b, n in FLAG_NAMES.items() if trace.ops.flags[op] & b & FORBIDS_RECOMPUTE)


def build(facts: Facts, actions: Iterable[Action] = ()) -> Schedule:
    """The schedule that actions mean (`traces.records.plan` says what each does).

    Ops stay in the order of the trace. Just before an op that takes a value which is absent, the ops that rebuild it
    run again, each once, in the order of a depth-first walk from the op's inputs; a view is rebuilt with its base and
    costs nothing. Every storage is freed after its last reader, or after its hold. Raises PlanError if an action is
    impossible, or a chain needs an op that may not run again.
    """
    building = _Building(facts, check_actions(facts, actions))
    for c in range(len(facts.trace.ops)):
        building.run(c)
    return building.schedule()


class _Building:
    """The steps so far, and which storages are present: a value that is not may not be read."""

    def __init__(self, facts: Facts, by_storage: dict[int, Action]) -> None:
        self.facts, self.trace = facts, facts.trace
        sts = self.trace.storages
        n_st, self.forward_end = len(sts), facts.forward_end
        self.retained = [s in facts.reloaded for s in range(n_st)]
        saved = zip(facts.saved_by_default, facts.pinned, self.retained, strict=True)
        self.saved = [(w or p) and not reloaded for w, p, reloaded in saved]
        self.reads, self.inputs = self.trace.ops.reads, self.trace.ops.inputs
        self.evictions: dict[int, list[int]] = {}  # op -> storages that are absent once it has run
        for s, a in by_storage.items():
            self.saved[s], self.retained[s] = a.recipe == SAVE or facts.pinned[s], a.retain
            for c in a.evict_after:
                self.evictions.setdefault(c, []).append(s)
        # Of what is not saved: the op of forward after which it is absent.
        self.leaves = [max(p, u) for p, u in zip(sts.producer, sts.last_forward_use, strict=True)]
        for s, p in enumerate(sts.producer):
            if 0 <= p < self.forward_end and not self.saved[s]:
                self.evictions.setdefault(self.leaves[s], []).append(s)

        self.present = list(facts.resident)  # storage -> an instance exists and may be read
        self.instance = [-1] * n_st  # storage -> its current instance
        self.owner: list[int] = []  # instance -> storage
        self.last_step: list[int] = []  # instance -> last step that needs it
        # op -> the instances that its value was made from, for views (None: never made)
        self.made_from: list[tuple[int, ...] | None] = [None] * len(self.trace.ops)
        self.op: list[int] = []
        self.recompute: list[bool] = []
        self.binds: list[tuple[int, ...]] = []
        self.forward_steps = 0

    def run(self, c: int) -> None:
        """Bring back what op c takes, run it, and evict what the plan says."""
        rebuilt = self._rebuild_inputs(c)
        self._emit(c, False, self.facts.creates[c])
        forward = c < self.forward_end
        for s in rebuilt:
            passed = forward and not self.saved[s] and self.leaves[s] <= c
            if passed or not self.retained[s]:
                self.present[s] = False
        for s in self.evictions.get(c, ()):
            self.present[s] = False
        if forward:
            self.forward_steps = len(self.op)

    def _emit(self, i: int, again: bool, binds: tuple[int, ...]) -> None:
        reads, step = self.reads[i], len(self.op)
        for s in reads:
            if not self.present[s]:
                of, name = self.trace.ops.name[i], self.trace.storages.name[s]
                raise PlanError(
                    f"op {i} ({of}) reads storage {s} ({name}), which is not there: it takes no value from the op that "
                    "makes it, so nothing says how to rebuild it."
                )
            if self.instance[s] >= 0:
                self.last_step[self.instance[s]] = step
        self.op.append(i)
        self.recompute.append(again)
        self.binds.append(binds)
        for s in binds:
            self.instance[s] = len(self.owner)
            self.owner.append(s)
            self.last_step.append(step)
            self.present[s] = True
        if self.facts.is_view[i]:
            self.made_from[i] = tuple(map(self.instance.__getitem__, reads))

    def _missing(self, i: int, consumer: int) -> bool:
        """Return whether the value of op i, as `consumer` reads it, is absent."""
        if self.facts.is_view[i]:
            if not all(map(self.present.__getitem__, self.reads[i])):
                return True
            return self.made_from[i] != tuple(map(self.instance.__getitem__, self.reads[i]))
        return any(s in self.reads[consumer] and not self.present[s] for s in self.facts.creates[i])

    def _rebuild_inputs(self, c: int) -> list[int]:
        """Run again what op c needs; returns the storages that came back."""
        if not any(self._missing(j, c) for j in self.inputs[c]):
            return []
        order, demanded = self._chain(c)
        rebuilt: list[int] = []
        for i in order:
            binds = tuple(
                s
                for s in self.facts.creates[i]
                if not self.present[s] and (s in demanded or (self.retained[s] and self._ahead(s, c)))
            )
            self._emit(i, True, binds)
            rebuilt.extend(binds)
        return rebuilt

    def _ahead(self, s: int, c: int) -> bool:
        """Return whether an op after c reads storage s before the plan has it absent again."""
        sts = self.trace.storages
        crosses = self.saved[s] or c >= self.forward_end
        return sts.last_forward_use[s] > c or (crosses and sts.last_backward_use[s] > c)

    def _chain(self, c: int) -> tuple[list[int], set[int]]:
        """The ops that run again before op c, in order, and the storages that they are wanted for.

        First all that is missing is seen, then it runs: an op from which two things are wanted runs once.
        """
        order: list[int] = []
        demanded: set[int] = set()
        visited: set[int] = set()
        stack = [(j, c, False) for j in reversed(self.inputs[c])]
        while stack:
            i, consumer, expanded = stack.pop()
            if expanded:
                order.append(i)
                continue
            if not self._missing(i, consumer):
                continue
            if not self.facts.is_view[i]:
                demanded.update(s for s in self.facts.creates[i] if s in self.reads[consumer])
            if i in visited:
                continue
            visited.add(i)
            if not self.facts.may_rerun[i] and not self.facts.is_view[i]:
                names = self.trace.ops.name
                raise PlanError(
                    f"op {c} ({names[c]}) needs op {i} ({names[i]}) again, which is marked {_marks(self.trace, i)}."
                )
            stack.append((i, consumer, True))
            stack.extend((j, i, False) for j in reversed(self.inputs[i]))
        return order, demanded

    def schedule(self) -> Schedule:
        """The steps, with what each frees and takes over."""
        frees, over = self._frees(), self.trace.ops.overwrites
        each = zip(self.op, frees, self.binds, strict=True)
        return Schedule(
            op=tuple(self.op),
            recompute=tuple(self.recompute),
            binds=tuple(self.binds),
            frees=tuple(tuple(sorted(f)) for f in frees),
            # What ends there is written into, instead of memory of the op's own.
            takes=tuple(over[i] if over[i] in gone and over[i] not in made else -1 for i, gone, made in each),
            forward_steps=self.forward_steps,
        )

    def _frees(self) -> Sequence[Sequence[int]]:
        """Storages by the step after which an instance of theirs is freed: its last reader, or the end of its hold."""
        hold = self.trace.storages.hold
        frees: list[list[int]] = [[] for _ in self.op]
        step_of_op = [0] * len(self.trace.ops)
        for step, (i, again) in enumerate(zip(self.op, self.recompute, strict=True)):
            if not again:
                step_of_op[i] = step
        seen: set[int] = set()
        for instance, s in enumerate(self.owner):
            end = self.last_step[instance]
            if hold[s] >= 0 and s not in seen:
                end = max(end, step_of_op[hold[s]])
            seen.add(s)
            frees[end].append(s)
        return frees
