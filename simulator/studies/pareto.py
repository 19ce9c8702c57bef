"""The front of one trace: the cheapest plan found for each of many budgets, and what each further byte costs.

A plan for one budget keeps to every larger one, so each budget gets the cheapest of all plans that keep to it,
whichever budget it was made for. The front is therefore monotone: a larger budget never gives a slower plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Final

from simulator.allocator.device_fit import Setting
from simulator.bounds.bound import bound_curve, bounder_of
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.core.replay import Replay
from simulator.planners import plan_with
from simulator.planners.outcome import Infeasible
from simulator.show import notebook
from simulator.show.tables import NUMBER, UNKNOWN, Cell, Table, no, table, yes
from simulator.studies.comparison import ManyPlans
from traces.errors import UnfinishedError
from traces.records.plan import Plan
from traces.units import show_bytes, show_percent, show_time

GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One budget of the front. The plan's figures are empty where no plan was found."""

    budget_bytes: int
    feasible: bool
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_time_ns: int | None = None
    overhead_percent: float | None = None
    recomputed_ops: int | None = None
    fits: bool | None = None  # into the device that was named
    made_for_bytes: int | None = None  # the budget that the plan was made for: this one or a smaller
    bound_overhead_percent: float | None = None  # certified; None: no plan can fit
    gap_points: float | None = None
    # Time that one GiB less costs here: by the plans up to the next smaller budget, and by the bound at this one.
    price_ns_per_gib: int | None = None
    bound_price_ns_per_gib: int | None = None
    solve_seconds: float | None = None
    finished: bool = True  # the planner came to an end; if not, a plan here was made for another budget
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Front(ManyPlans):
    """All points, by rising budget; the last is the peak with everything saved."""

    planner: str
    floor_bytes: int  # no plan can go below
    points: tuple[Point, ...] = ()
    solve_seconds: float = 0.0
    plans: tuple[Plan | None, ...] = ()  # by point

    def __repr__(self) -> str:
        fitting = [p for p in self.points if p.feasible]
        reach = f"down to {show_bytes(fitting[0].peak_allocated_bytes)}" if fitting else "no plan"
        return (
            f"<{self.trace.meta.model}, batch {self.trace.meta.batch_size}: {len(self.points)} budgets by "
            f"{self.planner}, {reach}, floor {show_bytes(self.floor_bytes)}>"
        )

    def _repr_html_(self) -> str:
        at = [(p.budget_bytes / GIB, p) for p in self.points]
        plans = [(x, p.overhead_percent) for x, p in at if p.overhead_percent is not None]
        bounds = [(x, p.bound_overhead_percent) for x, p in at if p.bound_overhead_percent is not None]
        curves = [(notebook.SAVED, bounds), (notebook.PLANNED, plans)]
        picture = notebook.picture(curves, "GiB", "% added", [], area=False)
        head = f"{self.trace.meta.model}: what each GiB costs ({self.planner}); grey: the certified bound"
        return notebook.framed(head, self.table(), picture)

    @property
    def saved(self) -> Replay:
        """The step with everything saved, and what constraints save beside."""
        return self.problem.saved

    def table(self) -> Table:
        """A row for each budget, the largest first."""
        most, base_ns = self.points[-1].budget_bytes, self.saved.timeline.step_time_ns
        device = self.setting.device
        fits = {None: UNKNOWN, True: yes("fits"), False: no("too large")}

        def bound(p: Point) -> float | str:
            return "infeasible" if p.bound_overhead_percent is None else p.bound_overhead_percent

        def price(p: Point) -> Cell:
            if p.price_ns_per_gib is None:
                return Cell(UNKNOWN)
            share = 100 * p.price_ns_per_gib / base_ns if base_ns else 0.0
            text = f"{show_time(p.price_ns_per_gib)} ({show_percent(share, signed=True)})"
            return Cell(text, p.price_ns_per_gib)

        def met(p: Point) -> Cell:
            if not p.finished:
                return no("not finished; another budget's plan" if p.feasible else "not finished")
            return yes("met") if p.feasible else no("no plan")

        return table(
            self.points[::-1],
            (
                ("budget", "bytes", lambda p: p.budget_bytes),
                ("of the peak", "share", lambda p: 100 * p.budget_bytes / most if most else None),
                ("peak", "bytes", lambda p: p.peak_allocated_bytes),
                ("overhead", "+percent", lambda p: p.overhead_percent),
                ("bound", "percent", bound),
                ("gap, points", "points", lambda p: p.gap_points),
                ("one GiB less costs", NUMBER, price),
                ("by the bound", "time", lambda p: p.bound_price_ns_per_gib),
                ("device" if device is None else device.name, "", lambda p: fits[p.fits]),
                ("", "", met),
            ),
            caption="One GiB less: the added time from this budget to the next smaller one in the table, for each GiB "
            "between them; by the bound: what the last byte costs at this budget at the instant that decides it.",
        ).known()

    def to_json(self) -> dict[str, Any]:
        """What `simulate pareto --json` prints."""
        reached = [p.peak_allocated_bytes for p in self.points if p.peak_allocated_bytes is not None]
        return {
            **self.asked(),
            "planner": self.planner,
            "solve_seconds": round(self.solve_seconds, 3),
            **self.told(),
            "floor_bytes": self.floor_bytes,
            "smallest_peak_bytes": min(reached, default=None),
            "points": [asdict(p) for p in self.points],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A plan with its replay, and the budget that it was made for."""

    plan: Plan
    replay: Replay
    made_for_bytes: int

    @property
    def step_ns(self) -> int:
        return self.replay.timeline.step_time_ns


def pareto(
    problem: Problem,
    trace_name: str,
    planner: str,
    points: int,
    limits: Limits,
    setting: Setting,
    progress: Callable[[str], None] = lambda line: None,
) -> Front:
    """The front with so many budgets, evenly from the floor to the peak with everything saved.

    Args:
        limits: `seconds` is for the whole front. Most budgets are easy, so each plan may take twice an equal share of
            it as long as there is time: the same for each, so that equal seeds make equal fronts.
        setting: the allocator settings and the device to ask about.

    A budget for which the planner does not end in time is said to be so, and the others stand. Budgets that the time
    does not reach are left out, every second one first; the two ends are always there.

    Raises:
        SpecError: the planner cannot plan this trace at all.
    """
    start = time.perf_counter()
    least, saved = bounder_of(problem).floor.peak_bytes, problem.saved
    most = saved.timeline.peak_allocated_bytes
    front = Front(problem=problem, trace_name=trace_name, setting=setting, planner=planner, floor_bytes=least)
    budgets = sorted({least + (most - least) * k // (points - 1) for k in range(points)})
    clock = limits.clock()
    made: dict[int, Pick | Infeasible | UnfinishedError] = {}
    seconds: dict[int, float] = {}
    # The ends first, then ever finer between them: should the time run out, the front is coarse and not cut off.
    for k, budget in enumerate(_coarse_to_fine(budgets)):
        if k > 1 and clock.over:
            progress(
                f"{k} of {len(budgets)} budgets were planned in {limits.seconds:g} s; the others are left out"
            )
            budgets = sorted(made)
            break
        progress(f"budget {k + 1} of {len(budgets)}: {budget} bytes")
        began = time.perf_counter()
        share = min(2 * limits.seconds / len(budgets), clock.left_seconds)
        try:
            plan = plan_with(planner, problem, budget, replace(limits, seconds=share))
            made[budget] = pick_of(problem, plan, budget)
        except (Infeasible, UnfinishedError) as error:
            made[budget] = error
        seconds[budget] = time.perf_counter() - began
    chosen = cheapest(budgets, [p for p in made.values() if isinstance(p, Pick)])
    # What is the same for all budgets that share a plan, by where that was made.
    known = {p.made_for_bytes: p for p in chosen if p is not None}
    figures = {budget: front.figures(p.replay) for budget, p in known.items()}
    rows = []
    for budget, pick, bound in zip(budgets, chosen, bound_curve(problem, budgets), strict=True):
        result = made[budget]
        finished = not isinstance(result, UnfinishedError)
        price_ns = round(bound.price_ns * GIB / bound.price_bytes) if bound.feasible else None
        rows.append(
            Point(
                budget_bytes=budget,
                feasible=pick is not None,
                made_for_bytes=None if pick is None else pick.made_for_bytes,
                gap_points=None
                if pick is None
                else bound.gap_points(pick.step_ns, saved.timeline.step_time_ns),
                bound_overhead_percent=bound.overhead_percent if bound.feasible else None,
                bound_price_ns_per_gib=price_ns,
                solve_seconds=round(seconds[budget], 3),
                finished=finished,
                message="" if isinstance(result, Pick) or (pick and finished) else str(result),
                **({} if pick is None else figures[pick.made_for_bytes]),
            )
        )
    return replace(
        front,
        points=_priced(rows),
        solve_seconds=time.perf_counter() - start,
        plans=tuple(None if pick is None else pick.plan for pick in chosen),
    )


def _coarse_to_fine(budgets: Sequence[int]) -> list[int]:
    """The largest and the smallest, then the middle, the middles of the halves, and so on."""
    out, gaps = [budgets[-1], budgets[0]], [(0, len(budgets) - 1)]
    while gaps:
        middles = [(low, (low + high) // 2, high) for low, high in gaps if high - low > 1]
        out += [budgets[middle] for _, middle, _ in reversed(middles)]
        gaps = [gap for low, middle, high in middles for gap in ((low, middle), (middle, high))]
    return list(dict.fromkeys(out))


def pick_of(problem: Problem, plan: Plan, made_for_bytes: int) -> Pick:
    """A plan, replayed."""
    replay = problem.unconstrained.replay(plan.actions)
    return Pick(plan=plan, replay=replay, made_for_bytes=made_for_bytes)


def cheapest(budgets: Sequence[int], made: Sequence[Pick]) -> tuple[Pick | None, ...]:
    """For each budget, the fastest of all plans that keep to it; of equally fast ones the one with the lowest peak."""

    def key(pick: Pick) -> tuple[int, int, int]:
        return pick.step_ns, pick.replay.timeline.peak_allocated_bytes, pick.made_for_bytes

    return tuple(
        min((p for p in made if p.replay.timeline.peak_allocated_bytes <= b), key=key, default=None)
        for b in budgets
    )


def _priced(points: Sequence[Point]) -> tuple[Point, ...]:
    """With what one GiB less costs: the time between a point and the next smaller one, per byte between them."""
    out = [*points[:1]]
    for below, point in pairwise(points):
        price = None
        between = point.budget_bytes - below.budget_bytes
        if below.step_time_ns is not None and point.step_time_ns is not None:
            price = round((below.step_time_ns - point.step_time_ns) * GIB / between)
        out.append(replace(point, price_ns_per_gib=price))
    return tuple(out)
