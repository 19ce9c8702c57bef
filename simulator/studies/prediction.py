"""What one step needs: replayed with everything saved and with a plan, and the plan made for a budget.

A budget limits the allocated or the reserved bytes. For reserved memory the planner is asked for smaller and smaller
allocated peaks until the allocator stays within the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from simulator.allocator.device import CUDA
from simulator.allocator.device_fit import DeviceFit, Setting, device_fit, kind_of
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.core.replay import Replay, run
from simulator.core.schedule import Schedule
from simulator.planners import DEFAULT, SAVE_ALL, plan_with
from simulator.planners.outcome import Infeasible, percent
from simulator.studies.tables import Table, table
from traces.errors import BudgetError, SpecError
from traces.measurement import RunFigures
from traces.plan import ALLOCATED, RESERVED, Action, Plan
from traces.trace import Trace
from traces.units import show_bytes, show_percent, show_time

UNLIMITED_BYTES: Final = 1 << 62
SHARES: Final = 4  # a planner's time, where several plans are made for one budget
ATTEMPTS: Final = 8  # plans that are made at most for one budget of reserved memory
STRIDES: Final = 8  # the budget falls by an eighth of the limit at most
CLOSE: Final = 100  # stop when the highest budget that may do is within 1/100 of the one that did
DROPOUT_MASK: Final = "lowtide.dropout_mask.default"  # a byte an element


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Prediction:
    """One step with everything saved and with a plan; what the allocator makes of them is worked out when asked for."""

    problem: Problem  # under the constraints that the plan was made under
    plan: Plan
    saved: Replay  # everything saved
    planned: Replay
    setting: Setting
    budget_bytes: int | None = None

    @property
    def trace(self) -> Trace:
        return self.problem.trace

    @property
    def saved_fit(self) -> DeviceFit:
        """What the step needs of the device with everything saved."""
        return self._fit((), self.saved)

    @property
    def planned_fit(self) -> DeviceFit:
        """What it needs with the plan."""
        return self._fit(self.plan.actions, self.planned)

    def _fit(self, actions: tuple[Action, ...], replay: Replay) -> DeviceFit:
        if replay == self.saved:
            actions = ()
        key = ("fit", self.setting, actions)
        return self.problem.unconstrained.once(key, lambda p: device_fit(p, replay, self.setting))

    @property
    def saved_figures(self) -> RunFigures:
        """The headline figures with everything saved."""
        return self.saved_fit.figures(self.saved.timeline.step_time_ns)

    @property
    def planned_figures(self) -> RunFigures:
        """The headline figures with the plan."""
        return self.planned_fit.figures(self.planned.timeline.step_time_ns)

    @property
    def overhead_percent(self) -> float:
        """Time that the plan adds, in percent of the step with everything saved."""
        base = self.saved.timeline.step_time_ns
        return percent(self.planned.timeline.step_time_ns - base, base)

    def __repr__(self) -> str:
        before, after = self.saved_figures, self.planned_figures
        peaks, times = [show_bytes(before.peak_allocated_bytes)], [show_time(before.step_time_ns)]
        if self.plan.actions:
            peaks.append(show_bytes(after.peak_allocated_bytes))
            times.append(
                f"{show_time(after.step_time_ns)} ({show_percent(self.overhead_percent, signed=True)})"
            )
        parts = [f"peak {' -> '.join(peaks)}", f"step {' -> '.join(times)}"]
        if after.peak_reserved_bytes is not None:
            parts.append(f"reserved {show_bytes(after.peak_reserved_bytes)}")
        if self.planned_fit.fits is not None:
            parts.append("fits" if self.planned_fit.fits else "does not fit")
        return f"<{self.trace.meta.model}, batch {self.trace.meta.batch_size}: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        from simulator.studies.notebook import prediction_html

        return prediction_html(self)

    def table(self) -> Table:
        """The headline figures with everything saved, and with the plan."""
        runs = [("everything saved", self.saved_figures, 0.0)]
        if self.plan.actions:
            runs.append((f"plan ({self.plan.planner})", self.planned_figures, self.overhead_percent))
        return table(
            runs,
            (
                ("run", "", lambda run: run[0]),
                ("peak allocated", "bytes", lambda run: run[1].peak_allocated_bytes),
                ("in blocks", "bytes", lambda run: run[1].peak_block_bytes),
                ("peak reserved", "bytes", lambda run: run[1].peak_reserved_bytes),
                ("step time", "time", lambda run: run[1].step_time_ns),
                ("overhead", "+percent", lambda run: run[2]),
            ),
        ).known()

    def whole_bytes(self, budget_of: str) -> int:
        """What 100 % of a budget stands for.

        Raises:
            SpecError: a budget of reserved memory for a CPU's trace.
        """
        if budget_of == ALLOCATED:
            return self.saved.timeline.peak_allocated_bytes
        if self.saved_fit.reserved is None:
            raise SpecError(
                "--budget-of reserved: the trace holds the graph of a CPU, where no allocator reserves memory; trace "
                "it with --target for a GPU, or with --device cuda."
            )
        return self.saved_fit.reserved.peak_reserved_bytes


def predict(
    problem: Problem, setting: Setting, plan: Plan | None = None, budget_bytes: int | None = None
) -> Prediction:
    """Replay a step without and with a plan, whatever the constraints; without a plan, everything is saved.

    Raises:
        PlanError: the plan does not fit the trace.
    """
    plan = plan or Plan(meta=problem.trace.meta, planner=SAVE_ALL)
    free = problem.unconstrained
    planned = free.replay(plan.actions) if plan.actions else free.saved
    return Prediction(
        problem=problem,
        plan=plan,
        saved=free.saved,
        planned=planned,
        setting=setting,
        budget_bytes=budget_bytes,
    )


def plan_for(
    problem: Problem,
    planner: str,
    limits: Limits,
    setting: Setting,
    *,
    budget_bytes: int | None,
    budget_of: str = ALLOCATED,
    progress: Callable[[str], None] = lambda line: None,
) -> Prediction:
    """The plan for a budget beside everything saved; the plan in it is complete.

    Raises:
        BudgetError: the planner finds none within the budget.
    """
    from simulator.studies.warnings import completed

    def make(budget_bytes: int) -> Plan:
        return plan_with(planner, problem, budget_bytes, limits)

    def reserved_bytes(plan: Plan) -> int:
        fit = predict(problem, setting, plan).planned_fit
        assert fit.reserved is not None
        progress(f"a plan that reserves {fit.wanted_bytes:,} bytes")
        # On the device, where the allocator may have given memory back at first.
        settled = not fit.out_of_memory and fit.reserved.steady
        return fit.reserved.peak_reserved_bytes if settled else fit.wanted_bytes

    if budget_bytes is not None and budget_of == RESERVED:
        limits = replace(limits, seconds=limits.seconds / SHARES)  # several plans are made
        plan = plan_within_reserved(make, reserved_bytes, budget_bytes)
    else:
        try:
            plan = make(UNLIMITED_BYTES if budget_bytes is None else budget_bytes)
        except Infeasible as error:
            if planner != DEFAULT:
                raise
            from simulator.studies.lowest_peak import with_lowest_peak

            raise with_lowest_peak(problem, error, limits) from None
    plan = replace(plan, budget_bytes=budget_bytes, budget_of=budget_of)
    return completed(predict(problem, setting, plan, budget_bytes))


def plan_within_reserved(
    make: Callable[[int], Plan], reserved_bytes: Callable[[Plan], int], limit_bytes: int
) -> Plan:
    """The plan whose reserved memory is within the limit and whose budget of allocated memory is the highest found.

    A plan within an allocated budget needs that much and its fragmentation more, which differs from plan to plan. So
    the budget starts at the limit, falls by what is too much, and once a plan fits is bisected between the last that
    did not and the one that did. Same input, same plan, if the planner gives the same for the same budget.

    Args:
        make: the plan for a budget of allocated memory; raises BudgetError if there is none.
        reserved_bytes: what the allocator reserves for a plan.
        limit_bytes: of reserved memory.

    Raises:
        BudgetError: no budget that was tried gave a plan within the limit.
    """
    best: Plan | None = None
    budget, high, low = limit_bytes, limit_bytes + 1, 0
    why: BudgetError | None = None  # there is no plan for the budget `low`
    least = None  # reserved by the leanest plan that was too large
    for _ in range(ATTEMPTS):
        try:
            plan = make(budget)
        except BudgetError as error:
            if least is None:
                raise
            if best is not None:
                break
            why, low, budget = error, budget, (budget + high) // 2
            continue
        reserved = reserved_bytes(plan)
        if reserved <= limit_bytes:
            best, low = plan, budget
        else:
            high = budget
            least = reserved if least is None else min(least, reserved)
        if best is None:
            fall = min(max(reserved - limit_bytes, limit_bytes // (2 * CLOSE), 1), limit_bytes // STRIDES)
            budget = (low + high) // 2 if low else budget - max(1, fall)
            if budget < 1:
                break
        elif high - low <= max(1, limit_bytes // CLOSE):
            break
        else:
            budget = (low + high) // 2
    if best is None:
        raise _none_within_reserved(limit_bytes, least or 0, why)
    return best


def _none_within_reserved(limit_bytes: int, least_bytes: int, error: BudgetError | None) -> Infeasible:
    why = f" Below that: {error}" if error is not None else ""
    return Infeasible(
        f"no plan was found whose reserved memory stays within {show_bytes(limit_bytes)} ({limit_bytes} bytes): the "
        f"leanest reserves {show_bytes(least_bytes)} ({least_bytes} bytes). Allow more, try --alloc-conf "
        f"expandable_segments:True, or use a smaller batch.{why}",
        {
            "budget_bytes": limit_bytes,
            "lowest_peak_bytes": least_bytes,
            "floor": error.figures.get("floor") if isinstance(error, Infeasible) else None,
        },
    )


# The untouched model


def untouched_fit(c: Prediction) -> DeviceFit:
    """What the step needs when the model runs untouched, in the ordinary loop.

    Counts: what `untouched_peak_bytes` counts; for reserved memory, that no op takes over its input's memory. Ignores:
    there, all else.
    """
    return device_fit(c.problem, untaken(c), c.setting, peak_bytes=untouched_peak_bytes(c))


def untouched_peak_bytes(c: Prediction) -> int:
    """The untouched model's peak of allocated bytes; the captured graph may need less, or more.

    The trace says so if its step was counted as it runs untouched (`tracer/record/untouched.py`): on the CPU,
    but for traces that are older than that. Otherwise it is concluded from the graph.

    Counts: that autograd's own code lets no op take over its input's memory; on the CPU, dropout masks in the type of
    what they mask (`_dropout_impl` in aten/src/ATen/native/Dropout.cpp), where the graph has a byte an element.
    Ignores: what else eager code holds longer. Measured on the CPU for six steps of BERT, GPT-2 and T5, whose eager
    peaks are 0.6 to 14 % above the graph's: right to within 96 bytes in each. No GPU has confirmed it there.
    """
    counted = c.trace.meta.untouched_peak_bytes
    if counted:
        return counted
    plain, schedule = untaken(c).timeline, c.saved.schedule
    wider = [0] * len(schedule) if kind_of(c.trace.meta) == CUDA else _wider_masks(c.trace, schedule)
    highest = max((n + more for n, more in zip(plain.peak_bytes, wider, strict=True)), default=0)
    return max(highest, c.saved.timeline.peak_allocated_bytes)


def untaken(c: Prediction) -> Replay:
    """Everything saved, and no op takes over the memory of its input."""
    schedule = replace(c.saved.schedule, takes=(-1,) * len(c.saved.schedule))
    return Replay(schedule=schedule, timeline=run(c.problem, schedule))


def _wider_masks(trace: Trace, schedule: Schedule) -> list[int]:
    """Step -> by how many bytes the live dropout masks grow if their elements are as wide as what they mask."""
    sts = trace.storages
    more = {
        s: (max((_item_bytes(trace, x) for x in trace.ops.reads[op]), default=1) - 1) * sts.nbytes[s]
        for s, op in enumerate(sts.producer)
        if op >= 0 and trace.ops.target[op] == DROPOUT_MASK
    }
    out, live = [], 0
    for binds, frees in zip(schedule.binds, schedule.frees, strict=True):
        live += sum(more.get(s, 0) for s in binds)
        out.append(live)
        live -= sum(more.get(s, 0) for s in frees)
    return out


def _item_bytes(trace: Trace, storage: int) -> int:
    """Bytes of an element, from the storage's size and shape (1 where they do not say)."""
    elements = math.prod(trace.storages.shape[storage])
    return max(1, trace.storages.nbytes[storage] // elements) if elements else 1
