"""Levers beside recomputation: which rewrites of the step a plan takes, and what each could do.

A rewrite is worth taking if the step so changed has a cheaper plan, or one at all. Steps are compared by the certified
bound of their plans first: a step whose bound is above a plan that is known already is not planned at all. So a plan
with more levers allowed is never worse, and one search is mostly enough.

Counts: each number of tiles of a single stretch; of the like stretches of layers one number together, by steps while
they help; of rewrites that stand for single values, the ranking of their kind in shares. Ignores: other combinations.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final

from simulator.bounds.bound import Bound, bounder_of
from simulator.core.limits import ALLOW, Levers
from simulator.core.problem import Problem
from simulator.core.rewrites import (
    KINDS,
    LEVERS,
    checked,
    draft_problem,
    exactness_of,
    in_order,
    rewritten_problem,
    tile,
)
from simulator.core.rewrites.pack import cheaper
from simulator.core.transfers import OFFLOAD, WAIT_OUT, pinned_bytes
from simulator.planners.outcome import Infeasible, percent
from simulator.show.tables import Table, table
from traces.errors import SpecError
from traces.files.json_records import to_json
from traces.records.gradient_errors import COMMAND
from traces.records.plan import APPROXIMATE, EXACT, EXACTNESS, FP, Plan, Rewrite
from traces.records.trace import MOST, Trace
from traces.units import show_bytes


def offered(problem: Problem, levers: Levers) -> dict[str, list[Rewrite]]:
    """The rewrites that are allowed, by kind. Raises SpecError if there is no such kind, or the errors are of another
    step.
    """
    if levers.errors is not None and levers.errors.fingerprint != problem.trace.meta.graph_fingerprint:
        raise SpecError(
            f"the errors of gradients were measured on another step, of {levers.errors.model}: `{COMMAND}`."
        )
    if unknown := [k for k in levers.kinds or () if k not in LEVERS]:
        raise SpecError(f"--levers {unknown[0]}: there is no such lever; there are {', '.join(LEVERS)}.")
    asked = (*KINDS, *_known(levers)) if levers.kinds is None else levers.kinds
    kinds = [k for k in asked if levers.allows(LEVERS[k].EXACTNESS)]
    return {k: found for k in kinds if (found := list(LEVERS[k].offer(problem)))}


def _check_named(levers: Levers) -> None:
    """Raise SpecError if a kind is asked for that is not allowed, or that is approximate and was not measured."""
    exactness = {k: LEVERS[k].EXACTNESS for k in levers.kinds or () if k in LEVERS}
    for kind, needed in exactness.items():
        if not levers.allows(needed):
            allow = next(word for word, meant in ALLOW.items() if meant == needed)
            raise SpecError(f"--levers {kind} needs --allow {allow}; now it is --allow {levers.allow}.")
    if lacking := [k for k, needed in exactness.items() if needed == APPROXIMATE and k not in _known(levers)]:
        raise SpecError(
            f"by how much {', '.join(lacking)} changes the gradient of this step is not known: measure it with "
            f"`{COMMAND} --levers {','.join(lacking)}`, then give --errors errors.json."
        )


def _known(levers: Levers) -> tuple[str, ...]:
    return () if levers.errors is None else levers.errors.kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A step as rewrites change it, and what any plan of it within the budget must take."""

    rewrites: tuple[Rewrite, ...]
    problem: Problem
    bound: Bound

    @property
    def least_ns(self) -> int:
        """The step's time with the cheapest plan, at least.

        Recomputing in backward makes no copy of forward earlier, nor a step that waits for its copies shorter.
        """
        trace, saved = self.problem.trace, self.problem.saved.timeline
        steps = zip(saved.op, saved.duration_ns, strict=True)
        waits_ns = sum(ns for i, ns in steps if trace.ops.target[i] in (OFFLOAD, WAIT_OUT))
        return max(saved.step_time_ns, trace.time_ns + waits_ns + self.bound.added_time_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slower:
    """A step as rewrites change it whose ops alone take longer than another step with its cheapest plan."""

    rewrites: tuple[Rewrite, ...]
    least_ns: int


def changed_steps(problem: Problem, budget_bytes: int, levers: Levers) -> list[Changed | Slower]:
    """The step as it is and as levers change it, those for which a plan may exist, by rising bound; where there is none
    for any, the one with the lowest floor; made once."""
    _check_named(levers)
    return problem.once(
        ("changed", budget_bytes, levers), lambda p: _changed_steps(problem, budget_bytes, levers)
    )


def _changed(problem: Problem, rewrites: tuple[Rewrite, ...], budget_bytes: int) -> Changed:
    step = draft_problem(problem, rewrites)
    return Changed(rewrites=rewrites, problem=step, bound=bounder_of(step).bound(budget_bytes))


def ops_take_ns(problem: Problem, rewrites: tuple[Rewrite, ...]) -> int:
    """What the ops of a changed step take at least, quickly found."""

    def adds_ns(r: Rewrite) -> int:
        adds = getattr(LEVERS[r.kind], "adds_ns", None)
        return 0 if adds is None else problem.once(("adds", r), lambda p: adds(p, r))

    return problem.trace.time_ns + sum(map(adds_ns, rewrites))


def _changed_steps(problem: Problem, budget_bytes: int, levers: Levers) -> list[Changed | Slower]:
    tried: dict[tuple[Rewrite, ...], Changed] = {}
    impossible: dict[tuple[Rewrite, ...], int] = {}  # the floor
    slower: dict[tuple[Rewrite, ...], Slower] = {}
    best_ns = MOST  # of those that may have a plan

    def worth(rewrites: tuple[Rewrite, ...]) -> tuple[bool, int, int]:
        """Whether there may be a plan; its time or else the floor, and of equal floors the time, below 0."""
        nonlocal best_ns
        if rewrites in slower or not _allowed(rewrites, levers):
            return False, -MOST, 0
        if rewrites in impossible:
            return False, -impossible[rewrites], -ops_take_ns(problem, rewrites)
        if rewrites not in tried:
            least_ns = ops_take_ns(problem, rewrites)
            least_ns += max(
                (_shown_ns(problem, x, rewrites, budget_bytes) for x in tried.values()), default=0
            )
            if least_ns >= best_ns:
                slower[rewrites] = Slower(rewrites=rewrites, least_ns=least_ns)
                return False, -MOST, 0
            q = draft_problem(problem, rewrites)
            waits_until = q.saved.timeline.step_time_ns
            if waits_until > q.trace.time_ns and any(
                x.bound.feasible and x.least_ns <= waits_until for x in tried.values()
            ):
                return False, -MOST, 0  # the copies alone take longer
            least_ns = q.trace.time_ns
            if best_ns < MOST:
                least_ns += bounder_of(q).quick_ns(budget_bytes, best_ns - least_ns)
            if least_ns >= best_ns:
                slower[rewrites] = Slower(rewrites=rewrites, least_ns=least_ns)
                return False, -MOST, 0
            if budget_bytes < bounder_of(q).floor.peak_bytes:
                impossible[rewrites] = _floor(problem, rewrites)
                return worth(rewrites)
            made = tried[rewrites] = _changed(problem, rewrites, budget_bytes)
            best_ns = min(best_ns, made.least_ns) if made.bound.feasible else best_ns
        x = tried[rewrites]
        if x.bound.feasible:
            return True, -x.least_ns, 0
        return False, -_floor(problem, rewrites), -ops_take_ns(problem, rewrites)

    worth(())
    if problem.saved.timeline.peak_allocated_bytes > budget_bytes:
        bound = tried[()].bound if () in tried else None
        _search(problem, list(filter(None, _choices(problem, levers, budget_bytes, bound))), worth)
    possible: list[Changed | Slower] = [*(x for x in tried.values() if x.bound.feasible), *slower.values()]
    return _in_order(problem, possible, budget_bytes) or [
        _changed(problem, max((*tried, *impossible), key=worth), budget_bytes)
    ]


def _search(
    problem: Problem,
    groups: list[Sequence[tuple[Rewrite, ...]]],
    worth: Callable[[tuple[Rewrite, ...]], Any],
) -> None:
    """Try combinations in two orders, since each way ends where no one change helps: what takes no time first, with
    copies to host memory or without. Where the former may do alone it goes first: few others come near its bound."""
    cheap = [c for c in groups if ops_take_ns(problem, c[0]) <= problem.trace.time_ns]
    plain = [c for c in cheap if not c[0][0].bytes_per_s]
    orders = [[*first, *(c for c in groups if c not in first)] for first in (plain, cheap)]
    may_do, *_ = worth(_best(cheap, worth))
    for order in reversed(orders) if may_do else orders:
        _best(order, worth)


def _look_closely(
    problem: Problem,
    step: Slower,
    budget_bytes: int,
    steps: list[Changed | Slower],
    promise: Callable[[Changed | Slower], tuple[int, ...]],
    best_ns: int = MOST,
) -> None:
    """Put a step among others by its bound, unless no plan of it is possible, or below `best_ns`."""
    draft = draft_problem(problem, step.rewrites)
    enough_ns = best_ns - draft.trace.time_ns
    if best_ns < MOST and bounder_of(draft).quick_ns(budget_bytes, enough_ns) >= enough_ns:
        return
    found = _changed(problem, step.rewrites, budget_bytes)
    if found.bound.feasible:
        insort(steps, found, key=promise)


def _in_order(problem: Problem, steps: list[Changed | Slower], budget_bytes: int) -> list[Changed | Slower]:
    """Steps by rising bound, the first of which has one."""
    steps.sort(key=_promise)
    while steps and isinstance(first := steps[0], Slower):
        del steps[0]
        _look_closely(problem, first, budget_bytes, steps, _promise)
    return steps


def _shown_ns(problem: Problem, few: Changed, rewrites: Sequence[Rewrite], budget_bytes: int) -> int:
    """What a step that has fewer tiles shows that every plan of one with more adds: while anything else runs, as much
    is in memory, and what runs again takes no longer."""
    if len(few.rewrites) != len(rewrites):
        return 0
    others = [(a, b) for a, b in zip(few.rewrites, rewrites, strict=True) if a != b]
    if any(a.kind != "tile" or replace(b, number=a.number) != a or a.number > b.number for a, b in others):
        return 0
    but = {name for a, _ in others for name in tile.names(problem.trace, a.storage)}
    return bounder_of(few.problem).shown_ns(budget_bytes, but)


def _promise(step: Changed | Slower) -> tuple[int, ...]:
    slower = isinstance(step, Slower)
    return step.least_ns, slower, len(step.rewrites), sum(r.number for r in step.rewrites)


def _best(
    groups: Sequence[Sequence[tuple[Rewrite, ...]]], worth: Callable[[tuple[Rewrite, ...]], Any]
) -> tuple[Rewrite, ...]:
    """Of each group none or one choice, those that together are worth most; of equals those that were tried first.

    One group after the other, and all of them again while that helps: first all choices, but of several groups of
    stretches two tiles and a middle number; if one is no worse than none, on to the next number while that is better.
    """
    groups = [choices for choices in groups if choices]
    taken = [-1] * len(groups)  # numbers of choices; -1: none

    def together(k: int, choice: int) -> tuple[Rewrite, ...]:
        now = (choice if j == k else n for j, n in enumerate(taken))
        return _one_format(
            in_order(r for choices, n in zip(groups, now, strict=True) if n >= 0 for r in choices[n])
        )

    for attempt in range(ATTEMPTS):
        before = list(taken)
        for k, choices in enumerate(groups):
            tiles = bool(choices[0][0].number) and (len(groups) > 1 or attempt)
            first = {0, len(choices) // 3} if tiles else range(len(choices))
            if choices[0][0].bytes_per_s:
                first = range(min(2, len(choices)))
            at = max((taken[k],) if taken[k] >= 0 else first, key=lambda n: worth(together(k, n)))
            if worth(together(k, at)) < worth(together(k, taken[k])):
                continue
            for step in (1, -1):
                while 0 <= at + step < len(choices) and worth(together(k, at + step)) > worth(
                    together(k, at)
                ):
                    at += step
            taken[k] = max(taken[k], at, -1, key=lambda n: worth(together(k, n)))
        if taken == before:
            break
    return together(0, taken[0]) if groups else ()


def _one_format(rewrites: Iterable[Rewrite]) -> tuple[Rewrite, ...]:
    """Without the approximate ones of values that one before them is of."""
    taken, out = set(), []
    for r in rewrites:
        if r.storage not in taken or LEVERS[r.kind].EXACTNESS != APPROXIMATE:
            out.append(r)
        taken.add(r.storage)
    return tuple(out)


def _allowed(rewrites: Iterable[Rewrite], levers: Levers) -> bool:
    return error_of(rewrites, levers) <= (levers.max_gradient_error or ANY)


def error_of(rewrites: Iterable[Rewrite], levers: Levers) -> float:
    """The error of the gradient that rewrites make together, as it was measured of their parts."""
    lossy = [r for r in rewrites if LEVERS[r.kind].EXACTNESS == APPROXIMATE]
    return levers.errors.of(lossy) if levers.errors is not None and lossy else 0.0


def parts(rewrites: Sequence[Rewrite]) -> list[tuple[Rewrite, ...]]:
    """Rewrites of single values, in the parts of which the first, the first two and so on can be chosen."""
    ends = [-(-len(rewrites) * k // SHARES) for k in range(SHARES + 1)]
    return [tuple(rewrites[a:b]) for a, b in pairwise(ends) if a < b]


def _choices(
    problem: Problem, levers: Levers, budget_bytes: int = 0, bound: Bound | None = None
) -> Iterator[Sequence[tuple[Rewrite, ...]]]:
    """What can be chosen one after the other: of stretches that are alike the number of tiles, of other kinds how
    many; of values that are packed exactly those for which a byte costs less than the last one of a bound."""
    for kind, rewrites in offered(problem, levers).items():
        if (of_kind := getattr(LEVERS[kind], "choices", None)) is not None:
            yield list(of_kind(problem, rewrites, levers, budget_bytes))
            continue
        groups: list[tuple[object, dict[int, list[Rewrite]]]] = []
        for r in (r for r in rewrites if r.number):
            like = LEVERS[kind].alike(problem.trace, r)
            known = next((group for other, group in groups if other == like), None)
            if known is None:
                groups.append((like, known := {}))
            known.setdefault(r.number, []).append(r)
        for _, group in groups:
            yield [tuple(group[number]) for number in sorted(group)]
        if not groups and LEVERS[kind].EXACTNESS == EXACT:
            if bound is not None and bound.feasible:
                over = max(1, problem.saved.timeline.peak_allocated_bytes - budget_bytes)
                # At last, on average.
                prices = (bound.price_ns, bound.price_bytes), (bound.added_time_ns, over)
                rewrites = list(cheaper(problem.trace, rewrites, *max(prices, key=lambda p: p[0] / p[1])))
            yield [tuple(rewrites)] if rewrites else ()
        elif not groups:
            yield list(accumulate(parts(rewrites)))


ATTEMPTS: Final = 3
# Two steps of equal kinds are as good as one another if they differ by one of so many parts.
CLOSE: Final = 2000
NEAR: Final = 5  # of these parts, within which a plan that was made sooner may become the best
SEARCHED: Final = 2  # so many steps that the same kinds change are planned, where the first has a plan
ANY: Final = 1.0  # error of the gradient, relative L2, where the user gives no limit
SHARES: Final = 4  # of the rewrites of one kind, in their order of worth


def with_loss(problem: Problem, levers: Levers) -> tuple[Problem, Levers] | None:
    """The step of model and loss function as one, whose loss head can run in tiles, if they are allowed; and the levers
    with the errors of that step."""
    if not levers.allows(FP) or "tile" not in (levers.kinds or KINDS) or problem.joined is None:
        return None
    if levers.errors is None:
        return problem.joined, levers
    errors = levers.errors.joined
    return None if errors is None else (problem.joined, replace(levers, errors=errors))


def left_out(problem: Problem, levers: Levers) -> str:
    """In words, why a loss head that is outside of the model does not run in tiles; "": it may, or there is none."""
    if with_loss(problem, replace(levers, errors=None)) is None or with_loss(problem, levers) is not None:
        return ""
    return (
        f"The loss is left outside of the captured graph by these --errors; measure them again with `{COMMAND}`: its "
        "tiles (lever tile) are not used."
    )


def has_head(problem: Problem, rewrites: Iterable[Rewrite]) -> bool:
    """Whether rewrites run a loss head in tiles."""
    heads = {x.storage for x in problem.trace.meta.stretches if x.backward is None}
    return any(r.kind == "tile" and r.storage in heads for r in rewrites)


def lowest_floor(problem: Problem, levers: Levers) -> int:
    """A peak that no plan can go below, with these levers or without; of combinations as `changed_steps`."""
    _check_named(levers)
    steps = [(problem, levers)]
    if (joined := with_loss(problem, levers)) is not None:
        steps.append(joined)

    def lowest(of: Problem, mine: Levers) -> int:
        groups = list(_choices(of, mine))
        return _floor(of, _best(groups, lambda rs: -_floor(of, rs) if _allowed(rs, mine) else -MOST))

    return min(lowest(*step) for step in steps)


def lower_bound(problem: Problem, budget_bytes: int, levers: Levers) -> Bound:
    """What every plan within the budget adds at least, with these levers or without; if there is more to choose than
    the number of tiles of one stretch, in the combinations that were tried."""
    bound = _lower_bound(problem, budget_bytes, levers)
    if (bound.added_time_ns or not bound.feasible) and (joined := with_loss(problem, levers)) is not None:
        of, mine = joined
        other = _lower_bound(of, budget_bytes, mine)
        return min(bound, other, key=lambda b: (not b.feasible, b.added_time_ns))
    return bound


def _lower_bound(problem: Problem, budget_bytes: int, levers: Levers) -> Bound:
    best = changed_steps(problem, budget_bytes, levers)[0]
    assert isinstance(best, Changed)
    rewrites = [r for of_kind in offered(problem, levers).values() for r in of_kind]
    tried = len({r.storage for r in rewrites}) > 1  # of one stretch, every number of tiles was tried
    if not best.rewrites:
        return replace(best.bound, tried=tried and best.bound.added_time_ns > 0)
    added = best.least_ns - problem.trace.time_ns if best.bound.feasible else 0
    whole = problem.trace.time_ns
    share = percent(added, whole)
    reason = best.bound.reason + "; of the steps as the rewrites that were tried change them" * tried
    return replace(best.bound, reason=reason, added_time_ns=added, overhead_percent=share, tried=tried)


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
    best: Plan | None = None
    refusal: Infeasible | None = None
    planned: Counter[frozenset[str]] = Counter()
    of_kinds: dict[frozenset[str], int] = {}  # the time of the best plan so far
    close_ns = problem.trace.time_ns // CLOSE

    def promise(step: Changed | Slower) -> tuple[int, ...]:
        return step.least_ns // max(1, close_ns), *_promise(step)[1:], step.least_ns

    steps = sorted(changed_steps(problem, budget_bytes, levers), key=promise)
    while steps:
        step = steps.pop(0)
        kinds = frozenset(r.kind for r in step.rewrites)
        if best is not None and (step.least_ns >= _time_ns(best) or planned[kinds] >= SEARCHED):
            continue
        if step.least_ns >= of_kinds.get(kinds, MOST) - close_ns:
            continue
        if isinstance(step, Slower):
            best_ns = MOST if best is None else _time_ns(best)
            _look_closely(problem, step, budget_bytes, steps, promise, best_ns)
            continue
        planned[kinds] += 1
        try:
            if best is not None and sooner is not None:
                near_ns = _time_ns(best) + NEAR * close_ns
                if _time_ns(sooner(step.problem)) >= near_ns:
                    continue
            made = make(checked(step.problem))
        except Infeasible as error:
            told = _with(step.rewrites, error)
            refusal = min(refusal or told, told, key=lambda e: e.figures["lowest_peak_bytes"])
            continue
        if made.rewrites and step.rewrites and levers.kinds is None:
            continue  # a planner that changes the step itself
        of_kinds[kinds] = min(of_kinds.get(kinds, MOST), _time_ns(made))
        if best is None or _time_ns(made) < _time_ns(best):
            best = _of(problem, made, step.rewrites, levers)
    if best is None:
        assert refusal is not None
        help_by = _helpful(problem, levers)
        raise Infeasible(f"{refusal} {help_by}", refusal.figures) if help_by else refusal
    return best


def _helpful(problem: Problem, levers: Levers) -> str:
    """In words, the rewrites that would lower the floor most, if they are not allowed; or why there are none."""
    if levers.errors is None:
        problem = problem.joined or problem
    elif (joined := with_loss(problem, levers)) is not None:
        problem, levers = joined
    could = Levers(allow="approximate", kinds=tuple(KINDS))
    best = _best(list(_choices(problem, could)), lambda rs: -_floor(problem, rs))
    allowed = {r for rewrites in offered(problem, levers).values() for r in rewrites}
    if allowed.issuperset(best):
        return nothing_in_tiles(problem.trace, levers)
    word = next(word for word, exactness in ALLOW.items() if exactness == exactness_of(best))
    lower = show_bytes(_floor(problem, best))
    kinds = ", ".join(dict.fromkeys(r.kind for r in best if r not in allowed))
    return f"With --allow {word} the lever {kinds} lowers what no plan can go below to {lower}."


def nothing_in_tiles(trace: Trace, levers: Levers) -> str:
    """In words, why a step has nothing that could run in tiles, if tiles are allowed; "": it has, or they are not."""
    named = trace.meta.stretches or trace.joined is not None
    if named or not levers.allows(FP) or "tile" not in (levers.kinds or KINDS):
        return ""
    return (
        "The trace names nothing that could run in tiles. Where you expect something: an older trace does not say it, "
        "so trace again; a loss is found where forward computes it, or a loss function that the trace was given, of "
        "the model's output and the targets alone; in a step() of your own it is not."
    )


def _with(rewrites: Sequence[Rewrite], refusal: Infeasible) -> Infeasible:
    """The refusal of a step as rewrites change it, which says so."""
    if not rewrites:
        return refusal
    kinds = " and ".join(dict.fromkeys(r.kind for r in rewrites))
    return Infeasible(f"{refusal} That is with {kinds} beside recomputation.", refusal.figures)


def _time_ns(plan: Plan) -> int:
    return int(plan.predicted["plan"]["step_time_ns"])


def _of(problem: Problem, plan: Plan, rewrites: tuple[Rewrite, ...], levers: Levers) -> Plan:
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


def host_bytes(trace: Trace, plan: Plan) -> int:
    """What waits in host memory at most: all that is copied there, when forward ends."""
    return sum(pinned_bytes(trace.storages.nbytes[r.storage]) for r in plan.rewrites if r.bytes_per_s)


def rewrites_in_words(trace: Trace, plan: Plan) -> list[str]:
    """How the step is changed, a line a kind."""
    by_kind: dict[str, list[Rewrite]] = {}
    for r in plan.rewrites:
        by_kind.setdefault(r.kind, []).append(r)
    lines = []
    for kind, rewrites in by_kind.items():
        tiles: dict[int, list[str]] = {}
        for r in rewrites:
            tiles.setdefault(r.number, []).append(r.op)
        more = {n: f" and {len(names) - 1} more" if names[1:] else "" for n, names in tiles.items()}
        of = ", ".join(f"{names[0]}{more[n]} in {n} tiles" for n, names in tiles.items() if n)
        of = of or f"{len(rewrites)} values"
        errors = [r.error for r in rewrites if r.error is not None]
        error = f"; relative error of the gradient {max(errors):.1e}" if errors else ""
        copied = f", {show_bytes(host_bytes(trace, plan))} in host memory" if rewrites[0].bytes_per_s else ""
        lines.append(f"{kind}: {of}{copied}{error}")
    return lines


# What each lever could do


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far a lever reaches by itself, or some together."""

    lever: str
    exactness: str
    rewrites: int  # how many are taken
    peak_allocated_bytes: int  # with everything saved
    floor_bytes: int  # no plan can go below
    added_time_ns: int  # with everything saved
    # No plan within the budget adds less; None: no plan, or no budget.
    bound_overhead_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What levers do to one trace; the first row is recomputation alone."""

    trace_name: str
    problem: Problem
    budget_bytes: int | None
    rows: tuple[Reach, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "trace": self.trace_name,
            "model": self.problem.trace.meta.model,
            "fingerprint": self.problem.trace.meta.fingerprint,
            "budget_bytes": self.budget_bytes,
            "levers": [to_json(row) for row in self.rows],
        }

    def table(self) -> Table:
        """One row a lever."""
        whole, time_ns = self.rows[0].peak_allocated_bytes, self.problem.trace.time_ns
        return table(
            self.rows,
            (
                ("lever", "", lambda r: r.lever),
                ("gradients", "", lambda r: IN_WORDS[r.exactness]),
                ("rewrites", "count", lambda r: r.rewrites),
                ("everything saved", "bytes", lambda r: r.peak_allocated_bytes),
                ("", "share", lambda r: percent(r.peak_allocated_bytes, whole)),
                ("time", "+percent", lambda r: percent(r.added_time_ns, time_ns)),
                ("no plan below", "bytes", lambda r: r.floor_bytes),
                (" ", "share", lambda r: percent(r.floor_bytes, whole)),
                ("within the budget", "+percent", lambda r: r.bound_overhead_percent),
            ),
        ).known()


IN_WORDS: Final = {EXACT: "equal in every bit", FP: "equal but for rounding", APPROXIMATE: "approximate"}
RECOMPUTE_ALONE: Final = "recompute"


def study(problem: Problem, name: str, budget_bytes: int | None = None) -> Study:
    """What each lever alone does to the step, and all of a class together.

    Counts: the step with everything saved, and the floor of its plans; of a stretch the number of tiles with the lowest
    floor, of other kinds all that is offered. Ignores: that fewer may do. As in plans, the step is that of model and
    loss function as one where a loss head outside of the model runs in tiles, and nowhere else.

    Args:
        name: of the trace, for the answer.
        budget_bytes: for what plans within it add at least.
    """
    found = _each_alone(problem)
    tiled, found_tiled = problem, found  # of which step a plan with tiles is
    if (joined := problem.joined) is not None:
        found_joined = _each_alone(joined)
        if has_head(joined, found_joined.get("tile", ())):
            tiled, found_tiled = joined, found_joined
    rows = [_reach(problem, RECOMPUTE_ALONE, (), budget_bytes)]
    for kind in LEVERS:
        step, rewrites = (tiled, found_tiled) if kind == "tile" else (problem, found)
        if kind in rewrites:
            rows.append(_reach(step, kind, rewrites[kind], budget_bytes))
    for name_of_all, most in (("all exact", EXACT), ("all up to rounding", FP), ("all", APPROXIMATE)):
        step, rewrites = (problem, found) if most == EXACT else (tiled, found_tiled)
        kinds = [k for k in rewrites if EXACTNESS.index(LEVERS[k].EXACTNESS) <= EXACTNESS.index(most)]
        together = _together(step, {k: rewrites[k] for k in kinds})
        if len({r.kind for r in together}) > 1:
            rows.append(_reach(step, name_of_all, together, budget_bytes))
    return Study(trace_name=name, problem=problem, budget_bytes=budget_bytes, rows=tuple(rows))


def _each_alone(problem: Problem) -> dict[str, tuple[Rewrite, ...]]:
    """Of each kind that a step offers, the rewrites with the lowest floor."""
    found: dict[str, tuple[Rewrite, ...]] = {}
    for kind in LEVERS:
        with suppress(SpecError):  # nobody says how fast copies to host memory are
            groups = list(_choices(problem, Levers(allow="approximate", kinds=(kind,))))
            lowest = _best(groups, lambda rs: -_floor(problem, rs))
            if chosen := lowest or next((choice for choices in groups for choice in choices), ()):
                found[kind] = chosen
    return found


def _together(problem: Problem, found: dict[str, tuple[Rewrite, ...]]) -> tuple[Rewrite, ...]:
    """All kinds together; of those that pack the same values in different formats the one with the lowest floor."""
    alike = [k for k in found if LEVERS[k].EXACTNESS == APPROXIMATE]
    rest = tuple(r for k, rewrites in found.items() if k not in alike for r in rewrites)
    taken = {r.storage for r in rest}
    choices = [(*rest, *(r for r in found[k] if r.storage not in taken)) for k in alike] or [rest]
    return min(choices, key=lambda rewrites: _floor(problem, rewrites))


def _floor(problem: Problem, rewrites: tuple[Rewrite, ...]) -> int:
    return bounder_of(draft_problem(problem, rewrites)).floor.peak_bytes


def _reach(problem: Problem, lever: str, rewrites: tuple[Rewrite, ...], budget_bytes: int | None) -> Reach:
    step = rewritten_problem(problem, rewrites)
    bound = None if budget_bytes is None else bounder_of(step).bound(budget_bytes)
    added = step.saved.timeline.step_time_ns - problem.trace.time_ns
    least = None
    if bound is not None and bound.feasible:
        least_ns = Changed(rewrites=rewrites, problem=step, bound=bound).least_ns
        least = percent(least_ns - problem.trace.time_ns, problem.trace.time_ns)
    return Reach(
        lever=lever,
        exactness=exactness_of(rewrites),
        rewrites=len(rewrites),
        peak_allocated_bytes=step.saved.timeline.peak_allocated_bytes,
        floor_bytes=bounder_of(step).floor.peak_bytes,
        added_time_ns=added,
        bound_overhead_percent=least,
    )
