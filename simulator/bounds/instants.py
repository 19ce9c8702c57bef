"""Work out what single instants of the step demand of every plan: bytes, and added time per byte saved.

The argument for it stands in `simulator.bounds.bound`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.bounds.components import Component, Known, components
from simulator.core.problem import Problem
from traces.records.trace import EAGER

TURN: Final = -1  # the instant when forward has ended, in place of an op id
# Looked at for one budget beside the turn. On 26 traces at up to 17 budgets each, no other than the first two ever had
# the best bound, of up to 274 that exceeded the budget.
MOST_INSTANTS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """One instant's demands: the free capacity is the budget less `unavoidable_bytes`."""

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
    """One split of one component: what is computed again after the instant, and what is saved for that."""

    component: int  # its first op
    evicted: tuple[int, ...]  # storages
    saved: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The storages in memory at an instant whatever the plan, and those wanted after it, by id."""

    unavoidable_bytes: int
    wanted: NDArray[np.bool_]
    forced: NDArray[np.bool_]
    at: int  # what was made before this op can be in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A peak below which no plan can go, and the op that decides it: what must be there while it runs."""

    peak_bytes: int
    op: int  # -1: the start of the step
    resident_bytes: int  # of the peak: parameters, buffers, optimizer state, inputs
    gradient_bytes: int  # of the peak: gradients and other storages that no plan can free by then
    working_bytes: int  # of the peak: what the op itself reads, creates and uses as workspace


class Instants:
    """The facts about one trace that all instants share, and the instants worked out so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.trace = problem, problem.trace
        trace = problem.trace
        ops, sts = trace.ops, trace.storages
        self.turn = turn = problem.forward_end
        # By op: the schedule of an empty plan has no further steps but for what comes back from host memory.
        of_steps = problem.saved.timeline
        self.peaks = [
            n for n, again in zip(of_steps.peak_bytes, of_steps.recompute, strict=True) if not again
        ]
        self._instants: dict[int, Instant] = {}
        # Each pair of an op and a storage that it reads, once.
        n_st = max(1, len(sts))
        counts = np.fromiter((len(r) for r in ops.reads), np.int64, len(ops))
        flat = np.fromiter(chain.from_iterable(ops.reads), np.int64, int(counts.sum()))
        reader, read = np.divmod(np.unique(np.repeat(np.arange(len(ops)), counts) * n_st + flat), n_st)
        self.reader, self.read = reader, read
        self.nbytes, self.producer = np.array(sts.nbytes, np.int64), np.array(sts.producer, np.int64)
        self._last_read = np.full(len(sts), -1, np.int64)  # op, in any phase
        np.maximum.at(self._last_read, read, reader)
        # What no plan evicts stays until its last reader: of forward only, if nothing saves it beyond.
        stays = ~np.array([problem.is_evictable(s) for s in range(len(sts))], np.bool_)
        saved = np.array(problem.pinned, np.bool_) | np.array(problem.saved_by_default, np.bool_)
        eager = np.array([bool(f & EAGER) for f in ops.flags], np.bool_)
        forces = (stays & (saved | (self.producer >= turn)))[read] | (
            (reader < turn) & (stays[read] | eager[reader])
        )
        self.until = np.array(sts.hold, np.int64)
        np.maximum.at(self.until, read[forces], reader[forces])
        self.forced_until = self.until.tolist()
        self._known: Known = {}
        self._weigh(reader, read)

    def _weigh(self, reader: NDArray[np.int64], read: NDArray[np.int64]) -> None:
        """Return what is in memory whatever the plan: before each op, by what each op reads beyond that, and at each
        op.
        """
        ops, sizes = self.trace.ops, self.nbytes
        begin, end = self.producer + 1, self.until + 1
        lasts = (begin > 0) & (begin < end)
        change = np.zeros(len(ops) + 1, np.int64)
        np.add.at(change, begin[lasts], sizes[lasts])
        np.add.at(change, end[lasts], -sizes[lasts])
        # [op + 1]: in the gap before the op; the turn is the gap before backward.
        self.sure_bytes: list[int] = (self.trace.resident_bytes + np.cumsum(change)).tolist()
        # [op]: of what it reads, that which the gap before it need not have.
        brought = np.zeros(len(ops), np.int64)
        extra = (self.producer[read] >= 0) & (self.until[read] < reader)
        np.add.at(brought, reader[extra], sizes[read[extra]])
        self.brought_bytes: list[int] = brought.tolist()
        # [op]: while it runs.
        self.unavoidable_bytes: list[int] = [
            sure + more + rise
            for sure, more, rise in zip(
                self.sure_bytes, self.brought_bytes, self.problem.transient_bytes, strict=False
            )
        ]
        for i, s in enumerate(ops.overwrites):
            if s >= 0 and self._taken(i) >= 0:
                self.unavoidable_bytes[i] -= self.trace.storages.nbytes[s]

    def sure(self, s: int, gap: int) -> bool:
        """Return whether a storage is in memory in the gap before an op whatever the plan."""
        producer = self.trace.storages.producer[s]
        return producer < 0 or (producer < gap and self.forced_until[s] >= gap)

    def _taken(self, op: int) -> int:
        """The storage that an op takes over although it is there whatever the plan, as it need not survive; or -1."""
        s = self.trace.ops.overwrites[op]
        if s < 0 or not 0 <= self.trace.storages.producer[s] < op:
            return -1
        until = self.forced_until[s]
        return s if until == op or (until < op and s in self.trace.ops.reads[op]) else -1

    @cached_property
    def floor(self) -> Floor:
        """The highest of the instants' unavoidable bytes, at the first op that has them.

        Counts: resident storages; storages alive at that instant that are no candidates and that backward or a hold
        still needs; the op's own reads, outputs and workspace. Ignores: the working set of recomputation chains, and
        non-candidates that only chains need; so the best possible plan may lie above it.
        """
        resident, sts = self.trace.resident_bytes, self.trace.storages
        peak = max(resident, max(self.unavoidable_bytes, default=0))
        op = self.unavoidable_bytes.index(peak) if peak > resident else -1
        reads = set(self.trace.ops.reads[op]) if op >= 0 else ()
        inside = sum(sts.nbytes[s] for s in reads if sts.producer[s] >= 0 and self.sure(s, op))
        stays = self.sure_bytes[op] - resident - inside if op >= 0 else 0
        return Floor(
            peak_bytes=peak,
            op=op,
            resident_bytes=resident,
            gradient_bytes=stays,
            working_bytes=peak - resident - stays,
        )

    def at(self, op: int) -> Instant:
        """The instant at which op `op` first runs, or the turn."""
        if op not in self._instants:
            setting = self.setting(op)
            parts = self._components(setting)
            steps = Counter(step for part in parts for step in part.steps)
            # Shifted far enough that two different prices never round to the same int, nor swap places.
            shift = 2 * max((b for _, b in steps), default=1).bit_length()
            ordered = sorted(steps, key=lambda step: ((step[0] << shift) // step[1], step))
            self._instants[op] = Instant(
                op=op,
                unavoidable_bytes=setting.unavoidable_bytes,
                most_bytes=sum(part.corners[0].nbytes for part in parts),
                steps=tuple(step for step in ordered for _ in range(steps[step])),
            )
        return self._instants[op]

    def overfull(self, budget_bytes: int) -> list[int]:
        """The turn, and the ops that would exceed the budget if everything were saved and that nothing outdoes.

        A later instant of backward with as high a peak outdoes an earlier one, because fewer storages are left to
        recompute; in forward an earlier instant outdoes a later one. Only the highest are taken.
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
        return [TURN, *worth[:MOST_INSTANTS]]

    def cuts(self, op: int) -> tuple[Cut, ...]:
        """The cuts of all components of an instant, by rising price; at first everything that may be is saved.

        A later cut of a component takes the place of its earlier ones.
        """
        out: list[tuple[Fraction, Cut]] = []
        for part in self._components(self.setting(op)):
            # Before the first price: what runs again at no price.
            prices = (Fraction(-1), *(Fraction(*step) for step in part.steps))
            for price, corner in zip(prices, part.corners, strict=True):
                evicted = tuple(s for p in corner.again for s in part.outputs[p])
                saved = tuple(part.links[x] for x in corner.saved)
                if evicted or saved:
                    out.append((price, Cut(component=part.ops[0], evicted=evicted, saved=saved)))
        return tuple(cut for _, cut in sorted(out, key=lambda c: (c[0], c[1].component)))

    def setting(self, op: int) -> Setting:
        """Return what is in memory while op `op` first runs, or at the turn."""
        at = self.turn if op == TURN else op
        forced = (self.producer >= 0) & (self.producer < at) & (self.until >= at)
        after = op
        unavoidable = self.sure_bytes[at]
        if op == TURN:
            after = at - 1
        else:
            unavoidable = self.unavoidable_bytes[op]
            producer = self.trace.storages.producer
            forced[[s for s in self.trace.ops.reads[op] if 0 <= producer[s] < op]] = True
            if self._taken(op) >= 0:
                forced[self._taken(op)] = False
        made = (self.producer >= 0) & (self.producer < min(at, self.turn))
        wanted = made & ~forced & (self._last_read > after)
        return Setting(unavoidable_bytes=unavoidable, wanted=wanted, forced=forced, at=at)

    def _components(self, setting: Setting) -> list[Component]:
        made = (self.producer >= 0) & (self.producer < min(setting.at, self.turn))
        link = made & ~setting.wanted & ~setting.forced
        return list(components(self.problem, setting.wanted.tolist(), link.tolist(), self._known))
