"""Predict what one step needs: everything saved, with a plan, and untouched; and what must be said beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from simulator.allocator.device import CUDA, DeviceFit, Setting, device_fit, kind_of, setting_of
from simulator.allocator.requests import untouched_requests
from simulator.core.problem import Problem, Replay, run
from simulator.levers import rewritten_problem
from simulator.planners import SAVE_ALL
from simulator.planners.outcome import percent
from traces.errors import SpecError
from traces.provenance import REHEARSED
from traces.records.measurement import RunFigures
from traces.records.plan import ALLOCATED, RESERVED, Action, Plan, PredictionWarning
from traces.records.trace import CUDNN_DECIDES, FAKE, REHEARSED_MODE, VIEW, Trace, TraceMeta
from traces.units import show_bytes, show_percent, show_time

if TYPE_CHECKING:
    from simulator.show.tables import Table


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Prediction:
    """One step with everything saved and with a plan; what the allocator makes of them is worked out when asked for."""

    problem: Problem
    plan: Plan
    saved: Replay  # everything saved
    planned: Replay
    setting: Setting

    @property
    def trace(self) -> Trace:
        return self.problem.trace

    @property
    def budget_bytes(self) -> int | None:
        return self.plan.budget_bytes

    @property
    def saved_fit(self) -> DeviceFit:
        """Return what the step needs of the device with everything saved."""
        return self._fit(self.problem, (), self.saved)

    @property
    def planned_fit(self) -> DeviceFit:
        return self._fit(self.step, self.plan.actions, self.planned)

    @property
    def step(self) -> Problem:
        """The step as the plan's rewrites change it, which its actions are of."""
        return rewritten_problem(self.problem, self.plan.rewrites)

    def _fit(self, problem: Problem, actions: tuple[Action, ...], replay: Replay) -> DeviceFit:
        if replay == self.saved:
            actions = ()
        return problem.once(("fit", self.setting, actions), lambda p: device_fit(p, replay, self.setting))

    @property
    def saved_figures(self) -> RunFigures:
        return self.saved_fit.figures(self.saved.timeline.step_time_ns)

    @property
    def planned_figures(self) -> RunFigures:
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
            added = show_percent(self.overhead_percent, signed=True)
            times.append(f"{show_time(after.step_time_ns)} ({added})")
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


def predict(problem: Problem, setting: Setting, plan: Plan | None = None) -> Prediction:
    """Replay a step without and with a plan; without a plan, everything is saved. Raises PlanError if the plan does
    not fit the trace.
    """
    plan = plan or Plan(meta=problem.trace.meta, planner=SAVE_ALL)
    step = rewritten_problem(problem, plan.rewrites)
    planned = step.replay(plan.actions) if plan.actions else step.saved
    return Prediction(problem=problem, plan=plan, saved=problem.saved, planned=planned, setting=setting)


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

    Counts: that autograd's own code lets no op take over its input's memory. Ignores: what else eager code holds
    longer, and on a CPU that its dropout masks are as wide as what they mask.
    """
    told = c.trace.meta.untouched_peak_bytes
    return told or max(run.timeline.peak_allocated_bytes for run in (untaken(c), c.saved))


def untaken(c: Prediction) -> Replay:
    """Everything saved, and no op takes over the memory of its input."""

    def replayed(problem: Problem) -> Replay:
        schedule = replace(c.saved.schedule, takes=(-1,) * len(c.saved.schedule))
        return Replay(schedule=schedule, timeline=run(problem, schedule))

    return c.problem.once("untaken", replayed)


UNKNOWN: Final = "none"  # keys of a trace's `workspace`
APPROXIMATE: Final = "approximate"
NOTABLE_PERCENT: Final = 2  # an underestimate by more than this is not left without a warning
UNTOUCHED, UNTOUCHED_LESS = "untouched-needs-more", "untouched-needs-less"
# Code -> its sentences, each with the figure without which, or the subject for which, it stands ("": always). Bytes are
# shown by their name, `all_` of it with the peak added, `share_` of it in percent of the peak.
SENTENCES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    APPROXIMATE: (
        ("", "Approximate: {number:,} of {computing:,} computing ops count by what they return alone, so the real peak "
         "may be higher."),
        ("cpu", "For the exact answer trace with --device cpu."),
        ("cuda", "For the exact answer trace where a CUDA build of torch is (pip install torch on Linux; no GPU is "
         "needed), or with --device cuda on the GPU."),
    ),
    "unknown-workspaces": (
        ("", "What libraries ask for inside {number:,} of {computing:,} computing ops is unknown and counts as "
         "nothing, so the real peak may be higher."),
        ("cpu", "To know them, trace with --device cpu."),
        ("cuda", "To know them, trace with --device cuda on the GPU."),
    ),
    UNTOUCHED: (
        ("", "The figures are those of the captured graph, which reuses memory where it can. The untouched model needs "
         "about {extra_bytes} ({share_extra_bytes}) more than what stands here for everything saved."),
    ),
    UNTOUCHED_LESS: (
        ("", "The untouched model needs about {all_extra_bytes}, less than the captured graph with all saved "
         "({share_extra_bytes}), as one does that checkpoints itself: within a larger budget it trains as it is."),
        ("in_vain", "This plan needs no less than that."),
    ),
    "not-settled": (
        ("", "With {subject}, reserved memory has not settled after {iterations} iterations; it may grow further."),
    ),
    "allocator-settings": (
        ("", "The plan keeps to its budget where PYTORCH_ALLOC_CONF is {subject} before CUDA starts, which `execute` "
         "sees to."),
    ),
    "retries": (
        ("", "With {subject}, the step fits the device only by giving all cached memory back {retries} times a step, "
         "which stops the GPU each time."),
    ),
}  # fmt: skip


def text(warning: PredictionWarning) -> str:
    """A warning in words."""
    subject, figures = warning.subject, warning.figures
    told: dict[str, object] = {**figures, "subject": subject}
    peak = int(figures.get("peak_bytes", 0))
    for name, n in figures.items():
        if name.endswith("_bytes"):
            told |= {name: show_bytes(int(n)), f"all_{name}": show_bytes(peak + int(n))}
            told[f"share_{name}"] = show_percent(100 * int(n) / max(1, peak), signed=True, digits=1)
    parts = SENTENCES[warning.code]
    return " ".join(part.format(**told) for of, part in parts if of in ("", subject) or figures.get(of))


def texts(c: Prediction, but: str = "") -> tuple[str, ...]:
    """The prose of `warnings`. Where figures of the untouched model stand beside it goes without UNTOUCHED."""
    return tuple(text(w) for w in warnings(c) if w.code != but)


def warnings_of(problem: Problem) -> tuple[PredictionWarning, ...]:
    """Return what must be said beside any figure of a trace, whatever the plan."""
    return warnings(predict(problem, setting_of(problem.trace.meta)))


def warnings(c: Prediction) -> tuple[PredictionWarning, ...]:
    """Return what must be said beside the figures of a prediction, the gravest first; empty if nothing."""
    return tuple(PredictionWarning(code=code, subject=of, figures=f) for code, of, f in _found(c))


def _found(c: Prediction) -> Iterator[tuple[str, str, dict[str, int]]]:
    meta, trace, kind = c.trace.meta, c.step.trace, kind_of(c.trace.meta)
    counts = trace.meta.workspace
    if unknown := unknown_ops(trace):
        # The trace's own counts: an op that overwrites its argument is known to allocate nothing, and has no events.
        computing = sum(counts.values()) or sum(not f & VIEW for f in trace.ops.flags)
        told = {"number": counts.get(UNKNOWN, 0) or len(unknown), "computing": computing}
        yield APPROXIMATE if meta.mode == FAKE else "unknown-workspaces", kind, told
    peak, untouched = c.saved.timeline.peak_allocated_bytes, untouched_peak_bytes(c)
    figures = {"extra_bytes": untouched - peak, "peak_bytes": peak}
    if peak and 100 * (untouched - peak) >= NOTABLE_PERCENT * peak:
        yield UNTOUCHED, "", figures
    elif peak and 100 * (peak - untouched) >= NOTABLE_PERCENT * peak:
        in_vain = c.plan.changes and c.planned.timeline.peak_allocated_bytes >= untouched
        yield UNTOUCHED_LESS, "", {**figures, "in_vain": int(in_vain)}
    if c.plan.budget_of == RESERVED and c.setting.alloc_conf:
        yield "allocator-settings", c.setting.alloc_conf, {}
    fits = {"everything saved": c.saved_fit, "the plan": c.planned_fit}
    for way, fit in list(fits.items())[: 1 if c.planned_fit is c.saved_fit else 2]:
        if fit.reserved is not None and not fit.reserved.steady:
            yield "not-settled", way, {"iterations": len(fit.reserved.iterations)}
        if fit.retries_a_step:
            yield "retries", way, {"retries": fit.retries_a_step}


def provenance(meta: TraceMeta) -> str:
    """Where the memory figures come from, in a few words."""
    place = meta.target or meta.device
    if meta.mode == REHEARSED_MODE:
        return f"simulated for {place} from ops {REHEARSED}"
    if meta.mode != FAKE:
        return f"simulated from ops measured on {place}"
    if kind_of(meta) == CUDA:
        return f"simulated for {place}, {APPROXIMATE}"
    return f"simulated, {'with measured rates of the processor; the step was not' if meta.rates else 'nothing was'} run"


def unknown_ops(trace: Trace) -> tuple[int, ...]:
    """The ops that compute and whose inner allocations are not known: they count as nothing."""
    ops, meta = trace.ops, trace.meta
    # Older traces do not count them.
    if not meta.workspace.get(UNKNOWN, 0) if meta.workspace else meta.mode != FAKE:
        return ()
    partly = CUDNN_DECIDES if kind_of(meta) == CUDA and "measured" not in meta.workspace else ()
    computing = (i for i in range(len(ops)) if ops.time_ns[i] and not ops.flags[i] & VIEW)
    return tuple(i for i in computing if not ops.events[i] or ops.target[i] in partly)
