"""The backward of a planned step for a loss that leaves out some of the outputs that the plan's loss uses.

Autograd never runs what only an unused output reaches: its parameters get no gradient at all, which an optimizer with
decay or momentum tells from a gradient of zeros; and zeros that pass through an infinite derivative would come out as
NaN. Every op of a backward is zero where all gradients that it takes are, so what only missing gradients reach is left
out; a sum with one is the other summand; any other op that joins the two takes zeros, as autograd's own do.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from tracer.torch_api import BoxedCodeGen
from traces.errors import PlanError

aten = torch.ops.aten
SUMS: Final = (aten.add.Tensor, aten.add_.Tensor)


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
            copies[n] = _joined(graph, n, copies)
    graph.set_codegen(BoxedCodeGen())
    kept = {c for n, c in copies.items() if n not in reached}
    graph.eliminate_dead_code(lambda n: n in kept or n.is_impure())
    graph.lint()
    return fx.GraphModule(backward, graph, class_name="LowtideBackward")


def _joined(graph: fx.Graph, n: fx.Node, copies: dict[fx.Node, fx.Node | None]) -> fx.Node:
    """An op that takes gradients of which some are missing."""
    if n.target in SUMS and not n.kwargs and all(isinstance(a, fx.Node) for a in n.args):
        (other,) = (a for a in n.all_input_nodes if copies[a] is not None)
        there = copies[other]
        assert there is not None
        lies = n.meta["val"].stride() == other.meta["val"].stride()
        if lies and (n.target is aten.add.Tensor or len(other.users) == 1):
            return there
        if not lies:  # as what reads it was captured for
            return _filled(graph, n, aten.copy_.default, there)
        copy = graph.call_function(aten.clone.default, (there,))  # what may be overwritten from here on
        copy.meta = dict(n.meta)
        return copy

    def given(a: fx.Node) -> fx.Node:
        return copies[a] or _filled(graph, a, aten.zero_.default)

    return graph.node_copy(n, given)


def _filled(graph: fx.Graph, like: fx.Node, fill: Any, *given: fx.Node) -> fx.Node:
    """New memory that lies as the value of a node, and what an op fills it with."""
    val = like.meta["val"]
    if any(isinstance(n, torch.SymInt) for n in val.shape):
        raise PlanError(
            "the loss leaves out an output that the plan's loss uses, in a call of other sizes than the plan's: trace "
            "the step with this loss and plan again."
        )
    layout, kind = (tuple(val.shape), tuple(val.stride())), {"dtype": val.dtype, "device": val.device}
    empty = graph.call_function(torch.empty_strided, layout, kind)
    filled = graph.call_function(fill, (empty, *given))
    empty.meta = filled.meta = dict(like.meta)
    return filled
