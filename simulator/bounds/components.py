"""What is wanted and what is there at an instant, as small networks that only the price of bytes connects.

Which ops and storages a network has, and what its edges mean, stands in `simulator.bounds.bound`. Networks that are
alike, of which repeated layers make many, are solved once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from simulator.bounds.mincut import Corner, Link, Rerun, corners
from simulator.core.problem import Problem

Known = dict[tuple[tuple[Rerun, ...], tuple[Link, ...]], tuple[Corner, ...]]  # network -> its corners


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Ops that links connect: storages that are wanted only if one of the ops that read them runs again."""

    ops: tuple[int, ...]  # rising
    outputs: tuple[tuple[int, ...], ...]  # of each op, those that are wanted in any case
    links: tuple[int, ...]  # storages, rising
    corners: tuple[Corner, ...]

    @property
    def steps(self) -> list[tuple[int, int]]:
        """From corner to corner: (added time, bytes saved)."""
        return [(b.time_ns - a.time_ns, a.nbytes - b.nbytes) for a, b in pairwise(self.corners)]


def components(
    problem: Problem, wanted: Sequence[bool], link: Sequence[bool], known: Known
) -> Iterator[Component]:
    """All components with a wanted storage, at an instant.

    Args:
        problem: the trace.
        wanted: [storage]: made before the instant, not there whatever the plan, and read after it.
        link: [storage]: made before the instant in forward, and neither wanted nor there whatever the plan.
        known: networks that are solved; more come in.
    """
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
        outputs = tuple(tuple(s for s in problem.creates[p] if wanted[s]) for p in mine)
        network = (
            tuple(
                Rerun(ops.time_ns[p] if problem.may_rerun[p] else -1, sum(nbytes[s] for s in made))
                for p, made in zip(mine, outputs, strict=True)
            ),
            tuple(
                Link(nbytes[s], place[producer[s]], tuple(sorted(place[p] for p in readers[s])))
                for s in links
            ),
        )
        if network not in known:
            known[network] = corners(*network)
        yield Component(ops=tuple(mine), outputs=outputs, links=tuple(links), corners=known[network])
