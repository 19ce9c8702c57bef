"""The cheapest split of a component of ops and storages at a price for bytes: a minimum cut, exactly."""

from __future__ import annotations

from dataclasses import dataclass, field


class Network:
    """A directed graph with int capacities, grown edge by edge; nodes are numbered from 0.

    Capacities are Python ints of any size, so nothing is ever rounded. Dinic's algorithm (Dinitz 1970): level graph
    by breadth-first search, then augmenting paths along it; O(nodes^2 * edges), far less on the networks here.
    """

    def __init__(self, nodes: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(nodes)]  # node -> edge ids; edge e's reverse is e ^ 1
        self._to: list[int] = []
        self._left: list[int] = []  # residual capacity by edge id

    def edge(self, tail: int, head: int, capacity: int) -> None:
        self._out[tail].append(len(self._to))
        self._to.append(head)
        self._left.append(capacity)
        self._out[head].append(len(self._to))
        self._to.append(tail)
        self._left.append(0)

    def source_side(self, source: int, sink: int) -> list[bool]:
        """Node -> whether it lies on the source's side of the minimum cut with the fewest nodes there.

        Uses the network up: call it once.
        """
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return [d >= 0 for d in level]
            self._block(source, sink, level)

    def _levels(self, source: int, sink: int) -> list[int]:
        out, to, left = self._out, self._to, self._left
        level = [-1] * len(out)
        level[source] = 0
        queue = [source]
        for node in queue:
            for e in out[node]:
                if left[e] and level[to[e]] < 0:
                    level[to[e]] = level[node] + 1
                    queue.append(to[e])
        return level

    def _block(self, source: int, sink: int, level: list[int]) -> None:
        """Saturate every shortest path."""
        out, to, left = self._out, self._to, self._left
        position = [0] * len(out)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                flow = min(left[e] for e in path)
                for e in path:
                    left[e] -= flow
                    left[e ^ 1] += flow
                first = next(k for k, e in enumerate(path) if not left[e])
                node = to[path[first] ^ 1]
                del path[first:]
                continue
            while position[node] < len(out[node]):
                e = out[node][position[node]]
                if left[e] and level[to[e]] == level[node] + 1:
                    path.append(e)
                    node = to[e]
                    break
                position[node] += 1
            else:
                if not path:
                    return
                node = to[path.pop() ^ 1]
                position[node] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Corner:
    """One way to split a component that is best at some price: what runs again, and what is saved."""

    time_ns: int
    nbytes: int
    again: tuple[int, ...] = field(default=(), compare=False)  # positions of the ops that run again
    saved: tuple[int, ...] = field(default=(), compare=False)  # of the links that are saved for them


@dataclass(frozen=True, slots=True)
class Rerun:
    """An op that may be needed again."""

    time_ns: int  # -1: it may not run again
    saved_bytes: int  # of its outputs that are wanted in any case: saved unless it runs again


@dataclass(frozen=True, slots=True)
class Link:
    """A storage that is wanted only if one of its readers runs again: then it is saved, or made again."""

    nbytes: int
    maker: int  # position among the component's ops
    readers: tuple[int, ...]


def corners(ops: tuple[Rerun, ...], links: tuple[Link, ...]) -> tuple[Corner, ...]:
    """All corners of the lower convex hull of (time, bytes), by rising time and falling bytes.

    The first has no more time than must be; each price per byte has its best split among the corners. Found by
    cutting at the price between two known corners until no cut is better (Eisner and Severance 1976).
    """
    if len(ops) == 1 and not links:
        time_ns, saved = ops[0].time_ns, ops[0].saved_bytes
        if time_ns < 0 or not saved:
            return (Corner(time_ns=0, nbytes=saved),)
        end = Corner(time_ns=time_ns, nbytes=0, again=(0,))
        return (Corner(time_ns=0, nbytes=saved), end) if time_ns else (end,)
    all_bytes = sum(o.saved_bytes for o in ops) + sum(x.nbytes for x in links)
    all_time = sum(o.time_ns for o in ops if o.time_ns > 0)
    first = _cut(ops, links, all_bytes + 1, 1)
    last = _cut(ops, links, 1, all_time + 1)
    out = [first]
    stack = [last] if last.time_ns > first.time_ns else []
    while stack:
        a, b = out[-1], stack[-1]
        per_ns, per_byte = a.nbytes - b.nbytes, b.time_ns - a.time_ns
        c = _cut(ops, links, per_ns, per_byte)
        if per_ns * c.time_ns + per_byte * c.nbytes < per_ns * a.time_ns + per_byte * a.nbytes:
            stack.append(c)
        else:
            out.append(stack.pop())
    return tuple(out)


def _cut(ops: tuple[Rerun, ...], links: tuple[Link, ...], per_ns: int, per_byte: int) -> Corner:
    """The split with the least per_ns * time + per_byte * bytes."""
    n = len(ops)
    source, sink = n + len(links), n + len(links) + 1
    net = Network(n + len(links) + 2)
    infinite = 1 + per_byte * (sum(o.saved_bytes for o in ops) + sum(x.nbytes for x in links))
    for p, o in enumerate(ops):
        net.edge(source, p, per_byte * o.saved_bytes)
        # More than all that could be saved is as good as infinite.
        net.edge(p, sink, min(per_ns * o.time_ns, infinite) if o.time_ns >= 0 else infinite)
    for k, x in enumerate(links):
        net.edge(n + k, x.maker, per_byte * x.nbytes)
        for p in x.readers:
            net.edge(p, n + k, infinite)
    again = net.source_side(source, sink)
    return Corner(
        time_ns=sum(o.time_ns for o, r in zip(ops, again[:n], strict=True) if r),
        nbytes=sum(o.saved_bytes for o, r in zip(ops, again[:n], strict=True) if not r)
        + sum(x.nbytes for k, x in enumerate(links) if again[n + k] and not again[x.maker]),
        again=tuple(p for p in range(n) if again[p]),
        saved=tuple(k for k, x in enumerate(links) if again[n + k] and not again[x.maker]),
    )
