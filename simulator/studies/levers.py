"""Levers beside recomputation: which rewrites of the step a plan takes, and what each could do.

A rewrite is worth taking if the step so changed has a cheaper plan, or one at all. Steps are compared by the certified
bound of their plans first: a step whose bound is above a plan that is known already is not planned at all. So a plan
with more levers allowed is never worse, and one search is mostly enough.

Counts: each number of tiles of each stretch, one stretch at a time, then all that help together; of rewrites that
stand for single values, the ranking of their kind in shares. Ignores: other combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from simulator.bounds.bound import Bound, bounder_of
from simulator.core.limits import ALLOW, Levers
from simulator.core.problem import Problem
from simulator.core.rewrites import KINDS, LEVERS, exactness_of, rewritten_problem
from simulator.planners.outcome import Infeasible
from traces.errors import SpecError
from traces.records.plan import EXACTNESS, Plan, Rewrite


def offered(problem: Problem, levers: Levers) -> dict[str, list[Rewrite]]:
    """The rewrites that are allowed, by kind.

    Raises:
        SpecError: there is no such kind.
    """
    if unknown := [k for k in levers.kinds or () if k not in LEVERS]:
        raise SpecError(f"--levers {unknown[0]}: there is no such lever; there are {', '.join(LEVERS)}.")
    most = EXACTNESS.index(ALLOW[levers.allow])
    if problem.trace.meta.within_backward:
        return {}  # `rewritten` says why
    asked = KINDS if levers.kinds is None else levers.kinds
    kinds = [k for k in asked if EXACTNESS.index(LEVERS[k].EXACTNESS) <= most]
    return {k: found for k in kinds if (found := list(LEVERS[k].offer(problem.trace)))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A step as rewrites change it, and what any plan of it within the budget must take."""

    rewrites: tuple[Rewrite, ...]
    problem: Problem
    bound: Bound

    @property
    def least_ns(self) -> int:
        """The step's time with the cheapest plan, at least."""
        return self.problem.trace.time_ns + self.bound.added_time_ns


def changed_steps(problem: Problem, budget_bytes: int, levers: Levers) -> list[Changed]:
    """The step as it is and as levers change it, those for which a plan may exist by rising bound; never empty."""

    def step(rewrites: Sequence[Rewrite]) -> Changed:
        q = rewritten_problem(problem, rewrites)
        return Changed(rewrites=tuple(rewrites), problem=q, bound=bounder_of(q).bound(budget_bytes))

    def better(a: Changed, b: Changed) -> bool:
        return (a.bound.feasible, -a.least_ns) > (b.bound.feasible, -b.least_ns)

    as_is = step(())
    out = [as_is]
    if problem.saved.timeline.peak_allocated_bytes <= budget_bytes:
        return out
    taken: tuple[Rewrite, ...] = ()
    for choices in _choices(offered(problem, levers)):
        tried = [step((*taken, *choice)) for choice in choices]
        out += tried
        best = tried[0]
        for one in tried[1:]:
            best = one if better(one, best) else best
        if best.bound.feasible or not as_is.bound.feasible:
            taken = best.rewrites
    possible = [x for x in out if x.bound.feasible]
    return sorted(possible, key=lambda x: (x.least_ns, len(x.rewrites))) or [as_is]


def _choices(offered: dict[str, list[Rewrite]]) -> Iterator[Sequence[tuple[Rewrite, ...]]]:
    """What can be chosen one after the other: of each stretch the number of tiles, of other kinds how many."""
    for rewrites in offered.values():
        of_storage: dict[int, list[Rewrite]] = {}
        for r in rewrites:
            of_storage.setdefault(r.storage, []).append(r)
        if any(r.number for r in rewrites):
            yield from ([(r,) for r in numbers] for numbers in of_storage.values())
        else:
            yield [tuple(rewrites[: -(-len(rewrites) * k // SHARES)]) for k in range(1, SHARES + 1)]


SHARES: Final = 4  # of the rewrites of one kind, in their order of worth


def lower_bound(problem: Problem, budget_bytes: int, levers: Levers) -> Bound:
    """What every plan within the budget adds at least, with these levers or without."""
    best = changed_steps(problem, budget_bytes, levers)[0]
    if not best.rewrites:
        return best.bound
    added, whole = best.least_ns - problem.trace.time_ns, problem.trace.time_ns
    return replace(best.bound, added_time_ns=added, overhead_percent=100 * added / whole if whole else 0.0)


def plan_with_levers(
    problem: Problem,
    budget_bytes: int,
    levers: Levers,
    make: Callable[[Problem], Plan],
) -> Plan:
    """The cheapest plan that is made of the step, as it is or as the levers change it.

    Args:
        make: the plan of one step within the budget.

    Raises:
        BudgetError: there is none; the refusal of the step as it is names a lever that is not allowed and would help.
    """
    best: Plan | None = None
    refusal: Infeasible | None = None
    for step in changed_steps(problem, budget_bytes, levers):
        if best is not None and step.least_ns >= _time_ns(best):
            break
        try:
            made = make(step.problem)
        except Infeasible as error:
            refusal = error if refusal is None or not step.rewrites else refusal
            continue
        if best is None or _time_ns(made) < _time_ns(best):
            best = _of(problem, made, step.rewrites)
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def _time_ns(plan: Plan) -> int:
    return int(plan.predicted["plan"]["step_time_ns"])


def _of(problem: Problem, plan: Plan, rewrites: tuple[Rewrite, ...]) -> Plan:
    """A plan of the changed step as one of the step itself."""
    ops, sts = problem.trace.ops, problem.trace.storages
    named = tuple(replace(r, op=ops.name[sts.producer[r.storage]]) for r in rewrites)
    return replace(plan, meta=problem.trace.meta, rewrites=named, exactness=exactness_of(named))
