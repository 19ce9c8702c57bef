"""Tile: a loss head runs in tiles over its rows, so that the widest values of the step never exist whole.

The loss is one number, so all of the stretch runs in forward, backward's part too, for a gradient of the loss of one:
what it leaves are the loss and the gradients of what it read, but for that factor, by which backward multiplies them.
No matrix product runs twice. (As Liger's and Cut Cross-Entropy's kernels do by hand; here of any graph.)

Counts: the sizes of what a tile makes, its rows' share of what the ops made; freed after their last use; sums in place.
The time of the ops, and for each further tile the least time that an op of the trace takes, for each op; the passes in
which sums are added up and gradients are multiplied, by the rate of the trace's fastest pass. Ignores: that small
matrix products may run slower than their share, and what ops allocate inside does not grow in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from simulator.core.facts import Facts
from simulator.core.rewrites.edit import Editing, Op, Value
from traces.errors import PlanError
from traces.records.plan import FP, Rewrite
from traces.records.stretch import PRODUCT, ROWS, Result, Stretch
from traces.records.trace import ACTIVATION, BACKWARD, EFFECT, FORWARD, VIEW, Trace

EXACTNESS: Final = FP
NUMBERS: Final = (2, 4, 8, 16, 32, 64, 128)  # of tiles that are tried
SHOWN: Final = (
    2  # so many tiles' allocations stand in the trace, beside the last: further ones are like the second
)


def offer(facts: Facts) -> Iterator[Rewrite]:
    """The stretches that can run in tiles, each in any number of them."""
    for stretch in facts.trace.meta.stretches:
        for number in NUMBERS:
            if number <= stretch.rows:
                yield Rewrite(kind="tile", storage=stretch.storage, number=number)


def edit(editing: Editing, rewrite: Rewrite) -> None:
    """Put the tiled stretch in the place of its ops.

    Raises:
        PlanError: the trace has no such stretch.
    """
    trace = editing.source
    stretch = next((x for x in trace.meta.stretches if x.storage == rewrite.storage), None)
    if stretch is None or rewrite.number < 1:
        raise PlanError(f"storage {rewrite.storage} cannot be made in {rewrite.number} tiles.")
    number = min(
        rewrite.number, stretch.rows
    )  # a smaller batch than the plan's may have fewer rows than tiles
    body = [i for i, _ in stretch.body]
    first = trace.storages.producer[stretch.storage]
    last = max(i for i in body if trace.ops.phase[i] == FORWARD)
    inputs, reads = _given(editing, stretch)
    factor, made_by = _factor(editing, stretch)
    values = {r.storage: editing.value[r.storage] for r in (*stretch.losses, *stretch.gradients)}
    raw = {
        r.storage: Value(
            name=f"{values[r.storage].name} in tiles",
            nbytes=values[r.storage].nbytes,
            dtype=values[r.storage].dtype,
            shape=values[r.storage].shape,
            category=ACTIVATION,
        )
        for r in stretch.gradients
    }
    tiles = Op(
        name=f"{trace.ops.name[first]}_tiles",
        target=f"lowtide.tiles_{number}",
        phase=FORWARD,
        module=trace.ops.module[first],
        time_ns=_time_ns(trace, stretch, number),
        inputs=inputs,
        reads=reads,
        writes=[*(values[r.storage] for r in stretch.losses), *(raw[r.storage] for r in stretch.gradients)],
        events=tuple(_events(trace, stretch, number, factor.nbytes)),
        flags=EFFECT,
        flops=sum(trace.ops.flops[i] for i in body),
        bytes_moved=sum(trace.ops.bytes_moved[i] for i in body),
    )
    scaled = {}
    for r in stretch.gradients:
        old = editing.op[r.op]
        scaled[r.op] = Op(
            name=f"{old.name}_scaled",
            target="aten.mul.Tensor",
            phase=BACKWARD,
            module=old.module,
            time_ns=_pass_ns(trace, 2 * values[r.storage].nbytes),
            inputs=[tiles, *made_by],
            reads=[raw[r.storage], factor],
            writes=[values[r.storage]],
            events=(values[r.storage].nbytes,),
            overwrites=raw[r.storage],
            bytes_moved=2 * values[r.storage].nbytes,
        )
    for value in values.values():
        value.producer = None
    for r in stretch.losses:
        values[r.storage].producer = tiles
    editing.insert(tiles, editing.op[last], after=True)
    for r in stretch.gradients:
        editing.insert(scaled[r.op], editing.op[r.op])
        values[r.storage].producer = scaled[r.op]
        editing.redirect(editing.op[r.op], scaled[r.op])
    for r in stretch.losses:
        editing.redirect(editing.op[r.op], tiles)
    editing.remove([editing.op[i] for i in body], tiles)


def _given(editing: Editing, stretch: Stretch) -> tuple[list[Op], list[Value]]:
    """The ops and the storages that the tiles take, in their order."""
    ops = [editing.op[i] for i, _ in stretch.inputs if i >= 0]
    return list(dict.fromkeys(ops)), list(dict.fromkeys(editing.value[s] for _, s in stretch.inputs))


def _factor(editing: Editing, stretch: Stretch) -> tuple[Value, list[Op]]:
    """The number in which backward is linear, and the op that makes it, if it is one of the graph."""
    body = {editing.op[i] for i, _ in stretch.body}
    known = {s for _, s in stretch.inputs} | {
        s for i, _ in stretch.body for s in editing.source.ops.writes[i]
    }
    read = {s for i, _ in stretch.body for s in editing.source.ops.reads[i]} - known
    if len(read) != 1:
        raise PlanError(
            f"the stretch of storage {stretch.storage} depends on more than one number of backward."
        )
    value = editing.value[read.pop()]
    makers = {x for op in body for x in op.inputs if x not in body and value in (*x.reads, *x.writes)}
    return value, sorted(makers, key=lambda op: op.at)


def _pass_ns(trace: Trace, nbytes: int) -> int:
    """The time in which so many bytes are read or written, by the rate of the trace's fastest op, and no less than its
    quickest op."""
    ops = trace.ops
    timed = zip(ops.bytes_moved, ops.time_ns, ops.flags, strict=True)
    rate = max((b / t for b, t, flags in timed if t and not flags & VIEW), default=0.0)
    return max(_least_ns(trace), math.ceil(nbytes / rate) if rate else 0)


def _least_ns(trace: Trace) -> int:
    """The least that an op of the trace takes."""
    return min((t for t in trace.ops.time_ns if t), default=0)


def _time_ns(trace: Trace, stretch: Stretch, number: int) -> int:
    ops = trace.ops
    computing = [i for i, _ in stretch.body if not ops.flags[i] & VIEW]
    sums = sum(trace.storages.nbytes[r.storage] for r in stretch.gradients if r.grows != ROWS)
    again = len(computing) * _least_ns(trace) + _pass_ns(trace, 2 * sums)
    return sum(ops.time_ns[i] for i in computing) + (number - 1) * again


def _events(trace: Trace, stretch: Stretch, number: int, factor_bytes: int) -> Iterator[int]:
    """What the tiles allocate and free: weights, a factor of one, whole gradients of rows, then tile by tile."""
    sts = trace.storages
    for targets in stretch.weights:
        yield from (targets, 8, -targets, 4, -8)
    yield factor_bytes
    results = {r.storage: r for r in (*stretch.losses, *stretch.gradients)}
    yield from (sts.nbytes[s] for s, r in results.items() if r.grows == ROWS)
    step = -(-stretch.rows // number)
    sizes = [min(step, stretch.rows - start) for start in range(0, stretch.rows, step)]
    shown = [*enumerate(sizes[:-1][:SHOWN]), (len(sizes) - 1, sizes[-1])]
    for k, rows in shown:
        yield from _tile_events(trace, stretch, results, rows, first=k == 0)
    yield from (-factor_bytes, *(-4 for _ in stretch.weights))


def _tile_events(
    trace: Trace, stretch: Stretch, results: dict[int, Result], rows: int, *, first: bool
) -> Iterator[int]:
    ops, sts = trace.ops, trace.storages
    last = {s: k for k, (i, _) in enumerate(stretch.body) for s in (*ops.reads[i], *ops.writes[i])}

    def size(nbytes: int, how: str) -> int:
        return -(-nbytes * rows // stretch.rows) if how == ROWS else nbytes

    there: dict[int, int] = {}
    for k, (i, how) in enumerate(stretch.body):
        made = {s: size(sts.nbytes[s], how) for s in ops.writes[i] if sts.producer[s] == i}
        in_place = how == PRODUCT and not first
        if not in_place:
            yield from _inside(ops.events[i], {sts.nbytes[s] for s in made}, lambda n: size(n, ROWS))
            yield from made.values()
            there |= made
        for s in made:
            r = results.get(s)
            if (
                r is not None and not in_place and (r.grows == ROWS or not first)
            ):  # copied, or added to the sum
                yield -there.pop(s)
            elif r is not None:
                there.pop(s, None)
        for s in [s for s in there if last[s] <= k]:
            yield -there.pop(s)


def _inside(events: Sequence[int], made: set[int], scaled: Callable[[int], int]) -> Iterator[int]:
    """What an op allocates and frees while it runs, beside what it makes, at a tile's size."""
    for n in events:
        if abs(n) not in made:
            yield scaled(n) if n > 0 else -scaled(-n)
