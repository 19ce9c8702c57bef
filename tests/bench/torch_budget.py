"""torch's activation_memory_budget and per-block checkpoints beside ours: same problem, same op times, same replay.

python -m tests.bench.torch_budget [bert-base|gpt2|resnet50 ...] [--cache DIR] [--seconds S] [--target h200] [--json]

The figures are those of the published comparison that the targets come from: the peak of forward and backward alone
(`--optimizer none`), resident bytes subtracted, gradients kept to the end, 1 MB = 1e6 bytes; time by the roofline of an
A100 40 GB without fusion; FLOPs by torch's own counter, which has none for attention on the CPU.

Counts: every storage of the captured graph once. Ignores: what a compiler would fuse or reorder, and kernels'
workspaces, for torch's plans and for ours alike. A published peak is rounded to a MB and is of a graph captured
otherwise, so beside each target stand the bound there, torch's own plan in this replay, and ours and the bound at the
peak of that plan. With `--target h200` the problem, the op times and the workspace are
those that Lowtide has for that GPU instead.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from simulator.bounds.bound import lower_bound
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.core.replay import Timeline, run
from simulator.core.schedule import build
from simulator.planners import DEFAULT, plan_with
from simulator.planners.outcome import percent
from simulator.planners.segments import OUTSIDE, actions_for, block_segments
from tests.bench.baselines.saved_sets import SavedSets, plans
from tests.bench.recorded import (
    CACHE,
    a100_times,
    ask_torch,
    directory_of,
    flops_as_times,
    published_flops,
    tensors_alone,
    trace_of,
)
from traces.errors import BudgetError
from traces.records.plan import SAVE
from traces.records.trace import Trace

MODELS: dict[str, dict[str, Any]] = {
    "bert-base": {"batch_size": 16, "seq_len": 512, "dropout": 0.0, "optimizer": "none"},
    "gpt2": {"batch_size": 8, "seq_len": 1024, "dropout": 0.0, "attention": "eager", "optimizer": "none"},
    "resnet50": {"batch_size": 64, "optimizer": "none"},
}
BUDGETS = tuple(round(0.05 * k, 2) for k in range(1, 21))
SOLVERS = ("dp", "ilp", "greedy")
GROUPS = (1, 2, 3, 4)  # blocks to a checkpoint


def added_percent(base: Timeline, planned: Timeline) -> float:
    """The time that a plan adds, in percent of the step with everything saved."""
    return percent(planned.step_time_ns - base.step_time_ns, base.step_time_ns)


def flops_percent(trace: Trace, planned: Timeline) -> float:
    """The FLOPs of the ops that run again, in percent of the step's; as `Ops.flops` counts them."""
    flops = trace.ops.flops
    again = sum(flops[i] for i, a in zip(planned.op, planned.recompute, strict=True) if a)
    return percent(again, sum(flops))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Below so many MB at no more than so many percent of time or FLOPs."""

    model: str
    below_mb: int
    percent: float
    of: str  # "time" or "flops"


TARGETS = (
    Target(model="bert-base", below_mb=3_202, percent=23.1, of="time"),
    Target(model="bert-base", below_mb=3_881, percent=13.4, of="flops"),
    Target(model="bert-base", below_mb=5_114, percent=4.5, of="flops"),
    Target(model="gpt2", below_mb=5_075, percent=22.6, of="flops"),
    Target(model="gpt2", below_mb=11_987, percent=0.4, of="flops"),
    Target(model="resnet50", below_mb=2_146, percent=25.3, of="time"),
    Target(model="resnet50", below_mb=2_804, percent=0.9, of="flops"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One plan's replay in the units of the published comparison."""

    label: str
    peak_mb: float
    time_percent: float
    flops_percent: float
    recomputed_ops: int
    seconds: float  # to plan
    valid: bool = True


class Model:
    """One model's trace, with the op times of an A100, and what plans of it come to."""

    def __init__(
        self,
        name: str,
        cache: Path,
        options: dict[str, Any] | None = None,
        target: str = "",
    ) -> None:
        options = {**(MODELS[name] if options is None else options), **({"target": target} if target else {})}
        self.recorded = trace_of(cache, name, **options)
        counted = self.recorded if target else published_flops(tensors_alone(self.recorded))
        self.trace = counted if target else a100_times(counted)
        self.by_flops = flops_as_times(counted)
        self.problem = Problem(self.trace)
        self.base = run(self.problem, build(self.problem, ()))
        directory = directory_of(cache, name, **options)
        self.saved_file = directory.with_name(directory.name + ".torch.json")

    def figures(self, label: str, timeline: Timeline, seconds: float, valid: bool = True) -> Figures:
        return Figures(
            label=label,
            peak_mb=(timeline.peak_allocated_bytes - self.trace.resident_bytes) / 1e6,
            time_percent=added_percent(self.base, timeline),
            flops_percent=flops_percent(self.trace, timeline),
            recomputed_ops=timeline.recomputed_ops,
            seconds=seconds,
            valid=valid,
        )

    def torchs(self, solvers: Sequence[str]) -> list[Figures]:
        """torch's plans; torch itself runs once, its answers are kept beside the trace."""
        if not self.saved_file.is_file():
            ask_torch(self.recorded, BUDGETS, solvers).save(self.saved_file)
        sets = SavedSets.load(self.saved_file)
        return [
            self.figures(f"torch {p.choice.label}", p.timeline, p.choice.solve_seconds, p.choice.valid)
            for p in plans(self.problem, sets)
        ]

    def without_links(self, label: str) -> Figures | None:
        """One of torch's plans with the values computed again that it saves for recomputations alone.

        Which of these it saves differs between captures of one model, though they cost no FLOPs: a table's rows, say.
        """
        sets = SavedSets.load(self.saved_file)
        chosen = tuple(s for s in sets.sets if f"torch {s.label}" == label)
        for p in plans(self.problem, replace(sets, sets=chosen)):
            actions = tuple(a for a in p.plan.actions if a.recipe != SAVE)
            timeline = run(self.problem, build(self.problem, actions))
            return self.figures(f"{label} without links", timeline, 0.0, p.choice.valid)
        return None

    def bound_percent(self, below_mb: float, of: str) -> float | None:
        """What every plan with a peak below that adds at least, in time or in FLOPs; None: there is no such plan."""
        budget_bytes = self.trace.resident_bytes + round(below_mb * 1e6) - 1
        bound = lower_bound(Problem(self.trace if of == "time" else self.by_flops), budget_bytes)
        return bound.overhead_percent if bound.feasible else None

    def checkpoints(self) -> list[Figures]:
        """`torch.utils.checkpoint` around every block, around every two, ..."""
        out = []
        segment = block_segments(self.trace.ops.module[: self.problem.forward_end])
        for count in GROUPS:
            begin = time.perf_counter()
            grouped = [OUTSIDE if b == OUTSIDE else b // count for b in segment]
            schedule = build(self.problem, actions_for(self.problem, grouped))
            seconds = time.perf_counter() - begin
            label = f"checkpoint every {count}"
            out.append(self.figures(label, run(self.problem, schedule), seconds))
        return out

    def ours(self, below_mb: float, of: str, planner: str, limits: Limits) -> Figures | None:
        """Our plan strictly below a peak, the cheaper in time or in FLOPs; None if there is none."""
        budget_bytes = self.trace.resident_bytes + round(below_mb * 1e6) - 1
        begin = time.perf_counter()
        try:
            plan = plan_with(
                planner, Problem(self.trace if of == "time" else self.by_flops), budget_bytes, limits
            )
        except BudgetError:
            return None
        seconds = time.perf_counter() - begin
        timeline = run(self.problem, build(self.problem, plan.actions))
        return self.figures(f"{planner} by {of}", timeline, seconds)


def judged(model: Model, t: Target, peers: Sequence[Figures], planner: str, limits: Limits) -> dict[str, Any]:
    """A target with the bound and our plan there, and the same at the peak of the peer's plan that it stands for."""

    def cost(f: Figures | None) -> float | None:
        return None if f is None else f.time_percent if t.of == "time" else f.flops_percent

    mine, bound = model.ours(t.below_mb, t.of, planner, limits), model.bound_percent(t.below_mb, t.of)
    value = cost(mine)
    # What was published is rounded to 0.1 %: of the peers that cost no more, the one with the lowest peak.
    alike = [f for f in peers if f.valid and round(cost(f) or 0.0, 1) <= t.percent]
    peer = min(alike, key=lambda f: f.peak_mb, default=None)
    lean = None if peer is None else model.without_links(peer.label)
    beside = []
    for f in (peer, lean):
        if f is not None:
            at_mb = f.peak_mb + 1e-6  # not above its peak
            at_peak = model.ours(at_mb, t.of, planner, limits)
            least = model.bound_percent(at_mb, t.of)
            beside.append({"peer": asdict(f), "ours": at_peak and asdict(at_peak), "bound_percent": least})
    return {
        **asdict(t),
        "ours": mine and asdict(mine),
        "met": value is not None and value <= t.percent,
        "bound_percent": bound,
        "possible": bound is not None and bound <= t.percent,
        "at_the_peers_peak": beside,
    }


def compare(
    name: str, cache: Path, planner: str, limits: Limits, solvers: Sequence[str], target: str
) -> dict[str, Any]:
    """All figures of one model; the published targets only for the published way of counting."""
    model = Model(name, cache, target=target)
    peers = model.torchs(solvers) + model.checkpoints()
    sweeps = {s: [f.peak_mb for f in peers if f.label.startswith(f"torch {s}-")] for s in solvers}
    beside = [(f, model.ours(f.peak_mb, "time", planner, limits)) for f in best_of(peers)]
    front = [f for _, f in beside if f is not None]
    targets = [judged(model, t, peers, planner, limits) for t in TARGETS if t.model == name and not target]
    return {
        "model": name,
        "options": MODELS[name],
        "ops": len(model.trace.ops),
        "keep_all_mb": (model.base.peak_allocated_bytes - model.trace.resident_bytes) / 1e6,
        "peers": [asdict(f) for f in peers],
        "falls_with_larger_budget": {
            s: sum(b < a for a, b in itertools.pairwise(peaks)) for s, peaks in sweeps.items()
        },
        "beside": [{"peer": asdict(p), "ours": m and asdict(m)} for p, m in beside],
        "ours_falls_with_larger_budget": sum(
            b.time_percent > a.time_percent
            for a, b in itertools.pairwise(sorted(front, key=lambda f: f.peak_mb))
        ),
        "targets": targets,
    }


def best_of(peers: Sequence[Figures]) -> list[Figures]:
    """The peers that no other beats in both peak and time, by peak: worth planning against."""
    out: list[Figures] = []
    for f in sorted(peers, key=lambda f: (f.peak_mb, f.time_percent)):
        if f.valid and (not out or f.time_percent < out[-1].time_percent):
            out.append(f)
    return out


@click.command()
@click.argument("models", nargs=-1, type=click.Choice([*MODELS]))
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
@click.option("--planner", default=DEFAULT, show_default=True)
@click.option("--solvers", default=",".join(SOLVERS), show_default=True, help="ilp needs scipy.")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="For each plan of ours.")
@click.option(
    "--target", default="", help="The graph and op times of this GPU, h200 for instance, workspace included."
)
@click.option("--json", "as_json", is_flag=True)
def main(
    models: tuple[str, ...],
    cache: Path,
    planner: str,
    solvers: str,
    seconds: float,
    target: str,
    as_json: bool,
) -> None:
    """Compare torch's budget mode, checkpoints and our planner on MODELS (default: all three)."""
    out = [
        compare(name, cache, planner, Limits(seconds=seconds), solvers.split(","), target)
        for name in models or MODELS
    ]
    if as_json:
        click.echo(json.dumps(out))
        return
    for data in out:
        click.echo(
            f"{data['model']} {data['options']}: {data['ops']} ops, keep-all {data['keep_all_mb']:,.1f} MB"
        )
        for f in data["peers"]:
            click.echo(line(f))
        click.echo(f"  larger budget, lower peak: {data['falls_with_larger_budget']}")
        click.echo("  the peers on the front, and ours strictly below the same peak")
        for pair in data["beside"]:
            click.echo(line(pair["peer"]))
            click.echo("      none" if pair["ours"] is None else "  " + line(pair["ours"]))
        for t in data["targets"]:
            verdict = "met" if t["met"] else "NOT met" if t["possible"] else "no plan can"
            click.echo(
                f"  below {t['below_mb']:,} MB at <= +{t['percent']} % {t['of']}: {verdict}; "
                f"bound {percents(t['bound_percent'])}"
            )
            click.echo("      none" if t["ours"] is None else "  " + line(t["ours"]))
            for pair in t["at_the_peers_peak"]:
                click.echo(f"    at a peer's peak; bound {percents(pair['bound_percent'])}")
                click.echo("  " + line(pair["peer"]))
                click.echo("      none" if pair["ours"] is None else "  " + line(pair["ours"]))


def percents(value: float | None) -> str:
    return "none fits" if value is None else f"+{value:.3f} %"


def line(f: dict[str, Any]) -> str:
    """One plan to read."""
    wrong = "" if f["valid"] else "  wrong gradients"
    return (
        f"  {f['label']:24} {f['peak_mb']:10,.1f} MB  time {f['time_percent']:+7.2f} %  FLOPs "
        f"{f['flops_percent']:+7.2f} %  {f['recomputed_ops']:5} ops  {f['seconds']:6.2f} s{wrong}"
    )


if __name__ == "__main__":
    main()
