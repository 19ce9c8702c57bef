"""A plan for those who keep their tools: a file of selective checkpointing, and every n layers; with what each needs.

Eager runs other ops than the captured graph has, so the ordinary loop is run, the model checkpointed so: on the CPU, or
for a GPU's plan on the null driver (`tracer.measure.untouched`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pprint import pformat
from typing import Any, Final

from simulator.core.problem import Problem
from simulator.planners.segments import block_paths
from tracer.measure.untouched import untouched_loop
from tracer.record.step import recorded_again
from tracer.rehearsal import run_on_null_driver
from tracer.step.loop import TrainingStep
from tracer.step.step import BuildStep, load_spec
from traces.devices import board_of
from traces.devices import device as device_entry
from traces.errors import PlanError
from traces.provenance import rehearsing
from traces.records.plan import Plan
from traces.units import show_bytes

EVERY: Final = 4  # layers of which one is checkpointed, at most
Saved = Mapping[str, Mapping[str, tuple[int, ...]]]  # block -> op -> which of its calls there are saved

FILE: Final = '''"""Selective activation checkpointing of {model}, made from a plan by `execute export`.

Peak of a step: {peak}; of the model as it is: {untouched}.

    from {{this file}} import apply
    apply(model)  # once, before training
"""

import functools
from collections import Counter

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Of each block, which calls of which ops are saved, counted from 0 in its forward; the rest is computed again.
SAVED = {saved}


def _contexts(saved):
    calls = {{False: Counter(), True: Counter()}}  # of forward, and of the recomputation

    def policy(ctx, op, *args, **kwargs):
        seen = calls[ctx.is_recompute]
        seen[str(op)] += 1
        keep = seen[str(op)] - 1 in saved.get(str(op), ())
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply(model):
    for path, saved in SAVED.items():
        block = model.get_submodule(path)
        more = {{"context_fn": functools.partial(_contexts, saved)}} if saved else {{}}
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **more)
    return model
'''


def exports(plan: Plan, model: str = "") -> dict[str, Any]:
    """Return what each export of a plan needs: the object that `execute export --json` prints, with the file as
    `policy`. `model` is built instead of what the plan names.

    Raises:
        PlanError: the plan has rewrites; the model has no repeated blocks, or is another than the plan's.
        EnvironmentProblem: the plan is for a GPU, and there is no CUDA build of torch.
    """
    if kinds := sorted({r.kind for r in plan.rewrites}):
        raise PlanError(
            f"the plan changes the step itself ({', '.join(kinds)}), which no other tool does; plan with recomputation "
            "alone (`simulate TRACE --budget ... --levers ''`) and export that."
        )
    if plan.meta.device != "cuda" or rehearsing():
        return there(plan=plan.to_json(), model=model)
    gpu = device_entry(board_of(plan.meta.target) or plan.meta.target)
    given = {"plan": plan.to_json(), "model": model}
    return run_on_null_driver("executor.exports:there", given, gpu, what="exported the plan")


def there(*, plan: dict[str, Any], model: str) -> dict[str, Any]:
    """Return what each export of a plan needs on a device that is there, or in a process on the null driver."""
    given = Plan.from_json(plan)
    meta, budget = given.meta, given.budget_bytes
    trace = recorded_again(meta, model, meta.device).trace
    if trace.meta.graph_fingerprint != meta.graph_fingerprint:
        raise PlanError("the model's graph is not the plan's; export a plan of this model as it is here.")
    problem = Problem(trace)
    block = block_paths(trace.ops.module[: problem.forward_end])
    saved, blocks = _saved(problem, given, block), list(dict.fromkeys(block.values()))
    if not blocks:
        raise PlanError(
            "the model has no repeated blocks (layers.0, layers.1, ...), which exports checkpoint."
        )
    ways: dict[tuple[str, str], Saved] = {("untouched", ""): {}, ("policy", f"{len(saved)} blocks"): saved}
    for n in range(1, min(EVERY, len(blocks)) + 1):
        setting = f"gradient_checkpointing_enable(every_n_layers={n}): {', '.join(blocks[::n])}"
        ways["layers", setting] = {path: {} for path in blocks[::n]}
    build = load_spec(model or meta.model, dict(meta.options), seed=meta.seed)
    rows: list[dict[str, Any]] = []
    for (kind, setting), way in ways.items():
        peak = _measured(build, meta.device, way)
        fits = None if budget is None else peak <= budget
        rows.append({"kind": kind, "setting": setting, "peak_bytes": peak, "within_budget": fits})
    untouched, *rows = rows
    policy = FILE.format(
        model=meta.model,
        peak=show_bytes(rows[0]["peak_bytes"]),
        untouched=show_bytes(untouched["peak_bytes"]),
        saved=pformat(saved, width=110, sort_dicts=False),
    )
    planned = problem.replay(given.actions).timeline.peak_allocated_bytes
    told = {"plan_peak_bytes": planned, "untouched_peak_bytes": untouched["peak_bytes"], "policy": policy}
    return {"budget_bytes": budget, **told, "exports": rows}


def _saved(problem: Problem, plan: Plan, block: Mapping[str, str]) -> Saved:
    """Return, for each block, the calls whose results the plan saves: those that are there when forward has ended.
    Blocks of which it saves everything that backward reads are left alone.
    """
    ops, schedule = problem.trace.ops, problem.replay(plan.actions).schedule
    there = schedule.made_by(schedule.forward_steps)
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    saved: dict[str, dict[str, tuple[int, ...]]] = {path: {} for path in block.values()}
    partly = set()
    for op in (op for op in range(problem.forward_end) if ops.module[op] in block):
        path, makes, target = block[ops.module[op]], problem.creates[op], ops.target[op]
        if any(s in there for s in makes):
            saved[path][target] = (*saved[path].get(target, ()), seen[path][target])
        if any(s not in there for s in makes if problem.saved_by_default[s]):
            partly.add(path)
        seen[path][target] += 1
    return {path: calls for path, calls in saved.items() if path in partly}


def _measured(build: BuildStep, device: str, saved: Saved) -> int:
    """The peak of the ordinary loop with these blocks checkpointed as the file does it."""
    made: dict[str, Any] = {}
    exec(FILE.format(model="", peak="", untouched="", saved=saved), made)

    def applied(device: str) -> TrainingStep:
        step = build.make(device)
        made["apply"](step.model)
        return step

    return untouched_loop(replace(build, make=applied), device)[0]
