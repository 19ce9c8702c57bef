"""A lower bound, certified, on the time that any plan within a budget adds.

The argument
------------
Take any plan that `schedule.build` accepts and whose peak is at most the budget B, and look at one instant t: while
op t of the trace runs for the first time ("the turn" is the instant when forward has ended). Let A be the storages
that were made before t and are not freed before t runs. What do we know of A?

1. Some storages are in A whatever the plan says (*forced*): those that t reads; those whose hold has not ended; what
   eager code in forward still reads; and, read by a later op, what no plan may evict: what backward made, what is
   pinned, and what cannot be made again. If t may take over the memory of one of them, and nothing forces that one to
   survive t, it counts nothing by itself. All else may be evicted between two uses, in forward as in backward.
2. The engine's peak at t is the residents, and A, and what t adds, less what t takes over. So the bytes of A that
   are not forced are at most  C = B − residents − forced − rise(t). (At the turn rise is 0: what an op leaves
   behind is never more than its peak.)
3. A storage from forward that an op after t reads (*wanted* at t) is in A, or the op that made it runs again after t:
   a copy that is there later was there at t, or was made since, and forward runs each op for the first time only once.
   When an op runs again, the same is true of each storage that it reads. Storages made at t or later cost nothing
   here. Views make no storage: whoever uses a view reads the storage itself. An op that may not run again does not.
4. The plan therefore adds at least  min { Σ time of R : (A, R) closed as in 3, Σ bytes of A not forced <= C },  where
   each op of R counts once, however many outputs it has and however often it runs. Which copy of a storage is
   in A does not matter: the first, or one recomputed before t; saved, retained or not, evicted later or again and
   again.

For a price λ >= 0 per byte, min { Σ time(R) + λ Σ bytes(A) } − λ C  is no more than that (weak duality), and the best
price gives the bound at t. For one price the minimum is a minimum cut with, for each op p that may be needed again,
a node r_p, and for each storage y that is read only by such ops (a *link*), a node n_y:

    source -> r_p   λ · bytes of p's wanted outputs (saved)    r_p -> sink      time(p), infinite if p may not run again
    r_q -> n_y      infinite, if q reads the link y            n_y -> r_p       λ · bytes(y), p makes y (saved)

A wanted storage needs no node: it is wanted anyway, so an op that reads it adds no edge. Hence the network falls
apart into many small components that only the price connects, and the minimum of the sum is the sum of the minima.
Each component's (time, bytes) corners are found once, by cuts at the rational prices between known corners; all
corners of an instant merged by price per byte give its bound for every budget at once.

Everything is an int or a ratio of ints: λ = time/bytes, with each capacity multiplied by that denominator. The
fraction of a nanosecond that is left is dropped. So nothing can lift the bound above the truth.

Each instant is a valid bound alone; the best of those looked at is reported, and which ones are looked at changes
how tight it is, not whether it holds.

Assumed of a plan, and true of all that `schedule.build` makes: ops run first in the order of the trace, only ops of
forward run again. A plan that reorders is not bound by this. What waits in host memory comes back at no time here.

Counts: at each instant, all that is in memory whatever the plan (parameters, gradients, temporaries of eager code,
the op's own reads, outputs and workspace), and each op that must then run again, once. Ignores: the memory that
recomputations themselves take, recomputations before the instant, running one op twice, and that a storage is saved
whole or not at all. So near the floor it is far below what the best plan adds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from simulator.bounds.networks import Corner, components, steps_of
from simulator.core.problem import Problem
from traces.records.trace import EAGER
from traces.units import show_percent

TURN: Final = -1  # the instant when forward has ended, in place of an op id
# Looked at for one budget beside the turn. On 26 traces at up to 17 budgets each, no other than the first two ever had
# the best bound, of up to 274 that exceeded the budget.
MOST_INSTANTS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """One instant's demands: the free capacity is the budget less `unavoidable_bytes`."""

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
class Floor:
    """A peak below which no plan can go, and the op that decides it: what must be there while it runs."""

    peak_bytes: int
    op: int  # -1: the start of the step
    resident_bytes: int  # of the peak: parameters, buffers, optimizer state, inputs
    gradient_bytes: int  # of the peak: gradients and other storages that no plan can free by then
    working_bytes: int  # of the peak: what the op itself reads, creates and uses as workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least time that every plan within a budget must add."""

    feasible: bool  # False: certainly no plan fits; True: none of the instants looked at rules one out
    added_time_ns: int  # rounded down; 0 if not feasible
    overhead_percent: float  # of the step time with everything saved
    op: int  # the op whose run gave it, or after which it holds; TURN: the end of forward, or nothing to be added
    price_ns: int  # the price there is price_ns / price_bytes: what the last byte costs
    price_bytes: int
    reason: str  # in words
    # Whether it holds only for plans with one of the combinations of rewrites that were tried, or none.
    tried: bool = False

    def least(self, where: str = "") -> str:
        """For people: what no plan goes below, and for which plans that is certified."""
        such = "with the rewrites that were tried " if self.tried else ""
        return f"no plan {such}{where}adds less than {show_percent(self.overhead_percent)}"

    def gap_points(self, step_ns: int, saved_ns: int) -> float | None:
        """By how many percent of the step with everything saved a plan's step takes longer than the bound says.

        None where no plan can fit, or nothing takes time.
        """
        if not self.feasible or not saved_ns:
            return None
        return round(100 * (step_ns - saved_ns - self.added_time_ns) / saved_ns, 4)

    def to_json(self) -> dict[str, Any]:
        return {
            "overhead_percent": self.overhead_percent if self.feasible else None,
            "added_time_ns": self.added_time_ns if self.feasible else None,
            "feasible": self.feasible,
            "op": self.op,
            "price_ns_per_gib": round(self.price_ns * 2**30 / self.price_bytes),
            "reason": self.reason,
        }


class Instants:
    """One trace's instants and the bounds that they give: the facts that they share, and what is worked out so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.trace = problem, problem.trace
        ops, sts = problem.trace.ops, problem.trace.storages
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
        self.nbytes, self.producer = np.array(sts.nbytes, np.int64), np.array(sts.producer, np.int64)
        self._last_read = np.full(len(sts), -1, np.int64)  # op, in any phase
        np.maximum.at(self._last_read, read, reader)
        # What no plan evicts stays until its last reader: of forward only, if nothing saves it beyond.
        stays = ~np.array(problem.rebuildable, np.bool_) | np.array(problem.pinned, np.bool_)
        saved = np.array(problem.pinned, np.bool_) | np.array(problem.saved_by_default, np.bool_)
        eager = np.array([bool(f & EAGER) for f in ops.flags], np.bool_)
        forces = (stays & (saved | (self.producer >= turn)))[read] | (
            (reader < turn) & (stays[read] | eager[reader])
        )
        self.until = np.array(sts.hold, np.int64)
        np.maximum.at(self.until, read[forces], reader[forces])
        self.forced_until = self.until.tolist()
        self._weigh(reader, read)

    def _weigh(self, reader: NDArray[np.int64], read: NDArray[np.int64]) -> None:
        """Weigh what is in memory whatever the plan: before each op, by what it reads beyond that, and at each op."""
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
        parts = zip(self.sure_bytes, self.brought_bytes, self.problem.transient_bytes, strict=False)
        self.unavoidable_bytes: list[int] = list(map(sum, parts))
        for i, s in enumerate(ops.overwrites):
            if s >= 0 and self._taken(i) >= 0:
                self.unavoidable_bytes[i] -= self.trace.storages.nbytes[s]

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
        inside = sum(sts.nbytes[s] for s in reads if 0 <= sts.producer[s] < op <= self.forced_until[s])
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
            unavoidable_bytes, parts = self._demands(op)
            steps = Counter(step for part, _ in parts for step in steps_of(part))
            # Shifted far enough that two different prices never round to the same int, nor swap places.
            shift = 2 * max((b for _, b in steps), default=1).bit_length()
            ordered = sorted(steps, key=lambda step: ((step[0] << shift) // step[1], step))
            self._instants[op] = Instant(
                unavoidable_bytes=unavoidable_bytes,
                most_bytes=sum(part[0].nbytes for part, _ in parts),
                steps=tuple(step for step in ordered for _ in range(steps[step])),
            )
        return self._instants[op]

    def overfull(self, budget_bytes: int) -> list[int]:
        """The turn, and the ops that would exceed the budget if everything were saved and that nothing outdoes.

        A later instant of backward with as high a peak outdoes an earlier one, because fewer storages are left to
        recompute; in forward an earlier instant outdoes a later one. Only the highest are taken.
        """
        worth: list[int] = []
        for order in (range(len(self.peaks) - 1, self.turn - 1, -1), range(self.turn)):
            top = budget_bytes
            for i in order:
                if self.peaks[i] > top:
                    top = self.peaks[i]
                    worth.append(i)
        worth.sort(key=lambda i: (-self.peaks[i], i))
        return [TURN, *worth[:MOST_INSTANTS]]

    def _demands(self, op: int) -> tuple[int, list[tuple[tuple[Corner, ...], list[list[int]]]]]:
        """What is in memory while an op first runs, or at the turn, whatever the plan; the components of the rest."""
        at = self.turn if op == TURN else op
        forced = (self.producer >= 0) & (self.producer < at) & (self.until >= at)
        after, unavoidable = (at - 1, self.sure_bytes[at]) if op == TURN else (op, self.unavoidable_bytes[op])
        if op != TURN:
            producer = self.trace.storages.producer
            forced[[s for s in self.trace.ops.reads[op] if 0 <= producer[s] < op]] = True
            if self._taken(op) >= 0:
                forced[self._taken(op)] = False
        made = (self.producer >= 0) & (self.producer < min(at, self.turn))
        wanted = made & ~forced & (self._last_read > after)
        link = made & ~wanted & ~forced
        return unavoidable, list(components(self.problem, wanted.tolist(), link.tolist()))

    def split(self, budget_bytes: int) -> dict[int, bool]:
        """Storage -> whether it is saved or made again, where the bound's instant is brought within the budget, one
        component after the other, cheapest time per byte first. Other instants may be over it."""
        least, parts = self._demands(self.bound(budget_bytes).op)
        over, at = least + sum(part[0].nbytes for part, _ in parts) - budget_bytes, [0] * len(parts)
        steps = ((t / size, k, size) for k, (part, _) in enumerate(parts) for t, size in steps_of(part))
        for _, k, size in sorted(steps):
            if over > 0:
                at[k], over = at[k] + 1, over - size
        fates = (zip(of, part[k].saved, strict=True) for (part, of), k in zip(parts, at, strict=True))
        return {s: saved for pairs in fates for of, saved in pairs if saved is not None for s in of}

    def bound(self, budget_bytes: int) -> Bound:
        """The best over the turn and the instants worth a look."""
        return self.problem.once(("bound", budget_bytes), lambda _: self._found(budget_bytes))

    def _found(self, budget_bytes: int) -> Bound:
        nothing = best = 0, 0, 1
        fits = budget_bytes >= self.floor.peak_bytes
        at, least = (TURN, 0) if fits else (self.floor.op, self.floor.peak_bytes)
        for op in () if least else self.overfull(budget_bytes):
            instant = self.at(op)
            found = instant.added(budget_bytes)
            if found is None:
                least = instant.unavoidable_bytes + instant.most_bytes - sum(b for _, b in instant.steps)
                best, at = nothing, op
                break
            if found[0] > best[0]:
                best, at = found, op
        then = "when forward has ended" if at == TURN else f"while {self.trace.ops.name[at]} (op {at}) runs"
        reason = "no instant shows that anything must be computed again"
        if best[0]:
            reason = (
                f"what must be in memory {then} leaves too little for the rest, which must be computed again"
            )
        if least:
            reason = f"no plan fits: {then} at least {least} bytes are in memory, whatever is computed again"
        return Bound(
            feasible=not least,
            added_time_ns=best[0],
            overhead_percent=100 * best[0] / self.trace.time_ns if self.trace.time_ns else 0.0,
            op=at,
            price_ns=best[1],
            price_bytes=best[2],
            reason=reason,
        )


def bounder_of(problem: Problem) -> Instants:
    """The instants of a problem, for any number of budgets, made once."""
    return problem.once("bounder", Instants)
