"""Tile: a stretch runs in tiles over its rows, so that the widest values of the step never exist whole.

Of a loss head the loss is one number, so all of it runs in forward, backward's part too, for a gradient of the loss of
one: what it leaves are the loss and the gradients of what it read, but for that factor, by which backward multiplies
them. No matrix product runs twice. (As Liger's and Cut Cross-Entropy's kernels do by hand; here of any graph.) Any
other stretch (an MLP block, as in ALST) is a call in forward, and one in backward, which
makes again in each tile what it reads of forward.

Counts: the sizes of what a tile makes, its rows' share of what the ops made; freed after their last use; sums in place;
a matrix product's workspace whole.
The time of the ops, and for each further tile the least time that an op of the trace takes, for each op; the passes in
which rows are put together, sums are added up and gradients are multiplied. Ignores: that small matrix products may run
slower than their share, and that what other ops allocate inside does not grow in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from simulator.core.problem import Problem
from simulator.levers.edit import Editing, Factor, InTiles, Ladder, Op, Taken, Value, new_op
from simulator.levers.pack import ITEM_BYTES, at_rate, pass_rate
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.trace import (
    ACTIVATION,
    BACKWARD,
    EFFECT,
    FORWARD,
    PRODUCT,
    ROWS,
    SUM,
    VIEW,
    WHOLE,
    OwnEvents,
    Part,
    Result,
    Stretch,
    Trace,
    replayed,
)

NUMBERS: Final = (2, 4, 8, 16, 32, 64, 128)  # of tiles that are tried
SHARE: Final = 32  # a stretch's widest value is at least one of so many parts of the step's largest
# In which a result is copied, or added to that of the tiles before.
PASSES: Final = {ROWS: 2, PRODUCT: 2, SUM: 3}
PRODUCTS: Final = tuple(f"aten.{name}.default" for name in ("mm", "addmm"))
NUMBER_BYTES: Final = 16  # a number by itself takes so much at most
# So many tiles' allocations stand in the trace, beside the last: further ones are like the second.
SHOWN: Final = 2


def offer(problem: Problem, kind: str = "tile") -> Iterator[Rewrite]:
    """The stretches that can run in tiles, each in any number of them; none whose widest value is small."""
    sts = problem.trace.storages
    least = max((n for n, op in zip(sts.nbytes, sts.producer, strict=True) if op >= 0), default=0) // SHARE
    for stretch in problem.trace.meta.stretches:
        for number in NUMBERS:
            if number <= stretch.rows and sts.nbytes[stretch.storage] >= least:
                yield Rewrite(kind=kind, storage=stretch.storage, number=number)


def ladders(problem: Problem, rewrites: Sequence[Rewrite], *_: object) -> Iterator[Ladder]:
    """A ladder of numbers of tiles for all that is alike, as layers are."""
    ops, sts = problem.trace.ops, problem.trace.storages
    alike: dict[object, dict[int, list[Rewrite]]] = {}
    for r in rewrites:
        tiled = _of(problem.trace, r)
        body = tuple(ops.target[i] for part in tiled.parts for i, _ in part.body)
        numbers = alike.setdefault((tiled.rows, sts.nbytes[tiled.storage], body), {})
        numbers.setdefault(r.number, []).append(r)
    for numbers in alike.values():
        yield [tuple(numbers[n]) for n in sorted(numbers)]


def told(_: Trace, rewrites: Sequence[Rewrite]) -> str:
    """Return what runs in tiles, and in how many."""
    tiles: dict[int, list[str]] = {}
    for r in rewrites:
        tiles.setdefault(r.number, []).append(r.op)
    more = {n: f" and {len(names) - 1} more" if names[1:] else "" for n, names in tiles.items()}
    return ", ".join(f"{names[0]}{more[n]} in {n} tiles" for n, names in tiles.items())


def _of(trace: Trace, rewrite: Rewrite) -> Stretch:
    stretch = next((x for x in trace.meta.stretches if x.storage == rewrite.storage), None)
    if stretch is None or rewrite.number < 1:
        raise PlanError(f"storage {rewrite.storage} cannot be made in {rewrite.number} tiles.")
    return stretch


def edit(editing: Editing, rewrite: Rewrite) -> None:
    """Put the tiled stretch in the place of its ops. Raises PlanError if the trace has no such stretch."""
    trace, stretch = editing.source, _of(editing.source, rewrite)
    # A smaller batch than the plan's may have fewer rows than tiles.
    number = min(rewrite.number, stretch.rows)
    if stretch.backward is None:
        _edit_head(editing, stretch, number)
        return
    body = {i for part in stretch.parts for i, _ in part.body}
    calls = []
    for k, (part, phase) in enumerate(zip(stretch.parts, (FORWARD, BACKWARD), strict=True)):
        tiles = Op(
            phase=phase,
            writes=[_unmade(editing, r) for r in part.results],
            events=_events(trace, stretch, part, number),
            **_figures(editing, stretch, k, number),
        )
        _put(editing, part, tiles)
        editing.redirect((editing.op[r.op] for r in part.results), tiles)
        calls.append(tiles)
    for tiles in reversed(calls):
        editing.remove([editing.op[i] for i in body if trace.ops.phase[i] == tiles.phase], tiles)


def _edit_head(editing: Editing, stretch: Stretch, number: int) -> None:
    trace = editing.source
    (part,) = stretch.parts
    factor, made_by = _factor(editing, stretch)
    fresh: dict[str, Any] = {"category": ACTIVATION, "producer": None, "hold": None, "uses": ()}
    whole = [(r.storage, editing.value[r.storage]) for r in stretch.gradients]
    raw = {s: replace(v, name=f"{v.name} in tiles", **fresh) for s, v in whole}
    tiles = Op(
        phase=FORWARD,
        writes=[*(_unmade(editing, r) for r in stretch.losses), *raw.values()],
        events=_events(trace, stretch, part, number, factor.nbytes),
        flags=EFFECT,
        **_figures(editing, stretch, 0, number),
    )
    _put(editing, part, tiles)
    for r in stretch.gradients:
        old, value = editing.op[r.op], editing.value[r.storage]
        scaled = new_op(
            old,
            f"{old.name}_scaled",
            "aten.mul.Tensor",
            BACKWARD,
            (Taken(tiles, raw[r.storage]), Factor(stretch.storage)),
            [value],
            inputs=[tiles, *made_by],
            reads=[raw[r.storage], factor],
            time_ns=at_rate(editing.once(pass_rate), 2 * value.nbytes),
            events=(value.nbytes,),
            overwrites=raw[r.storage],
            bytes_moved=2 * value.nbytes,
        )
        editing.insert(scaled, old)
        value.producer = scaled
        editing.redirect([old], scaled)
    editing.redirect((editing.op[r.op] for r in stretch.losses), tiles)
    editing.remove([editing.op[i] for i, _ in part.body], tiles)


def _unmade(editing: Editing, result: Result) -> Value:
    """A result's storage, which another op is going to make."""
    value = editing.value[result.storage]
    editing.unmake(value)
    if result.grows == SUM:
        value.nbytes = _sum_bytes(editing.source, result.storage)
    return value


def _sum_bytes(trace: Trace, s: int) -> int:
    """Return the size of a sum as a stretch leaves it: some losses lie in the memory of what they added up."""
    sts = trace.storages
    return math.prod(sts.shape[s]) * ITEM_BYTES.get(sts.dtype[s], 0) or sts.nbytes[s]


def _figures(editing: Editing, stretch: Stretch, k: int, number: int) -> dict[str, Any]:
    """Return what the op of a part has in common in both phases."""
    ops, part = editing.source.ops, stretch.parts[k]
    body = [i for i, _ in part.body]
    made_by = editing.source.storages.producer[stretch.storage]
    given = (editing.standing(editing.op[i]) for i, _ in part.inputs if i >= 0)
    return {
        "name": f"{ops.name[made_by]}_tiles{'_backward' * (k > 0)}",
        "target": f"lowtide.tiles_{number}",
        "source": made_by if k == 0 else next(i for i in body if ops.phase[i] != FORWARD),
        "called_with": (InTiles(stretch.storage, k, number),),
        "module": ops.module[made_by],
        "time_ns": _time_ns(editing.source, part, number, editing.once(pass_rate), editing.once(_least_ns)),
        "inputs": list(dict.fromkeys(given)),
        "reads": list(dict.fromkeys(editing.value[s] for _, s in part.inputs)),
        "flops": sum(ops.flops[i] for i in body),
        "bytes_moved": sum(ops.bytes_moved[i] for i in body),
    }


def _put(editing: Editing, part: Part, tiles: Op) -> None:
    """Put a call behind the last of what it takes, or before its first op, if nothing of its phase is."""
    given = [op for op in tiles.inputs if op.phase == tiles.phase]
    if given:
        editing.insert(tiles, max(given, key=editing.position), after=True)
    else:
        body = (editing.op[i] for i, _ in part.body)
        editing.insert(tiles, next(op for op in body if op.phase == tiles.phase))


def _factor(editing: Editing, stretch: Stretch) -> tuple[Value, list[Op]]:
    """The number in which backward is linear, and the op that makes it, if it is one of the graph."""
    body = {editing.op[i] for i, _ in stretch.body}
    ops = editing.source.ops
    known = {s for _, s in stretch.inputs}.union(*(ops.writes[i] for i, _ in stretch.body))
    read = {s for i, _ in stretch.body for s in ops.reads[i]} - known
    if len(read) != 1:
        raise PlanError(f"the stretch of storage {stretch.storage} depends on several numbers of backward.")
    value = editing.value[read.pop()]
    makers = {x for op in body for x in op.inputs if x not in body and value in (*x.reads, *x.writes)}
    return value, sorted(makers, key=lambda op: op.at)


def _least_ns(trace: Trace) -> int:
    return min((t for t in trace.ops.time_ns if t), default=0)


def _time_ns(trace: Trace, part: Part, number: int, rate: tuple[int, int], least_ns: int) -> int:
    ops = trace.ops
    computing = [i for i, _ in part.body if not ops.flags[i] & VIEW]
    moved = {
        how: sum(trace.storages.nbytes[r.storage] for r in part.results if r.grows == how) for how in PASSES
    }
    sums = sum(PASSES[how] * moved[how] for how in (PRODUCT, SUM))
    again = len(computing) * least_ns + at_rate(rate, sums)
    once = sum(ops.time_ns[i] for i in computing) + at_rate(rate, PASSES[ROWS] * moved[ROWS])
    return once + (number - 1) * again


def _events(
    trace: Trace, stretch: Stretch, part: Part, number: int, factor_bytes: int = 0
) -> tuple[int, ...]:
    """Return what the tiles allocate and free: weights, a factor of one, whole results of rows, then tile by tile."""
    own = OwnEvents()
    for k, targets in enumerate(stretch.weights):
        own.events += (targets, 8, 8 * targets, -8 * targets, 4, -8, -targets)
        own.live.append((("weight", k), 4))
    own.allocate("factor", factor_bytes)
    results = {r.storage: r for r in part.results}
    for s, r in results.items():
        own.allocate("whole", *[trace.storages.nbytes[s]] * (r.grows == ROWS))
    step = -(-stretch.rows // number)
    sizes = [min(step, stretch.rows - start) for start in range(0, stretch.rows, step)]
    shown = [*enumerate(sizes[:-1][:SHOWN]), (len(sizes) - 1, sizes[-1])]
    for k, rows in shown:
        _run_tile(own, trace, stretch.rows, part, results, rows, tile=k)
    own.free("factor")
    for k in range(len(stretch.weights)):
        own.free(("weight", k))
    return tuple(own.events)


def _run_tile(
    own: OwnEvents, trace: Trace, whole: int, part: Part, results: dict[int, Result], rows: int, *, tile: int
) -> None:
    ops, sts, on_gpu = trace.ops, trace.storages, trace.meta.device.startswith("cuda")
    last = {s: k for k, (i, _) in enumerate(part.body) for s in (*ops.reads[i], *ops.writes[i])}

    def size(nbytes: int, how: str) -> int:
        return -(-nbytes * rows // whole) if how == ROWS else nbytes

    there: dict[int, object] = {}  # storage -> the name of its block
    for k, (i, how) in enumerate(part.body):
        mine = [s for s in ops.writes[i] if sts.producer[s] == i]
        resized = [s for s in mine if how == SUM and sts.nbytes[s] > _sum_bytes(trace, s)]
        made = {s: size(sts.nbytes[s], ROWS if s in resized else how) for s in mine}
        in_place = how == PRODUCT and tile > 0
        new = () if in_place else tuple(made)
        sizes = {sts.nbytes[s]: made[s] for s in made}
        # A library's workspace is as large for few rows; and so is what is too small to have something of each.
        inside = WHOLE if on_gpu and ops.target[i] in PRODUCTS else ROWS
        alone = max(NUMBER_BYTES, whole - 1)
        events = [n for n in ops.events[i] if new or abs(n) not in sizes]
        asks: list[int] = []
        tiled = [
            ((n > 0) - (n < 0)) * (sizes.get(abs(n)) or size(abs(n), inside if abs(n) > alone else WHOLE))
            for n in events
        ]
        there |= {s: (tile, k, block) for s, block in replayed(made, tiled, new, asks).items()}
        count = 0
        for n in asks:
            if n > 0:
                own.allocate((tile, k, count), n)
                count += 1
            else:
                own.free((tile, k, ~n))
        for s in made:
            if s in resized:
                own.allocate((tile, k, s), _sum_bytes(trace, s))
                own.free(there[s])
                there[s] = (tile, k, s)
            r = results.get(s)
            if r is not None and r.grows != ROWS and (in_place or not tile):
                there.pop(s, None)  # it stays, or is no value of its own
        for s in [s for s in there if last[s] <= k]:
            own.free(there.pop(s))
