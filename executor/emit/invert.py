"""Let an activation's backward take its output and its side bits, as `simulator.levers.invert` does."""

from __future__ import annotations

import torch

from executor.inverted import ops
from executor.rewriting import Changing
from simulator.levers.invert import pair_of
from traces.errors import PlanError
from traces.records.plan import Rewrite

lowtide = torch.ops.lowtide


def change(changing: Changing, rewrite: Rewrite) -> None:
    """Put the bits before the activation, and the other op in the place of its backward; where a rewrite before has
    taken one of them out, or its input away, all is left as it is. Raises PlanError if the storage is no such input in
    this graph, or the output is laid out otherwise than it.
    """
    program, graph = changing.program, changing.graph
    pair = pair_of(changing.trace, rewrite.storage)
    if isinstance(pair, str):
        raise PlanError(f"the input of {rewrite.op or 'an activation'} cannot be done without here: {pair}.")
    before, after = (program.ops[i].node for i in (pair.forward, pair.backward))
    forward, backward = changing.node[before], changing.node[after]
    if not {forward, backward} <= {*graph.nodes}:
        return
    x, copy = forward.args[0], program.ops[pair.copy].node if pair.copy >= 0 else None
    if (changing.node[copy] if copy else x) not in backward.args:
        return
    val, y = x.meta["val"], before.meta["val"]
    if val.stride() != y.stride() or not torch.ops.aten.is_non_overlapping_and_dense(y):
        raise PlanError(f"{before.name} is laid out otherwise than its input; please report this.")
    with graph.inserting_before(forward):
        side = graph.call_function(lowtide.side.default, (x, pair.kind))
    changing.name(side, f"{before.name}_side", before)
    with y.fake_mode:
        side.meta["val"] = ops.side(val, pair.kind)
    with graph.inserting_before(backward):
        taken = (backward.args[0], forward, side, pair.kind)
        new = graph.call_function(lowtide.backward_from_output.default, taken)
    changing.instead(after, new)
    changing.remove([after] if copy is None else [copy, after])
    changing.name(new, after.name, after)
