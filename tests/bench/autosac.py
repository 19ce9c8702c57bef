"""torch's AutoSAC (torch.distributed._tools) on GPT-2, where it runs, beside our plans for the same trace.

python -m tests.bench.autosac [--shares 0.9,0.7,0.5] [--cache DIR] [--seconds S] [--json]

AutoSAC needs PuLP and pwlf (`pip install pulp pwlf`), and CUDA, for its roofline alone; here the A100's numbers of
`tests.bench.recorded` stand in for that, on fake CPU tensors, so nothing runs. It chooses modules and how much of each
to discard; nothing in torch turns that into a step, so its peak and its recomputation time are its own predictions and
cannot be replayed. They stand beside our replayed ones for the same share of each one's own keep-all peak, and are not
otherwise comparable: AutoSAC counts by modules and has its own idea of the peak.

GPT-2 only: torchvision's ResNets fail in its `parse_module_info` (one ReLU module called three times), and Hugging
Face's BERT in its trackers (a loss module made inside forward).
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.planners import DEFAULT, plan_with
from tests.bench.recorded import (
    A100_BYTES_PER_S,
    A100_FLOPS_PER_S,
    CACHE,
    a100_times,
    published_flops,
    trace_of,
)
from tests.bench.torch_budget import added_percent
from traces.errors import BudgetError

OPTIONS = {"batch_size": 8, "seq_len": 1024, "dropout": 0.0, "attention": "eager", "optimizer": "none"}


def graph() -> tuple[Any, dict[str, float]]:
    """AutoSAC's graph of GPT-2's modules, and the seconds that each of its trackers takes."""
    import torch
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker, _ModState
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    from tracer.record.step import fake_mode
    from tracer.step.step import load_spec

    mode = "operator-level-cost-model"
    seconds: dict[str, float] = {}
    RuntimeEstimator._roofline_estimate = classmethod(_roofline)  # type: ignore[method-assign]
    with fake_mode():
        step = load_spec("gpt2", OPTIONS)("cpu")
        model = step.model

        def loss() -> torch.Tensor:
            return step.loss_of(model(*step.args, **step.kwargs))

        begin = time.perf_counter()
        tracker = MemTracker()
        tracker.track_external(model)
        last: Any = None
        with tracker as running:
            for k in range(2):
                value = loss()
                value.backward()
                if k:
                    last = running.get_tracker_snapshot("current")
                model.zero_grad(set_to_none=True)
                if not k:
                    running.reset_mod_stats()
        for stats in tracker.memory_tracking.values():
            if _ModState.POST_BW not in stats.snapshots:
                stats.snapshots.setdefault(_ModState.POST_BW, []).append(copy.deepcopy(last))
        seconds["memory"] = time.perf_counter() - begin
        begin = time.perf_counter()
        runtime = RuntimeEstimator()
        with runtime(estimate_mode_type=mode):
            loss().backward()
        model.zero_grad(set_to_none=True)
        seconds["runtime"] = time.perf_counter() - begin
        begin = time.perf_counter()
        sac = SACEstimator()
        with sac(estimate_mode_type=mode):
            value = loss()
        value.backward()
        seconds["sac"] = time.perf_counter() - begin
        begin = time.perf_counter()
        info = aggregate_stats(model, tracker, runtime, sac, torch.device("cpu"))
        parsed = parse_module_info(info)
        seconds["graph"] = time.perf_counter() - begin
    return parsed, seconds


def _roofline(cls: type, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """An op's result and its milliseconds on an A100; in place of torch's, which asks CUDA for the numbers."""
    import torch
    from torch.utils import _pytree as pytree

    from tracer.costs.roofline import op_bytes, op_flops

    kwargs = kwargs or {}
    out = func(*args, **kwargs)

    def tensors(value: Any) -> list[torch.Tensor]:
        return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]

    moved = op_bytes(tensors((args, kwargs)), tensors(out), func)
    if all(r.alias_info is not None for r in func._schema.returns):
        moved = 0  # a view
    flops = op_flops(func, args, kwargs, out)
    return out, 1e3 * max(flops / A100_FLOPS_PER_S, moved / A100_BYTES_PER_S)


@click.command()
@click.option(
    "--shares", default="0.9,0.7,0.5,0.4", show_default=True, help="Of each one's own keep-all peak."
)
@click.option("--planner", default=DEFAULT, show_default=True)
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
@click.option("--seconds", type=float, default=5.0, show_default=True, help="For each plan of ours.")
@click.option("--json", "as_json", is_flag=True)
def main(shares: str, planner: str, cache: Path, seconds: float, as_json: bool) -> None:
    """Run AutoSAC's integer programme on GPT-2 and plan for the same shares."""
    from torch.distributed._tools.ilp_utils import get_peak_memory_runtime_baseline
    from torch.distributed._tools.sac_ilp import sac_milp

    with contextlib.redirect_stdout(sys.stderr):  # its estimator prints
        modules, took = graph()
    peak, compute_ms = get_peak_memory_runtime_baseline(modules)
    trace = a100_times(published_flops(trace_of(cache, "gpt2", **OPTIONS)))
    base = Problem(trace).saved.timeline
    rows = []
    for share in map(float, shares.split(",")):
        begin = time.perf_counter()
        _, added_ms, reached = sac_milp(modules, memory_budget=share * peak / 2**30)
        theirs = time.perf_counter() - begin
        begin = time.perf_counter()
        ours = None
        try:
            budget_bytes = int(share * base.peak_allocated_bytes)
            plan = plan_with(planner, Problem(trace), budget_bytes, Limits(seconds=seconds))
            ours = added_percent(base, Problem(trace).replay(plan.actions).timeline)
        except BudgetError:
            pass
        rows.append(
            {
                "share": share,
                "autosac_percent": 100 * added_ms / compute_ms if reached >= 0 else None,
                "autosac_peak_bytes": reached if reached >= 0 else None,
                "autosac_seconds": theirs,
                "ours_percent": ours,
                "ours_seconds": time.perf_counter() - begin,
            }
        )
    data = {
        "modules": len(modules.nodes),
        "autosac_keep_all_bytes": peak,
        "ours_keep_all_bytes": base.peak_allocated_bytes,
        "tracker_seconds": took,
        "rows": rows,
    }
    if as_json:
        click.echo(json.dumps(data))
        return
    click.echo(
        f"GPT-2: {data['modules']} modules; keep-all {peak / 1e6:,.0f} MB by AutoSAC, "
        f"{base.peak_allocated_bytes / 1e6:,.0f} MB by us; trackers {sum(took.values()):.1f} s"
    )
    for r in rows:
        theirs_, ours_ = (
            "none" if r[k] is None else f"+{r[k]:.2f} %" for k in ("autosac_percent", "ours_percent")
        )
        click.echo(
            f"  {100 * r['share']:.0f} %: AutoSAC predicts {theirs_} in {r['autosac_seconds']:.2f} s; "
            f"ours {ours_} in {r['ours_seconds']:.2f} s"
        )


if __name__ == "__main__":
    main()
