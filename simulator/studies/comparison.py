"""Planners side by side on one trace and budget: what each reaches, what it costs, how far it is from optimal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from simulator.allocator.device_fit import DeviceFit, Setting, device_fit
from simulator.bounds.bound import Bound, lower_bound
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.core.replay import Replay
from simulator.core.rewrites import rewritten_problem
from simulator.core.schedule import breach
from simulator.planners import find, plan_with
from simulator.planners.outcome import Infeasible, percent
from simulator.prediction.warnings import texts_of
from simulator.show.notebook import framed
from simulator.show.tables import Cell, Table, no, table, yes
from traces.errors import LowtideError
from traces.records.plan import Plan
from traces.records.trace import Trace
from traces.units import show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One planner's answer, or another system's plan replayed. The figures are empty where there is no plan."""

    planner: str
    feasible: bool  # a plan is there, its replayed peak is within the budget, and it obeys the constraints
    solve_seconds: float | None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_time_ns: int | None = None
    overhead_percent: float | None = None
    gap_points: float | None = None  # over the certified bound; only for a plan within the budget
    recomputed_ops: int | None = None
    fits: bool | None = None  # into the device that was named
    lowest_peak_bytes: int | None = None  # of a refusal: the lowest peak that the planner reached
    message: str = ""  # why there is no plan, or what is wrong with it
    peer: bool = False  # another system's plan, imported


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ManyPlans:
    """What answers about many plans of one trace have in common: the step, and what each plan is judged under."""

    problem: Problem  # with the constraints of the plans
    trace_name: str
    setting: Setting

    @property
    def trace(self) -> Trace:
        return self.problem.trace

    @property
    def saved(self) -> Replay:
        """The step with everything saved."""
        return self.problem.unconstrained.saved

    def fit(self, replay: Replay, step: Problem | None = None) -> DeviceFit:
        """What a plan needs of the device, without a look at torch's defaults; `step`: another than the problem's."""
        return device_fit(step or self.problem, replay, replace(self.setting, asked=False))

    def figures(self, replay: Replay, step: Problem | None = None) -> dict[str, Any]:
        """What a plan comes to, by the names that it has in every answer."""
        timeline, base_ns = replay.timeline, self.problem.unconstrained.saved.timeline.step_time_ns
        fit = self.fit(replay, step)
        return {
            "peak_allocated_bytes": timeline.peak_allocated_bytes,
            "peak_reserved_bytes": fit.figures().peak_reserved_bytes,
            "step_time_ns": timeline.step_time_ns,
            "overhead_percent": round(percent(timeline.step_time_ns - base_ns, base_ns), 4),
            "recomputed_ops": timeline.recomputed_ops,
            "fits": fit.fits,
        }

    def asked(self) -> dict[str, Any]:
        """What the JSON begins with."""
        meta, device = self.trace.meta, self.setting.device
        return {
            "trace": self.trace_name,
            "model": meta.model,
            "batch_size": meta.batch_size,
            "target": meta.target,
            "fingerprint": meta.fingerprint,
            "alloc_conf": self.setting.alloc_conf,
            "device": None if device is None else device.to_json(),
        }

    def told(self) -> dict[str, Any]:
        """The step with everything saved, and what must be said beside every figure."""
        baseline = self.fit(self.saved).figures(self.saved.timeline.step_time_ns)
        return {"baseline": baseline.headline(), "warnings": texts_of(self.problem)}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(ManyPlans):
    """One trace and one budget under several planners."""

    budget_bytes: int
    bound: Bound  # of the constrained problem
    entrants: tuple[Entrant, ...] = ()

    def __repr__(self) -> str:
        best = next((e for e in ranked(self.entrants) if e.feasible), None)
        told = "no plan" if best is None else f"{best.planner} {best.overhead_percent:+.2f} %"
        within = f"{self.trace.meta.model} within {show_bytes(self.budget_bytes)}"
        return f"<{within}: {told}, of {len(self.entrants)} planners>"

    def _repr_html_(self) -> str:
        return framed(repr(self).strip("<>"), self.table())

    def table(self) -> Table:
        """A row for each planner, the cheapest first, those without a plan last."""
        return table(
            ranked(self.entrants),
            (
                ("planner", "", lambda e: e.planner),
                ("peak", "bytes", lambda e: e.peak_allocated_bytes),
                ("step time", "time", lambda e: e.step_time_ns),
                ("overhead", "+percent", lambda e: e.overhead_percent),
                ("gap, points", "points", lambda e: e.gap_points),
                ("solve time", "time", lambda e: None if e.solve_seconds is None else e.solve_seconds * 1e9),
                ("ops run again", "count", lambda e: e.recomputed_ops),
                ("", "", lambda e: verdict(e, self.budget_bytes)),
            ),
            caption="The gap is the overhead less the certified bound: how far from optimal the plan can be at most. "
            "Solve times are of this machine.",
        )

    def with_entrants(self, entrants: Iterable[Entrant]) -> Comparison:
        """The same with more rows."""
        return replace(self, entrants=(*self.entrants, *entrants))

    def judged(
        self, planner: str, plan: Plan, solve_seconds: float | None, *, peer: bool = False, message: str = ""
    ) -> Entrant:
        """A plan's row, by the exact replay, also if the plan is over the budget or breaks the constraints.

        Neither makes a plan that can be had, and the bound says nothing of them. Raises PlanError if the plan does not
        fit the trace.
        """
        replay = rewritten_problem(self.problem.unconstrained, plan.rewrites).replay(plan.actions)
        step = rewritten_problem(self.problem, plan.rewrites)
        if broken := breach(step, replay.schedule):
            message = "; ".join(part for part in (f"breaks the constraints: {broken}", message) if part)
        feasible = replay.timeline.peak_allocated_bytes <= self.budget_bytes and not broken
        times = replay.timeline.step_time_ns, self.saved.timeline.step_time_ns
        return Entrant(
            planner=planner,
            feasible=feasible,
            solve_seconds=None if solve_seconds is None else round(solve_seconds, 3),
            gap_points=self.bound.gap_points(*times) if feasible and step is self.problem else None,
            message=message,
            peer=peer,
            **self.figures(replay, step),
        )

    def to_json(self) -> dict[str, Any]:
        """What `simulate compare --json` prints."""
        bound, told = self.bound.to_json(), self.told()
        return {
            **self.asked(),
            "budget_bytes": self.budget_bytes,
            "feasible": any(e.feasible for e in self.entrants),
            "baseline": told["baseline"],
            "bound": {k: bound[k] for k in ("overhead_percent", "added_time_ns", "feasible", "reason")},
            "warnings": told["warnings"],
            "planners": [asdict(e) for e in self.entrants],
        }


def compare(
    problem: Problem,
    trace_name: str,
    budget_bytes: int,
    planners: Iterable[str],
    limits: Limits,
    setting: Setting,
    progress: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """A row for each planner, in the order given; the bound is that of the constrained problem.

    Each planner has `limits.seconds` for itself. One that cannot plan this trace or budget has a row that says why.
    """
    found = Comparison(
        problem=problem,
        trace_name=trace_name,
        budget_bytes=budget_bytes,
        bound=lower_bound(problem, budget_bytes),
        setting=setting,
    )
    rows = []
    for name in planners:
        progress(f"planning with {name}")
        find(name)  # what it imports is not its solve time
        start = time.perf_counter()
        try:
            plan = plan_with(name, problem, budget_bytes, limits)
        except LowtideError as error:
            lowest = error.figures["lowest_peak_bytes"] if isinstance(error, Infeasible) else None
            seconds = round(time.perf_counter() - start, 3)
            rows.append(
                Entrant(
                    planner=name,
                    feasible=False,
                    solve_seconds=seconds,
                    lowest_peak_bytes=lowest,
                    message=str(error),
                )
            )
            continue
        rows.append(found.judged(name, plan, time.perf_counter() - start))
    return found.with_entrants(rows)


def ranked(entrants: tuple[Entrant, ...]) -> list[Entrant]:
    """Within the budget by time, then over it by peak, then those without a plan."""

    def key(e: Entrant) -> tuple[int, int]:
        if e.feasible:
            return 0, e.step_time_ns or 0
        return (2, 0) if e.peak_allocated_bytes is None else (1, e.peak_allocated_bytes)

    return sorted(entrants, key=key)


def verdict(e: Entrant, budget_bytes: int) -> Cell:
    """Whether a plan meets the budget, and what else is to be said of it."""
    if e.peak_allocated_bytes is None:
        known = e.lowest_peak_bytes
        return no(e.message if known is None else f"no plan; lowest peak {show_bytes(known)}")
    parts = [
        "met" if e.feasible else "",
        "over the budget" if e.peak_allocated_bytes > budget_bytes else "",
        "does not fit the device" if e.fits is False else "",
        e.message,
    ]
    said = "; ".join(part for part in parts if part)
    return yes(said) if e.feasible else no(said)
