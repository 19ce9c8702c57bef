"""Pack a saved value: `lowtide::pack` in forward, `lowtide::unpack` in backward, as `simulator.levers.pack`."""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from executor.codecs.payloads import lies_dense, new_payload, new_tensor
from executor.rewriting import Changing
from simulator.core.formats import FORMATS, HOLDS
from simulator.levers.activations import activation_of, kind
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.trace import VIEW

lowtide = torch.ops.lowtide


def change(changing: Changing, rewrite: Rewrite) -> None:
    """Put the ops in, and let backward (and of a mask forward, too) take what was unpacked.

    A value that backward no longer reads, because of a rewrite before, is left as it is. Raises PlanError if the value
    has gaps in memory, or is an index that the format may not hold.
    """
    graph, format = changing.graph, _format(changing, rewrite)
    op, captured, suffix = changing.made(rewrite.storage)
    value, val = changing.node[captured], captured.meta["val"]
    if not lies_dense(val.shape, val.stride()):
        raise PlanError(f"{captured.name} has gaps in memory and cannot be packed; please report this.")
    if format in HOLDS:
        of = op.node.args[0].meta["val"].shape
        if math.prod(of[-3 if "3d" in str(op.node.target) else -2 :]) > HOLDS[format]:
            raise PlanError(
                f"{captured.name} may have numbers that {format} cannot hold; please report this."
            )
    forward, backward = readers(changing, value)
    if not backward:
        return
    layout = (list(val.shape), list(val.stride()), val.dtype)
    with val.fake_mode:
        payload = new_payload(val, format)
        again = new_tensor(payload, format, *layout)

    name = op.node.name

    def unpacked(end: str, late: bool) -> fx.Node:
        args = (packed, format, *layout)
        return changing.call(
            lowtide.unpack.default, args, again, f"{name}_unpacked{suffix}{end}", captured, late=late
        )

    ops = [n for n in forward if n.target is not operator.getitem]
    at_once = format == "bits" and bool(forward)
    with graph.inserting_after(changing.end(ops[-1] if ops and not at_once else value)):
        packed = changing.call(
            lowtide.pack.default, (value, format), payload, f"{name}_packed{suffix}", captured
        )
    with graph.inserting_before(backward[0]):
        back = unpacked("", late=True)
    instead, behind = {value: back}, back
    views = _views(changing)
    for n in _taken([x for x in forward if x in views], backward):
        with graph.inserting_after(behind):
            behind = instead[n] = graph.node_copy(n, lambda a: instead.get(a, a))
        behind.name = f"{n.name}_unpacked"
        behind.meta["partitioner_tag"] = "is_backward"
    _redirect(backward, instead)
    if at_once:
        with graph.inserting_after(packed):
            back = unpacked("_in_forward", late=False)
        _redirect(forward, {value: back})


def _format(changing: Changing, rewrite: Rewrite) -> str:
    """The format as the ops take it: with the activation whose input it holds."""
    if not FORMATS[rewrite.kind].of_activations:
        return rewrite.kind
    trace = changing.trace
    pair = activation_of(trace, rewrite.storage)
    if isinstance(pair, str):
        raise PlanError(f"{rewrite.op or 'a value'} cannot be packed as {rewrite.kind} here: {pair}.")
    return f"{rewrite.kind}:{kind(trace, pair[0])}"


def _views(changing: Changing) -> set[fx.Node]:
    """The nodes of the graph as it is now that are views, with the picks from their tuples."""
    program = changing.program
    found = [op for op, row in zip(program.ops, program.rows, strict=True) if row.flags & VIEW]
    return {changing.node[n] for op in found for n in (op.node, *op.parts)}


def readers(changing: Changing, value: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """What takes a value or a view of it: in forward, and in backward; in order."""
    views = _views(changing)
    found, looking = set(value.users), list(value.users)
    while looking:
        n = looking.pop()
        more = [] if n not in views else [x for x in n.users if x not in found]
        found.update(more)
        looking += more
    taking = [n for n in changing.graph.nodes if n in found]
    late = {n for n in taking if n.meta.get("partitioner_tag") == "is_backward"}
    return [n for n in taking if n not in late], [n for n in taking if n in late]


def _taken(views: list[fx.Node], backward: list[fx.Node]) -> list[fx.Node]:
    """Those views of forward that backward takes, with those that they are views of."""
    taken = {x for n in backward for x in n.all_input_nodes}
    found = []
    for n in reversed(views):
        if n in taken:
            found.append(n)
            taken.update(n.all_input_nodes)
    return found[::-1]


def _redirect(nodes: list[fx.Node], instead: dict[fx.Node, fx.Node]) -> None:
    for n in nodes:
        n.args, n.kwargs = fx.node.map_arg((n.args, n.kwargs), lambda a: instead.get(a, a))
