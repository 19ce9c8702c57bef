"""List what a Schedule asks of CUDA's caching allocator, in order: the sizes, and what is given back.

Parameters, buffers and the batch come first, by id. Optimizer state comes when the first optimizer step begins, and
stays; a library's workspace in the first op that uses it. An op allocates and frees as its measured events say, or else
allocates its outputs in order; what the schedule releases after a step is freed when the step has ended. None of this
depends on where the allocator puts a block, so it is worked out once for all iterations and settings.

Counts and ignores: of the requests, what `simulator.allocator.reserved` counts and ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Final

from simulator.core.problem import Problem
from simulator.core.schedule import Schedule
from traces.records.trace import (
    BACKWARD,
    FIRST,
    FORWARD,
    GRADIENT,
    LATER,
    OPTIMIZER,
    OPTIMIZER_STATE,
    WORKSPACE,
    Trace,
    replayed,
    that_stay,
)

MOST_PARTS: Final = 3  # of those that accumulate gradients: the third and all further ones ask the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of one iteration, as columns, and those that are made once."""

    # Bytes of what is there before the first iteration.
    residents: tuple[int, ...]
    blocks: tuple[int, ...]  # by request: the block that it is about, by its own number; ~number: given back
    sizes: tuple[int, ...]  # by request: bytes; 0 where a block is given back
    once: tuple[tuple[int, int], ...]  # in the first iteration alone: how many requests before it, and bytes
    count: int  # of the blocks that one iteration asks for
    phases: tuple[tuple[str, int], ...] = ()  # in order, and how many requests come before each
    # What the first iteration asks in place of that; None: the same. Blocks of one iteration may be given back in the
    # next.
    first: Requests | None = None


def untouched_requests(trace: Trace) -> Requests | None:
    """The requests of the untouched loop, as the trace has them; None: it has none."""
    of = trace.untouched
    if not of.block:
        return None
    there = Residents.of(trace, gradients=False)
    rows = list(zip(of.block, of.nbytes, of.once, of.phase, strict=True))
    at_first = [(k, n, phase) for k, n, once, phase in rows if once != LATER]
    given = {~k for k, n, _ in at_first if not n}
    kept = any(n and (k < 0 or (phase == OPTIMIZER and k not in given)) for k, n, phase in at_first)
    # State is there before if the first iteration asks for nothing that stays, as Adagrad's does not.
    residents = there.first if kept else (*there.first, *there.state)
    if LATER not in of.once:
        return _requests_in(rows, residents)
    first = _requests_in([row for row in rows if row[2] != LATER], residents)
    return replace(_requests_in([row for row in rows if row[2] != FIRST], residents), first=first)


def _requests_in(rows: Sequence[tuple[int, int, int, str]], residents: tuple[int, ...]) -> Requests:
    """The requests of some rows of Untouched."""
    for_good = [n > 0 and block < 0 for block, n, _, _ in rows]
    before = list(accumulate((not f for f in for_good), initial=0))
    asked = [(block, n) for (block, n, _, _), f in zip(rows, for_good, strict=True) if not f]
    turns = [k for k, row in enumerate(rows) if not k or rows[k - 1][3] != row[3]]
    return Requests(
        residents=residents,
        blocks=tuple(block for block, _ in asked),
        sizes=tuple(n for _, n in asked),
        once=tuple((before[k], rows[k][1]) for k, f in enumerate(for_good) if f),
        count=sum(1 for _, n in asked if n),
        phases=tuple((rows[k][3], before[k]) for k in turns),
    )


def requests_of(problem: Problem, schedule: Schedule) -> Requests:
    """The requests of a schedule, worked out once.

    A trace of a loop whose gradients add up is of the last part of a later iteration. The parts before it are played
    from it; where there are no gradients yet, those that backward makes stay.
    """
    return problem.once(("requests", schedule), lambda p: recorded(p, schedule, Recorder))


def recorded(problem: Problem, schedule: Schedule, make: Callable[..., Recorder]) -> Requests:
    """The requests of a schedule by recorders that `make` makes, of the first iteration last."""
    options = problem.trace.meta.options
    # Of how many parts an iteration is whose gradients add up, and whether these stay for the next.
    parts, stay = min(options.get("accumulate", 1), MOST_PARTS), options.get("zero_grad") in ("keep", "none")
    later = _iteration(make(problem, gradients=parts == 1 or stay), schedule, parts, stay=stay)
    if not stay:
        return later
    first = _iteration(make(problem, gradients=False, before=later.count), schedule, parts, stay=True)
    return replace(later, residents=first.residents, first=first)


def _iteration(recording: Recorder, schedule: Schedule, parts: int, *, stay: bool) -> Requests:
    """The requests of an iteration of so many parts, whose gradients stay for the next or do not."""
    phases: list[tuple[str, int]] = []
    steps = phases_of(recording.trace, schedule)
    for left in reversed(range(parts)):
        for step, phase in enumerate(steps):
            if left and phase == OPTIMIZER:
                break
            if not step or steps[step - 1] != phase:
                phases.append((phase, len(recording.blocks)))
            recording.step(schedule, step)
        if left:
            recording.held, recording.there = recording.there, {}
    recording.begin_optimizer()  # a step without an optimizer op has all its residents by then
    if not stay:
        for block in chain.from_iterable(recording.sums.values()):
            recording.free(block)
    return Requests(
        residents=recording.residents,
        blocks=tuple(recording.blocks),
        sizes=tuple(recording.sizes),
        once=tuple(recording.once),
        count=recording.count,
        phases=tuple(phases),
    )


def phases_of(trace: Trace, schedule: Schedule) -> tuple[str, ...]:
    """Step -> the phase in which it runs: of an op that runs again, that of what it runs for."""
    first = schedule.forward_steps
    later = zip(schedule.op[first:], schedule.recompute[first:], strict=True)
    return (FORWARD,) * first + tuple(BACKWARD if again else trace.ops.phase[op] for op, again in later)


TAKEN: Final = -1


def asked_by(problem: Problem, op: int, taken: int) -> tuple[list[int], list[tuple[int, int]], bool]:
    """Return what an op asks, whenever it runs, if it takes over the memory of that storage, or of none (-1).

    That is: bytes of a new block (~k: the k-th of them is given back); its outputs in order, storage and block (TAKEN:
    what was its input's); whether it first of all gives back what it takes over, since no output is as large.
    """
    nbytes = problem.trace.storages.nbytes
    wanted = [s for s in problem.creates[op] if nbytes[s]]
    events = list(problem.trace.ops.events[op])
    heir = None
    if taken >= 0:
        # Memory that the op takes over from its input: for an output of the same size, or else freed beforehand.
        heir = next((s for s in wanted if nbytes[s] == nbytes[taken]), None)
        if heir is not None:
            wanted.remove(heir)
            if positions := that_stay(events).get(nbytes[heir]):
                del events[positions[0]]
    asks: list[int] = []
    made = [] if heir is None else [(heir, TAKEN)]
    made += replayed(nbytes, events, wanted, asks).items()
    return asks, made, taken >= 0 and heir is None


class Recorder:
    """The requests so far, and which block each storage has."""

    def __init__(self, problem: Problem, *, gradients: bool, before: int = 0) -> None:
        """gradients: whether those of earlier parts are there; before: blocks have numbers from this on."""
        trace = problem.trace
        self.trace = trace
        self.problem = problem
        self.blocks: list[int] = []
        self.sizes: list[int] = []
        self.count = before
        self.once: list[tuple[int, int]] = []
        self.there: dict[int, list[int]] = {}  # storage -> its blocks, the older first
        self.held: dict[int, list[int]] = {}  # what the loop has of the part before, until it has this part's
        self.sums: dict[int, list[int]] = {}  # gradients of earlier parts that were made here, like `there`
        given = (s for s, p in enumerate(trace.storages.producer) if p < 0)
        self.missing = {s for s in given if not gradients and trace.storages.category[s] == GRADIENT}
        residents = Residents.of(trace, gradients=gradients)
        self.residents, self.state = residents.first, residents.state
        self.workspaces = {op: list(sizes) for op, sizes in residents.workspaces.items()}

    def allocate(self, nbytes: int) -> int:
        self.blocks.append(self.count)
        self.sizes.append(nbytes)
        self.count += 1
        return self.count - 1

    def free(self, block: int) -> None:
        self.blocks.append(~block)
        self.sizes.append(0)

    def begin_optimizer(self) -> None:
        """Allocate the optimizer's state, unless that was done."""
        self.once += ((len(self.blocks), n) for n in self.state)
        self.state = ()

    def step(self, schedule: Schedule, step: int) -> None:
        op, nbytes = schedule.op[step], self.trace.storages.nbytes
        frees = [s for s in schedule.frees[step] if nbytes[s]]
        if sums := self.missing.intersection(self.trace.ops.writes[op]):
            self.begin_sums(sums, frees)
            return
        if self.state and self.trace.ops.phase[op] == OPTIMIZER:
            self.begin_optimizer()
        taken = schedule.takes[step]
        passes = taken if taken >= 0 and nbytes[taken] else -1
        asks, made, back = self.problem.once(("asked", op, passes), lambda p: asked_by(p, op, passes))
        taken_over = self.there[passes].pop(0) if passes >= 0 else -1
        if back:
            self.free(taken_over)
        first = self.count
        for n in asks:
            if n > 0:
                self.allocate(n)
            else:
                self.free(first + ~n)
        # A library asks for its workspace when an op's outputs are there; in backward's thread also for a rerun.
        again = schedule.recompute[step] and step >= schedule.forward_steps
        sizes = self.workspaces.pop(op, []) if not again else []
        if again and self.problem.asks_again[op]:
            later = min((o for o in self.workspaces if self.trace.ops.phase[o] == BACKWARD), default=-1)
            sizes += self.workspaces.pop(later, [])
        self.once += ((len(self.blocks), n) for n in sizes)
        for s, block in made:
            block = taken_over if block == TAKEN else first + block
            if s in schedule.binds[step]:
                self.there.setdefault(s, []).append(block)
            else:  # a recompute step also makes outputs that nobody asked for
                self.free(block)
            for old in self.held.pop(s, ()):
                self.free(old)
        if passes >= 0:
            frees.remove(taken)
        for s in frees:
            self.free(self.there[s].pop(0))

    def begin_sums(self, sums: set[int], frees: list[int]) -> None:
        """Nothing is there to which a gradient would be added, so it stays as it is, or a copy of its whole does."""
        nbytes = self.trace.storages.nbytes
        self.missing -= sums
        for g in sorted(sums):
            of = next((s for s in frees if nbytes[s] == nbytes[g]), None)
            if of is not None:
                frees.remove(of)
            self.sums[g] = [self.allocate(nbytes[g]) if of is None else self.there[of].pop(0)]
        for s in frees:
            self.free(self.there[s].pop(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Residents:
    """Sizes in bytes of what is allocated once, by when that is."""

    first: tuple[int, ...]  # before the first iteration, as in Requests
    state: tuple[int, ...]  # of the optimizer: when its first step begins, as torch's own make it
    # Of libraries: by the first op that uses them.
    workspaces: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, trace: Trace, *, gradients: bool = True) -> Residents:
        """Return those of a trace; without `gradients`, none that something before this iteration left."""
        sts = trace.storages
        residents = [
            s
            for s, producer in enumerate(sts.producer)
            if producer < 0 and sts.nbytes[s] and (gradients or sts.category[s] != GRADIENT)
        ]
        workspaces: dict[int, list[int]] = {}
        for s in residents:
            uses = [n for n in (sts.first_forward_use[s], sts.first_backward_use[s]) if n >= 0]
            if sts.category[s] == WORKSPACE and uses:  # of others nobody knows when they came
                workspaces.setdefault(min(uses), []).append(s)
        late = {s for made in workspaces.values() for s in made}
        state = [s for s in residents if sts.category[s] == OPTIMIZER_STATE and s not in late]
        late |= {*state}
        return cls(
            first=tuple(sts.nbytes[s] for s in residents if s not in late),
            state=tuple(sts.nbytes[s] for s in state),
            workspaces={op: tuple(sts.nbytes[s] for s in made) for op, made in workspaces.items()},
        )
