"""What must be said beside a prediction: what it does not know, by how much that may matter, who confirmed it.

A workspace that is not known counts as nothing, so the peak may be higher than predicted. How much higher is not known
either; the size that is named beside it is what the peak would be if every such convolution, matrix product or
attention took as much again inside as its largest tensor, or on a CPU as its tensors together. Real ones may take
more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from simulator.allocator.device import CUDA
from simulator.allocator.device_fit import kind_of, setting_of
from simulator.core.problem import Problem
from simulator.core.replay import Replay
from simulator.prediction.step import Prediction, predict, untouched_peak_bytes
from traces.devices import device
from traces.errors import SpecError
from traces.provenance import REHEARSED
from traces.records.plan import RESERVED, PredictionWarning
from traces.records.trace import CUDNN_DECIDES, VIEW, Trace, TraceMeta
from traces.units import show_bytes, show_percent

UNKNOWN, RULES, ELSEWHERE = "none", "rules", "rules elsewhere"
FAKE: Final = "fake"
REHEARSED_MODE: Final = "rehearsed"
NOTABLE_PERCENT: Final = 2  # an underestimate by more than this is not left without a warning
UNCONFIRMED: Final = "not confirmed on a GPU"
UNTOUCHED: Final = "untouched-needs-more"
UNTOUCHED_LESS: Final = "untouched-needs-less"
# The codes of what stands beside every prediction of its kind and so says nothing of this one.
STANDING: Final = frozenset({"derived-workspaces", "not-confirmed"})


def provenance(meta: TraceMeta) -> str:
    """Where the memory figures come from, in a few words."""
    place = meta.target or meta.device
    if meta.mode == REHEARSED_MODE:
        return f"simulated for {place} from ops {REHEARSED}"
    if meta.mode != FAKE:
        return f"simulated from ops measured on {place}"
    if kind_of(meta) == CUDA:
        return f"simulated for {place}, {UNCONFIRMED}"
    if meta.rates:
        return "simulated, with measured rates of the processor; the step was not run"
    return "simulated, nothing was run"


def warnings(c: Prediction) -> tuple[PredictionWarning, ...]:
    """What must be said beside the figures of a prediction, the gravest first; empty if nothing."""
    meta = c.trace.meta
    out = [*_unknown(c.step.trace, c.planned), *_untouched(c), *_recurrent(meta), *_derived(meta)]
    if meta.mode in (FAKE, REHEARSED_MODE) and kind_of(meta) == CUDA:
        out.append(PredictionWarning(code="not-confirmed"))
    elif meta.mode == FAKE and _is_gpu(meta.target):
        out.append(PredictionWarning(code="graph-of-a-cpu", subject=meta.target))
    out += _settings(c)
    for way, fit in (("everything kept", c.saved_fit), ("the plan", c.planned_fit)):
        of = fit.reserved
        if of is not None and not (way == "the plan" and fit is c.saved_fit):
            if not of.steady:
                iterations = {"iterations": len(of.iterations)}
                out.append(PredictionWarning(code="not-settled", subject=way, figures=iterations))
            if of.retries_a_step:
                retries = {"retries": of.retries_a_step}
                out.append(PredictionWarning(code="retries", subject=way, figures=retries))
    return tuple(out)


def texts(c: Prediction) -> tuple[str, ...]:
    """The prose of `warnings`."""
    return tuple(map(text, warnings(c)))


def texts_beside_untouched(c: Prediction) -> tuple[str, ...]:
    """The prose of `warnings` where figures of the untouched model stand: without the one that says what it needs."""
    return tuple(text(w) for w in warnings(c) if w.code != UNTOUCHED)


def warnings_of(problem: Problem) -> tuple[PredictionWarning, ...]:
    """What must be said beside any figure of a trace, whatever the plan."""
    return warnings(predict(problem, setting_of(problem.trace.meta)))


def texts_of(problem: Problem) -> list[str]:
    """The prose of `warnings_of`."""
    return list(map(text, warnings_of(problem)))


def unknown_ops(trace: Trace) -> tuple[int, ...]:
    """The ops that compute and whose inner allocations are not known."""
    meta = trace.meta
    counted = bool(meta.workspace)  # older traces do not say
    if not meta.workspace.get(UNKNOWN, 0) if counted else meta.mode != FAKE:
        return ()
    ops = trace.ops
    by_rule = kind_of(meta) == CUDA and "measured" not in meta.workspace
    partly = CUDNN_DECIDES if by_rule else ()
    return tuple(
        i
        for i in range(len(ops))
        if ops.time_ns[i] and not ops.flags[i] & VIEW and (not ops.events[i] or ops.target[i] in partly)
    )


def risk_bytes(trace: Trace, replay: Replay) -> int:
    """By how much the peak would rise if unknown workspaces were as large as the largest tensor of their op.

    On a CPU, where a convolution copies all that it reads and makes to layouts of its own: as large as these together.

    Counts: ops that do floating-point arithmetic by the trace's count, that is convolutions, matrix products and
    attention. Ignores: all others, and workspaces that are larger than that.
    """
    together = sum if kind_of(trace.meta) != CUDA else max
    ops, nbytes = trace.ops, trace.storages.nbytes
    unknown = {i for i in unknown_ops(trace) if ops.flops[i]}
    worst = peak = replay.timeline.peak_allocated_bytes
    for step, i in enumerate(replay.schedule.op):
        if i in unknown:
            inside = together((0, *(nbytes[s] for s in {*ops.reads[i], *ops.writes[i]})))
            worst = max(worst, replay.timeline.peak_bytes[step] + inside)
    return worst - peak


def _unknown(trace: Trace, replay: Replay) -> list[PredictionWarning]:
    unknown = unknown_ops(trace)
    if not unknown:
        return []
    # The trace's own counts: an op that overwrites its argument is known to allocate nothing, and has no events either.
    told = trace.meta.workspace
    figures = {
        "number": told.get(UNKNOWN, 0) or len(unknown),
        "computing": sum(told.values()) or sum(1 for f in trace.ops.flags if not f & VIEW),
        "risk_bytes": risk_bytes(trace, replay),
        "peak_bytes": replay.timeline.peak_allocated_bytes,
    }
    return [PredictionWarning(code="unknown-workspaces", subject=kind_of(trace.meta), figures=figures)]


def _untouched(c: Prediction) -> list[PredictionWarning]:
    """That the untouched model needs notably more or less than what stands for everything saved, and how much."""
    peak = c.saved.timeline.peak_allocated_bytes
    untouched = untouched_peak_bytes(c)
    extra = untouched - peak
    if not peak or 100 * abs(extra) < NOTABLE_PERCENT * peak:
        return []
    figures: dict[str, int] = {"extra_bytes": extra, "peak_bytes": peak}
    if extra > 0:
        return [PredictionWarning(code=UNTOUCHED, figures=figures)]
    in_vain = c.plan.changes and c.planned.timeline.peak_allocated_bytes >= untouched
    return [PredictionWarning(code=UNTOUCHED_LESS, figures={**figures, "in_vain": int(in_vain)})]


def _recurrent(meta: TraceMeta) -> list[PredictionWarning]:
    """That a GPU runs recurrent layers in one kernel each whose captured graph has elementary ops in its place."""
    names = meta.sketch.get("recurrent")
    if kind_of(meta) != CUDA or not isinstance(names, list) or not names:
        return []
    return [PredictionWarning(code="recurrent", subject=str(names[0]), figures={"modules": len(names)})]


def _settings(c: Prediction) -> list[PredictionWarning]:
    """That a budget of reserved memory is kept to under certain settings alone, and what is reserved without them."""
    settings, plain = c.setting.settings, c.planned_fit.by_default
    if c.plan.budget_of != RESERVED or settings is None or plain is None or not c.setting.alloc_conf:
        return []
    figures = {"default_bytes": plain.peak_reserved_bytes, "expandable": int(settings.expandable_segments)}
    return [PredictionWarning(code="allocator-settings", subject=c.setting.alloc_conf, figures=figures)]


def _derived(meta: TraceMeta) -> list[PredictionWarning]:
    """What was concluded from other calls than this step's own."""
    elsewhere = meta.workspace.get(ELSEWHERE, 0)
    rules = meta.workspace.get(RULES, 0) + elsewhere
    figures = {"rules": rules, "elsewhere": elsewhere}
    return [PredictionWarning(code="derived-workspaces", figures=figures)] if rules else []


def _is_gpu(target: str) -> bool:
    try:
        return device(target).kind == CUDA
    except SpecError:
        return False


# Prose


def text(warning: PredictionWarning) -> str:
    """A warning in words."""
    return _PROSE[warning.code](warning.subject, warning.figures)


def _unknown_text(kind: str, f: Mapping[str, Any]) -> str:
    what = "its largest tensor" if kind == CUDA else "its tensors together"
    size = (
        f" If each convolution, matrix product and attention took as much as {what}, the peak would "
        f"be {show_bytes(f['peak_bytes'] + f['risk_bytes'])} "
        f"({show_percent(100 * f['risk_bytes'] / f['peak_bytes'], signed=True, digits=1)})."
        if f["risk_bytes"]
        else ""
    )
    how = "--device cuda on the GPU" if kind == CUDA else "--device cpu"
    return (
        f"The inner allocations of {f['number']:,} of {f['computing']:,} computing ops are unknown and count as "
        f"nothing, so the real peak may be higher.{size} To know them, trace with {how}."
    )


def _untouched_text(_: str, f: Mapping[str, Any]) -> str:
    share = show_percent(100 * f["extra_bytes"] / f["peak_bytes"], signed=True, digits=1)
    return (
        "The figures are those of the captured graph, which reuses memory where it can. The untouched model needs "
        f"about {show_bytes(f['extra_bytes'])} ({share}) more than what stands here for everything kept."
    )


def _untouched_less_text(_: str, f: Mapping[str, Any]) -> str:
    needs = show_bytes(f["peak_bytes"] + f["extra_bytes"])
    share = show_percent(100 * f["extra_bytes"] / f["peak_bytes"], signed=True, digits=1)
    told = (
        f"The untouched model needs about {needs}, less than the captured graph with all saved ({share}), as one does "
        "that checkpoints itself: within a larger budget it trains as it is."
    )
    return f"{told} This plan needs no less than that." if f["in_vain"] else told


def _derived_text(_: str, f: Mapping[str, Any]) -> str:
    told = (
        f"The inner allocations of {f['rules']:,} ops follow from rules; other sizes, machines and versions may differ "
        "from them."
    )
    if f["elsewhere"]:
        told += (
            " The rules were read from a processor with AVX-512, and this one has none: they were compared with "
            "torch's AVX2 kernels in a few networks only, so the real peak may be some percent higher. To know it, "
            "trace with --device cpu."
        )
    return told


def _recurrent_text(first: str, f: Mapping[str, Any]) -> str:
    which = f"{first!r}" + (f" and {f['modules'] - 1:,} more" if f["modules"] > 1 else "")
    return (
        f"Recurrent layers ({which}) are predicted as the elementary ops that planned steps run; without a plan a GPU "
        "runs cuDNN's kernel for them, which keeps other values and buffers of its own: the untouched loop may need "
        "notably more or less than what stands here. To know it, rehearse the loop (`execute rehearse`)."
    )


def _settings_text(conf: str, f: Mapping[str, Any]) -> str:
    growing = (
        " Expandable segments need a platform on which torch can map memory, which Windows is not: there it warns and "
        "goes on without them."
        if f["expandable"]
        else ""
    )
    return (
        f"The plan keeps to its budget where PYTORCH_ALLOC_CONF is {conf} before CUDA starts, which `execute` sees to; "
        f"under torch's default settings it reserves {show_bytes(f['default_bytes'])}.{growing}"
    )


_PROSE: Final[Mapping[str, Callable[[str, Mapping[str, Any]], str]]] = {
    "unknown-workspaces": _unknown_text,
    UNTOUCHED: _untouched_text,
    UNTOUCHED_LESS: _untouched_less_text,
    "recurrent": _recurrent_text,
    "derived-workspaces": _derived_text,
    "not-confirmed": lambda *_: (
        f"This prediction is {UNCONFIRMED}: the step was not run on one. To confirm it, run `execute --device cuda` "
        "there, or trace with --device cuda."
    ),
    "graph-of-a-cpu": lambda target, _: (
        f"The times are for {target}, but the graph and its memory are those of a CPU; a GPU takes other kernels, "
        f"which keep other values. For its memory, trace with --target {target} again."
    ),
    "not-settled": lambda way, f: (
        f"With {way}, reserved memory has not settled after {f['iterations']} iterations; it may grow further."
    ),
    "allocator-settings": _settings_text,
    "retries": lambda way, f: (
        f"With {way}, the step fits the device only by giving all cached memory back {f['retries']} times a step, "
        "which stops the GPU each time."
    ),
}
