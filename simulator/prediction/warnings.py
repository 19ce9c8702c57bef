"""Say what must be said beside a prediction: codes with their figures, and the one table that puts them into words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from simulator.allocator.device import CUDA, kind_of, setting_of
from simulator.core.problem import Problem
from simulator.prediction.step import Prediction, predict, untouched_peak_bytes
from traces.provenance import REHEARSED
from traces.records.plan import RESERVED, PredictionWarning
from traces.records.trace import CUDNN_DECIDES, VIEW, Trace, TraceMeta
from traces.units import show_bytes, show_percent

UNKNOWN: Final = "none"  # keys of a trace's `workspace`
RULES: Final = ("approximate", "rules", "rules elsewhere")  # the last two of older traces
APPROXIMATE: Final = "approximate"
FAKE, REHEARSED_MODE = "fake", "rehearsed"  # modes of a trace
NOTABLE_PERCENT: Final = 2  # an underestimate by more than this is not left without a warning
UNTOUCHED, UNTOUCHED_LESS = "untouched-needs-more", "untouched-needs-less"
# Code -> its sentences, each with the figure without which, or the subject for which, it stands ("": always). Bytes are
# shown by their name, `all_` of it with the peak added, `share_` of it in percent of the peak.
SENTENCES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    APPROXIMATE: (
        ("", "Approximate: of {computing:,} computing ops {rules:,} count by a few rules and {number:,} by what they "
         "return alone, so the real peak may be higher."),
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
    "recurrent": (
        ("", "Recurrent layers ({modules:,}, such as {subject!r}) are predicted as the elementary ops that planned "
         "steps run; without a plan a GPU runs cuDNN's kernel for them, which keeps other values and buffers of its "
         "own: the untouched loop may need notably more or less than what stands here. To know it, rehearse the loop "
         "(`execute rehearse`)."),
    ),
    "not-settled": (
        ("", "With {subject}, reserved memory has not settled after {iterations} iterations; it may grow further."),
    ),
    "allocator-settings": (
        ("", "The plan keeps to its budget where PYTORCH_ALLOC_CONF is {subject} before CUDA starts, which `execute` "
         "sees to; under torch's default settings it reserves {default_bytes}."),
        ("expandable", "Expandable segments need a platform on which torch can map memory, which Windows is not: there "
         "it warns and goes on without them."),
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


def texts(c: Prediction) -> tuple[str, ...]:
    """The prose of `warnings`."""
    return tuple(map(text, warnings(c)))


def texts_beside_untouched(c: Prediction) -> tuple[str, ...]:
    """The prose of `warnings` where figures of the untouched model stand: without the one that says what it needs."""
    return tuple(text(w) for w in warnings(c) if w.code != UNTOUCHED)


def warnings_of(problem: Problem) -> tuple[PredictionWarning, ...]:
    """Return what must be said beside any figure of a trace, whatever the plan."""
    return warnings(predict(problem, setting_of(problem.trace.meta)))


def texts_of(problem: Problem) -> list[str]:
    """The prose of `warnings_of`."""
    return list(map(text, warnings_of(problem)))


def warnings(c: Prediction) -> tuple[PredictionWarning, ...]:
    """Return what must be said beside the figures of a prediction, the gravest first; empty if nothing."""
    return tuple(PredictionWarning(code=code, subject=of, figures=f) for code, of, f in _found(c))


def _found(c: Prediction) -> Iterator[tuple[str, str, dict[str, int]]]:
    meta, trace, kind = c.trace.meta, c.step.trace, kind_of(c.trace.meta)
    counts = trace.meta.workspace
    unknown, rules = unknown_ops(trace), sum(counts.get(name, 0) for name in RULES)
    if unknown or rules:
        # The trace's own counts: an op that overwrites its argument is known to allocate nothing, and has no events.
        number, computing = counts.get(UNKNOWN, 0) or len(unknown), sum(counts.values())
        told = {
            "number": number,
            "computing": computing or sum(not f & VIEW for f in trace.ops.flags),
            "rules": rules,
        }
        yield APPROXIMATE if meta.mode == FAKE else "unknown-workspaces", kind, told
    peak, untouched = c.saved.timeline.peak_allocated_bytes, untouched_peak_bytes(c)
    figures = {"extra_bytes": untouched - peak, "peak_bytes": peak}
    if peak and 100 * (untouched - peak) >= NOTABLE_PERCENT * peak:
        yield UNTOUCHED, "", figures
    elif peak and 100 * (peak - untouched) >= NOTABLE_PERCENT * peak:
        in_vain = c.plan.changes and c.planned.timeline.peak_allocated_bytes >= untouched
        yield UNTOUCHED_LESS, "", {**figures, "in_vain": int(in_vain)}
    names = meta.sketch.get("recurrent")
    if kind == CUDA and isinstance(names, list) and names:
        yield "recurrent", str(names[0]), {"modules": len(names)}
    yield from _of_the_allocator(c)


def _of_the_allocator(c: Prediction) -> Iterator[tuple[str, str, dict[str, int]]]:
    settings, plain, conf = c.setting.settings, c.planned_fit.by_default, c.setting.alloc_conf
    if c.plan.budget_of == RESERVED and settings is not None and plain is not None and conf:
        growing = int(settings.expandable_segments)
        yield "allocator-settings", conf, {"default_bytes": plain.peak_reserved_bytes, "expandable": growing}
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
