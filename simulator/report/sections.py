"""Turn a Comparison into the blocks of a report: memory, the peak, recomputations, activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from simulator.core.graph import Graph
from simulator.core.replay import breakdown, holdings
from simulator.core.schedule import Schedule
from simulator.core.timeline import Timeline
from simulator.report import bars, charts
from simulator.report.activations import Activation, Recomputation, activations, by_module, recomputations
from simulator.report.page import (
    Block,
    Cell,
    Chart,
    Switch,
    Table,
    Text,
    bytes_cell,
    count_cell,
    percent_cell,
    time_cell,
)
from simulator.studies.prediction import Comparison
from traces.plan import Plan
from traces.trace import CATEGORIES, FLAG_NAMES, Trace
from traces.units import show_bytes, show_time

HOLDERS: Final = 20  # rows of the table of the largest storages at the peak
ROWS: Final = 150  # rows of the long tables

RESERVED_LINE: Final = (
    " The dotted line is what the caching allocator has reserved once the step has settled."
)


def memory_blocks(
    c: Comparison, measured_curve: Sequence[tuple[int, int]] | None = None
) -> tuple[Block, ...]:
    """Two stacked areas with common scales, with everything kept and with the plan."""
    pair = (c.kept_timeline, c.planned_timeline)
    curve = _stretched(measured_curve or (), c.planned_timeline.step_time_ns)
    levels = {
        name: reserved.figures.peak_reserved_bytes
        for name, reserved in (("kept", c.kept_reserved), ("plan", c.planned_reserved))
        if reserved is not None
    }
    top = max(
        [
            1,
            c.budget_bytes or 0,
            *levels.values(),
            *(t.peak_allocated_bytes for t in pair),
            *(b for _, b in curve),
        ]
    )
    extent = charts.Extent(
        top_bytes=top,
        end_ns=max([1, *(t.step_time_ns for t in pair)]),
        steps=max(1, len(c.kept), len(c.planned)),
    )
    drawn = []
    for name, title, schedule, timeline in (
        ("kept", "Everything kept", c.kept, c.kept_timeline),
        ("plan", "With the plan", c.planned, c.planned_timeline),
    ):
        spec = charts.memory_over_step(
            c.trace,
            schedule,
            timeline,
            extent,
            budget_bytes=c.budget_bytes,
            reserved_bytes=levels.get(name),
            measured_curve=curve if name == "plan" else None,
            name=name,
        )
        drawn.append(Chart(spec=spec, title=f"{title}: peak {show_bytes(timeline.peak_allocated_bytes)}"))
    line = (
        " The black line is what a real step had allocated; the profiler that records it slows the step, so its "
        "clock is scaled to the predicted length."
    )
    switch = Switch(
        signal="clock", label="Horizontal axis", choices=(("time", "time"), ("steps", "number of the op"))
    )
    return (
        Text(
            text="Bytes allocated while each op runs, by category. Long timelines are thinned so that the "
            "highest and the lowest point of every stretch stay. Drag to move, hold Shift and turn the wheel to "
            "zoom, double-click to reset." + (line if curve else "") + (RESERVED_LINE if levels else "")
        ),
        switch,
        *drawn,
    )


def _stretched(curve: Sequence[tuple[int, int]], end_ns: int) -> tuple[tuple[int, int], ...]:
    """The curve with its last point at `end_ns`."""
    last = curve[-1][0] if curve else 0
    return tuple((t * end_ns // last, b) for t, b in curve) if last > 0 else ()


def peak_blocks(c: Comparison) -> tuple[Block, ...]:
    """The peak by category, with and without the plan, and the largest storages that stand there."""
    before = breakdown(c.trace, c.kept, c.kept_timeline).at_peak
    after = breakdown(c.trace, c.planned, c.planned_timeline).at_peak
    peak = sum(after.values())
    rows = tuple(
        (
            category,
            bytes_cell(before.get(category, 0)),
            bytes_cell(after.get(category, 0)),
            percent_cell(100.0 * after.get(category, 0) / peak if peak else 0.0, digits=1),
        )
        for category in CATEGORIES
        if before.get(category) or after.get(category)
    )
    total = ("peak", bytes_cell(sum(before.values())), bytes_cell(peak), percent_cell(100.0, digits=1))
    at = c.planned_timeline.peak_step
    where = f" The plan's peak is reached while {c.trace.ops.name[c.planned.op[at]]} runs." if at >= 0 else ""
    return (
        Text(
            text="The parts sum to the peak. Workspace is what the running op uses beyond its outputs."
            + where
        ),
        Chart(spec=bars.peak_by_category({"keep-all": before, "plan": after}, c.budget_bytes)),
        Table(
            columns=("category", "everything kept", "with the plan", "share of the plan's peak"),
            rows=rows,
            numbers=frozenset({1, 2, 3}),
            total=total,
        ),
        holders(c.trace, c.planned, c.planned_timeline, f"The {HOLDERS} largest storages at the plan's peak"),
        holders(
            c.trace,
            c.kept,
            c.kept_timeline,
            f"The {HOLDERS} largest storages at the peak",
            folded="The largest storages at the peak with everything kept",
        ),
    )


def holders(trace: Trace, schedule: Schedule, timeline: Timeline, caption: str, *, folded: str = "") -> Table:
    """The largest storages that are allocated at the peak."""
    ops, sts = trace.ops, trace.storages
    there = holdings(trace, schedule, timeline.peak_step) if timeline.peak_step >= 0 else ()
    rows = []
    for h in there[:HOLDERS]:
        p = sts.producer[h.storage]
        rows.append(
            (
                sts.name[h.storage],
                target_text(trace, p) if p >= 0 else Cell(text="exists throughout the step", tone="quiet"),
                ops.module[p] if p >= 0 else "",
                h.category,
                shape_text(trace, h.storage),
                bytes_cell(h.nbytes),
            )
        )
    shown = sum(h.nbytes for h in there[:HOLDERS])
    return Table(
        columns=("storage", "op", "module", "category", "shape", "size"),
        rows=tuple(rows),
        numbers=frozenset({5}),
        code=frozenset({0, 1, 2}),
        total=(f"{len(rows)} of {len(there):,} storages", "", "", "", "", bytes_cell(shown)),
        caption=caption,
        folded=folded,
    )


def recompute_blocks(c: Comparison) -> tuple[Block, ...]:
    """What runs again, by op and by module."""
    found = recomputations(c.trace, c.planned, c.planned_timeline, c.plan.recomputed)
    if not found:
        return (Text(text="The plan recomputes nothing."),)
    total_ns = sum(r.time_ns for r in found)
    rows = tuple(_recompute_row(c.trace, r, total_ns) for r in found[:ROWS])
    evicted = sum(c.trace.storages.nbytes[s] for s in c.plan.recomputed)
    return (
        Text(
            text=f"{len(c.plan.recomputed):,} storages ({show_bytes(evicted)}) are released in forward "
            f"and computed again in backward, by {len(found):,} ops that together take {show_time(total_ns)}. "
            "A link is an op that runs only because another recomputation needs its output."
        ),
        Chart(spec=bars.cost_by_module(by_module(c.trace, found)), title="Recompute time by module"),
        Table(
            columns=(
                "op",
                "target",
                "module",
                "storages",
                "role",
                "rebuilt",
                "runs again",
                "time",
                "share of overhead",
            ),
            rows=rows,
            numbers=frozenset({5, 6, 7, 8}),
            code=frozenset({0, 1, 2, 3}),
            total=(
                f"{len(rows):,} of {len(found):,} ops",
                *[""] * 4,
                bytes_cell(sum(r.nbytes for r in found[:ROWS])),
                count_cell(sum(r.times for r in found[:ROWS])),
                time_cell(sum(r.time_ns for r in found[:ROWS])),
                percent_cell(
                    100.0 * sum(r.time_ns for r in found[:ROWS]) / total_ns if total_ns else 0.0, digits=1
                ),
            ),
            caption=f"The costliest of {len(found):,} ops that run again"
            if len(found) > ROWS
            else "Ops that run again",
        ),
    )


def _recompute_row(trace: Trace, r: Recomputation, total_ns: int) -> tuple[Cell | str, ...]:
    return (
        trace.ops.name[r.op],
        target_text(trace, r.op),
        trace.ops.module[r.op],
        ", ".join(str(s) for s in r.storages),
        Cell(text="link", tone="quiet") if r.link else "recomputed",
        bytes_cell(r.nbytes),
        count_cell(r.times),
        time_cell(r.time_ns),
        percent_cell(100.0 * r.time_ns / total_ns if total_ns else 0.0, digits=1),
    )


def activation_blocks(trace: Trace, graph: Graph, plan: Plan) -> tuple[Block, ...]:
    """Sizes, uses and idle times of everything that forward keeps for backward."""
    found = activations(trace, graph)
    if not found:
        return (Text(text="Forward keeps nothing for backward."),)
    candidates, chosen = frozenset(graph.candidates), plan.recomputed

    def action(s: int) -> str:
        return bars.RECOMPUTED if s in chosen else bars.KEPT if s in candidates else bars.UNABLE

    kinds: dict[tuple[str, str], int] = {}
    for a in found:
        key = (target_text(trace, a.producer), action(a.storage))
        kinds[key] = kinds.get(key, 0) + a.nbytes
    per_kind: dict[str, int] = {}
    for (kind, _), nbytes in kinds.items():
        per_kind[kind] = per_kind.get(kind, 0) + nbytes
    large = sorted(per_kind, key=lambda k: (-per_kind[k], k))[:12]
    points = [
        (trace.ops.name[a.producer], action(a.storage), a.idle_ns, a.nbytes) for a in found[: charts.POINTS]
    ]
    rows = tuple(_activation_row(trace, a, action(a.storage)) for a in found[:ROWS])
    shown = sum(a.nbytes for a in found[:ROWS])
    whole = sum(a.nbytes for a in found)
    return (
        Text(
            text=f"Forward keeps {len(found):,} activations for backward, {show_bytes(whole)} in all. Idle is the "
            "time from the last use in forward to the first use in backward, with everything kept. The recompute "
            "cost is that of the producing op and of the links before it that backward does not keep."
        ),
        Chart(
            spec=bars.bytes_by_kind([(k, a, n) for (k, a), n in sorted(kinds.items()) if k in large]),
            title="Activations by the op that makes them",
        ),
        Chart(spec=bars.idle_against_size(points), title="Idle time and size of each activation"),
        Table(
            columns=(
                "id",
                "op",
                "module",
                "tensor",
                "size",
                "forward",
                "backward",
                "idle",
                "recompute",
                "links",
                "action",
            ),
            rows=rows,
            numbers=frozenset({0, 4, 5, 6, 7, 8, 9}),
            code=frozenset({1, 2}),
            total=(
                "",
                f"{len(rows):,} of {len(found):,}",
                *[""] * 2,
                bytes_cell(shown),
                *[""] * 6,
            ),
            caption="The largest activations; forward and backward: the first and last op that uses it",
        ),
    )


def _activation_row(trace: Trace, a: Activation, action: str) -> tuple[Cell | str, ...]:
    ops, sts = trace.ops, trace.storages
    if a.recompute_ns is None:
        flags = ", ".join(n for b, n in FLAG_NAMES.items() if ops.flags[a.producer] & b)
        cost = Cell(text=flags or "–", tone="quiet")
    else:
        cost = time_cell(a.recompute_ns)
    return (
        Cell(text=str(a.storage), sort=a.storage),
        ops.name[a.producer],
        ops.module[a.producer],
        f"{sts.dtype[a.storage]} {shape_text(trace, a.storage)}",
        bytes_cell(a.nbytes),
        _uses(a.first_forward_use, a.last_forward_use),
        _uses(a.first_backward_use, a.last_backward_use),
        time_cell(a.idle_ns),
        cost,
        count_cell(a.links) if a.recompute_ns is not None else "–",
        action,
    )


def _uses(first: int, last: int) -> Cell:
    if first < 0:
        return Cell(text="–", sort=-1)
    return Cell(text=str(first) if first == last else f"{first}–{last}", sort=first)


def shape_text(trace: Trace, storage: int) -> str:
    """`64×256×56×56`; `scalar` for no dimensions."""
    return "×".join(str(d) for d in trace.storages.shape[storage]) or "scalar"


def target_text(trace: Trace, op: int) -> str:
    """The op's target without what most of them share: `convolution` for `aten.convolution.default`."""
    return trace.ops.target[op].removeprefix("aten.").removesuffix(".default")
