"""A plan for those who keep their tools: a file of selective checkpointing, with what it needs, and every n layers.

Eager runs other ops than the captured graph has, so the ordinary loop is run, the model checkpointed by the file: on
the CPU, or for a GPU's plan on the null driver (`tracer.measure.untouched`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pprint import pformat
from typing import Any, Final

from simulator.core.problem import Problem
from simulator.planners.segments import block_paths
from tracer.measure.untouched import untouched_loop
from tracer.record.step import recorded_again
from tracer.rehearsal import run_on_null_driver
from tracer.step.step import load_spec
from traces.devices import board_of
from traces.devices import device as device_entry
from traces.errors import PlanError
from traces.provenance import rehearsing
from traces.records.plan import Plan

EVERY: Final = 4  # layers of which one is checkpointed, at most, in what is listed
FILE: Final = '''"""Selective activation checkpointing of {model}, made from a plan: import apply from here."""

import functools
from collections import Counter

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Of each block, which calls of which ops are saved, counted from 0 in its forward; the rest is computed again.
SAVED = {saved}


def _contexts(saved):
    calls = {{False: Counter(), True: Counter()}}  # of forward, and of the recomputation

    def policy(ctx, op, *args, **kwargs):
        k = calls[ctx.is_recompute][str(op)]
        calls[ctx.is_recompute][str(op)] += 1
        return CheckpointPolicy.MUST_SAVE if k in saved.get(str(op), ()) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply(model):
    """Change the model, once, before it is trained."""
    for path, saved in SAVED.items():
        block = model.get_submodule(path)
        more = {{"context_fn": functools.partial(_contexts, saved)}} if saved else {{}}
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **more)
    return model
'''


def exports(plan: Plan, model: str = "") -> dict[str, Any]:
    """What `execute export --json` prints, with the file as `policy`. `model`: is built instead of what the plan names.

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
    block, replayed = block_paths(trace.ops.module[: problem.forward_end]), problem.replay(given.actions)
    if not block:
        raise PlanError("the model has no repeated blocks (layers.0, layers.1, ...) to checkpoint.")
    blocks, saved = list(dict.fromkeys(block.values())), _saved(problem, replayed.schedule, block)
    build, made = load_spec(model or meta.model, dict(meta.options), seed=meta.seed), dict[str, Any]()
    file = FILE.format(model=meta.model, saved=pformat(saved, width=110, sort_dicts=False))
    exec(file, made)

    def checkpointed(device: str) -> Any:
        step = build.make(device)
        made["apply"](step.model)
        return step

    peak, _ = untouched_loop(replace(build, make=checkpointed), meta.device)
    return {
        "budget_bytes": budget,
        "plan_peak_bytes": replayed.timeline.peak_allocated_bytes,
        "untouched_peak_bytes": untouched_loop(build, meta.device)[0],
        "policy": file,
        "policy_peak_bytes": peak,
        "within_budget": None if budget is None else peak <= budget,
        "every_n_layers": {n: blocks[::n] for n in range(1, min(EVERY, len(blocks)) + 1)},
    }


def _saved(problem: Problem, schedule: Any, block: dict[str, str]) -> dict[str, dict[str, list[int]]]:
    """Return, for each block, the calls whose results the plan saves: op -> which of its calls there. Those of which it
    saves everything that backward reads are left alone.
    """
    ops, there = problem.trace.ops, schedule.made_by(schedule.forward_steps)
    calls, partly = Counter[tuple[str, str]](), set()
    saved: dict[str, dict[str, list[int]]] = {path: {} for path in block.values()}
    for op in (op for op in range(problem.forward_end) if ops.module[op] in block):
        path, makes, target = block[ops.module[op]], problem.creates[op], ops.target[op]
        if any(s in there for s in makes):
            saved[path].setdefault(target, []).append(calls[path, target])
        if any(s not in there for s in makes if problem.saved_by_default[s]):
            partly.add(path)
        calls[path, target] += 1
    return {path: calls for path, calls in saved.items() if path in partly}
