"""The chain of an op: the ops that must run again before it, in the order in which they do.

A depth-first walk from the inputs of the op: an op runs again after all that it needs has, and once however many need
it. Written once and compiled into each kernel that walks.
"""

from __future__ import annotations

from typing import Any

from simulator.kernels.compiled import inlined
from simulator.kernels.records import long


@inlined
def chain(c: int, at: int, present: Any, facts: Any, work: Any, checked: bool) -> Any:
    """How many ops must run again for op c, each as ~op from `work.op[at]` on; ~b if op b must and may not.

    Args:
        c: the op, by position.
        at: where to write them.
        present: [storage], whether it is there when c is about to run.
        facts: the trace.
        work: out: `demanded` is c where some op of the chain, or c, needs what is not there, and `visited` where an op
            is in the chain; they were c nowhere before.
        checked: whether it matters if an op may run again.
    """
    ops, storages, ids, stack, order = facts.ops, facts.storages, facts.ids, work.stack, work.op
    n_order = top = long(0)
    for j in range(ops[c + 1].needs_at - 1, ops[c].needs_at - 1, -1):
        if not present[ids[j]]:
            stack[top] = ids[j]
            top += 1
    while top:
        top -= 1
        x = stack[top]
        if x < 0:
            order[at + n_order] = x
            n_order += 1
            continue
        work.demanded[x] = c
        b = storages[x].producer
        if work.visited[b] == c:
            continue
        work.visited[b] = c
        if checked and not ops[b].may_rerun:
            return ~long(b)
        stack[top] = ~b
        top += 1
        for j in range(ops[b + 1].needs_at - 1, ops[b].needs_at - 1, -1):
            if not present[ids[j]]:
                stack[top] = ids[j]
                top += 1
    return n_order
