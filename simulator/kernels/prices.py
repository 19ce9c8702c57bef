"""Turn a price for bytes into what each storage adds to the least cost of having all those before it: marginal cuts."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from simulator.kernels.compiled import compiled

NO_LIMIT: Final = 1 << 61


@compiled
def marginal_cuts(
    order: Any, out_at: Any, out: Any, left: Any, most_visits: int, n_nodes: int, share: Any
) -> None:
    """Demand one node after the other, and note how much each of them lifts the minimum cut to the sink (node 0).

    What a new demand adds is the flow that it can send on beside what flows already (Ford, Fulkerson 1956, shortest
    paths first). A node from which nothing reaches the sink any more never reaches it again, so none is tried twice.

    Args:
        order: the nodes that are demanded.
        out_at: [node + 1], and `out`: [3, edge]: head, and place of the opposite edge, by tail.
        out: see there.
        left: [edge], in and out: the capacity that is left; NO_LIMIT: any.
        most_visits: edges looked at, after which the rest of the order adds nothing.
        n_nodes: how many nodes there are.
        share: [node], out: for each node of the order, what it adds.
    """
    seen = np.full(n_nodes, -1, np.int64)
    dead = np.zeros(n_nodes, np.uint8)
    came = np.empty(n_nodes, np.int64)  # by which edge
    queue = np.empty(n_nodes, np.int64)
    visits = 0
    turn = 0
    for s in order:
        while not dead[s]:
            turn += 1
            begin, end = 0, 1
            queue[0] = s
            seen[s] = turn
            while begin < end and seen[0] != turn:
                node = queue[begin]
                begin += 1
                for e in range(out_at[node], out_at[node + 1]):
                    visits += 1
                    head = out[0, e]
                    if left[e] and seen[head] != turn and not dead[head]:
                        seen[head] = turn
                        came[head] = e
                        queue[end] = head
                        end += 1
            if seen[0] != turn:
                for k in range(end):
                    dead[queue[k]] = 1
                break
            flow = np.int64(NO_LIMIT)
            node = 0
            while node != s:
                e = came[node]
                flow = min(flow, left[e])
                node = out[0, out[1, e]]
            node = 0
            while node != s:
                e = came[node]
                back = out[1, e]
                if left[e] != NO_LIMIT:
                    left[e] -= flow
                if left[back] != NO_LIMIT:
                    left[back] += flow
                node = out[0, back]
            share[s] += flow
            if visits > most_visits:
                return
