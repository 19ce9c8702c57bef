"""Run an activation that is written out in steps as torch's one op, as `simulator.core.rewrites.fuse` does."""

from __future__ import annotations

from operator import attrgetter

import torch

from executor.rewriting import Changing
from simulator.core.rewrites.fuse import chain_of
from traces.errors import PlanError
from traces.records.plan import Rewrite


def change(changing: Changing, rewrite: Rewrite) -> None:
    """Put the two ops in the place of the steps; where a rewrite before has taken one out, all is left as it is. Raises
    PlanError if the storage is not the output of such a chain in this graph, or the op lays its result out otherwise.
    """
    program, graph = changing.program, changing.graph
    chain = chain_of(changing.chains, rewrite)
    if not {changing.node[program.ops[i].node] for i in (*chain.forward, *chain.backward)} <= {*graph.nodes}:
        return
    steps = (chain.backward, chain.forward)  # backward's steps take forward's values
    for ops, (at, target, taken, _) in zip(steps, reversed(chain.calls), strict=True):
        old, nodes = program.ops[at].node, [program.ops[i].node for i in taken]
        op = attrgetter(target.removeprefix("aten."))(torch.ops.aten)
        named = {"approximate": chain.options[0]} if chain.options else {}
        was = old.meta["val"]
        with was.fake_mode:
            made = op(*(n.meta["val"] for n in nodes), **named)
        if (made.shape, made.stride(), made.dtype) != (was.shape, was.stride(), was.dtype):
            raise PlanError(f"{target} lays its result out otherwise than {old.name}; please report this.")
        with graph.inserting_before(changing.node[old]):
            new = graph.call_function(op, tuple(changing.node[n] for n in nodes), named)
        changing.instead(old, new)
        changing.remove(program.ops[i].node for i in ops)
        changing.name(new, old.name, old)
        changing.node[old] = new
