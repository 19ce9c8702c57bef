"""Run a stretch of the step in tiles: a call in its place makes the loss and the gradients, tile by tile, or two calls
do, one in forward and one in backward."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from executor.rewriting import Changing
from tracer.capture.passes.dropout import drawn_mask
from tracer.record.tiles import SIZES, Axis, Call, Found, packet
from tracer.torch_api import FakeTensor
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.stretch import PRODUCT, ROWS
from traces.records.trace import EFFECT

aten = torch.ops.aten
MEAN_LOSS, SUM_LOSS = 1, 2  # torch's numbers of reductions


def change(changing: Changing, rewrite: Rewrite) -> None:
    """Put the calls of the tiles behind the last of what they take, and take the stretch out. Raises PlanError if the
    graph has no such stretch.
    """
    program = changing.program
    found = next((x for x in changing.stretches if program.storage_of[x.product][0] == rewrite.storage), None)
    if found is None or rewrite.number < 1:
        raise PlanError(
            f"{rewrite.op or 'a stretch of the step'} cannot be made in {rewrite.number} tiles here: the rows of its "
            "values depend on each other, or more leaves it than can be put together."
        )
    number = min(rewrite.number, found.rows)  # a smaller batch than the plan's may have fewer rows than tiles
    graph, now = changing.graph, changing.node
    made: dict[fx.Node, fx.Node] = {}
    for n in found.drawn():
        x, p = n.args[0].meta["val"], n.args[1]
        now[n].target, now[n].args = drawn_mask._opoverload, (list(x.shape), p, x.dtype, x.device)
    for call in found.parts:
        made |= _put(changing, found, call, number)
    for n, new in made.items():
        if found.factor is not None and n in found.gradients:
            with graph.inserting_before(now[n]):
                new = graph.call_function(aten.mul.Tensor, (new, now[found.factor]))
            changing.name(new, f"{n.name}_scaled", n)
        changing.instead(n, new)
    why = f"a plan that runs the loss head in {number} tiles does not make it"
    for k in found.outputs:
        changing.not_made[k] = f"output {k} of the model does not exist whole: {why}"
        changing.outputs[k] = made[found.results[0]]
    changing.remove(found.body)


def _put(changing: Changing, found: Found, call: Call, number: int) -> dict[fx.Node, fx.Node]:
    """Put a call into the graph; the results of the original -> what is there now."""
    graph, now = changing.graph, changing.node
    forward = call.results[0] in changing.forward
    place = _behind(graph, (now[n] for n in call.inputs), forward)
    first = next(n for n in call.body if (n in changing.forward) == forward)
    with graph.inserting_before(now[first]) if place is None else graph.inserting_after(place):
        behind = tiles = graph.call_function(Tiles(found, call, number), tuple(now[n] for n in call.inputs))
    like = found.product if forward else first
    changing.name(tiles, f"{found.product.name}_tiles{'' if forward else '_backward'}", like)
    tiles.meta.pop("val", None)
    made = {}
    for k, n in enumerate(call.results):
        with graph.inserting_after(behind):
            behind = made[n] = graph.call_function(operator.getitem, (tiles, k))
        scaled = found.factor is not None and n in found.gradients
        changing.name(behind, f"{n.name}_in_tiles" if scaled else n.name, n, like)
    return made


def _behind(graph: fx.Graph, inputs: Iterable[fx.Node], forward: bool) -> fx.Node | None:
    """The last node of a phase among a call's inputs; None: there is none."""
    made = {n for n in inputs if n.op == "call_function"}
    late = {n for n in made if n.meta.get("partitioner_tag") == "is_backward"}
    of_phase = made - late if forward else late
    return next((n for n in reversed(graph.nodes) if n in of_phase), None)


class Tiles:
    """The call: what a part of the stretch takes -> what it leaves; of a head, gradients are for a factor of one.

    What it allocates, in this order: the weights of the targets of cross entropies; the factor; whole results of rows;
    then in each tile what the ops make, each freed after its last use. Sums are added up in place.
    """

    __module__ = __name__

    def __init__(self, found: Found, call: Call, number: int) -> None:
        self.found, self.call, self.number = found, call, number
        self.flags = 0 if found.factor is None else EFFECT  # a head runs once
        self.__name__ = self.__qualname__ = f"tiles_{number}"
        self.first, self.later = (_tile(found, call, again=again) for again in (False, True))

    def __str__(self) -> str:
        return f"lowtide.{self.__name__}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tiles:
        return self

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found, call = self.found, self.call
        like = {n: n.meta["val"] for n in call.results}
        if isinstance(given[0], FakeTensor):  # of which only the results are asked
            return tuple(given[0].new_empty(x.shape, dtype=x.dtype) for x in like.values())
        inputs = dict(zip(call.inputs, given, strict=True))
        weights = [_weight(loss, inputs) for loss in found.losses]
        factor = []
        if found.factor is not None:
            one = found.factor.meta["val"]
            factor = [given[0].new_ones(one.shape, dtype=one.dtype)]
        out: dict[fx.Node, torch.Tensor] = {
            n: given[0].new_empty(x.shape, dtype=x.dtype) for n, x in like.items() if found.grows(n) == ROWS
        }
        step = -(-found.rows // self.number)
        for start in range(0, found.rows, step):
            rows = min(step, found.rows - start)
            cuts = [_cut(x, found.inputs[n], start, rows) for n, x in inputs.items()]
            into = [_cut(x, found.axes[n], start, rows) for n, x in out.items() if found.grows(n) == ROWS]
            if start == 0:
                sums = self.first(rows, *factor, *weights, *cuts, *into)
                out.update(zip(_sums(found, call), sums, strict=True))
            else:
                self.later(rows, *factor, *weights, *cuts, *into, *(out[n] for n in _sums(found, call)))
            del cuts, into
        for loss, weight in zip(found.losses, weights, strict=True):
            for n in loss.users:
                if n in found.results and loss.args[3] == MEAN_LOSS:
                    out[n].div_(weight)
        return tuple(out[n] for n in call.results)


def _sums(found: Found, call: Call) -> list[fx.Node]:
    return [n for n in call.results if found.grows(n) != ROWS]


def _weight(loss: fx.Node, inputs: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
    """By what a cross entropy is divided: the sum of the weights of all targets that are not ignored."""
    named, ignored = loss.args[1], loss.args[4]
    while named not in inputs:  # a view that is made in the tiles
        named = named.args[0]
    target = inputs[named]
    of = inputs[loss.args[2]] if loss.args[2] is not None else None
    mask = target != ignored
    if of is None:
        return mask.sum().to(loss.args[0].meta["val"].dtype)
    return (of.take(target.clamp(0, of.numel() - 1)) * mask).sum()


def _cut(x: torch.Tensor, axis: Axis | None, start: int, rows: int) -> torch.Tensor:
    """So many rows of a tensor, from one on; a row that lies in several dimensions is in the first of them alone."""
    if axis is None:
        return x
    if axis.span == 1:
        return x.narrow(axis.dim, start * axis.unit, rows * axis.unit)
    shape = list(x.shape)
    shape[axis.dim : axis.dim + axis.span] = [rows, *[1] * (axis.span - 1)]
    return x.flatten(axis.dim, axis.dim + axis.span - 1).narrow(axis.dim, start, rows).view(shape)


def _tile(found: Found, call: Call, *, again: bool) -> fx.GraphModule:
    """A call for as many rows as it is told: rows, factor, weights, inputs, whole results of rows to write into, and
    `again`: the sums so far, to add to. Otherwise it returns the sums."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    now: dict[fx.Node, fx.Node] = {}
    if found.factor is not None:
        now[found.factor] = graph.placeholder("factor")
    for k, weight in enumerate(found.losses.values()):
        now[weight] = graph.placeholder(f"weight_{k}")
    weights = set(found.losses.values())
    for n in call.inputs:
        now[n] = graph.placeholder(f"given_{n.name}")
    into = {n: graph.placeholder(f"into_{n.name}") for n in call.results if found.grows(n) == ROWS}
    sums = {n: graph.placeholder(f"sum_{n.name}") for n in (_sums(found, call) if again else ())}
    for n in call.body:
        if n in weights:
            continue
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), now.__getitem__)
        target = n.target
        if n in found.losses and n.args[3] == MEAN_LOSS:
            args = (*args[:3], SUM_LOSS, *args[4:])
        axis, sized = found.axes.get(n), SIZES.get(packet(n))
        if axis is not None and sized is not None:
            args = (*args[:sized], _sizes(graph, rows, n, axis), *args[sized + 1 :])
        if n in sums and found.grows(n) == PRODUCT:
            target, args = aten.addmm_.default, (sums[n], *args)
        now[n] = graph.call_function(target, args, dict(kwargs))
        if packet(n) is aten.mean and n in found.sums:
            share = graph.call_function(operator.truediv, (rows, found.rows))
            now[n] = graph.call_function(aten.mul_.Tensor, (now[n], share))
        if n in into:
            graph.call_function(aten.copy_.default, (into[n], now[n]))
        elif n in sums and found.grows(n) != PRODUCT:
            graph.call_function(aten.add_.Tensor, (sums[n], now[n]))
    graph.output(tuple(now[n] for n in ([] if again else _sums(found, call))))
    return fx.GraphModule({}, graph, class_name="LowtideTile")


def _sizes(graph: fx.Graph, rows: fx.Node, n: fx.Node, axis: Axis) -> Sequence[Any]:
    """The sizes of a value in a tile."""
    sizes: list[Any] = list(n.meta["val"].shape)
    if axis.unit != 1:
        rows = graph.call_function(operator.mul, (rows, axis.unit))
    sizes[axis.dim : axis.dim + axis.span] = [rows, *[1] * (axis.span - 1)]
    return sizes
