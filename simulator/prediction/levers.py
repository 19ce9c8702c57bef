"""Plans and bounds of a step as it is and as levers change it, and which rewrites are worth one.

A rewrite is worth taking if the step so changed has a cheaper plan, or one at all. Levers say what can be chosen, as
ladders (`simulator.levers`); steps are compared by the certified bound of their plans first: one whose bound is above a
plan that is known already is not planned at all. So a plan with more levers allowed is never worse, and one search is
mostly enough.

Counts: each rung of a single ladder; of several, each beside what was chosen of the others. Ignores: other
combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from simulator.bounds import Bound, bounder_of
from simulator.core.facts import waiting_ns
from simulator.core.limits import ALLOW, Levers
from simulator.core.problem import Problem
from simulator.levers import LEVERS, UNASKED, checked, draft_problem, exactness_of, in_order
from simulator.levers.edit import Ladder
from simulator.planners.outcome import Infeasible, percent
from traces.errors import SpecError
from traces.records.plan import APPROXIMATE, ERRORS_COMMAND, Plan, Rewrite
from traces.records.trace import MOST
from traces.units import show_bytes

Rewrites = tuple[Rewrite, ...]
ANY: Final = 1.0  # error of the gradient, relative L2, where the user gives no limit


# What can be chosen


def offered(problem: Problem, levers: Levers) -> dict[str, list[Rewrite]]:
    """The rewrites that are allowed, by kind. Raises SpecError if there is no such kind, or the errors are of another
    step.
    """
    if levers.errors is not None and levers.errors.fingerprint != problem.trace.meta.graph_fingerprint:
        raise SpecError(f"the errors were measured on another step: `{ERRORS_COMMAND}`.")
    if unknown := [k for k in levers.kinds or () if k not in LEVERS]:
        raise SpecError(f"--levers {unknown[0]}: there is no such lever; there are {', '.join(LEVERS)}.")
    asked = (
        (*UNASKED, *(levers.errors.kinds if levers.errors else ())) if levers.kinds is None else levers.kinds
    )
    kinds = [k for k in asked if levers.allows(LEVERS[k].exactness)]
    return {k: found for k in kinds if (found := list(LEVERS[k].offer(problem)))}


def ladders(problem: Problem, levers: Levers) -> list[Ladder]:
    """The ladders of all that is allowed. Raises SpecError as `offered`, or if nobody says how fast copies are."""
    found = offered(problem, levers).items()
    of_kinds = (LEVERS[kind].ladders(problem, some, levers) for kind, some in found)
    return [ladder for ladders in of_kinds for ladder in ladders if ladder]


def climb(of: Sequence[Ladder], worth: Callable[[Rewrites], Any]) -> Rewrites:
    """Choose none or one rung of each ladder, twice one ladder after the other: that which together with the rungs of
    the others is worth most; of equals the first."""
    at: list[Rewrites] = [()] * len(of)
    for _ in range(2):
        for k, rungs in enumerate(of):
            at[k] = max(((), *rungs), key=lambda rung: worth(_together([*at[:k], rung, *at[k + 1 :]])))
    return _together(at)


def _together(rungs: Iterable[Rewrites]) -> Rewrites:
    """The rewrites of some rungs; of several of one value the first that is made: the others would find nothing."""
    by_storage: dict[int, Rewrite] = {}
    for r in in_order(r for rung in rungs for r in rung):
        by_storage.setdefault(r.storage, r)
    return tuple(by_storage.values())


def error_of(rewrites: Iterable[Rewrite], levers: Levers) -> float:
    """The error of the gradient that rewrites make together, as it was measured of their parts."""
    lossy = [r for r in rewrites if LEVERS[r.kind].exactness == APPROXIMATE]
    return levers.errors.of(lossy) if levers.errors is not None and lossy else 0.0


def check_named(levers: Levers) -> None:
    """Raise SpecError if a kind is asked for that is not allowed, or that is approximate and was not measured."""
    exactness = {k: LEVERS[k].exactness for k in levers.kinds or () if k in LEVERS}
    for kind, needed in exactness.items():
        if not levers.allows(needed):
            allow = next(word for word, meant in ALLOW.items() if meant == needed)
            raise SpecError(f"--levers {kind} needs --allow {allow}; now it is --allow {levers.allow}.")
    measured = levers.errors.kinds if levers.errors else ()
    if lacking := [k for k, n in exactness.items() if n == APPROXIMATE and k not in measured]:
        raise SpecError(
            f"by how much {', '.join(lacking)} changes the gradient of this step is not known: measure it with "
            f"`{ERRORS_COMMAND} --levers {','.join(lacking)}`, then give --errors errors.json."
        )


# Which steps are worth a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A step as rewrites change it, and what any plan of it within the budget must take."""

    rewrites: Rewrites
    problem: Problem
    bound: Bound

    @property
    def least_ns(self) -> int:
        """The step's time with the cheapest plan, at least.

        Recomputing in backward makes no copy of forward earlier, nor a step that waits for its copies shorter.
        """
        trace, saved = self.problem.trace, self.problem.saved.timeline
        waits_ns = waiting_ns(trace, saved.op, saved.duration_ns)
        return max(saved.step_time_ns, trace.time_ns + waits_ns + self.bound.added_time_ns)

    @property
    def worth(self) -> tuple[int, ...]:
        """Most if it may have a plan, the shorter the more; else the more, the lower its floor."""
        if self.bound.feasible:
            return 1, -self.least_ns, -len(self.rewrites)
        return 0, -bounder_of(self.problem).floor.peak_bytes, -self.problem.trace.time_ns


def changed_steps(problem: Problem, budget_bytes: int, levers: Levers) -> list[Changed]:
    """The step as it is and as levers change it: those that may have a plan, by rising bound; where there is none, that
    with the lowest floor. Made once. Raises SpecError if a lever is asked for that is none, is not allowed or was not
    measured.
    """
    check_named(levers)
    found: dict[Rewrites, Changed] = {}

    def worth(rewrites: Rewrites) -> tuple[int, ...]:
        if error_of(rewrites, levers) > (levers.max_gradient_error or ANY):
            return (-1,)
        if rewrites not in found:
            step = draft_problem(problem, rewrites)
            bound = bounder_of(step).bound(budget_bytes)
            found[rewrites] = Changed(rewrites=rewrites, problem=step, bound=bound)
        return found[rewrites].worth

    def made(problem: Problem) -> list[Changed]:
        worth(())
        if problem.saved.timeline.peak_allocated_bytes > budget_bytes:
            climb(ladders(problem, levers), worth)
        steps = sorted(found.values(), key=lambda step: step.worth, reverse=True)
        return [step for step in steps if step.bound.feasible] or steps[:1]

    return problem.once(("changed", budget_bytes, levers), made)


# Two steps are as good as one another if they differ by one of so many parts.
CLOSE: Final = 2000


def plan_with_levers(
    problem: Problem, budget_bytes: int, levers: Levers, make: Callable[[Problem], Plan], *, helps: bool
) -> Plan:
    """The cheapest plan that `make` makes, within the budget, of the step as it is or as the levers change it; of steps
    that the same kinds change, of the first that has one. Raises BudgetError: there is none; that of the step with the
    lowest peak, which (`helps`) names a lever that is not allowed and would help."""
    close_ns, planned = max(1, problem.trace.time_ns // CLOSE), set[frozenset[str]]()
    best, best_ns = None, MOST
    refusal: Infeasible | None = None

    def promise(step: Changed) -> tuple[int, ...]:
        return step.least_ns // close_ns, len(step.rewrites), sum(r.number for r in step.rewrites)

    for step in sorted(changed_steps(problem, budget_bytes, levers), key=promise):
        kinds = frozenset(r.kind for r in step.rewrites)
        if step.least_ns >= best_ns or kinds in planned:
            continue
        try:
            made = make(checked(step.problem))
        except Infeasible as error:
            such = " and ".join(dict.fromkeys(r.kind for r in step.rewrites))
            beside = f" That is with {such} beside recomputation." * bool(such)
            told = Infeasible(f"{error}{beside}", error.figures)
            refusal = min(refusal or told, told, key=lambda e: e.figures["lowest_peak_bytes"])
            continue
        planned.add(kinds)
        # Where the planner changes the step itself, it is asked for the step as it is.
        both = made.rewrites and step.rewrites and levers.kinds is None
        if (made_ns := int(made.predicted["plan"]["step_time_ns"])) < best_ns and not both:
            best, best_ns = _of(problem, made, step.rewrites, levers), made_ns
    if best is None:
        assert refusal is not None
        more = _helpful(problem, budget_bytes, levers) if helps else ""
        raise Infeasible(f"{refusal} {more}".strip(), refusal.figures)
    return best


TRIED: Final = "; of the steps as the rewrites that were tried change them"  # after the reason of a bound


def lower_bound(problem: Problem, budget_bytes: int, levers: Levers) -> Bound:
    """Return what every plan within the budget adds at least, with these levers or without; in the combinations that
    were tried, if there is more to choose than the number of tiles of one head."""
    best = changed_steps(problem, budget_bytes, levers)[0]
    rewrites = [r for of_kind in offered(problem, levers).values() for r in of_kind]
    bound, time_ns = best.bound, problem.trace.time_ns
    tried = len({r.storage for r in rewrites}) > 1  # of one head, every number of tiles was tried
    if best.rewrites:
        added = best.least_ns - time_ns if bound.feasible else 0
        bound = replace(bound, added_time_ns=added, overhead_percent=percent(added, time_ns))
    else:
        tried = tried and bound.added_time_ns > 0
    return replace(bound, tried=tried, reason=bound.reason + TRIED * tried)


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


def _helpful(problem: Problem, budget_bytes: int, levers: Levers) -> str:
    """In words, the rewrites that would help most, if they are not allowed."""
    best = changed_steps(problem, budget_bytes, Levers(allow="approximate", kinds=UNASKED))[0]
    allowed = {r for rewrites in offered(problem, levers).values() for r in rewrites}
    if lacking := [r for r in best.rewrites if r not in allowed]:
        word = next(word for word, exactness in ALLOW.items() if exactness == exactness_of(best.rewrites))
        kinds, lower = ", ".join(dict.fromkeys(r.kind for r in lacking)), bounder_of(best.problem).floor
        return f"--allow {word} ({kinds}) lowers what no plan can go below to {show_bytes(lower.peak_bytes)}."
    return ""
