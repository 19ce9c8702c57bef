"""Decide what must be said beside a prediction: what it does not know, by how much that may matter, who confirmed it.

A workspace that is not known counts as nothing, so the peak may be higher than predicted. How much higher is not known
either; the size that is named beside it is what the peak would be if every such convolution, matrix product or
attention took as much again inside as its largest tensor, or on a CPU as its tensors together. Real ones may take
more.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.allocator.question import ask, kind_of
from simulator.core.problem import Problem
from simulator.core.schedule import Schedule
from simulator.core.timeline import Timeline
from simulator.studies.prediction import Comparison, compare, with_reserved
from simulator.studies.untouched import untouched_peak_bytes
from traces.devices import device
from traces.errors import SpecError
from traces.plan import Plan
from traces.trace import VIEW, Trace, TraceMeta
from traces.units import show_bytes, show_percent

UNKNOWN, INTERPOLATED, RULES, ELSEWHERE = "none", "interpolated", "rules", "rules elsewhere"
FAKE, CUDA = "fake", "cuda"
NOTABLE_PERCENT = 2  # an underestimate by more than this is not left without a warning
UNCONFIRMED = "not confirmed on a GPU"
# How the warnings end that stand beside every prediction of their kind and so say nothing of this one.
MAY_DIFFER = "other sizes, machines and versions may differ from them."
CONFIRM_IT = "To confirm it, run `execute --device cuda` there, or trace with --device cuda."


def provenance(meta: TraceMeta) -> str:
    """Where the memory figures come from, in a few words."""
    place = meta.target or meta.device
    if meta.mode != FAKE:
        return f"simulated from ops measured on {place}"
    if kind_of(meta) == CUDA:
        return f"simulated for {place}, {UNCONFIRMED}"
    if meta.rates:
        return "simulated, with measured rates of the processor; the step was not run"
    return "simulated, nothing was run"


def warnings(c: Comparison) -> tuple[str, ...]:
    """What must be said beside the figures of a comparison, the gravest first; empty if nothing."""
    trace, meta = c.trace, c.trace.meta
    out = [*_unknown(trace, c.planned, c.planned_timeline), *about_untouched(c)]
    out += _derived(meta)
    if meta.mode == FAKE and kind_of(meta) == CUDA:
        out.append(f"This prediction is {UNCONFIRMED}: the step was not run on one. {CONFIRM_IT}")
    elif meta.mode == FAKE and _is_gpu(meta.target):
        out.append(
            f"The times are for {meta.target}, but the graph and its memory are those of a CPU; a GPU takes other "
            f"kernels, which keep other values. For its memory, trace with --target {meta.target} again."
        )
    for way, reserved in (("everything kept", c.kept_reserved), ("the plan", c.planned_reserved)):
        if reserved is None or (way == "the plan" and reserved is c.kept_reserved):
            continue
        if not reserved.figures.steady:
            out.append(
                f"With {way}, reserved memory has not settled after {len(reserved.figures.iterations)} iterations; it "
                "may grow further."
            )
        if reserved.figures.retries_a_step:
            out.append(
                f"With {way}, the step fits the device only by giving all cached memory back "
                f"{reserved.figures.retries_a_step} times a step, which stops the GPU each time."
            )
    return tuple(out)


def warnings_of(problem: Problem) -> tuple[str, ...]:
    """What must be said beside any figure of a trace, whatever the plan."""
    meta = problem.trace.meta
    return warnings(with_reserved(compare(problem, Plan(meta=meta), None), ask(meta)))


def answered(c: Comparison) -> Comparison:
    """The comparison whose plan carries the predicted figures, the allocator settings, and what to say beside them."""
    predicted = {**c.predicted(), "warnings": list(warnings(c)), "provenance": provenance(c.trace.meta)}
    meta = c.plan.meta if c.question is None else replace(c.plan.meta, alloc_conf=c.question.alloc_conf)
    return replace(c, plan=replace(c.plan, meta=meta, predicted=predicted))


def unknown_ops(trace: Trace) -> tuple[int, ...]:
    """The ops that compute and whose inner allocations are not known."""
    meta = trace.meta
    counted = bool(meta.workspace)  # older traces do not say
    if not meta.workspace.get(UNKNOWN, 0) if counted else meta.mode != FAKE:
        return ()
    ops = trace.ops
    return tuple(
        i for i in range(len(ops)) if ops.time_ns[i] and not ops.flags[i] & VIEW and not ops.events[i]
    )


def risk_bytes(trace: Trace, schedule: Schedule, timeline: Timeline) -> int:
    """By how much the peak would rise if unknown workspaces were as large as the largest tensor of their op.

    On a CPU, where a convolution copies all that it reads and makes to layouts of its own: as large as these together.

    Counts: ops that do floating-point arithmetic by the trace's count, that is convolutions, matrix products and
    attention. Ignores: all others, and workspaces that are larger than that.
    """
    together = sum if kind_of(trace.meta) != CUDA else max
    ops, nbytes = trace.ops, trace.storages.nbytes
    unknown = {i for i in unknown_ops(trace) if ops.flops[i]}
    worst = timeline.peak_allocated_bytes
    for step, i in enumerate(schedule.op):
        if i in unknown:
            inside = together((0, *(nbytes[s] for s in {*ops.reads[i], *ops.writes[i]})))
            worst = max(worst, timeline.peak_bytes[step] + inside)
    return worst - timeline.peak_allocated_bytes


def about_untouched(c: Comparison) -> tuple[str, ...]:
    """That the untouched model needs notably more than what stands for everything kept, and how much."""
    peak = c.kept_timeline.peak_allocated_bytes
    extra = untouched_peak_bytes(c) - peak
    if not peak or 100 * extra < NOTABLE_PERCENT * peak:
        return ()
    return (
        "The figures are those of the captured graph, which reuses memory where it can. The untouched model needs "
        f"about {show_bytes(extra)} ({show_percent(100 * extra / peak, signed=True, digits=1)}) more than what "
        "stands here for everything kept.",
    )


def _derived(meta: TraceMeta) -> list[str]:
    """What was concluded from other calls than this step's own."""
    interpolated, elsewhere = meta.workspace.get(INTERPOLATED, 0), meta.workspace.get(ELSEWHERE, 0)
    rules = meta.workspace.get(RULES, 0) + elsewhere
    parts = [
        *(
            [f"of {interpolated:,} ops are interpolated from measurements at other sizes"]
            if interpolated
            else []
        ),
        *([f"of {rules:,} ops follow from rules"] if rules else []),
    ]
    if not parts:
        return []
    told = f"The inner allocations {' and '.join(parts)}; {MAY_DIFFER}"
    if elsewhere:
        told += (
            " The rules were read from a processor with AVX-512, and this one has none: they were compared with "
            "torch's AVX2 kernels in a few networks only, so the real peak may be some percent higher. To know it, "
            "trace with --device cpu."
        )
    return [told]


def stands_always(warning: str) -> bool:
    """Whether a warning stands beside every prediction of its kind, whatever the step."""
    return MAY_DIFFER in warning or warning.endswith(CONFIRM_IT)


def _unknown(trace: Trace, schedule: Schedule, timeline: Timeline) -> list[str]:
    unknown = unknown_ops(trace)
    if not unknown:
        return []
    # The trace's own counts: an op that overwrites its argument is known to allocate nothing, and has no events either.
    told = trace.meta.workspace
    computing = sum(told.values()) or sum(1 for f in trace.ops.flags if not f & VIEW)
    number = told.get(UNKNOWN, 0) or len(unknown)
    risk, peak = risk_bytes(trace, schedule, timeline), timeline.peak_allocated_bytes
    what = "its largest tensor" if kind_of(trace.meta) == CUDA else "its tensors together"
    size = (
        f" If each convolution, matrix product and attention took as much as {what}, the peak would "
        f"be {show_bytes(peak + risk)} ({show_percent(100 * risk / peak, signed=True, digits=1)})."
        if risk
        else ""
    )
    how = "--device cuda on the GPU" if kind_of(trace.meta) == CUDA else "--device cpu"
    return [
        f"The inner allocations of {number:,} of {computing:,} computing ops are unknown and count as nothing, "
        f"so the real peak may be higher.{size} To know them, trace with {how}."
    ]


def _is_gpu(target: str) -> bool:
    try:
        return device(target).kind == CUDA
    except SpecError:
        return False
