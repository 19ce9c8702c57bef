"""What levers share: ladders, which say what can be chosen, and the editing of a trace: its ops and storages as objects
that are added, taken out and redirected, then a trace again.

An op that is added says what it takes, beside the columns of a trace, so that the executor can run what the edited
trace says.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

from simulator.core.problem import Problem
from traces.records.plan import Rewrite
from traces.records.store import validate
from traces.records.trace import (
    BACKWARD,
    DIGESTS,
    EAGER,
    FORWARD,
    Ops,
    Storages,
    Trace,
    digests,
    eager_runs,
    uses_of,
)

Known = TypeVar("Known")
PLAIN = [f.name for f in fields(Ops) if f.name not in ("inputs", "reads", "writes", "overwrites")]
USES = tuple(f"{which}_{phase}_use" for phase in (FORWARD, BACKWARD) for which in ("first", "last"))

SHARES: Final = 4  # of the rewrites of one kind, in their order of worth


# Sets of rewrites, its rungs, of which a plan takes none or one; the next rung changes more than the one before.
Ladder = Sequence[tuple[Rewrite, ...]]


def parts(rewrites: Sequence[Rewrite]) -> list[tuple[Rewrite, ...]]:
    """Rewrites of single values, in the parts of which the first, the first two and so on can be chosen."""
    ends = [-(-len(rewrites) * k // SHARES) for k in range(SHARES + 1)]
    return [tuple(rewrites[a:b]) for a, b in pairwise(ends) if a < b]


def by_shares(_: Problem, rewrites: Sequence[Rewrite], *__: object) -> Iterator[Ladder]:
    """A quarter of what is offered, half of it, and so on."""
    yield list(accumulate(parts(rewrites)))


def counted(_: Trace, rewrites: Sequence[Rewrite]) -> str:
    return f"{len(rewrites)} values"


@dataclass(slots=True, eq=False, kw_only=True)
class Value:
    """A storage; its columns are those of the trace."""

    name: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    category: str
    producer: Op | None = None
    hold: Op | None = None
    uses: tuple[int, ...] = ()  # as the trace has them, which is true of what libraries hold
    at: int = -1  # the storage of the trace that this is


@dataclass(slots=True, eq=False, kw_only=True)
class Op:
    """An op; its columns are those of the trace."""

    name: str
    target: str
    phase: str
    module: str
    time_ns: int
    inputs: Sequence[Op] = ()
    reads: Sequence[Value] = ()
    writes: Sequence[Value] = ()
    events: tuple[int, ...] = ()
    overwrites: Value | None = None
    flags: int = 0
    flops: int = 0
    bytes_moved: int = 0
    arguments: str = ""
    at: int = field(default=-1)  # the op of the trace that this is, or in whose place it stands
    source: int = -1  # the op of the trace that this is or repeats, or whose module it belongs to
    # What it is called with: `Taken`, `Argument`, `Layout`, `Factor`, `InTiles`, or constants; None: the
    # source's own arguments.
    called_with: tuple[Any, ...] | None = None
    # In place of an op's value that the source's arguments name, as far as it lies in a storage: another op's value.
    instead: dict[tuple[Op, Value], Op] | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The value of an op that lies in a storage."""

    op: Op
    value: Value


@dataclass(frozen=True, slots=True)
class Argument:
    """The source's own argument."""

    number: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Three arguments: size, strides and type that the value of a storage has where it is made."""

    value: Value


@dataclass(frozen=True, slots=True)
class Factor:
    """The number in which the backward of a loss head is linear; the head by the storage of its widest value."""

    head: int


@dataclass(frozen=True, slots=True)
class InTiles:
    """All that a part of a head or an MLP takes, which runs in tiles."""

    storage: int  # of its widest value
    part: int
    number: int  # of tiles


def new_op(
    of: Op, name: str, target: str, phase: str, given: Sequence[Any], made: Sequence[Value], **more: Any
) -> Op:
    """An op of another's module that is called with what is given, and takes and reads what of it is `Taken`."""
    taken = [x for x in given if isinstance(x, Taken)]
    inputs, reads = [x.op for x in taken], [x.value for x in taken]
    columns: dict[str, Any] = {"time_ns": 0, "inputs": inputs, "reads": reads, **more}
    columns |= {"module": of.module, "source": of.source, "called_with": tuple(given), "writes": list(made)}
    return Op(name=name, target=target, phase=phase, **columns)


def users_of(trace: Trace) -> tuple[list[list[int]], list[list[int]]]:
    """Op -> the ops that take its value; storage -> the ops that read or write it."""
    takers: list[list[int]] = [[] for _ in trace.ops.name]
    users: list[list[int]] = [[] for _ in trace.storages.name]
    for i, (inputs, *of) in enumerate(zip(trace.ops.inputs, trace.ops.reads, trace.ops.writes, strict=True)):
        for x in inputs:
            takers[x].append(i)
        for s in {*of[0], *of[1]}:
            users[s].append(i)
    return takers, users


class Editing:
    """One trace while it is edited; `op` and `value` are by the trace's ids."""

    def __init__(self, trace: Trace, known: dict[Any, Any] | None = None) -> None:
        """`known`: what `once` was told of this trace before."""
        self.source, self._known = trace, {} if known is None else known
        self._users: dict[Op | Value, list[Op]] = {}  # those that may take an op's value, or read a value
        sts, ops = trace.storages, trace.ops
        uses = zip(*(getattr(sts, column) for column in USES), strict=True)
        of_values = zip(sts.name, sts.nbytes, sts.dtype, sts.shape, sts.category, uses, strict=True)
        self.value = [
            Value(name=name, nbytes=nbytes, dtype=dtype, shape=shape, category=category, uses=used, at=s)
            for s, (name, nbytes, dtype, shape, category, used) in enumerate(of_values)
        ]
        rows = zip(*(getattr(ops, c) for c in PLAIN), strict=True)
        self.op = [Op(**dict(zip(PLAIN, row, strict=True)), at=i, source=i) for i, row in enumerate(rows)]
        of_op, of_value = self.op.__getitem__, self.value.__getitem__
        for op, inputs, reads, writes, over in zip(
            self.op, ops.inputs, ops.reads, ops.writes, ops.overwrites, strict=True
        ):
            op.inputs = list(map(of_op, inputs))
            op.reads = list(map(of_value, reads))
            op.writes = list(map(of_value, writes))
            op.overwrites = self.value[over] if over >= 0 else None
        for s, value in enumerate(self.value):
            value.producer = self.op[sts.producer[s]] if sts.producer[s] >= 0 else None
            value.hold = self.op[sts.hold[s]] if sts.hold[s] >= 0 else None
        self.order, self._values = list(self.op), list(self.value)
        self._made: list[Value] = []  # by ops that were put in, and not among the values yet
        self.rates = dict(trace.meta.rates)
        self._redirected: dict[Op, Op] = {}
        self._instead: dict[Op, Op] = {}  # what was taken out -> what stands there now

    def take(self, op: Op, inputs: Sequence[Op]) -> None:
        op.inputs = inputs
        for x in inputs:
            self._users_of(x).append(op)

    def read(self, op: Op, values: Sequence[Value]) -> None:
        op.reads = values
        for v in values:
            self._users_of(v).append(op)

    def _users_of(self, x: Op | Value) -> list[Op]:
        if x not in self._users:
            those, column = (self.op, 0) if isinstance(x, Op) else (self.value, 1)
            of_trace = x.at >= 0 and those[x.at] is x
            known = self.once(users_of)[column][x.at] if of_trace else ()
            self._users[x] = [self.op[i] for i in known]
        return self._users[x]

    def readers(self, value: Value) -> list[Op]:
        """The ops that read a value, in their order."""
        those = {op for op in self._users_of(value) if value in op.reads and self.there(op)}
        return sorted(those, key=self.position)

    def unmake(self, value: Value) -> None:
        """Take a value out that another op is going to make."""
        value.producer = None
        (self._made if value in self._made else self._values).remove(value)

    def there(self, op: Op) -> bool:
        return op not in self._instead

    def position(self, op: Op) -> int:
        return self.order.index(op, bisect_left(self.order, op.at, key=attrgetter("at")))

    def insert(self, new: Op, place: Op, *, after: bool = False) -> None:
        """Put an op before another one, or behind it, and what it makes before all that later ops make."""
        self.order.insert(self.position(place) + after, new)
        self.take(new, new.inputs)
        self.read(new, new.reads)
        new.at = place.at
        for value in new.writes:
            if value.producer is None:
                value.producer = new
                self._made.append(value)

    @property
    def values(self) -> list[Value]:
        """Return what there is, in the order in which it is made."""
        if self._made:
            number = {op: i for i, op in enumerate(self.order)}
            behind = list(accumulate((number[v.producer] if v.producer else -1 for v in self._values), max))
            made = sorted((number[v.producer], k, v) for k, v in enumerate(self._made) if v.producer)
            for at, _, value in reversed(made):
                self._values.insert(bisect_right(behind, at), value)
            self._made = []
        return self._values

    def once(self, of: Callable[[Trace], Known]) -> Known:
        """Return what a function says of the trace as it was, asked once for all rewrites."""
        if of not in self._known:
            self._known[of] = of(self.source)
        return cast(Known, self._known[of])

    def standing(self, op: Op) -> Op:
        """The op whose value stands for that of one of the trace."""
        while op in self._redirected:
            op = self._redirected[op]
        return op

    def instead_of(self, op: Op) -> Op:
        """Return what stands where an op of the trace was taken out; itself, if it is there."""
        while op in self._instead:
            op = self._instead[op]
        return op

    def redirect(self, old: Iterable[Op], new: Op) -> None:
        """Let ops take the value of `new` where they take those of `old`."""
        instead = dict.fromkeys(old, new)
        self._redirected |= instead
        for op in {op for x in instead for op in self._users_of(x)} - {new}:
            if not instead.keys().isdisjoint(op.inputs):
                self.take(op, list(dict.fromkeys(instead.get(x, x) for x in op.inputs)))

    def remove(self, old: Iterable[Op], new: Op) -> None:
        """Take ops out, with what they make, but for those that others take; what else refers to them (a hold, a first
        use) refers to `new`."""
        gone, there = set(old), set(self.order)
        takers = {x: there.intersection(self._users_of(x)) - gone for x in gone}
        taken = {x for x, ops in takers.items() if any(x in op.inputs for op in ops)}
        while taken:
            gone -= taken
            taken = {x for op in taken for x in op.inputs} & gone
        self._instead |= dict.fromkeys(gone, new)
        for those in (self._values, self._made):
            those[:] = [v for v in those if v.producer not in gone]
        self.order = [op for op in self.order if op not in gone]

    def trace(self, *, draft: bool = False) -> Trace:
        """The trace as it is now; a draft is not checked and has no fingerprints."""
        number = {op: i for i, op in enumerate(self.order)}
        ids = {v: s for s, v in enumerate(self.values)}
        forward = self.source.meta.forward_ops
        # What the model returns is held until its forward ends, whatever that ends in now.
        returned, end = self.op[forward - 1] if forward else None, self._moved(forward) - 1

        def now(op: Op | None) -> int:
            return -1 if op is None else number[self.instead_of(op)]

        columns: dict[str, Any] = {f: tuple(map(attrgetter(f), self.order)) for f in PLAIN}
        columns |= {
            "inputs": tuple(tuple(number[x] for x in op.inputs) for op in self.order),
            "reads": tuple(tuple(ids[x] for x in op.reads) for op in self.order),
            "writes": tuple(tuple(ids[x] for x in op.writes) for op in self.order),
            "overwrites": tuple(ids[op.overwrites] if op.overwrites else -1 for op in self.order),
        }
        ops = Ops(**columns)
        held = ("name", "nbytes", "category", "dtype", "shape")
        of_values: dict[str, Any] = {column: tuple(map(attrgetter(column), self.values)) for column in held}
        found = uses_of(ops, len(self.values))
        of_values |= {
            column: tuple(
                # A library's workspace is used by ops that do not read it.
                new if v.producer is not None else now(self.op[v.uses[k]] if v.uses[k] >= 0 else None)
                for v, new in zip(self.values, found[column], strict=True)
            )
            for k, column in enumerate(USES)
        }
        storages = Storages(
            **of_values,
            producer=tuple(now(v.producer) for v in self.values),
            hold=tuple(end if v.hold and v.hold is returned else now(v.hold) for v in self.values),
        )
        backward = self._moved(self.source.meta.first_backward_graph_op)
        later = [i for i in range(backward, len(ops)) if not ops.flags[i] & EAGER]
        meta = replace(
            self.source.meta,
            forward_ops=end + 1,
            first_backward_graph_op=backward,
            within_backward=eager_runs(ops.flags, later),
            stretches=(),
            rates=self.rates,
            untouched_peak_bytes=0,
            **(dict.fromkeys(DIGESTS, "") if draft else digests(ops, storages)),
        )
        made = replace(self.source, meta=meta, ops=ops, storages=storages)
        return made if draft else validate(made)

    def _moved(self, old: int) -> int:
        """Where what stood behind so many ops of the trace stands now."""
        return bisect_left(self.order, old, key=attrgetter("at"))
