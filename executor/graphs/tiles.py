"""Tiles: the call that runs a part of a loss head or an MLP over its rows, tile by tile, and its inner graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tracer.record.tiles import TURNED, VIEWS, Call, Found, packet
from tracer.torch_api import FakeTensor
from traces.records.trace import EFFECT, PRODUCT, ROWS

aten = torch.ops.aten
MEAN_LOSS, SUM_LOSS = 1, 2  # torch's numbers of reductions


class Tiles:
    """The call: what a part takes -> what it leaves; of a head, gradients are for a factor of one.

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
            into = [_cut(x, found.lies[n], start, rows) for n, x in out.items() if found.grows(n) == ROWS]
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


def _cut(x: torch.Tensor, lies: int, start: int, rows: int) -> torch.Tensor:
    """So many rows of a tensor, from one on; those of several dimensions are in the first of them alone."""
    if lies <= 1:
        return x.narrow(int(lies == TURNED), start, rows) if lies else x
    shape = _sizes(x, rows, lies)
    return x.flatten(0, lies - 1).narrow(0, start, rows).view(shape)


def _sizes(x: torch.Tensor, rows: Any, lies: int) -> list[Any]:
    """The sizes of a value in a tile."""
    return [rows, *[1] * (lies - 1), *x.shape[lies:]]


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
        if packet(n) in VIEWS and (lies := found.lies.get(n)):
            args = (args[0], _sizes(n.meta["val"], rows, lies))
        if n in sums and found.grows(n) == PRODUCT:
            target, args = aten.addmm_.default, (sums[n], *args)
        now[n] = graph.call_function(target, args, dict(kwargs))
        if n in into:
            graph.call_function(aten.copy_.default, (into[n], now[n]))
        elif n in sums and found.grows(n) != PRODUCT:
            graph.call_function(aten.add_.Tensor, (sums[n], now[n]))
    graph.output(tuple(now[n] for n in ([] if again else _sums(found, call))))
    return fx.GraphModule({}, graph, class_name="LowtideTile")
