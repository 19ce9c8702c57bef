"""Split what is wanted and what is there at an instant into small networks that only the price of bytes connects, and
find the cheapest split of each at a price: a minimum cut, exactly.

Which ops and storages a network has, and what its edges mean, stands in `simulator.bounds`. Networks that are
alike, of which repeated layers make many, are solved once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress, pairwise

from simulator.core.problem import Problem


class Network:
    """A directed graph with int capacities, grown edge by edge; nodes are numbered from 0.

    Capacities are Python ints of any size, so nothing is ever rounded. Shortest augmenting paths (Edmonds and Karp
    1972); O(nodes * edges^2), far less on the networks here.
    """

    def __init__(self, nodes: int) -> None:
        self._left: list[dict[int, int]] = [{} for _ in range(nodes)]  # node -> head -> capacity that is left

    def edge(self, tail: int, head: int, capacity: int) -> None:
        self._left[tail][head] = self._left[tail].get(head, 0) + capacity
        self._left[head].setdefault(tail, 0)

    def source_side(self, source: int, sink: int) -> list[bool]:
        """Node -> whether it lies on the source's side of the minimum cut with the fewest nodes there.

        Uses the network up: call it once.
        """
        while True:
            came = self._reached(source, sink)
            if sink not in came:
                return [node in came for node in range(len(self._left))]
            path, node = [], sink
            while node != source:
                path.append((came[node], node))
                node = came[node]
            flow = min(self._left[tail][head] for tail, head in path)
            for tail, head in path:
                self._left[tail][head] -= flow
                self._left[head][tail] += flow

    def _reached(self, source: int, sink: int) -> dict[int, int]:
        """Node -> the one before it on a shortest way from the source; as far as the sink, if that is reached."""
        came, queue = {source: source}, [source]
        for node in queue:
            for head, room in self._left[node].items():
                if room and head not in came:
                    came[head] = node
                    queue.append(head)
            if sink in came:
                break
        return came


@dataclass(frozen=True, slots=True, kw_only=True)
class Corner:
    """A split of a component that is best at some price: the time of what runs again, the bytes of what is saved."""

    time_ns: int
    nbytes: int
    # Whether each op's wanted outputs are saved, then each link; None: nothing needs it.
    saved: tuple[bool | None, ...] = field(compare=False, default=())


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


@cache
def corners(ops: tuple[Rerun, ...], links: tuple[Link, ...]) -> tuple[Corner, ...]:
    """All corners of the lower convex hull of (time, bytes), by rising time and falling bytes.

    The first has no more time than must be; each price per byte has its best split among the corners. Found by
    cutting at the price between two known corners until no cut is better (Eisner and Severance 1976).
    """
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
    of_links = (not again[x.maker] if again[n + k] else None for k, x in enumerate(links))
    saved = (*(not r for r in again[:n]), *of_links)
    nbytes = sum(compress((*(o.saved_bytes for o in ops), *(x.nbytes for x in links)), saved))
    return Corner(time_ns=sum(compress((o.time_ns for o in ops), again)), nbytes=nbytes, saved=saved)


def steps_of(found: tuple[Corner, ...]) -> list[tuple[int, int]]:
    """From corner to corner: (added time, bytes saved)."""
    return [(b.time_ns - a.time_ns, a.nbytes - b.nbytes) for a, b in pairwise(found)]


def components(
    problem: Problem, wanted: Sequence[bool], link: Sequence[bool]
) -> Iterator[tuple[tuple[Corner, ...], list[list[int]]]]:
    """The corners of each component with a wanted storage, and what their `saved` is about: ops that links connect,
    storages that are wanted only if one of the ops that read them runs again. `wanted`: made before the instant, not
    there whatever the plan, and read after it; `link`: made before it in forward, neither wanted nor there."""
    ops, sts = problem.trace.ops, problem.trace.storages
    reads, producer, nbytes = ops.reads, sts.producer, sts.nbytes
    root = {p: p for p, is_wanted in zip(producer, wanted, strict=True) if is_wanted}
    readers: dict[int, list[int]] = {}  # of each link
    stack = list(root)
    while stack:
        p = stack.pop()
        for s in reads[p]:
            if not link[s]:
                continue
            if s not in readers:
                readers[s] = []
                if producer[s] not in root:
                    root[producer[s]] = producer[s]
                    stack.append(producer[s])
            readers[s].append(p)

    def find(p: int) -> int:
        while root[p] != p:
            root[p] = root[root[p]]
            p = root[p]
        return p

    for s, by in readers.items():
        for p in by:
            root[find(p)] = find(producer[s])
    members: dict[int, tuple[list[int], list[int]]] = {}
    for p in sorted(root):
        members.setdefault(find(p), ([], []))[0].append(p)
    for s in sorted(readers):
        members[find(producer[s])][1].append(s)
    for mine, links in members.values():
        place = {p: k for k, p in enumerate(mine)}
        outputs = [[s for s in problem.creates[p] if wanted[s]] for p in mine]
        times = (ops.time_ns[p] if problem.may_rerun[p] else -1 for p in mine)
        again = tuple(map(Rerun, times, (sum(nbytes[s] for s in made) for made in outputs)))
        users = (tuple(sorted(place[p] for p in readers[s])) for s in links)
        of_links = tuple(Link(nbytes[s], place[producer[s]], q) for s, q in zip(links, users, strict=True))
        yield corners(again, of_links), [*outputs, *([s] for s in links)]
