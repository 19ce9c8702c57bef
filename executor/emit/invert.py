"""Let an activation's backward take its output and its side bits, as `simulator.core.rewrites.invert` does."""

from __future__ import annotations

import torch

from executor.inverted import ops
from executor.rewriting import Changing
from simulator.core.rewrites.activations import kind
from simulator.core.rewrites.invert import pair_of
from traces.errors import PlanError
from traces.records.plan import Rewrite

lowtide = torch.ops.lowtide


def change(changing: Changing, rewrite: Rewrite) -> None:
    """Put the bits behind the activation, and the other op in the place of its backward; where a rewrite before has
    taken one of them out, or its input away, all is left as it is.

    Raises:
        PlanError: the storage is no such input in this graph, or the output is laid out otherwise than it.
    """
    program, graph = changing.program, changing.graph
    trace = program.trace()
    pair = pair_of(trace, rewrite.storage)
    if isinstance(pair, str):
        raise PlanError(f"the input of {rewrite.op or 'an activation'} cannot be done without here: {pair}.")
    forward, backward = (program.ops[i].node for i in pair)
    x, y, grad = forward.args[0], forward.meta["val"], backward.args[0]
    if x.meta["val"].stride() != y.stride() or not torch.ops.aten.is_non_overlapping_and_dense(y):
        raise PlanError(f"{forward.name} is laid out otherwise than its input; please report this.")
    both = {changing.node[forward], changing.node[backward]}
    if not both <= {*graph.nodes} or changing.node[x] not in changing.node[backward].args:
        return
    with graph.inserting_after(changing.node[forward]):
        side = graph.call_function(lowtide.side.default, (changing.node[x], kind(trace, pair[0])))
    changing.name(side, f"{forward.name}_side", forward)
    with y.fake_mode:
        side.meta["val"] = ops.side(x.meta["val"], kind(trace, pair[0]))
    with graph.inserting_before(changing.node[backward]):
        new = graph.call_function(
            lowtide.backward_from_output.default,
            (changing.node[grad], changing.node[forward], side, kind(trace, pair[0])),
        )
    changing.instead(backward, new)
    name = backward.name
    changing.remove([backward])
    changing.name(new, name, backward)
