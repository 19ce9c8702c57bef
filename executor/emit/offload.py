"""Let a value wait in host memory, by the ops of `executor.codecs.host`, as `simulator.levers.offload` does."""

from __future__ import annotations

import torch

from executor.codecs.host import new_ticket, new_value
from executor.codecs.payloads import lies_dense
from executor.emit.pack import readers
from executor.rewriting import Changing
from simulator.levers.offload import place
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.trace import BACKWARD, FORWARD

lowtide = torch.ops.lowtide


def change(changing: Changing, rewrite: Rewrite) -> None:
    """Put the four ops in, and let all that takes the value take what is reloaded; a value that backward no longer
    reads, because of a rewrite before, is left as it is. Raises PlanError if the value has gaps in memory, or the graph
    lacks an op that the plan names.
    """
    program, graph = changing.program, changing.graph
    (op, captured, suffix), there = changing.made(rewrite.storage), set(graph.nodes)
    value, val = changing.node[captured], captured.meta["val"]
    if value not in there or not readers(changing, value)[1]:
        return
    if not lies_dense(val.shape, val.stride()):
        raise PlanError(f"{captured.name} has gaps in memory and cannot be copied away; please report this.")

    def named(what: str) -> str:
        return f"{op.node.name}_{what}{suffix}"

    layout = (list(val.shape), list(val.stride()), val.dtype)
    with val.fake_mode:
        ticket = new_ticket(val)
        again = new_value(ticket, *layout)
    with graph.inserting_after(changing.end(value)):
        out = changing.call(lowtide.offload.default, (value,), ticket, named("offloaded"), captured)
    with graph.inserting_after(out):
        back = changing.call(lowtide.reload.default, (out, *layout), again, named("reloaded"), captured)
    value.replace_all_uses_with(back, delete_user_cb=lambda user: user is not out)
    for name, tag, target, phase, before in (
        ("out", "is_forward", lowtide.wait_out.default, FORWARD, rewrite.out_before),
        ("prefetched", "is_backward", lowtide.prefetch.default, BACKWARD, rewrite.in_before),
    ):
        i = place(changing.trace, before, phase, lambda i: changing.node[program.ops[i].node] in there)
        if i >= 0:
            where = graph.inserting_before(changing.node[program.ops[i].node])
        else:
            of_phase = [
                n for n in graph.nodes if n.op == "call_function" and n.meta["partitioner_tag"] == tag
            ]
            where = graph.inserting_after(of_phase[-1])
        with where:
            changing.call(target, (back, out), None, named(name), captured, late=phase == BACKWARD)
