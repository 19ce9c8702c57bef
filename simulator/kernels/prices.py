"""What it costs at least to have storages, at a price for bytes: minimum cuts that grow demand by demand."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from simulator.kernels.compiled import compiled, inner

NO_LIMIT: Final = 1 << 61
NEVER: Final = 1 << 40  # no row
DEAD: Final = -1


class Cuts(NamedTuple):
    """A network whose sink is node 0, with more and more nodes demanded from row to row."""

    out_at: Any  # [node + 1], and `out`: [2, edge]: head, and place of the opposite edge, by tail
    out: Any
    left: Any  # [row, edge]: the capacity left beside what flows for its demands; NO_LIMIT: any; the last: work space
    total: Any  # [row]: what flows for all its demands: their minimum cut, or less
    dead_from: Any  # [node]: the first row in which nothing reaches the sink from it any more; NEVER
    # Work space, by node.
    seen: Any  # in which search it was reached last; or that it never reaches the sink again
    came: Any  # by which edge
    queue: Any


@inner
def demand(s: int, row: int, at: int, dead: int, search: int, c: Any) -> tuple[int, int, int]:
    """Demand one more node in left[at], which goes on from a row: (what that adds, last search, edges looked at).

    What a new demand adds is the flow that it can send on beside what flows already (Ford, Fulkerson 1956, shortest
    paths first). A node from which nothing reaches the sink any more never reaches it again: it is marked `dead`.
    """
    out_at, out, left, seen, came, queue = c.out_at, c.out, c.left, c.seen, c.came, c.queue
    added = visits = 0
    while c.dead_from[s] > row and seen[s] != dead:
        search += 1
        begin, end = 0, 1
        queue[0] = s
        seen[s] = search
        while begin < end and seen[0] != search:
            node = queue[begin]
            begin += 1
            for e in range(out_at[node], out_at[node + 1]):
                visits += 1
                head = out[0, e]
                if left[at, e] and seen[head] != search and seen[head] != dead and c.dead_from[head] > row:
                    seen[head] = search
                    came[head] = e
                    queue[end] = head
                    end += 1
        if seen[0] != search:
            for k in range(end):
                seen[queue[k]] = dead
            break
        flow = NO_LIMIT
        node = 0
        while node != s:
            e = came[node]
            flow = min(flow, left[at, e])
            node = out[0, out[1, e]]
        node = 0
        while node != s:
            e = came[node]
            back = out[1, e]
            if left[at, e] != NO_LIMIT:
                left[at, e] -= flow
            if left[at, back] != NO_LIMIT:
                left[at, back] += flow
            node = out[0, back]
        added += flow
    return added, search, visits


@compiled
def grow(nodes: Any, rows: Any, most_visits: int, c: Any) -> None:
    """Demand nodes, each from its row on (rising); after so many edges looked at, the others are not demanded."""
    row = search = visits = 0
    for k in range(nodes.shape[0] + 1):
        until = rows[k] if k < nodes.shape[0] else c.left.shape[0] - 2
        while row < until:
            for node in range(c.seen.shape[0]):
                if c.seen[node] == DEAD and c.dead_from[node] == NEVER:
                    c.dead_from[node] = row
            row += 1
            c.total[row] = c.total[row - 1]
            for e in range(c.left.shape[1]):
                c.left[row, e] = c.left[row - 1, e]
        if k < nodes.shape[0] and visits <= most_visits:
            added, search, more = demand(nodes[k], row, row, DEAD, search, c)
            c.total[row] += added
            visits += more
    for node in range(c.seen.shape[0]):
        c.seen[node] = 0
