"""The backward of a planned step for a loss that leaves out some of the outputs that the plan's loss uses.

Autograd never runs what only an unused output reaches: its parameters get no gradient at all, which an optimizer with
decay or momentum tells from a gradient of zeros; and zeros that pass through an infinite derivative would come out as
NaN. Every op of a backward is zero where all gradients that it takes are, so what only missing gradients reach is left
out; a sum with one is the other summand; any other op that joins the two takes zeros, as autograd's own do.
"""

from __future__ import annotations

import torch
from torch import fx

from tracer.torch_api import BoxedCodeGen
from traces.errors import PlanError


def without(backward: fx.GraphModule, missing: frozenset[str]) -> fx.GraphModule:
    """A backward module whose gradients named in `missing` are None; gradients that only they reach are None, too.

    Args:
        backward: takes saved values and tangents in one list; its tangents bear `tangent_of` in their meta.
        missing: names of placeholders, which still have a place in the list.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node | None] = {}  # None: no gradient comes here
    reached: set[fx.Node] = set()  # what depends on any gradient, there or not
    for n in backward.graph.nodes:
        absent = [a for a in n.all_input_nodes if copies.get(a, a) is None]
        if n.op == "placeholder":
            made: fx.Node | None = graph.node_copy(n)
            if "tangent_of" in n.meta:
                reached.add(n)
            copies[n] = None if n.name in missing else made
            continue
        if n.op == "output":
            graph.output(fx.node.map_arg(n.args[0], copies.__getitem__)).meta = dict(n.meta)
            continue
        if any(a in reached for a in n.all_input_nodes):
            reached.add(n)
        if not absent:
            copies[n] = graph.node_copy(n, copies.__getitem__)
        elif not any(a in reached and copies[a] is not None for a in n.all_input_nodes):
            copies[n] = None
        else:
            copies[n] = graph.node_copy(n, lambda a: copies[a] or _zeros(graph, a))
    graph.set_codegen(BoxedCodeGen())
    kept = {c for n, c in copies.items() if n not in reached}
    graph.eliminate_dead_code(lambda n: n in kept or n.is_impure())
    graph.lint()
    return fx.GraphModule(backward, graph, class_name="LowtideBackward")


def _zeros(graph: fx.Graph, like: fx.Node) -> fx.Node:
    """Zeros that lie as the value of a node."""
    val = like.meta["val"]
    if any(isinstance(n, torch.SymInt) for n in val.shape):
        raise PlanError(
            "the loss leaves out an output that the plan's loss uses, in a call of other sizes than the plan's: trace "
            "the step with this loss and plan again."
        )
    layout, kind = (tuple(val.shape), tuple(val.stride())), {"dtype": val.dtype, "device": val.device}
    empty = graph.call_function(torch.empty_strided, layout, kind)
    filled = graph.call_function(torch.ops.aten.zero_.default, (empty,))
    empty.meta = filled.meta = dict(like.meta)
    return filled
