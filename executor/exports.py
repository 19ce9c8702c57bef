"""A plan for those who keep their tools: a file of selective checkpointing, with what it needs, and every n layers.

Eager runs other ops than the captured graph has, so the ordinary loop is run, the model checkpointed by the file: on
the CPU, or for a GPU's plan on the null driver (`tracer.measure.untouched`).
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
from tracer.step.step import load_spec
from traces.devices import board_of
from traces.devices import device as device_entry
from traces.errors import PlanError
from traces.provenance import rehearsing
from traces.records.plan import Plan

EVERY: Final = 4  # layers of which one is checkpointed, at most, in what is listed
Saved = Mapping[str, Mapping[str, tuple[int, ...]]]  # block -> op -> which of its calls there are saved

FILE: Final = '''"""Selective activation checkpointing of {model}, made from a plan by `execute export`.

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
    """Return the object that `execute export --json` prints, with the file as `policy`.

    Args:
        model: is built instead of what the plan names.

    Raises:
        PlanError: the plan has rewrites; the model has no repeated blocks, or is another than the plan's.
        EnvironmentProblem: the plan is for a GPU, and there is no CUDA build of torch.
    """
    if kinds := sorted({r.kind for r in plan.rewrites}):
        raise PlanError(
            f"the plan changes the step itself ({', '.join(kinds)}), which no other tool does; plan with recomputation "
            "alone (`simulate TRACE --budget ... --levers ''`) and export that."
        )
    given: dict[str, Any] = {"plan": plan.to_json(), "model": model}
    if plan.meta.device != "cuda" or rehearsing():
        return there(**given)
    gpu = device_entry(board_of(plan.meta.target) or plan.meta.target)
    return run_on_null_driver("executor.exports:there", given, gpu, what="exported the plan")


def there(*, plan: dict[str, Any], model: str) -> dict[str, Any]:
    """`exports` on a device that is there, or in a process on the null driver."""
    given = Plan.from_json(plan)
    meta, budget = given.meta, given.budget_bytes
    trace = recorded_again(meta, model, meta.device).trace
    if trace.meta.graph_fingerprint != meta.graph_fingerprint:
        raise PlanError("the model's graph is not the plan's; export a plan of this model as it is here.")
    problem = Problem(trace)
    block = block_paths(trace.ops.module[: problem.forward_end])
    saved, blocks = _saved(problem, given, block), list(dict.fromkeys(block.values()))
    if not blocks:
        raise PlanError("the model has no repeated blocks (layers.0, layers.1, ...) to checkpoint.")
    build = load_spec(model or meta.model, dict(meta.options), seed=meta.seed)
    file = FILE.format(model=meta.model, saved=pformat(saved, width=110, sort_dicts=False))

    def checkpointed(device: str) -> TrainingStep:
        made: dict[str, Any] = {}
        exec(file, made)
        step = build.make(device)
        made["apply"](step.model)
        return step

    peak, _ = untouched_loop(replace(build, make=checkpointed), meta.device)
    fits = None if budget is None else peak <= budget
    ways = [{"kind": "policy", "setting": f"{len(saved)} blocks", "peak_bytes": peak, "within_budget": fits}]
    for n in range(1, min(EVERY, len(blocks)) + 1):
        setting = f"gradient_checkpointing_enable(every_n_layers={n}): {', '.join(blocks[::n])}"
        ways.append({"kind": "layers", "setting": setting})
    return {
        "budget_bytes": budget,
        "plan_peak_bytes": problem.replay(given.actions).timeline.peak_allocated_bytes,
        "untouched_peak_bytes": untouched_loop(build, meta.device)[0],
        "policy": file,
        "exports": ways,
    }


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
