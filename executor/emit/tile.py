"""Run a stretch of the step in tiles: one call in its place, which makes the loss and the gradients tile by tile."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from executor.rewriting import Changing
from tracer.record.stretches import MEAN_LOSS, SIZES, Axis, Found
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.stretch import PRODUCT, ROWS

aten = torch.ops.aten


def change(changing: Changing, rewrite: Rewrite) -> None:
    """Put the call of the tiles behind the stretch's last op of forward, and take the stretch out.

    Raises:
        PlanError: the graph has no such stretch.
    """
    program = changing.program
    found = next((x for x in changing.stretches if program.storage_of[x.product][0] == rewrite.storage), None)
    if found is None or rewrite.number < 1:
        raise PlanError(
            f"{rewrite.op or 'a stretch of the step'} cannot be made in {rewrite.number} tiles here: the rows of its "
            "values depend on each other, or they are not added up."
        )
    number = min(rewrite.number, found.rows)  # a smaller batch than the plan's may have fewer rows than tiles
    graph, now = changing.graph, changing.node
    last = [n for n in found.body if n in changing.forward][-1]
    with graph.inserting_after(now[last]):
        call = graph.call_function(Tiles(found, number), tuple(now[n] for n in found.inputs))
    changing.name(call, f"{found.product.name}_tiles", found.product)
    call.meta.pop("val", None)
    behind = call
    made: dict[fx.Node, fx.Node] = {}
    for k, n in enumerate((*found.results, *found.gradients)):
        with graph.inserting_after(behind):
            behind = made[n] = graph.call_function(operator.getitem, (call, k))
        changing.name(behind, f"{n.name}_in_tiles" if n in found.gradients else n.name, n, found.product)
    for n in found.results:
        changing.instead(n, made[n])
    assert found.factor is not None
    for n in found.gradients:
        with graph.inserting_before(now[n]):
            scaled = graph.call_function(aten.mul.Tensor, (made[n], now[found.factor]))
        changing.name(scaled, f"{n.name}_scaled", n)
        changing.instead(n, scaled)
    why = f"a plan that runs the loss head in {number} tiles does not make it"
    for k in found.outputs:
        changing.not_made[k] = f"output {k} of the model does not exist whole: {why}"
        changing.outputs[k] = made[found.results[0]]
    changing.remove(found.body)


class Tiles:
    """The call: the stretch's inputs -> its sums, and its gradients for a factor of one.

    What it allocates, in this order: the weights of the targets of cross entropies; the factor; whole gradients of
    rows; then in each tile what the ops make, each freed after its last use. Sums are added up in place.
    """

    __module__ = __name__

    def __init__(self, found: Found, number: int) -> None:
        self.found, self.number = found, number
        self.__name__ = self.__qualname__ = f"tiles_{number}"
        self.first, self.later = (_tile(found, again=again) for again in (False, True))

    def __str__(self) -> str:
        return f"lowtide.{self.__name__}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tiles:
        return self

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.found
        inputs = dict(zip(found.inputs, given, strict=True))
        weights = [_weight(loss, inputs) for loss in found.losses]
        assert found.factor is not None
        like = found.factor.meta["val"]
        factor = given[0].new_ones(like.shape, dtype=like.dtype)
        out: dict[fx.Node, torch.Tensor] = {}
        for n in found.gradients:
            if found.grows(n) == ROWS:
                out[n] = given[0].new_empty(n.meta["val"].shape, dtype=n.meta["val"].dtype)
        step = -(-found.rows // self.number)
        for start in range(0, found.rows, step):
            rows = min(step, found.rows - start)
            cuts = [_cut(x, found.inputs[n], start, rows) for n, x in inputs.items()]
            into = [_cut(x, found.axes[n], start, rows) for n, x in out.items() if found.grows(n) == ROWS]
            if start == 0:
                sums = self.first(rows, factor, *weights, *cuts, *into)
                out.update(zip(_sums(found), sums, strict=True))
            else:
                self.later(rows, factor, *weights, *cuts, *into, *(out[n] for n in _sums(found)))
            del cuts, into
        for loss, weight in zip(found.losses, weights, strict=True):
            for n in loss.users:
                if n in found.results and loss.args[3] == MEAN_LOSS:
                    out[n].div_(weight)
        return tuple(out[n] for n in (*found.results, *found.gradients))


def _sums(found: Found) -> list[fx.Node]:
    return [n for n in (*found.results, *found.gradients) if found.grows(n) != ROWS]


def _weight(loss: fx.Node, inputs: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
    """By what a cross entropy is divided: the sum of the weights of all targets that are not ignored."""
    target, ignored = inputs[loss.args[1]], loss.args[4]
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


def _tile(found: Found, *, again: bool) -> fx.GraphModule:
    """The stretch for as many rows as it is told: rows, factor, weights, inputs, whole gradients of rows to write into,
    and `again`: the sums so far, to add to. Otherwise it returns the sums."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    factor = graph.placeholder("factor")
    now: dict[fx.Node, fx.Node] = {found.factor: factor} if found.factor is not None else {}
    for k, weight in enumerate(found.losses.values()):
        now[weight] = graph.placeholder(f"weight_{k}")
    weights = set(found.losses.values())
    for n in found.inputs:
        now[n] = graph.placeholder(f"given_{n.name}")
    into = {n: graph.placeholder(f"into_{n.name}") for n in found.gradients if found.grows(n) == ROWS}
    sums = {n: graph.placeholder(f"sum_{n.name}") for n in (_sums(found) if again else ())}
    for n in found.body:
        if n in weights:
            continue
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), now.__getitem__)
        target = n.target
        if n.op == "call_function" and n in found.losses:
            args = (*args[:3], 2, *args[4:])  # a sum
        axis = found.axes.get(n)
        sized = SIZES.get(getattr(target, "overloadpacket", None))
        if axis is not None and sized is not None:
            args = (*args[:sized], _sizes(graph, rows, n, axis), *args[sized + 1 :])
        if n in sums and found.grows(n) == PRODUCT:
            target, args = aten.addmm_.default, (sums[n], *args)
        now[n] = graph.call_function(target, args, dict(kwargs))
        if n in found.means:
            share = graph.call_function(operator.truediv, (rows, found.rows))
            now[n] = graph.call_function(aten.mul_.Tensor, (now[n], share))
        if n in into:
            graph.call_function(aten.copy_.default, (into[n], now[n]))
        elif n in sums and found.grows(n) != PRODUCT:
            graph.call_function(aten.add_.Tensor, (sums[n], now[n]))
    graph.output(tuple(now[n] for n in ([] if again else _sums(found))))
    return fx.GraphModule({}, graph, class_name="LowtideTile")


def _sizes(graph: fx.Graph, rows: fx.Node, n: fx.Node, axis: Axis) -> Sequence[Any]:
    """The sizes of a value in a tile."""
    sizes: list[Any] = list(n.meta["val"].shape)
    if axis.unit != 1:
        rows = graph.call_function(operator.mul, (rows, axis.unit))
    sizes[axis.dim : axis.dim + axis.span] = [rows, *[1] * (axis.span - 1)]
    return sizes
