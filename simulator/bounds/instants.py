"""Turn a Trace into what single instants of the step demand of every plan: bytes, and added time per byte saved.

The argument for it stands in `simulator.bounds.bound`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Final

from simulator.bounds.mincut import Corner, Link, Rerun, corners
from simulator.engine import run
from simulator.graph import Graph, analyse
from simulator.schedule import build
from traces.trace import Trace

TURN: Final = -1  # the instant when forward has ended, in place of an op id
LEAST_INSTANTS: Final = 8  # looked at for one budget, if so many exceed it
MOST_WORK: Final = 500_000  # ops times instants, beyond that


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """What one instant demands: the free capacity is the budget less `unavoidable_bytes`."""

    op: int
    unavoidable_bytes: int
    most_bytes: int  # of what may be in memory beyond that: with nothing to run again
    steps: tuple[tuple[int, int], ...]  # (added time, bytes saved), cheapest time per byte first

    def added(self, budget_bytes: int) -> tuple[int, int, int] | None:
        """Added time rounded down and the price as (ns, bytes); None if even every saving is not enough."""
        over = self.most_bytes + self.unavoidable_bytes - budget_bytes
        time_ns, price = 0, (0, 1)
        for ns, nbytes in self.steps:
            if over <= 0:
                break
            price = (ns, nbytes)
            time_ns += ns if over >= nbytes else ns * over // nbytes
            over -= nbytes
        return None if over > 0 else (time_ns, *price)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One split of one component: what is computed again after the instant, and what is kept for that."""

    component: int  # its first op
    released: tuple[int, ...]  # storages
    saved: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is in memory at an instant whatever the plan, and what is wanted after it (by storage id)."""

    unavoidable_bytes: int
    wanted: set[int]
    forced: set[int]
    at: int  # what was made before this op can be in memory


# Ops of a component, the wanted outputs of every op, the component's links, its corners.
Solved = tuple[list[int], dict[int, list[int]], list[int], tuple[Corner, ...]]


class Instants:
    """The facts about one trace that all instants share, and the instants worked out so far."""

    def __init__(self, trace: Trace, graph: Graph | None = None) -> None:
        self.trace = trace
        self.graph = graph = graph or analyse(trace)
        ops, sts = trace.ops, trace.storages
        n_st = len(sts)
        self.turn = turn = graph.first_backward_op
        candidate = [False] * n_st
        for s in graph.candidates:
            candidate[s] = True
        self.last_read = [-1] * n_st  # op, in any phase
        forced_until = list(sts.hold)
        for i in range(len(ops)):
            for s in ops.reads[i]:
                self.last_read[s] = i
                kept = graph.pinned[s] or (graph.wanted[s] and not candidate[s])
                if i < turn or kept or sts.producer[s] >= turn:
                    forced_until[s] = max(forced_until[s], i)
        self.forced_until = forced_until
        self.made = [s for s in range(n_st) if sts.producer[s] >= 0]
        self.made_forward = [s for s in self.made if sts.producer[s] < turn]
        # By op: the schedule of an empty plan has no further steps.
        self.peaks = run(trace, build(trace, (), graph), graph).peak_bytes
        self._instants: dict[int, Instant] = {}
        self._corners: dict[object, tuple[Corner, ...]] = {}

    def at(self, op: int) -> Instant:
        """The instant at which op `op` first runs, or the turn."""
        if op not in self._instants:
            self._instants[op] = self._instant(op)
        return self._instants[op]

    def overfull(self, budget_bytes: int) -> list[int]:
        """The turn, and the ops that would exceed the budget if everything were kept and that nothing outdoes.

        A later instant of backward with as high a peak outdoes an earlier one, because fewer storages are left to
        recompute; in forward an earlier instant outdoes a later one. On a large trace only the highest are taken.
        """
        worth: list[int] = []
        top = budget_bytes
        for i in range(len(self.peaks) - 1, self.turn - 1, -1):
            if self.peaks[i] > top:
                top = self.peaks[i]
                worth.append(i)
        top = budget_bytes
        for i in range(self.turn):
            if self.peaks[i] > top:
                top = self.peaks[i]
                worth.append(i)
        worth.sort(key=lambda i: (-self.peaks[i], i))
        return [TURN, *worth[: max(LEAST_INSTANTS, MOST_WORK // max(1, len(self.peaks)))]]

    def _instant(self, op: int) -> Instant:
        setting = self.setting(op)
        most, steps = self._components(setting)
        return Instant(op=op, unavoidable_bytes=setting.unavoidable_bytes, most_bytes=most, steps=steps)

    def cuts(self, op: int) -> tuple[Cut, ...]:
        """The cuts of all components of an instant, by rising price; at first everything that may be is kept.

        A later cut of a component takes the place of its earlier ones.
        """
        out: list[tuple[Fraction, Cut]] = []
        for component, outputs, own, found in self._solved(self.setting(op)):
            for k, corner in enumerate(found):
                price = Fraction(-1)  # what runs again at no price
                if k:
                    a = found[k - 1]
                    price = Fraction(corner.time_ns - a.time_ns, a.nbytes - corner.nbytes)
                released = tuple(s for p in corner.again for s in outputs[component[p]])
                saved = tuple(own[x] for x in corner.saved)
                if released or saved:
                    out.append((price, Cut(component=component[0], released=released, saved=saved)))
        return tuple(cut for _, cut in sorted(out, key=lambda c: (c[0], c[1].component)))

    def setting(self, op: int) -> Setting:
        """What is in memory while op `op` first runs, or at the turn."""
        trace, graph = self.trace, self.graph
        ops, nbytes, producer = trace.ops, trace.storages.nbytes, trace.storages.producer
        at = self.turn if op == TURN else op  # what was made before `at` can be in memory
        needed_now: frozenset[int] = frozenset() if op == TURN else frozenset(ops.reads[op])
        forced = {
            s for s in self.made if producer[s] < at and (self.forced_until[s] >= at or s in needed_now)
        }
        unavoidable = trace.resident_bytes
        if op != TURN:
            unavoidable += graph.rise_bytes[op]
            taken = ops.overwrites[op]
            if taken in forced and self.forced_until[taken] <= op:
                forced.discard(taken)
        unavoidable += sum(nbytes[s] for s in forced)
        after = at - 1 if op == TURN else op

        wanted = {
            s for s in self.made_forward if producer[s] < at and s not in forced and self.last_read[s] > after
        }
        return Setting(unavoidable_bytes=unavoidable, wanted=wanted, forced=forced, at=at)

    def _components(self, setting: Setting) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Bytes with everything wanted kept, and the savings of all components, cheapest first."""
        most = 0
        steps: list[tuple[int, int]] = []
        for _, _, _, found in self._solved(setting):
            most += found[0].nbytes
            steps += [(b.time_ns - a.time_ns, a.nbytes - b.nbytes) for a, b in pairwise(found)]
        # Shifted far enough that two different prices never round to the same int, nor swap places.
        shift = 2 * max((b for _, b in steps), default=1).bit_length()
        steps.sort(key=lambda step: ((step[0] << shift) // step[1], step))
        return most, tuple(steps)

    def _solved(self, setting: Setting) -> Iterator[Solved]:
        """The components of an instant with their corners."""
        wanted, forced, at = setting.wanted, setting.forced, setting.at
        ops, producer = self.trace.ops, self.trace.storages.producer
        outputs: dict[int, list[int]] = {}  # op that may be needed again -> its wanted outputs
        for s in sorted(wanted):
            outputs.setdefault(producer[s], []).append(s)
        links: dict[int, list[int]] = {}  # link -> ops that read it
        stack = list(outputs)
        while stack:
            p = stack.pop()
            for s in ops.reads[p]:
                if s in wanted or s in forced or not 0 <= producer[s] < at:
                    continue
                if s not in links:
                    links[s] = []
                    if producer[s] not in outputs:
                        outputs[producer[s]] = []
                        stack.append(producer[s])
                links[s].append(p)
        root = {p: p for p in outputs}

        def find(p: int) -> int:
            while root[p] != p:
                root[p] = root[root[p]]
                p = root[p]
            return p

        for s, readers in links.items():
            for p in readers:
                root[find(p)] = find(producer[s])
        members: dict[int, list[int]] = {}
        for p in sorted(outputs):
            members.setdefault(find(p), []).append(p)
        links_of: dict[int, list[int]] = {}
        for s in sorted(links):
            links_of.setdefault(find(producer[s]), []).append(s)
        for r, component in members.items():
            own = links_of.get(r, [])
            yield component, outputs, own, self._solve(component, outputs, own, links)

    def _solve(
        self, component: list[int], outputs: dict[int, list[int]], own: list[int], links: dict[int, list[int]]
    ) -> tuple[Corner, ...]:
        ops, nbytes, producer = self.trace.ops, self.trace.storages.nbytes, self.trace.storages.producer
        key = (tuple((p, *outputs[p]) for p in component), tuple((s, *links[s]) for s in own))
        if key not in self._corners:
            place = {p: k for k, p in enumerate(component)}
            self._corners[key] = corners(
                tuple(
                    Rerun(
                        ops.time_ns[p] if self.graph.may_rerun[p] else -1, sum(nbytes[s] for s in outputs[p])
                    )
                    for p in component
                ),
                tuple(Link(nbytes[s], place[producer[s]], tuple(place[p] for p in links[s])) for s in own),
            )
        return self._corners[key]
