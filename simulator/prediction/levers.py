"""Plans and bounds of a step as it is and as levers change it, and which rewrites are worth one.

A rewrite is worth taking if the step so changed has a cheaper plan, or one at all. Levers say what can be chosen, as
ladders (`simulator.levers`); steps are compared by the certified bound of their plans first: one whose bound is above a
plan that is known already is not planned at all. So a plan with more levers allowed is never worse, and one search is
mostly enough.

Counts: each rung of a single ladder; of several, steps from rung to rung while they help. Ignores: other combinations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from simulator.bounds import Bound, bounder_of
from simulator.core.facts import waiting_ns
from simulator.core.limits import ALLOW, Levers
from simulator.core.problem import Problem
from simulator.levers import LEVERS, UNASKED, checked, draft_problem, exactness_of, in_order
from simulator.levers.edit import Ladder
from simulator.planners.outcome import Infeasible, percent
from traces.errors import SpecError
from traces.records.plan import APPROXIMATE, ERRORS_COMMAND, FP, Plan, Rewrite
from traces.records.trace import MOST, Trace
from traces.units import show_bytes

Rewrites = tuple[Rewrite, ...]
ATTEMPTS: Final = 3
NONE: Final = -1  # no rung of a ladder
ANY: Final = 1.0  # error of the gradient, relative L2, where the user gives no limit


# What can be chosen


def offered(problem: Problem, levers: Levers) -> dict[str, list[Rewrite]]:
    """The rewrites that are allowed, by kind. Raises SpecError if there is no such kind, or the errors are of another
    step.
    """
    if levers.errors is not None and levers.errors.fingerprint != problem.trace.meta.graph_fingerprint:
        raise SpecError(
            f"the errors were measured on another step, of {levers.errors.model}: `{ERRORS_COMMAND}`."
        )
    if unknown := [k for k in levers.kinds or () if k not in LEVERS]:
        raise SpecError(f"--levers {unknown[0]}: there is no such lever; there are {', '.join(LEVERS)}.")
    asked = (*UNASKED, *_measured(levers)) if levers.kinds is None else levers.kinds
    kinds = [k for k in asked if levers.allows(LEVERS[k].exactness)]
    return {k: found for k in kinds if (found := list(LEVERS[k].offer(problem)))}


def ladders(problem: Problem, levers: Levers, budget_bytes: int = 0) -> list[Ladder]:
    """The ladders of all that is allowed. Raises SpecError as `offered`, or if nobody says how fast copies are."""
    found = offered(problem, levers).items()
    of_kinds = (LEVERS[kind].ladders(problem, some, levers, budget_bytes) for kind, some in found)
    return [ladder for ladders in of_kinds for ladder in ladders]


def climb(of: Sequence[Ladder], worth: Callable[[Rewrites], int | Worth]) -> Rewrites:
    """Choose none or one rung of each ladder, those that together are worth most; of equals the first that was tried.

    One ladder after the other, and all of them again while that helps: the best of its first rungs; if that is no worse
    than none, on to the next while that is better.
    """
    at = [NONE] * len(of)

    def value(k: int, rung: int) -> int | Worth:
        return worth(_together(of, [*at[:k], rung, *at[k + 1 :]]))

    for _ in range(ATTEMPTS):
        before = list(at)
        for k, ladder in enumerate(of):
            rung = max((at[k],) if at[k] != NONE else ladder.first, key=lambda n: value(k, n))
            if value(k, rung) < value(k, at[k]):  # type: ignore[operator]
                continue
            for step in (1, -1):
                while 0 <= rung + step < len(ladder.rungs) and value(k, rung + step) > value(k, rung):  # type: ignore[operator]
                    rung += step
            at[k] = max(at[k], rung, NONE, key=lambda n: value(k, n))
        if at == before:
            break
    return _together(of, at)


def _together(of: Sequence[Ladder], at: Sequence[int]) -> Rewrites:
    """The rewrites of some rungs; of several of one value the first that is made: the others would find nothing."""
    chosen = (r for ladder, rung in zip(of, at, strict=True) if rung != NONE for r in ladder.rungs[rung])
    by_storage: dict[int, Rewrite] = {}
    for r in in_order(chosen):
        by_storage.setdefault(r.storage, r)
    return tuple(by_storage.values())


def error_of(rewrites: Iterable[Rewrite], levers: Levers) -> float:
    """The error of the gradient that rewrites make together, as it was measured of their parts."""
    lossy = [r for r in rewrites if LEVERS[r.kind].exactness == APPROXIMATE]
    return levers.errors.of(lossy) if levers.errors is not None and lossy else 0.0


def floor_of(problem: Problem, rewrites: Rewrites) -> int:
    """A peak that no plan of the step so changed can go below."""
    return bounder_of(draft_problem(problem, rewrites)).floor.peak_bytes


def _measured(levers: Levers) -> tuple[str, ...]:
    return () if levers.errors is None else levers.errors.kinds


def allowed(rewrites: Rewrites, levers: Levers) -> bool:
    """Return whether the gradient's error stays within what the user allows."""
    return error_of(rewrites, levers) <= (levers.max_gradient_error or ANY)


def check_named(levers: Levers) -> None:
    """Raise SpecError if a kind is asked for that is not allowed, or that is approximate and was not measured."""
    exactness = {k: LEVERS[k].exactness for k in levers.kinds or () if k in LEVERS}
    for kind, needed in exactness.items():
        if not levers.allows(needed):
            allow = next(word for word, meant in ALLOW.items() if meant == needed)
            raise SpecError(f"--levers {kind} needs --allow {allow}; now it is --allow {levers.allow}.")
    if lacking := [k for k, n in exactness.items() if n == APPROXIMATE and k not in _measured(levers)]:
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
        """The step's time with the cheapest plan, at least."""
        return _least_ns(self.problem, self.bound.added_time_ns)


class Worth(NamedTuple):
    """The worth of a step: most if it may have a plan, the shorter the more; else the more, the less it needs."""

    feasible: bool
    less: int  # its time, or of one without a plan its floor, below 0
    ops: int = 0  # of those without a plan the time of the ops, below 0


NOTHING: Final = Worth(feasible=False, less=-MOST)  # not allowed


class Chooser:
    """One step for one budget: the steps that levers make of it, each of which is judged once."""

    def __init__(self, problem: Problem, budget_bytes: int, levers: Levers) -> None:
        self.problem, self.budget_bytes, self.levers = problem, budget_bytes, levers
        self.judged: dict[Rewrites, Worth] = {}
        self.steps: list[Changed] = []  # of which a plan may exist

    def run(self) -> list[Changed]:
        """The steps of which a plan may exist, by rising bound; where there is none, that with the lowest floor."""
        self.worth(())
        if self.problem.saved.timeline.peak_allocated_bytes > self.budget_bytes:
            climb(ladders(self.problem, self.levers, self.budget_bytes), self.worth)
        lowest = max(self.judged, key=self.judged.__getitem__)
        return sorted(self.steps, key=promise_of) or [self._changed(lowest)]

    def _changed(self, rewrites: Rewrites) -> Changed:
        step = draft_problem(self.problem, rewrites)
        return Changed(rewrites=rewrites, problem=step, bound=bounder_of(step).bound(self.budget_bytes))

    def worth(self, rewrites: Rewrites) -> Worth:
        if rewrites not in self.judged:
            self.judged[rewrites] = self._judge(rewrites)
        return self.judged[rewrites]

    def _judge(self, rewrites: Rewrites) -> Worth:
        if not allowed(rewrites, self.levers):
            return NOTHING
        found = self._changed(rewrites)
        if not found.bound.feasible:
            floor = floor_of(self.problem, rewrites)
            return Worth(feasible=False, less=-floor, ops=-found.problem.trace.time_ns)
        self.steps.append(found)
        return Worth(feasible=True, less=-found.least_ns)


def changed_steps(problem: Problem, budget_bytes: int, levers: Levers) -> list[Changed]:
    """The step as it is and as levers change it, as `Chooser.run` has them; made once. Raises SpecError if a lever is
    asked for that is none, is not allowed or was not measured.
    """
    check_named(levers)
    key = "changed", budget_bytes, levers
    return problem.once(key, lambda p: Chooser(problem, budget_bytes, levers).run())


def _least_ns(step: Problem, added_ns: int) -> int:
    """A step's time with so much more to run, at least. Recomputing in backward makes no copy of forward earlier, nor a
    step that waits for its copies shorter."""
    trace, saved = step.trace, step.saved.timeline
    waits_ns = waiting_ns(trace, saved.op, saved.duration_ns)
    return max(saved.step_time_ns, trace.time_ns + waits_ns + added_ns)


def promise_of(step: Changed) -> tuple[int, ...]:
    """By what steps are told apart: the shorter first, of equals those that change less."""
    return step.least_ns, len(step.rewrites), sum(r.number for r in step.rewrites)


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
    close_ns, planned = problem.trace.time_ns // CLOSE, Counter[frozenset[str]]()
    best: Plan | None = None
    refusal: Infeasible | None = None

    def promise(step: Changed) -> tuple[int, ...]:
        return step.least_ns // max(1, close_ns), *promise_of(step)[1:], step.least_ns

    # By rising bound, few of equal kinds, as long as they may have a cheaper plan than the best so far.
    for step in sorted(changed_steps(problem, budget_bytes, levers), key=promise):
        best_ns, kinds = _time_ns(best), frozenset(r.kind for r in step.rewrites)
        near_ns = close_ns if planned[kinds] else 0
        if best and (step.least_ns >= best_ns - near_ns or planned[kinds] >= SEARCHED):
            continue
        planned[kinds] += 1
        try:
            if best and sooner and _time_ns(sooner(step.problem)) >= best_ns + NEAR * close_ns:
                continue
            made = make(checked(step.problem))
        except Infeasible as error:
            told = _with(step.rewrites, error)
            refusal = min(refusal or told, told, key=lambda e: e.figures["lowest_peak_bytes"])
            continue
        # Where the planner changes the step itself, it is asked for the step as it is.
        both = made.rewrites and step.rewrites and levers.kinds is None
        if _time_ns(made) < best_ns and not both:
            best = _of(problem, made, step.rewrites, levers)
    if best is None:
        assert refusal is not None
        raise Infeasible(f"{refusal} {_helpful(problem, levers)}".strip(), refusal.figures)
    return best


def lowest_floor(problem: Problem, levers: Levers) -> int:
    """A peak that no plan can go below, with these levers or without; of combinations as `changed_steps`."""
    check_named(levers)
    found = ladders(problem, levers)
    best = climb(found, lambda rs: -floor_of(problem, rs) if allowed(rs, levers) else -MOST)
    return floor_of(problem, best)


TRIED: Final = "; of the steps as the rewrites that were tried change them"  # after the reason of a bound


def lower_bound(problem: Problem, budget_bytes: int, levers: Levers) -> Bound:
    """Return what every plan within the budget adds at least, with these levers or without; if there is more to choose
    than the number of tiles of one head, in the combinations that were tried.
    """
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
    best = climb(ladders(problem, could), lambda rs: -floor_of(problem, rs))
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
