"""Pack: a value that forward makes and backward reads waits in a smaller format, one of `simulator.core.formats`.

The packed value is made after the last op of forward that reads the value, and unpacked right before the first op of
backward that does; that op and later ones read what was unpacked, through views of their own. Masks are packed as soon
as they are made, and forward reads them unpacked, too: so what forward makes of them can be recomputed in backward,
from what is saved there. The rewrite's kind is the format.

Counts: payloads; the buffers and the passes of both ops, at the rate that the trace's larger ops without matrix
products have together. Ignores: launches of kernels beyond that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from simulator.core.formats import FORMATS, HOLDS, narrow
from simulator.core.problem import Problem
from simulator.levers.edit import Editing, Layout, Op, Taken, Value, new_op, users_of
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.trace import ACTIVATION, BACKWARD, EAGER, FORWARD, RANDOM, VIEW, Trace

LEAST: Final = 1 << 14  # numbers: fewer are not worth an op, and often statistics
ITEM_BYTES: Final = {"bool": 1, "int64": 8, "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SHARE: Final = 16  # of the bytes that the largest op moves, that part makes an op a large one
COMPARISONS: Final = tuple(f"aten.{name}." for name in ("eq", "ne", "lt", "le", "gt", "ge"))
POOLS: Final = ("aten.max_pool", "aten.adaptive_max_pool", "aten.fractional_max_pool")


def backward_of(*activations: str) -> dict[str, str]:
    """Op of forward -> op of backward."""
    return {f"aten.{x}.default": f"aten.{x}_backward.default" for x in activations}


ACTIVATIONS: Final = backward_of("gelu", "silu")


def edit(editing: Editing, rewrite: Rewrite) -> None:
    """Put the two ops (three for a mask) into the step; a value that backward no longer reads, because of a rewrite
    before, is left as it is. Raises PlanError if the value is not one that is saved, or not one that this format holds.
    """
    trace, s = editing.source, rewrite.storage
    known = 0 <= s < len(trace.storages)
    if why := _reason(trace, s, rewrite.kind, editing.once(users_of)[1][s]) if known else "there is none":
        name = f"storage {s} ({rewrite.op})" if rewrite.op else f"storage {s}"
        raise PlanError(f"{name} cannot be packed as {rewrite.kind}: {why}.")
    made_of = ""
    if FORMATS[rewrite.kind].of_activations:
        pair = activation_of(trace, editing.once(users_of)[1][s], s)
        assert not isinstance(pair, str)
        made_of = f":{activation(trace, pair[0])}"
    Packing(editing, editing.value[s], rewrite.kind, made_of).edit()


def offer(problem: Problem, format: str) -> list[Rewrite]:
    """The saved values that can be packed in a format and are worth it; first what saves most for its time."""
    trace, sts = problem.trace, problem.trace.storages
    rate, found = problem.once(pass_rate, lambda f: pass_rate(f.trace)), []
    users = problem.once(users_of, lambda f: users_of(f.trace))[1]
    for s in trace.saved:
        if problem.pinned[s] or math.prod(sts.shape[s]) < LEAST or sts.dtype[s] not in FORMATS[format].dtypes:
            continue
        saved, moved = costs(trace, s, format)
        narrows = saved > 0 and (format not in HOLDS or format == narrow(_positions(trace, s)))
        if narrows and not _reason(trace, s, format, users[s]):
            found.append((-saved / max(1, at_rate(rate, moved)), s))
    op = [trace.ops.name[p] for p in sts.producer]
    return [Rewrite(kind=format, storage=s, op=op[s]) for _, s in sorted(found)]


def costs(trace: Trace, s: int, format: str) -> tuple[int, int]:
    """Bytes that a packed storage saves, and bytes that its ops read and write."""
    sts, rule = trace.storages, FORMATS[format]
    n = math.prod(sts.shape[s])
    item = ITEM_BYTES.get(sts.dtype[s], 1)
    unpacked = 1 + (format == "bits" and sts.last_forward_use[s] >= 0)
    moved = rule.bytes_moved(n, item, rule.pack_moves)
    moved += unpacked * rule.bytes_moved(n, item, rule.unpack_moves)
    return sts.nbytes[s] - rule.payload_bytes(n), moved


def at_rate(rate: tuple[int, int], nbytes: int) -> int:
    """The time in which passes read and write so many bytes, as the larger ops do that are no matrix products."""
    time_ns, moved = rate
    return -(-nbytes * time_ns // moved) if moved else 0


def pass_rate(trace: Trace) -> tuple[int, int]:
    """The time in ns that those ops take together, and the bytes that they move."""
    ops = trace.ops
    timed = [
        (b, t) for b, t, flops in zip(ops.bytes_moved, ops.time_ns, ops.flops, strict=True) if b and not flops
    ]
    most = max((b for b, _ in timed), default=0)
    large = [(b, t) for b, t in timed if SHARE * b >= most]  # of small ones the launch decides
    return sum(t for _, t in large), sum(b for b, _ in large)


def _positions(trace: Trace, s: int) -> int:
    """How many positions the indices of a max pooling can name: those of a plane of its input; of others, all."""
    sts, made_by = trace.storages, trace.storages.producer[s]
    target, given = trace.ops.target[made_by], trace.ops.reads[made_by]
    if not target.startswith(POOLS) or not given:
        return 1 << 62
    planes = math.prod(sts.shape[s][: -3 if "3d" in target else -2])  # as many as the indices have
    return sts.nbytes[given[0]] // ITEM_BYTES.get(sts.dtype[given[0]], 1) // max(1, planes)


def _reason(trace: Trace, s: int, format: str, users: Iterable[int]) -> str:
    """Why a storage of these users cannot be packed; "": it can."""
    ops, sts, made_by = trace.ops, trace.storages, trace.storages.producer[s]
    if reason := needed(trace, s, users):
        return reason
    if sts.dtype[s] not in FORMATS[format].dtypes:
        return f"it is of {sts.dtype[s]}"
    if FORMATS[format].of_activations and isinstance(why := activation_of(trace, users, s), str):
        return why
    if format in HOLDS and _positions(trace, s) > HOLDS[format]:
        return f"it may have numbers from {HOLDS[format]:,} up"
    # As the op of a maximum's backward does: few are equal with an error.
    late = range(sts.first_backward_use[s], sts.last_backward_use[s] + 1)
    compare = (ops.name[i] for i in late if s in ops.reads[i] and ops.target[i].startswith(COMPARISONS))
    if not FORMATS[format].exact and (compared := next(compare, "")):
        return f"{compared} compares it"
    # What an op makes beside something larger, or as a column, is statistics, in which an error is a whole row's.
    largest = max(sts.nbytes[x] for x in ops.writes[made_by])
    if not FORMATS[format].exact and (sts.nbytes[s] < largest or sts.shape[s][-1:] in ((), (1,))):
        return "it is statistics of rows"
    return ""


def needed(trace: Trace, s: int, users: Iterable[int]) -> str:
    """Why nothing else can take a storage's place in the captured graph, of its users; "": something can."""
    ops, sts, made_by = trace.ops, trace.storages, trace.storages.producer[s]
    made = made_by >= 0 and ops.phase[made_by] == FORWARD and not ops.flags[made_by] & EAGER
    if not made or sts.last_backward_use[s] < 0:
        return "it is not made in forward and read in backward"
    if sts.hold[s] >= 0:
        return "code outside the captured graph holds it"
    if sts.nbytes[s] != math.prod(sts.shape[s]) * ITEM_BYTES.get(sts.dtype[s], 0):
        return f"it is of {sts.dtype[s]}, or its memory has gaps"
    last = max(sts.last_forward_use[s], sts.last_backward_use[s])
    for i in (i for i in users if made_by < i <= last):
        if s in ops.writes[i]:
            return f"{ops.name[i]} overwrites it"
        if ops.flags[i] & VIEW and len(ops.reads[i]) > 1:
            return f"{ops.name[i]}, a view of it, reads something else, too"
        if ops.flags[i] & EAGER:
            return "code outside the captured graph reads it"
    return ""


def activation(trace: Trace, op: int) -> str:
    """The activation of an op of forward, by the name that `executor.inverted` has for it."""
    name = trace.ops.target[op].split(".")[1]
    return "gelu_tanh" if name == "gelu" and json.loads(trace.ops.arguments[op])[1] == "tanh" else name


def activation_of(
    trace: Trace,
    users: Iterable[int],
    s: int,
    pairs: Mapping[str, str] = ACTIVATIONS,
    *,
    copied: bool = False,
) -> tuple[int, int] | str:
    """The activation of forward that reads a storage of these users, and its op of backward, which alone reads it
    there; or why there is none. `copied`: or which overwrites what the storage is a copy of, as torch saves it for one
    that works in place.
    """
    ops, made_by = trace.ops, trace.storages.producer[s]
    readers = [i for i in users if i > made_by and s in ops.reads[i]]
    backwards = [i for i in readers if ops.phase[i] != FORWARD]
    copied = copied and ops.target[made_by] == "aten.clone.default" and backwards == readers
    of = [i for i in range(made_by, len(ops)) if ops.inputs[i] == ops.inputs[made_by]] if copied else readers
    forwards = [i for i in of if ops.target[i] in pairs]
    wanted = [pairs[ops.target[i]] for i in forwards]
    if len(wanted) != 1 or [ops.target[i] for i in backwards] != wanted:
        return "backward reads it for something else than one activation"
    f, b = forwards[0], backwards[0]
    if not (ops.arguments[f] and ops.arguments[b]):
        return "the trace does not say with what arguments its ops run"
    told = json.loads(ops.arguments[f])[1:]
    same = told == json.loads(ops.arguments[b])[2 : 2 + len(told)]
    if ((made_by,) if copied else ops.inputs[f]) != ops.inputs[b][1:] or not same:
        return "its activation and that of backward are not one"
    return f, b


class Packing:
    """One value as another takes its place."""

    def __init__(self, editing: Editing, value: Value, format: str, made_of: str = "") -> None:
        """`made_of`: the activation whose input the value is, as codecs are told it."""
        self.editing, self.value, self.format, self.told = editing, value, format, format + made_of
        assert value.producer is not None
        self.made_by = value.producer
        made = [v for v in self.made_by.writes if v.producer is self.made_by]
        before = sum(v in made for v in editing.value[: editing.value.index(value)]) if len(made) > 1 else 0
        self.suffix = f"_{before}" if len(made) > 1 else ""
        self.elements = math.prod(value.shape)

    def edit(self) -> None:
        editing, value = self.editing, self.value
        readers = [op for op in editing.readers(value) if op is not self.made_by]
        forward = [op for op in readers if op.phase == FORWARD]
        backward = [op for op in readers if op.phase != FORWARD]
        at_once = self.format == "bits" and bool(forward)
        if not backward:
            return
        pack = self._pack()
        editing.insert(pack, forward[-1] if forward and not at_once else self.made_by, after=True)
        unpack = self._unpack(pack, BACKWARD)
        editing.insert(unpack, backward[0])
        # Backward's ops that take views of forward take the same views of what was unpacked.
        instead, behind = {self.made_by: unpack}, unpack
        taken, views = {x for op in backward for x in op.inputs}, list[Op]()
        for op in reversed(forward):
            if op.flags & VIEW and op in taken:
                views.append(op)
                taken.update(op.inputs)  # those that it is a view of
        for op in reversed(views):
            view = replace(op, name=f"{op.name}_unpacked", phase=BACKWARD)
            editing.insert(view, behind, after=True)
            instead[op] = behind = view
        self.redirect([x for x in instead.values() if x is not unpack] + backward, instead, unpack.writes[0])
        if at_once:
            unpack = self._unpack(pack, FORWARD)
            editing.insert(unpack, pack, after=True)
            self.redirect(forward, {self.made_by: unpack}, unpack.writes[0])

    def _pack(self) -> Op:
        rule, n, item = FORMATS[self.format], self.elements, ITEM_BYTES[self.value.dtype]
        name, nbytes = f"{self.made_by.name}_packed{self.suffix}", rule.payload_bytes(n)
        payload = Value(name=name, nbytes=nbytes, dtype="uint8", shape=(nbytes,), category=ACTIVATION)
        given = Taken(self.made_by, self.value), self.told
        events, moved = rule.pack_events(n, item), rule.bytes_moved(n, item, rule.pack_moves)
        return self._op("pack", FORWARD, given, payload, events, moved)

    def _unpack(self, pack: Op, phase: str) -> Op:
        rule, n, item = FORMATS[self.format], self.elements, self.value.nbytes // self.elements
        name = f"{self.made_by.name}_unpacked{self.suffix}{'_in_forward' if phase == FORWARD else ''}"
        again = replace(self.value, name=name, category=ACTIVATION, producer=None, hold=None)
        given = Taken(pack, pack.writes[0]), self.told, Layout(self.value)
        events, moved = rule.unpack_events(n, item), rule.bytes_moved(n, item, rule.unpack_moves)
        return self._op("unpack", phase, given, again, events, moved)

    def _op(
        self, what: str, phase: str, given: tuple[Any, ...], made: Value, events: tuple[int, ...], moved: int
    ) -> Op:
        time_ns = at_rate(self.editing.once(pass_rate), moved)
        figures = {"time_ns": time_ns, "bytes_moved": moved, "events": events}
        flags, target = RANDOM if what == "pack" else 0, f"lowtide.{what}.default"
        return new_op(self.made_by, made.name, target, phase, given, [made], flags=flags, **figures)

    def redirect(self, ops: Iterable[Op], instead: dict[Op, Op], value: Value) -> None:
        """Let ops take other ops' values where they take this one's, and read what is behind those."""
        for op in ops:
            inputs: list[Op] = []
            for x in op.inputs:
                inputs += self._taken(op, instead[x], value) if x is self.made_by else [instead.get(x, x)]
            self.editing.take(op, list(dict.fromkeys(inputs)))
            self.editing.read(op, [value if v is self.value else v for v in op.reads])
            op.overwrites = value if op.overwrites is self.value else op.overwrites
            op.instead = {**(op.instead or {}), **{(x, self.value): new for x, new in instead.items()}}

    def _taken(self, op: Op, instead: Op, value: Value) -> list[Op]:
        """Return what an op takes in the place of the maker: that, too, or alone, if it takes something else of its."""
        views = {v for x in op.inputs if x.flags & VIEW for v in x.reads}
        others = [v for v in op.reads if v.producer is self.made_by and v not in (*views, self.value)]
        if not others:
            return [instead]
        if not views.isdisjoint((self.value, value)):
            return [self.made_by]
        first = op.reads.index(self.value) < op.reads.index(others[0])
        return [instead, self.made_by] if first else [self.made_by, instead]
