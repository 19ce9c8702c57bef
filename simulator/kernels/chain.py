"""Turn an op and what is there into its chain: the ops that must run again before it, in the order in which they do.

A depth-first walk from the inputs of the op: an op runs again after all that it needs has, and once however many need
it. Written once and compiled into each kernel that walks: they differ only in what is there and in what may run again.
"""

from __future__ import annotations

from typing import Any

from simulator.kernels.compiled import inlined


@inlined
def chain(
    c: int,
    mark: int,
    there: Any,
    needs_at: Any,
    needs: Any,
    producer: Any,
    may_rerun: Any,
    demanded: Any,
    visited: Any,
    stack: Any,
    order: Any,
) -> int:
    """How many ops must run again for op c, which stand in `order`; ~b if op b must and may not.

    Args:
        c: the op, by position.
        mark: a number that `visited` and `demanded` hold nowhere yet.
        there: [storage], whether it is there when c is about to run.
        needs_at: [op + 1], and `needs`: by op the storages that it needs, in the order in which they are rebuilt.
        needs: see there.
        producer: [storage].
        may_rerun: [op], or None: all may.
        demanded: [storage], out: `mark` where some op of the chain, or c, needs it and it is not there.
        visited: [op], out: `mark` where it is in the chain.
        stack: work space.
        order: out.
    """
    n_order = top = 0
    for j in range(needs_at[c + 1] - 1, needs_at[c] - 1, -1):
        if not there[needs[j]]:
            stack[top] = needs[j]
            top += 1
    while top:
        top -= 1
        x = stack[top]
        if x < 0:
            order[n_order] = ~x
            n_order += 1
            continue
        demanded[x] = mark
        b = producer[x]
        if visited[b] == mark:
            continue
        visited[b] = mark
        if may_rerun is not None and not may_rerun[b]:
            return ~int(b)
        stack[top] = ~b
        top += 1
        for j in range(needs_at[b + 1] - 1, needs_at[b] - 1, -1):
            if not there[needs[j]]:
                stack[top] = needs[j]
                top += 1
    return n_order
