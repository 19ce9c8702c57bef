"""What each storage adds to the least cost of having all those before it, at a price for bytes: marginal cuts."""

from __future__ import annotations

from typing import Any, Final

from simulator.kernels.compiled import compiled

NO_LIMIT: Final = 1 << 61
DEAD: Final = -1


@compiled
def marginal_cuts(
    order: Any, out_at: Any, out: Any, left: Any, most_visits: int, seen: Any, came: Any, queue: Any, share: Any
) -> None:  # fmt: skip
    """Demand one node after the other, and note how much each of them lifts the minimum cut to the sink (node 0).

    What a new demand adds is the flow that it can send on beside what flows already (Ford, Fulkerson 1956, shortest
    paths first). A node from which nothing reaches the sink any more never reaches it again, so none is tried twice.

    Args:
        order: the nodes that are demanded.
        out_at: [node + 1], and `out`: [3, edge]: head, and place of the opposite edge, by tail.
        out: see there.
        left: [edge], in and out: the capacity that is left; NO_LIMIT: any.
        most_visits: edges looked at, after which the rest of the order adds nothing.
        seen: [node], work space, 0: in which turn it was reached last; DEAD: it never reaches the sink again.
        came: [node], work space: by which edge.
        queue: [node], work space.
        share: [node], out: for each node of the order, what it adds.
    """
    visits = 0
    turn = 0
    for s in order:
        while seen[s] != DEAD:
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
                    if left[e] and seen[head] != turn and seen[head] != DEAD:
                        seen[head] = turn
                        came[head] = e
                        queue[end] = head
                        end += 1
            if seen[0] != turn:
                for k in range(end):
                    seen[queue[k]] = DEAD
                break
            flow = NO_LIMIT
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
