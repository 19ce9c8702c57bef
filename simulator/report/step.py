"""The page of one step: where its memory goes, and what a plan saves and costs; and that of a study of it."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

from simulator.core.evaluator import evaluator_of
from simulator.core.problem import Problem, Replay, holdings, peak_by_category
from simulator.levers import rewrites_in_words
from simulator.planners.mu_two import Costs
from simulator.planners.outcome import where
from simulator.prediction.ask import Answer
from simulator.prediction.loop_peaks import peaks_table
from simulator.prediction.step import UNTOUCHED, Prediction, describe, text, texts, warnings_of
from simulator.prediction.step import provenance as figures_from
from simulator.report import charts
from simulator.report.page import Block, Chart, Page, Section, Text, warned, write_page
from simulator.show.tables import CODE, NUMBER, Cell, Table, table, time_cell
from simulator.studies.rows import Study
from traces.records.plan import Plan
from traces.records.trace import ACTIVATION, CATEGORIES, FLAG_NAMES, Trace
from traces.units import show_bytes, show_percent, show_time

HOLDERS: Final = 20  # rows of the table of the largest storages at the peak
LONGEST_TABLE: Final = 150  # rows of the long tables
PEAKS_CAPTION: Final = (
    "Peaks of the untouched loop, and beside it of the planned step; of each phase in the steady iteration"
)


def write_step(path: str | Path, found: Answer) -> Path:
    """Write the page of an answer, whole or not at all. Raises EnvironmentProblem if a package that reports need is not
    installed.
    """
    c = found.planned
    answer: tuple[Block, ...] = (
        Table(columns=("", "answer"), rows=tuple(in_words(found))),
        memory(c),
        peaks_table(c, found.asked, caption=PEAKS_CAPTION),
        Text(provenance(c.trace) + " Every figure on this page is predicted.", "note"),
        *warned(texts(c, but=UNTOUCHED)),
    )
    title, subtitle = f"{c.trace.meta.model}: memory of one training step", describe(c.trace.meta)
    return write_page(path, Page(title, subtitle, (Section("Answer", answer), *simulation_sections(c))))


def write_study(path: str | Path, found: Study[Any]) -> Path:
    """Write the page, whole or not at all; raises EnvironmentProblem like `write_step`."""
    problem, blocks = found.problem, list[Block]()
    if any(found.curves.values()):
        caption = (
            "Red: the cheapest plan found for each budget. Dashed: no plan for that budget adds less, certified for "
            "plans that keep the order of the ops. What lies between is all that any planner could still gain. Only "
            "the points are worked out."
        )
        blocks.append(Chart(charts.front(found.curves), caption))
    if found.data.get("record") == "capacity":
        from simulator.report.capacity import heat_map

        blocks.append(heat_map(found))
    of = ". ".join(found.notes) if problem is None else provenance(problem.trace)
    beside = [Text(f"{of} Every figure on this page is predicted; nothing was run.", "note")]
    answer = Section("Answer", (Text(found.words), *blocks, found.table, *beside))
    if problem is None:
        return write_page(path, Page(found.short, "", (answer,)))
    beside += warned(map(text, warnings_of(problem)))
    model = Section("Model and trace", (metadata(problem.trace),))
    return write_page(path, Page(found.short, describe(problem.trace.meta), (answer, model)))


def simulation_sections(c: Prediction) -> tuple[Section, ...]:
    sentence, parts = at_peak(c)
    held = Text(f"{sentence} the parts sum to it. Workspace is what the running op uses beyond its outputs.")
    largest = holders(c.step.trace, c.planned, f"The {HOLDERS} largest storages at the plan's peak")
    return (
        Section("What holds the memory at the peak", (held, parts, largest)),
        Section("Static analysis of activations", activation_blocks(c.step, c.plan)),
        Section("Model and trace", (metadata(c.trace),)),
    )


# What stands beside figures


def provenance(trace: Trace) -> str:
    """Where the times and sizes of a trace come from, in words."""
    return f"Op times: {trace.meta.times}. Memory: {figures_from(trace.meta)}."


def metadata(trace: Trace) -> Table:
    """Return what the trace records about itself, and its figures."""
    rows = {}
    for k, v in trace.meta.to_json().items():
        if v and isinstance(v, str | int | dict) and k != "sketch":
            parts = [f"{n} {x}" for n, x in sorted(v.items())] if isinstance(v, dict) else [str(v)]
            rows[k.replace("_", " ")] = ", ".join(parts)
    return Table(columns=("", "value"), rows=tuple((rows | trace.describe()[1]).items()))


# The answer


def in_words(found: Answer) -> list[tuple[str, str]]:
    """Return what there is to say of an answer, each with a word before it; "": it goes on about the one before."""
    c = found.planned
    plan, before, after = c.plan, c.saved.timeline, c.planned.timeline
    lines, time = [("budget", _budget(found)), *_device(c)], show_time(after.step_time_ns)
    if not plan.changes:
        return [*lines, ("time", time), *_reserved(c)]
    added = show_percent(c.overhead_percent, signed=True)
    again = f"{len(plan.recomputed)} values recomputed by {after.recomputed_ops} op runs"
    lines.append(("time", f"{show_time(before.step_time_ns)} -> {time} ({added}; {c.trace.meta.times})"))
    if found.bound is not None and found.gap_points is not None:
        within = f"this one is within {found.gap_points:.2f} points of it"
        lines.append(("bound", f"{found.bound.least('for this budget ')}; {within}"))
    lines.append(("plan", f"{plan.planner}: {again}, found in {found.solve_seconds:.2f} s"))
    return [*lines, *(("rewrite", line) for line in rewrites_in_words(c.trace, plan)), *_reserved(c)]


def _budget(found: Answer) -> str:
    """The budget, how much of it the plan needs, and what 100 % of a budget stands for."""
    c = found.planned
    of = c.plan.budget_of
    peak, whole = c.planned_figures.peak_bytes(of), found.asked.whole_bytes(of)
    parts = ["none" if c.budget_bytes is None else f"{show_bytes(c.budget_bytes)} of {of} memory"]
    if peak is not None and (c.plan.changes or c.budget_bytes is not None):
        share = f" ({show_percent(100 * peak / whole, digits=1)})" if whole else ""
        parts.append(f"the plan needs {show_bytes(peak)}{share}")
    parts.append(f"100 % is {show_bytes(whole)}, the captured graph with everything saved")
    return "; ".join(parts)


def _reserved(c: Prediction) -> list[tuple[str, str]]:
    """Reserved memory, and the allocator settings."""
    of, conf = c.planned_fit.reserved, c.setting.alloc_conf
    if of is None:
        return []
    under = f" with {conf}" if conf else ""
    share = show_percent(100 * of.fragmentation, digits=1)
    return [("reserved", f"fragmentation {share}{under}; {figures_from(c.trace.meta)}")]


def _device(c: Prediction) -> list[tuple[str, str]]:
    fit = c.planned_fit
    if fit.device is None:
        return []
    retries = f", with {fit.retries_a_step} retries a step" if fit.retries_a_step else ""
    fits = f"fits{retries}, {show_bytes(fit.left_bytes)} left"
    return [("device", fit.device.room()), ("", fits if fit.fits else f"does not fit: {fit.out_of_memory}")]


# Memory over the step, and at its peak


def memory(c: Prediction) -> Chart:
    """The step over its time: the planned one by category, the one with everything saved as a line."""
    figures = c.planned_fit.figures()
    text = "Areas: what is allocated while each op runs, by category. Drag to move, turn the wheel with Shift to zoom."
    if c.plan.changes:
        text += " Dashed line: the same step with everything saved."
    if figures.peak_reserved_bytes:
        text += " Dotted: what the caching allocator has reserved once the step has settled."
    levels = {"budget": c.budget_bytes, "reserved": figures.peak_reserved_bytes}
    beside = c.saved if c.plan.changes else None
    return Chart(charts.memory_over_step(c.step.trace, c.planned, beside, levels), text)


def at_peak(c: Prediction) -> tuple[str, Table]:
    """Where the plan's peak is, and what holds it there, by category, beside the peak with everything saved."""
    trace = c.step.trace
    before = peak_by_category(c.trace, c.saved.schedule, c.saved.timeline)
    after = peak_by_category(trace, c.planned.schedule, c.planned.timeline)
    peak = sum(after.values())
    parts = table(
        [category for category in CATEGORIES if before.get(category) or after.get(category)],
        (
            ("category", "", str),
            ("everything saved", "bytes", lambda k: before.get(k, 0)),
            ("with the plan", "bytes", lambda k: after.get(k, 0)),
            ("share", "share", lambda k: 100.0 * after.get(k, 0) / max(1, peak)),
        ),
        total=("peak", sum(before.values()), peak, 100.0),
    )
    schedule, at = c.planned.schedule, c.planned.timeline.peak_step
    if at < 0:
        return "At the peak:", parts
    again = " again" if schedule.recompute[at] else ""
    return f"At the peak, while {where(trace, schedule.op[at])} runs{again}:", parts


def holders(trace: Trace, replay: Replay, caption: str = "", most: int = HOLDERS) -> Table:
    """The largest storages that are allocated at the peak."""
    ops, sts = trace.ops, trace.storages
    at = replay.timeline.peak_step
    there, made = holdings(trace, replay.schedule, at) if at >= 0 else [], sts.producer
    shown, always = there[:most], Cell("exists throughout the step", tone="quiet")
    return table(
        shown,
        (
            ("storage", CODE, lambda s: sts.name[s]),
            ("op", CODE, lambda s: target_text(trace, made[s]) if made[s] >= 0 else always),
            ("module", CODE, lambda s: ops.module[made[s]] if made[s] >= 0 else ""),
            ("category", "", lambda s: sts.category[s]),
            ("shape", "", lambda s: shape_text(trace, s)),
            ("size", "bytes", lambda s: sts.nbytes[s]),
        ),
        total=(f"{len(shown)} of {len(there):,} storages", "", "", "", "", sum(sts.nbytes[s] for s in shown)),
        caption=caption,
    )


# Activations


class Activation(NamedTuple):
    """One storage that forward makes and backward reads, with everything saved."""

    storage: int
    nbytes: int
    producer: int
    idle_ns: int  # from the end of its last forward use (or producer) to the start of its first backward use
    recompute_ns: int | None  # its op and those before it that must run, too; None: it may not run again


def activations(problem: Problem) -> tuple[Activation, ...]:
    """The static analysis of every storage that is saved from forward for backward, largest first.

    Counts: the op times of the trace in its order, with everything saved; for the recompute cost, the
    producing op and each op before it whose output backward does not save. Ignores: that several
    recomputations can share ops, and that a plan may have evicted what a chain starts from.
    """
    ops, sts = problem.trace.ops, problem.trace.storages
    end = list(accumulate(ops.time_ns))
    costs = Costs(ev := evaluator_of(problem), ev.state())
    candidates = set(problem.candidates)
    out = []
    for s in range(len(sts)):
        if problem.saved_by_default[s] and sts.category[s] == ACTIVATION and sts.nbytes[s]:
            first, rest = sts.first_backward_use[s], max(sts.last_forward_use[s], sts.producer[s])
            idle_ns = end[first] - ops.time_ns[first] - end[rest]
            cost_ns = costs.of(s) if s in candidates else None
            out.append(Activation(s, sts.nbytes[s], sts.producer[s], idle_ns, cost_ns))
    return tuple(sorted(out, key=lambda a: (-a.nbytes, a.storage)))


def activation_blocks(problem: Problem, plan: Plan) -> tuple[Block, ...]:
    """Sizes, uses and idle times of everything that forward saves for backward."""
    trace = problem.trace
    ops, sts = trace.ops, trace.storages
    found = activations(problem)
    if not found:
        return (Text("Forward saves nothing for backward."),)
    candidates, recomputed = frozenset(problem.candidates), plan.recomputed

    def action(a: Activation) -> str:
        if a.storage in recomputed:
            return charts.RECOMPUTED
        return charts.IS_SAVED if a.storage in candidates else charts.UNABLE

    def cost(a: Activation) -> Cell:
        if a.recompute_ns is not None:
            return time_cell(a.recompute_ns)
        flags = ", ".join(n for b, n in FLAG_NAMES.items() if ops.flags[a.producer] & b)
        return Cell(flags or "–", tone="quiet")

    points = [(ops.name[a.producer], action(a), a.idle_ns, a.nbytes) for a in found[: charts.MOST_POINTS]]
    shown, whole = found[:LONGEST_TABLE], sum(a.nbytes for a in found)
    return (
        Text(
            f"Forward saves {len(found):,} activations for backward, {show_bytes(whole)} in all. Idle is the time from "
            "the last use in forward to the first use in backward, with everything saved. The recompute cost is that "
            "of the producing op and of those before it whose output backward does not save."
        ),
        Chart(charts.idle_against_size(points), title="Idle time and size of each activation"),
        table(
            shown,
            (
                ("id", NUMBER, lambda a: Cell(str(a.storage), a.storage)),
                ("op", CODE, lambda a: ops.name[a.producer]),
                ("module", CODE, lambda a: ops.module[a.producer]),
                ("tensor", "", lambda a: f"{sts.dtype[a.storage]} {shape_text(trace, a.storage)}"),
                ("size", "bytes", lambda a: a.nbytes),
                ("last in forward", "count", lambda a: max(sts.last_forward_use[a.storage], a.producer)),
                ("first in backward", "count", lambda a: sts.first_backward_use[a.storage]),
                ("idle", "time", lambda a: a.idle_ns),
                ("recompute", NUMBER, cost),
                ("action", "", action),
            ),
            total=("", f"{len(shown):,} of {len(found):,}", "", "", sum(a.nbytes for a in shown), *[""] * 5),
            caption="The largest activations; forward and backward: the ops between which each is idle",
        ),
    )


def shape_text(trace: Trace, storage: int) -> str:
    """`64×256×56×56`; `scalar` for no dimensions."""
    return "×".join(str(d) for d in trace.storages.shape[storage]) or "scalar"


def target_text(trace: Trace, op: int) -> str:
    """The op's target without what most of them share: `convolution` for `aten.convolution.default`."""
    return trace.ops.target[op].removeprefix("aten.").removesuffix(".default")
