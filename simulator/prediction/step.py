"""Predict what one step needs: replayed with everything saved, with a plan, and as the untouched model runs it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from simulator.allocator.device import CUDA, DeviceFit, Setting, asking_ahead, device_fit, kind_of
from simulator.allocator.requests import untouched_requests
from simulator.core.problem import Problem
from simulator.core.replay import Replay, run
from simulator.core.schedule import Schedule
from simulator.levers import rewritten_problem
from simulator.levers.tile import DROPOUT_MASK
from simulator.planners import SAVE_ALL
from simulator.planners.outcome import percent
from traces.errors import SpecError
from traces.records.measurement import RunFigures
from traces.records.plan import ALLOCATED, Action, Plan
from traces.records.trace import Trace, TraceMeta
from traces.units import show_bytes, show_percent, show_time

if TYPE_CHECKING:
    from simulator.show.tables import Table


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
        """Return what the step needs of the device with everything saved."""
        return self._fit(self.problem.unconstrained, (), self.saved, self.setting)

    @property
    def planned_fit(self) -> DeviceFit:
        """Return what it needs with the plan."""
        return self._fit(self.step, self.plan.actions, self.planned, self.planned_setting)

    @property
    def step(self) -> Problem:
        """The step as the plan's rewrites change it, which its actions are of; without constraints."""
        return rewritten_problem(self.problem.unconstrained, self.plan.rewrites)

    def _fit(
        self, problem: Problem, actions: tuple[Action, ...], replay: Replay, setting: Setting
    ) -> DeviceFit:
        if replay == self.saved:
            actions = ()
        return problem.once(("fit", setting, actions), lambda p: device_fit(p, replay, setting))

    @property
    def planned_setting(self) -> Setting:
        """Under which the planned step runs: what the plan asks for ahead is asked for."""
        return asking_ahead(self.setting, self.plan.ahead_bytes)

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
        if self.plan.changes:
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
        from simulator.show import notebook

        curves = [(notebook.SAVED, notebook.curve(self.saved.timeline))]
        if self.plan.changes:
            curves.append((notebook.PLANNED, notebook.curve(self.planned.timeline)))
        limits = [] if self.budget_bytes is None else [self.budget_bytes]
        picture = notebook.picture(curves, "ms", "allocated", limits, area=True)
        return notebook.framed(describe(self.trace.meta), self.table(), picture)

    def table(self) -> Table:
        """The headline figures with everything saved, and with the plan."""
        from simulator.show.tables import figures_table

        runs = [("everything saved", self.saved_figures, 0.0)]
        if self.plan.changes:
            runs.append((f"plan ({self.plan.planner})", self.planned_figures, self.overhead_percent))
        return figures_table(runs, ("overhead", "+percent", lambda run: run[2]), title="run")

    def whole_bytes(self, budget_of: str) -> int:
        """Return what 100 % of a budget stands for. Raises SpecError: a budget of reserved memory for a CPU's trace."""
        if budget_of == ALLOCATED:
            return self.saved.timeline.peak_allocated_bytes
        if self.saved_fit.reserved is None:
            raise SpecError(
                "--budget-of reserved: the trace holds the graph of a CPU, where no allocator reserves memory; trace "
                "it with --target for a GPU, or with --device cuda."
            )
        return self.saved_fit.reserved.peak_reserved_bytes


def describe(meta: TraceMeta) -> str:
    """The step in one line: model, batch, sequence length, dtype, optimizer, and the device of its times."""
    length = meta.options.get("seq_len")
    parts = (
        meta.model,
        f"batch {meta.batch_size}" if meta.batch_size else "",
        f"sequence length {length}" if length else "",
        meta.dtype,
        meta.optimizer,
        f"times for {meta.target}" if meta.target else "",
    )
    return ", ".join(part for part in parts if part)


def predict(
    problem: Problem, setting: Setting, plan: Plan | None = None, budget_bytes: int | None = None
) -> Prediction:
    """Replay a step without and with a plan, whatever the constraints; without a plan, everything is saved. A plan of
    model and loss function as one is replayed on that step. Raises PlanError if the plan does not fit the trace.
    """
    plan = plan or Plan(meta=problem.trace.meta, planner=SAVE_ALL)
    problem = problem.planned_by(plan)
    free = problem.unconstrained
    step = rewritten_problem(free, plan.rewrites)
    planned = step.replay(plan.actions) if plan.actions else step.saved
    return Prediction(
        problem=problem,
        plan=plan,
        saved=free.saved,
        planned=planned,
        setting=setting,
        budget_bytes=budget_bytes,
    )


def untouched_fit(c: Prediction) -> DeviceFit:
    """Return what the step needs when the model runs untouched, in the ordinary loop.

    Counts: what `untouched_peak_bytes` counts; for blocks and reserved memory the requests that the trace has of the
    untouched loop, and of a trace without them that no op takes over its input's memory. Ignores: there, all else.
    """
    requests, peak_bytes = untouched_requests(c.trace), untouched_peak_bytes(c)
    return c.problem.once(
        ("untouched", c.setting),
        lambda p: device_fit(p, untaken(c), c.setting, peak_bytes=peak_bytes, requests=requests),
    )


def untouched_peak_bytes(c: Prediction) -> int:
    """The untouched model's peak of allocated bytes; the captured graph may need less, or more.

    The trace says so if the loop was rehearsed or measured as it runs untouched. Of other traces it is concluded from
    the graph.

    Counts: that autograd's own code lets no op take over its input's memory; on the CPU, dropout masks in the type of
    what they mask (`_dropout_impl` in aten/src/ATen/native/Dropout.cpp), where the graph has a byte an element.
    Ignores: what else eager code holds longer. Measured on the CPU for six steps of BERT, GPT-2 and T5, whose eager
    peaks are 0.6 to 14 % above the graph's: right to within 96 bytes in each.
    """
    counted = c.trace.meta.untouched_peak_bytes
    if counted:
        return counted
    return max(run.timeline.peak_allocated_bytes for run in (untaken(c), c.saved))


def untaken(c: Prediction) -> Replay:
    """Everything saved, and no op takes over the memory of its input; on a CPU with dropout masks as wide as what they
    mask."""

    def replayed(problem: Problem) -> Replay:
        schedule = replace(c.saved.schedule, takes=(-1,) * len(c.saved.schedule))
        timeline, wider = run(problem, schedule), _wider_masks(c.trace, schedule)
        peaks = tuple(n + more for n, more in zip(timeline.peak_bytes, wider, strict=True))
        return Replay(schedule=schedule, timeline=replace(timeline, peak_bytes=peaks))

    return c.problem.once("untaken", replayed)


def _wider_masks(trace: Trace, schedule: Schedule) -> list[int]:
    """Step -> by how many bytes the live dropout masks grow: on a CPU, elements are as wide as what they mask."""
    if kind_of(trace.meta) == CUDA:
        return [0] * len(schedule)
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
