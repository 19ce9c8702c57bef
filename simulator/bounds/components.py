"""What is wanted and what is there at an instant, as small networks that only the price of bytes connects.

Which ops and storages a network has, and what its edges mean, stands in `simulator.bounds.bound`. Most ops stand
alone: all that they read is there or wanted anyway. These are told as arrays. The others are found by a walk; from one
instant to the next only those are walked again for which something has changed, and networks that are alike, of which
repeated layers make many, are solved once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.bounds.mincut import Corner, Link, Rerun, corners
from simulator.core.problem import Problem

NEVER: Final = -1  # the time of an op that may not run again
NONE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The ops that no link connects with another, by rising id; arrays with one entry an op."""

    op: NDArray[np.int64]
    time_ns: NDArray[np.int64]  # NEVER: it may not run again
    saved_bytes: NDArray[np.int64]  # of its wanted outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """Ops that links connect: storages that are wanted only if one of the ops that read them runs again."""

    ops: tuple[int, ...]  # rising
    outputs: tuple[tuple[int, ...], ...]  # of each op, those that are wanted in any case
    links: tuple[int, ...]  # storages, rising
    corners: tuple[Corner, ...]

    @property
    def steps(self) -> list[tuple[int, int]]:
        """From corner to corner: (added time, bytes saved)."""
        return [(b.time_ns - a.time_ns, a.nbytes - b.nbytes) for a, b in pairwise(self.corners)]


class Components:
    """All components with a wanted storage, at the instant that it was last moved to."""

    def __init__(self, problem: Problem, reader: NDArray[np.int64], read: NDArray[np.int64]) -> None:
        """At no instant yet; `reader` and `read` are the pairs of an op of forward and a storage that it reads."""
        trace = problem.trace
        self.trace, self.problem = trace, problem
        self._reader, self._read = reader, read
        self._producer = np.array(trace.storages.producer, np.int64)
        self._nbytes = np.array(trace.storages.nbytes, np.int64)
        may = np.array(problem.may_rerun, np.bool_)
        self._time_ns = np.where(may, np.array(trace.ops.time_ns, np.int64), NEVER)
        none = np.zeros(0, np.int64)
        self.alone = Alone(op=none, time_ns=none, saved_bytes=none)
        self.linked: dict[int, Linked] = {}  # by a number of no meaning
        self.linked_bytes = 0  # of all of them, with everything saved
        self.linked_steps: Counter[tuple[int, int]] = Counter()
        self._number = 0
        self._part_of = np.full(problem.forward_end, NONE, np.int64)  # op -> its component's number
        self._wanted = np.zeros(len(trace.storages), np.bool_)
        self._link = np.zeros(len(trace.storages), np.bool_)
        self._known: dict[tuple[tuple[Rerun, ...], tuple[Link, ...]], tuple[Corner, ...]] = {}

    def move(self, wanted: NDArray[np.bool_], link: NDArray[np.bool_]) -> None:
        """To another instant.

        Args:
            wanted: [storage]: made before the instant, not there whatever the plan, and read after it.
            link: [storage]: made before the instant in forward, and neither wanted nor there whatever the plan.
        """
        n_ops = len(self._part_of)
        has, touched, reads_link = (np.zeros(n_ops, np.bool_) for _ in range(3))
        saved_bytes = np.zeros(n_ops, np.int64)
        makers = self._producer[wanted]
        has[makers] = True
        np.add.at(saved_bytes, makers, self._nbytes[wanted])
        reads_link[self._reader[link[self._read]]] = True
        changed = (wanted != self._wanted) | (link != self._link)
        touched[self._producer[changed]] = True
        touched[self._reader[changed[self._read]]] = True
        for number in np.unique(self._part_of[touched]).tolist():
            if number != NONE:
                self._forget(number)
        self._wanted, self._link = wanted, link
        self._connect(np.flatnonzero(has & reads_link & (self._part_of == NONE)).tolist())
        op = np.flatnonzero(has & (self._part_of == NONE))
        self.alone = Alone(op=op, time_ns=self._time_ns[op], saved_bytes=saved_bytes[op])

    def _connect(self, stack: list[int]) -> None:
        """Find the components of these ops, which read links."""
        reads, producer = self.trace.ops.reads, self.trace.storages.producer
        is_link = self._link.tolist() if stack else []
        readers: dict[int, list[int]] = {}
        root = {p: p for p in stack}
        while stack:
            p = stack.pop()
            for s in reads[p]:
                if not is_link[s]:
                    continue
                if s not in readers:
                    readers[s] = []
                    if producer[s] not in root:
                        # What a component that stayed as it was makes for others belongs to these now.
                        number = int(self._part_of[producer[s]])
                        more = (producer[s],) if number == NONE else self._forget(number).ops
                        root.update((q, q) for q in more)
                        stack.extend(more)
                readers[s].append(p)

        def find(p: int) -> int:
            while root[p] != p:
                root[p] = root[root[p]]
                p = root[p]
            return p

        for s, by in readers.items():
            for p in by:
                root[find(p)] = find(producer[s])
        members: dict[int, list[int]] = {}
        for p in sorted(root):
            members.setdefault(find(p), []).append(p)
        links_of: dict[int, list[int]] = {}
        for s in sorted(readers):
            links_of.setdefault(find(producer[s]), []).append(s)
        for r, ops in members.items():
            self._add(ops, links_of[r], readers)

    def _add(self, ops: list[int], links: list[int], readers: dict[int, list[int]]) -> None:
        nbytes, producer = self.trace.storages.nbytes, self.trace.storages.producer
        place = {p: k for k, p in enumerate(ops)}
        outputs = tuple(tuple(s for s in self.problem.creates[p] if self._wanted[s]) for p in ops)
        network = (
            tuple(
                Rerun(int(self._time_ns[p]), sum(nbytes[s] for s in mine))
                for p, mine in zip(ops, outputs, strict=True)
            ),
            tuple(
                Link(nbytes[s], place[producer[s]], tuple(sorted(place[p] for p in readers[s])))
                for s in links
            ),
        )
        if network not in self._known:
            self._known[network] = corners(*network)
        part = Linked(ops=tuple(ops), outputs=outputs, links=tuple(links), corners=self._known[network])
        self._number += 1
        self.linked[self._number] = part
        self._part_of[ops] = self._number
        self.linked_bytes += part.corners[0].nbytes
        self.linked_steps.update(part.steps)

    def _forget(self, number: int) -> Linked:
        part = self.linked.pop(number)
        self._part_of[list(part.ops)] = NONE
        self.linked_bytes -= part.corners[0].nbytes
        for step in part.steps:
            self.linked_steps[step] -= 1
            if not self.linked_steps[step]:
                del self.linked_steps[step]
        return part
