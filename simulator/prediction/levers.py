"""Plans and bounds of a step as it is and as levers change it.

Counts: the steps that `simulator.prediction.choose` finds worth a plan. Ignores: other combinations of rewrites.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from simulator.bounds.bound import Bound
from simulator.core.limits import ALLOW, Levers
from simulator.core.problem import Problem
from simulator.levers import UNASKED, checked, exactness_of
from simulator.levers.lever import Wish
from simulator.planners.outcome import Infeasible, percent
from simulator.prediction.choose import (
    Changed,
    Chooser,
    Rewrites,
    Slower,
    allowed,
    changed_steps,
    check_named,
    climb,
    error_of,
    floor_of,
    ladders,
    offered,
    promise_of,
)
from traces.errors import SpecError
from traces.records.plan import FP, Plan
from traces.records.trace import MOST, Trace
from traces.units import show_bytes

# Two steps of equal kinds are as good as one another if they differ by one of so many parts.
CLOSE: Final = 2000
NEAR: Final = 5  # of these parts, within which a plan that was made sooner may become the best
SEARCHED: Final = 2  # so many steps that the same kinds change are planned, where the first has a plan


def plan_with_levers(
    problem: Problem,
    budget_bytes: int,
    levers: Levers,
    make: Callable[[Problem], Plan],
    sooner: Callable[[Problem], Plan] | None = None,
) -> Plan:
    """The cheapest plan that is made of the step, as it is or as the levers change it.

    Args:
        make: the plan of one step within the budget.
        sooner: one in less time: after the first plan, a step is planned in full only if so it comes near the best.

    Raises:
        BudgetError: there is none. The refusal is that of the step with the lowest peak, and names a lever that is not
            allowed and would help.
    """
    planning = _Planning(problem, budget_bytes, levers)
    for step in planning.steps():
        planning.plan(step, make, sooner)
    if planning.best is None:
        assert planning.refusal is not None
        help_by = _helpful(problem, levers)
        told = f"{planning.refusal} {help_by}" if help_by else str(planning.refusal)
        raise Infeasible(told, planning.refusal.figures)
    return planning.best


class _Planning:
    """The best plan so far, and the refusal with the lowest peak."""

    def __init__(self, problem: Problem, budget_bytes: int, levers: Levers) -> None:
        self.problem, self.levers = problem, levers
        self.chooser = Chooser(problem, budget_bytes, levers)
        self.found = changed_steps(problem, budget_bytes, levers)
        self.close_ns = problem.trace.time_ns // CLOSE
        self.best: Plan | None = None
        self.refusal: Infeasible | None = None

    def steps(self) -> Iterator[Changed]:
        """The steps that may have a cheaper plan than the best so far, by rising bound, few of equal kinds."""

        def promise(step: Changed | Slower) -> tuple[int, ...]:
            return step.least_ns // max(1, self.close_ns), *promise_of(step)[1:], step.least_ns

        steps, planned = sorted(self.found, key=promise), Counter[frozenset[str]]()
        while steps:
            step, best_ns = steps.pop(0), _time_ns(self.best)
            kinds = frozenset(r.kind for r in step.rewrites)
            near_ns = self.close_ns if planned[kinds] else 0
            if self.best and (step.least_ns >= best_ns - near_ns or planned[kinds] >= SEARCHED):
                continue
            if isinstance(step, Changed):
                planned[kinds] += 1
                yield step
            elif self.best is None or self.chooser.quick_ns(step.rewrites, best_ns) < best_ns:
                found = self.chooser.changed(step.rewrites)
                if found.bound.feasible:
                    insort(steps, found, key=promise)

    def plan(
        self, step: Changed, make: Callable[[Problem], Plan], sooner: Callable[[Problem], Plan] | None
    ) -> None:
        """Plan a step, in full only if one made sooner comes near the best."""
        near_ns = _time_ns(self.best) + NEAR * self.close_ns
        try:
            if self.best and sooner is not None and _time_ns(sooner(step.problem)) >= near_ns:
                return
            made = make(checked(step.problem))
        except Infeasible as error:
            told = _with(step.rewrites, error)
            self.refusal = min(self.refusal or told, told, key=lambda e: e.figures["lowest_peak_bytes"])
            return
        if made.rewrites and step.rewrites and self.levers.kinds is None:
            return  # a planner that changes the step itself
        if _time_ns(made) < _time_ns(self.best):
            self.best = _of(self.problem, made, step.rewrites, self.levers)


def lowest_floor(problem: Problem, levers: Levers) -> int:
    """A peak that no plan can go below, with these levers or without; of combinations as `changed_steps`."""
    check_named(levers)
    found = ladders(problem, Wish(levers=levers))
    return floor_of(
        problem, climb(found, lambda rs: -floor_of(problem, rs) if allowed(rs, levers) else -MOST)
    )


TRIED: Final = "; of the steps as the rewrites that were tried change them"  # after the reason of a bound


def lower_bound(problem: Problem, budget_bytes: int, levers: Levers) -> Bound:
    """Return what every plan within the budget adds at least, with these levers or without; if there is more to choose
    than the number of tiles of one head, in the combinations that were tried.
    """
    best = changed_steps(problem, budget_bytes, levers)[0]
    assert isinstance(best, Changed)
    rewrites = [r for of_kind in offered(problem, levers).values() for r in of_kind]
    tried = len({r.storage for r in rewrites}) > 1  # of one head, every number of tiles was tried
    if not best.rewrites:
        tried = tried and best.bound.added_time_ns > 0
        return replace(best.bound, tried=tried, reason=best.bound.reason + TRIED * tried)
    added = best.least_ns - problem.trace.time_ns if best.bound.feasible else 0
    share = percent(added, problem.trace.time_ns)
    reason = best.bound.reason + TRIED * tried
    return replace(best.bound, reason=reason, added_time_ns=added, overhead_percent=share, tried=tried)


def _time_ns(plan: Plan | None) -> int:
    return MOST if plan is None else int(plan.predicted["plan"]["step_time_ns"])


def _with(rewrites: Rewrites, refusal: Infeasible) -> Infeasible:
    """The refusal of a step as rewrites change it, which says so."""
    if not rewrites:
        return refusal
    kinds = " and ".join(dict.fromkeys(r.kind for r in rewrites))
    return Infeasible(f"{refusal} That is with {kinds} beside recomputation.", refusal.figures)


def _of(problem: Problem, plan: Plan, rewrites: Rewrites, levers: Levers) -> Plan:
    """A plan of the changed step as one of the step itself."""
    ops, sts = problem.trace.ops, problem.trace.storages
    if rewrites and plan.rewrites:
        raise SpecError(f"{plan.planner} changes the step itself: name no --levers beside it.")
    made = rewrites or plan.rewrites
    errors = {k: error_of([r for r in made if r.kind == k], levers) or None for k in {r.kind for r in made}}
    named = tuple(replace(r, op=ops.name[sts.producer[r.storage]], error=errors[r.kind]) for r in made)
    # Where the optimizer steps in backward is told of the step that the plan's op ids are of.
    meta = replace(problem.trace.meta, within_backward=plan.meta.within_backward)
    return replace(plan, meta=meta, rewrites=named, exactness=exactness_of(named))


def _helpful(problem: Problem, levers: Levers) -> str:
    """In words, the rewrites that would lower the floor most, if they are not allowed; or why there are none."""
    could = Levers(allow="approximate", kinds=UNASKED)
    best = climb(ladders(problem, Wish(levers=could)), lambda rs: -floor_of(problem, rs))
    allowed = {r for rewrites in offered(problem, levers).values() for r in rewrites}
    if allowed.issuperset(best):
        return nothing_in_tiles(problem.trace, levers)
    word = next(word for word, exactness in ALLOW.items() if exactness == exactness_of(best))
    lower = show_bytes(floor_of(problem, best))
    kinds = ", ".join(dict.fromkeys(r.kind for r in best if r not in allowed))
    return f"With --allow {word} the lever {kinds} lowers what no plan can go below to {lower}."


def nothing_in_tiles(trace: Trace, levers: Levers) -> str:
    """In words, why a step has nothing that could run in tiles, if tiles are allowed; "": it has, or they are not."""
    if trace.meta.stretches or not levers.allows(FP) or "tile" not in (levers.kinds or UNASKED):
        return ""
    return (
        "The trace names nothing that could run in tiles. Where you expect something: an older trace does not say it, "
        "so trace again; a loss is found where forward computes it, or with --join-loss in a loss function; in a "
        "step() of your own it is not."
    )
