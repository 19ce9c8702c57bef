"""Turn a trace and a plan into the answer of `simulate`: one JSON object, or a summary to read."""

from __future__ import annotations

from typing import Any

from simulator.allocator.question import Reserved
from simulator.core.replay import breakdown, holdings
from simulator.planners.outcome import Refusal, where
from simulator.studies import warnings as caveats
from simulator.studies.fit import Fit
from simulator.studies.prediction import Comparison
from traces.measurement import RunFigures
from traces.plan import RECOMPUTE, RESERVED, SAVE, Plan
from traces.trace import Trace
from traces.units import show_bytes, show_percent, show_time

NO_BUDGET = "without a budget nothing bounds the added time from below"
TOP_HOLDERS = 5


def answer(
    c: Comparison,
    trace_name: str,
    solve_seconds: float,
    bound: dict[str, Any] | None = None,
    fit: Fit | None = None,
) -> dict[str, Any]:
    """What `simulate --json` prints for a plan within the budget.

    Args:
        bound: what `bound_answer` says of the budget.
        fit: whether the step fits the device that was named.
    """
    return {
        **_question(c, trace_name, c.plan.planner, solve_seconds, bound),
        "feasible": fit is None or fit.plan_fits,
        "budget_bytes": c.budget_bytes,
        "budget_of": c.plan.budget_of,
        "gap_points": gap_points(c, bound),
        "device_memory": None if fit is None else fit.to_json(),
        "baseline": _kept(c),
        "plan": {
            **c.planned_figures.headline(),
            "allocator": _allocator(c.planned_reserved),
            "peak_by_category": breakdown(c.trace, c.planned, c.planned_timeline).at_peak,
            "overhead_percent": c.overhead_percent,
            "recomputed_ops": c.planned_timeline.recomputed_ops,
            "recomputed_storages": len(c.plan.recomputed),
            "recipes": c.plan.by_recipe,
        },
    }


def refusal(
    trace_name: str,
    kept: Comparison,
    planner: str,
    error: Refusal,
    solve_seconds: float,
    bound: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `simulate --json` prints when no plan fits: the same keys, the plan's figures empty, and why."""
    return {
        **_question(kept, trace_name, planner, solve_seconds, bound),
        "feasible": False,
        "baseline": _kept(kept),
        "plan": {**RunFigures().headline(), "overhead_percent": None, "recomputed_ops": None},
        "message": str(error),
        **error.figures,
    }


def gap_points(c: Comparison, bound: dict[str, Any] | None) -> float | None:
    """The plan's overhead minus the certified bound, in percent of the keep-all step; None where there is no bound."""
    step_ns = c.kept_timeline.step_time_ns
    if bound is None or bound["added_time_ns"] is None or not step_ns:
        return None
    added_ns = c.planned_timeline.step_time_ns - step_ns
    bound_ns = int(bound["added_time_ns"])
    return round(100 * (added_ns - bound_ns) / step_ns, 4)


def _question(
    c: Comparison, trace_name: str, planner: str, solve_seconds: float, bound: dict[str, Any] | None
) -> dict[str, Any]:
    trace = c.trace
    return {
        "trace": trace_name,
        "model": trace.meta.model,
        "batch_size": trace.meta.batch_size,
        "target": trace.meta.target,
        "fingerprint": trace.meta.fingerprint,
        "provenance": caveats.provenance(trace.meta),
        "alloc_conf": None if c.question is None else c.question.alloc_conf,
        "planner": planner,
        "solve_seconds": round(solve_seconds, 3),
        "bound": bound or {"overhead_percent": None, "reason": NO_BUDGET},
        "gap_points": None,
        "warnings": list(caveats.warnings(c)),
    }


def _kept(c: Comparison) -> dict[str, Any]:
    return {
        **c.kept_figures.headline(),
        "allocator": _allocator(c.kept_reserved),
        "peak_by_category": breakdown(c.trace, c.kept, c.kept_timeline).at_peak,
    }


def _allocator(reserved: Reserved | None) -> dict[str, Any] | None:
    return None if reserved is None else reserved.to_json()


def summary(
    c: Comparison,
    trace_name: str,
    solve_seconds: float,
    plan_path: str | None,
    bound: dict[str, Any] | None = None,
    fit: Fit | None = None,
) -> str:
    """The answer to read."""
    trace, plan, timeline = c.trace, c.plan, c.planned_timeline
    peak = timeline.peak_allocated_bytes
    of = " of reserved memory" if plan.budget_of == RESERVED else ""
    limit = f"budget {show_bytes(c.budget_bytes)}{of}" if c.budget_bytes is not None else "no budget given"
    lines = [f"{trace_name}: {_what(trace)}"]
    if plan.actions:
        before = c.kept_timeline.peak_allocated_bytes
        lines += [
            f"peak    {show_bytes(before)} -> {show_bytes(peak)} ({show_percent(100 * peak / before, digits=1)}), "
            f"{limit}",
            f"time    {show_time(c.kept_timeline.step_time_ns)} -> {show_time(timeline.step_time_ns)} "
            f"({show_percent(c.overhead_percent, signed=True)})",
            f"plan    {plan.planner}: {len(plan.recomputed)} values recomputed by {timeline.recomputed_ops} op "
            f"runs{_swapped(plan)}, found in {solve_seconds:.2f} s",
        ]
        gap = gap_points(c, bound)
        if bound is not None and gap is not None:
            lines.append(
                f"bound   no plan for this budget adds less than {show_percent(bound['overhead_percent'])}; "
                f"this one is within {gap:.2f} points of it"
            )
    else:
        lines += [
            f"peak    {show_bytes(peak)} with everything kept, {limit}",
            f"time    {show_time(timeline.step_time_ns)}",
        ]
    lines += reserved_lines(c)
    if fit is not None:
        lines += fit.lines()
    lines += [f"warning {text}" for text in caveats.warnings(c)]
    lines += _at_peak(c)
    if plan_path:
        lines.append(f"Next: execute {plan_path}")
    elif plan.actions:
        lines.append("Next: save the plan with -o plan.json, then run `execute plan.json`.")
    elif c.budget_bytes is None:
        lines.append(f"Next: simulate {trace_name} --budget 60% -o plan.json")
    return "\n".join(lines)


def _swapped(plan: Plan) -> str:
    """How many values each other recipe does without, to follow what is recomputed."""
    others = {k: n for k, n in plan.by_recipe.items() if k not in (RECOMPUTE, SAVE)}
    return "".join(f", {n} replaced {kind.replace('_', ' ')}" for kind, n in others.items())


def reserved_lines(c: Comparison) -> list[str]:
    """Reserved memory to read, with and without the allocator settings that were asked about."""
    kept, planned, question = c.kept_reserved, c.planned_reserved, c.question
    if kept is None or planned is None or question is None:
        return []
    both = (kept,) if planned is kept else (kept, planned)
    peaks = " -> ".join(show_bytes(r.figures.peak_reserved_bytes) for r in both)
    blocks = show_bytes(planned.figures.peak_allocated_bytes)
    lines = [
        f"reserved {peaks} by the caching allocator; {blocks} in blocks, fragmentation "
        f"{show_percent(100 * planned.figures.fragmentation, digits=1)}; {caveats.provenance(c.trace.meta)}"
    ]
    if question.asked:
        plain = [r.by_default for r in both if r.by_default is not None]
        default = " -> ".join(show_bytes(f.peak_reserved_bytes) for f in plain)
        saved = planned.figures.peak_reserved_bytes - plain[-1].peak_reserved_bytes
        lines.append(
            f"         with {question.alloc_conf or 'no settings'}; without: {default}, so it changes "
            f"{show_percent(100 * saved / max(1, plain[-1].peak_reserved_bytes), signed=True, digits=1)}"
        )
    elif question.alloc_conf:
        lines.append(f"         with {question.alloc_conf}, as recorded")
    return lines


def _at_peak(c: Comparison) -> list[str]:
    """What holds the memory at the plan's peak, by category and by storage."""
    trace, step = c.trace, c.planned_timeline.peak_step
    if step < 0:
        return []
    peak = c.planned_timeline.peak_allocated_bytes
    again = " again" if c.planned.recompute[step] else ""
    lines = [f"At the peak, while {where(trace, c.planned.op[step])} runs{again}:"]
    at_peak = breakdown(trace, c.planned, c.planned_timeline).at_peak
    parts = [(category, n) for category, n in at_peak.items() if n]
    width = max((len(category) for category, _ in parts), default=0)
    for category, n in (*parts, ("sum", sum(n for _, n in parts))):
        share = show_percent(100 * n / peak, digits=1) if peak else ""
        lines.append(f"  {category:<{width}}  {show_bytes(n):>11}  {share:>7}")
    lines.append("Largest there:")
    for h in holdings(trace, c.planned, step)[:TOP_HOLDERS]:
        producer = trace.storages.producer[h.storage]
        module = trace.ops.module[producer] if producer >= 0 else ""
        label = f"{trace.storages.name[h.storage]} ({h.category}{', ' + module if module else ''})"
        lines.append(f"  {show_bytes(h.nbytes):>11}  {label}")
    return lines


def _what(trace: Trace) -> str:
    meta = trace.meta
    batch = f"batch {meta.batch_size}" if meta.batch_size else ""
    target = f"times for {meta.target}" if meta.target else ""
    return ", ".join(p for p in (meta.model, batch, meta.dtype, meta.optimizer, target) if p)
