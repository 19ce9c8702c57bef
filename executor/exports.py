"""A plan as a file of selective checkpointing, with what the ordinary loop needs by it, and as every n layers."""

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
from traces.devices import board_of, device
from traces.errors import PlanError
from traces.provenance import rehearsing
from traces.records.plan import Plan

FILE: Final = '''"""Selective activation checkpointing of {model}, made from a plan: import apply from here."""

import functools
from collections import Counter

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Of each block, which calls of which ops are saved, counted from 0 in its forward; the rest is computed again.
SAVED = {saved}


def _contexts(saved):
    calls = Counter()

    def policy(ctx, op, *args, **kwargs):
        calls[ctx.is_recompute, str(op)] += 1
        k = calls[ctx.is_recompute, str(op)] - 1
        return CheckpointPolicy.MUST_SAVE if k in saved.get(str(op), ()) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply(model):
    """Change the model, once, before it is trained."""
    for path, saved in SAVED.items():
        block = model.get_submodule(path)
        how = {{"use_reentrant": False, "context_fn": functools.partial(_contexts, saved)}}
        block.forward = functools.partial(checkpoint, block.forward, **how)
    return model
'''


def exports(plan: Plan | dict[str, Any], model: str = "") -> dict[str, Any]:
    """The file as `policy`, its peak, and the blocks of every n-th layer. Raises PlanError if the plan has rewrites, or
    the model no repeated blocks or another graph than the plan's; EnvironmentProblem if a GPU's has no null driver.
    """
    given = plan if isinstance(plan, Plan) else Plan.from_json(plan)
    meta, made = given.meta, dict[str, Any]()
    if given.rewrites:
        raise PlanError("the plan changes the step itself, which no other tool does; plan with --levers ''.")
    if meta.device == "cuda" and not rehearsing():
        gpu, told = device(board_of(meta.target) or meta.target), {"plan": given.to_json(), "model": model}
        return run_on_null_driver("executor.exports:exports", told, gpu, what="exported the plan")
    trace = recorded_again(meta, model, meta.device).trace
    if trace.meta.graph_fingerprint != meta.graph_fingerprint:
        raise PlanError("the model's graph is not the plan's; export a plan of this model as it is here.")
    problem = Problem(trace)
    if not (block := block_paths(trace.ops.module[: problem.forward_end])):
        raise PlanError("the model has no repeated blocks (layers.0, layers.1, ...) to checkpoint.")
    saved = _saved(problem, problem.replay(given.actions).schedule, block)
    file = FILE.format(model=meta.model, saved=pformat(saved, width=110, sort_dicts=False))
    exec(file, made)
    build = load_spec(model or meta.model, dict(meta.options), seed=meta.seed)

    def checkpointed(device: str) -> Any:
        step = build.make(device)
        made["apply"](step.model)
        return step

    peak, _ = untouched_loop(replace(build, make=checkpointed), meta.device)
    blocks = list(dict.fromkeys(block.values()))
    every = {n: blocks[::n] for n in range(1, min(4, len(blocks)) + 1)}
    return {"policy": file, "policy_peak_bytes": peak, "every_n_layers": every}


def _saved(problem: Problem, schedule: Any, block: dict[str, str]) -> dict[str, dict[str, list[int]]]:
    """Return the calls whose results the plan saves, op -> which of its calls, for each block of which it does not save
    all that backward reads."""
    ops, there, calls = problem.trace.ops, schedule.made_by(schedule.forward_steps), Counter[Any]()
    needed = [[s for s in made if problem.saved_by_default[s]] for made in problem.creates]
    forward = [op for op in range(problem.forward_end) if ops.module[op] in block]
    partly = {block[ops.module[op]] for op in forward if not there.issuperset(needed[op])}
    saved: dict[str, dict[str, list[int]]] = {path: {} for path in block.values() if path in partly}
    for op in forward:
        path, target = block[ops.module[op]], ops.target[op]
        if path in saved and not there.isdisjoint(problem.creates[op]):
            saved[path].setdefault(target, []).append(calls[path, target])
        calls[path, target] += 1
    return saved
