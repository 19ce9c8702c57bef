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

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from simulator.bounds.instants import TURN, Floor, Instants
from simulator.core.problem import Problem
from simulator.core.swaps import relaxed
from traces.units import show_percent

TOO_LITTLE = "leaves too little for the rest, which must be computed again"
NOTHING_SHOWN = "no instant shows that anything must be computed again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least time that every plan within a budget must add."""

    budget_bytes: int
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
        """The `bound` of `simulate --json`."""
        return {
            "overhead_percent": self.overhead_percent if self.feasible else None,
            "added_time_ns": self.added_time_ns if self.feasible else None,
            "feasible": self.feasible,
            "op": self.op,
            "price_ns_per_gib": round(self.price_ns * 2**30 / self.price_bytes),
            "reason": self.reason,
        }


def lower_bound(problem: Problem, budget_bytes: int) -> Bound:
    """The certified bound for one budget; see the module's text for what it counts and ignores."""
    return bounder_of(problem).bound(budget_bytes)


def bound_curve(problem: Problem, budgets: Iterable[int]) -> tuple[Bound, ...]:
    """The certified bound for each budget, by rising budget; work is shared among them.

    A plan within a budget is also within every larger one, so what holds for a larger budget holds for a
    smaller one, and the curve never rises with the budget.
    """
    bounder = bounder_of(problem)
    out: list[Bound] = []
    for budget in sorted(set(budgets), reverse=True):
        bound, best = bounder.bound(budget), out[-1] if out else None
        if best is not None and (best.feasible, -best.added_time_ns) < (bound.feasible, -bound.added_time_ns):
            bound = bounder.carry(best, budget)
        out.append(bound)
    return tuple(reversed(out))


def bounder_of(problem: Problem) -> Bounder:
    """The bounder of a problem, made once."""
    return problem.once("bounder", Bounder)


class Bounder:
    """Bounds for one problem and any number of budgets."""

    def __init__(self, problem: Problem) -> None:
        problem = relaxed(problem)
        self.trace = problem.trace
        self.instants = Instants(problem)
        self._known: dict[int, Bound] = {}  # by budget

    @property
    def floor(self) -> Floor:
        """A peak that no plan can go below."""
        return self.instants.floor

    def quick_ns(self, budget_bytes: int, enough_ns: int) -> int:
        """Return what instants by themselves show that every plan within the budget adds; ends where that is enough."""
        most_ns = 0
        for op in self.instants.overfull(budget_bytes):
            most_ns = max(most_ns, *(self.instants.at(op).added(budget_bytes) or (0,))[:1])
            if most_ns > enough_ns:
                break
        return most_ns

    def bound(self, budget_bytes: int) -> Bound:
        """The best over the turn and the instants worth a look."""
        if budget_bytes not in self._known:
            self._known[budget_bytes] = self._found(budget_bytes)
        return self._known[budget_bytes]

    def _found(self, budget_bytes: int) -> Bound:
        if budget_bytes < self.floor.peak_bytes:
            return self._infeasible(budget_bytes, self.floor.op, self.floor.peak_bytes)
        best, at = (0, 0, 1), TURN
        for op in self.instants.overfull(budget_bytes):
            instant = self.instants.at(op)
            found = instant.added(budget_bytes)
            if found is None:
                least = instant.unavoidable_bytes + instant.most_bytes - sum(b for _, b in instant.steps)
                return self._infeasible(budget_bytes, op, least)
            if found[0] > best[0]:
                best, at = found, op
        reason = f"what must be in memory {self._while(at)} {TOO_LITTLE}" if best[0] else NOTHING_SHOWN
        return self._bound(budget_bytes, at, best, reason)

    def carry(self, bound: Bound, budget_bytes: int) -> Bound:
        """A bound for a larger budget, as one for a smaller budget."""
        if bound.feasible:
            return replace(bound, budget_bytes=budget_bytes)
        return self._infeasible(budget_bytes, bound.op, budget_bytes + 1)

    def _bound(self, budget_bytes: int, op: int, found: tuple[int, int, int], reason: str) -> Bound:
        """`found`: as `Instant.added` gives it."""
        added_time_ns, price_ns, price_bytes = found
        return Bound(
            budget_bytes=budget_bytes,
            feasible=True,
            added_time_ns=added_time_ns,
            overhead_percent=100 * added_time_ns / self.trace.time_ns if self.trace.time_ns else 0.0,
            op=op,
            price_ns=price_ns,
            price_bytes=price_bytes,
            reason=reason,
        )

    def _infeasible(self, budget_bytes: int, op: int, least_bytes: int) -> Bound:
        least = f"at least {least_bytes} bytes are in memory, whatever is computed again"
        bound = self._bound(budget_bytes, op, (0, 0, 1), f"no plan fits: {self._while(op)} {least}")
        return replace(bound, feasible=False)

    def _while(self, op: int) -> str:
        return "when forward has ended" if op == TURN else f"while {self.trace.ops.name[op]} (op {op}) runs"
