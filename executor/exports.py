"""What a plan comes to in the words of other tools: whole layers, a selective-checkpoint policy.

None of them does what the plan does, so each runs itself: the model is checkpointed so, and the ordinary loop measured,
of a GPU's plan on the null driver.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pprint import pformat
from tempfile import TemporaryDirectory
from typing import Any, Final

from simulator.core.problem import Problem
from simulator.planners.segments import block_paths
from tracer.costs.profiles import board_of
from tracer.measure.untouched import untouched_loop
from tracer.record.step import recorded_again
from tracer.rehearsal import run_on_null_driver
from tracer.step.loop import TrainingStep
from tracer.step.step import BuildStep, load_spec
from traces.devices import device as device_entry
from traces.errors import PlanError
from traces.files.json_records import from_json, to_json
from traces.provenance import rehearsing
from traces.records.plan import Plan
from traces.units import show_bytes

EVERY: Final = (1, 2, 3, 4)  # layers of which one is checkpointed
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """One of them."""

    kind: str  # "policy", "layers" or "activation_memory_budget"
    setting: str  # what to write
    peak_bytes: int  # that it is predicted to need, allocated
    within_budget: bool | None  # of the plan; None: it has none
    note: str = ""


@dataclass(frozen=True, slots=True)
class Exports:
    """What a plan comes to elsewhere."""

    plan_peak_bytes: int
    untouched_peak_bytes: int
    exports: tuple[Export, ...]
    policy: str  # the file


def exports(plan: Plan, model: str = "") -> Exports:
    """Find out what each export of a plan needs.

    Args:
        model: build this instead of what the plan names.

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
        return _exports(plan, model)
    gpu = device_entry(board_of(plan.meta.target) or plan.meta.target)
    with TemporaryDirectory() as folder:
        path = plan.save(Path(folder) / "plan.json")
        given = {"plan": str(path), "model": model}
        return from_json(
            Exports, run_on_null_driver("executor.exports:there", given, gpu, what="exported the plan")
        )


def there(plan: str, model: str) -> dict[str, Any]:
    """The same of the plan in a file, for a process on the null driver."""
    return to_json(_exports(Plan.load(Path(plan)), model))


def _exports(plan: Plan, model: str) -> Exports:
    trace = recorded_again(plan.meta, model, plan.meta.device).trace
    if trace.meta.graph_fingerprint != plan.meta.graph_fingerprint:
        raise PlanError("the model's graph is not the plan's; export a plan of this model as it is here.")
    problem = Problem(trace)
    modules = trace.ops.module[: problem.forward_end]
    block = block_paths(modules)
    blocks = list(dict.fromkeys(block[m] for m in modules if m in block))
    if not blocks:
        raise PlanError(
            "the model has no repeated blocks (layers.0, layers.1, ...), which is what exports are of."
        )
    budget, build = (
        plan.budget_bytes,
        load_spec(model or plan.meta.model, dict(plan.meta.options), seed=plan.meta.seed),
    )

    def row(kind: str, setting: str, peak: int, note: str = "") -> Export:
        fits = None if budget is None else peak <= budget
        return Export(kind=kind, setting=setting, peak_bytes=peak, within_budget=fits, note=note)

    untouched, _ = _measured(build, plan.meta.device, {})
    saved = _saved(problem, plan, block)
    peak, found = _measured(build, plan.meta.device, saved)
    lost = sorted({op for ops in saved.values() for op in ops} - found)
    note = f"eager runs no {', '.join(lost)}, so these are computed again" if lost else ""
    rows = [row("policy", f"{len(saved)} blocks", peak, note)]
    for n in (n for n in EVERY if n <= len(blocks)):
        every: Saved = {path: {} for k, path in enumerate(blocks) if k % n == 0}
        setting = f"gradient_checkpointing_enable(every_n_layers={n}): {', '.join(every)}"
        rows.append(row("layers", setting, _measured(build, plan.meta.device, every)[0]))
    policy = FILE.format(
        model=trace.meta.model,
        peak=show_bytes(peak),
        untouched=show_bytes(untouched),
        saved=pformat({k: dict(v) for k, v in saved.items()}, width=110, sort_dicts=False),
    )
    planned = problem.replay(plan.actions).timeline.peak_allocated_bytes
    return Exports(planned, untouched, tuple(rows), policy)


def _saved(problem: Problem, plan: Plan, block: Mapping[str, str]) -> Saved:
    """Of each block, the calls whose results the plan saves: that are there when forward has ended.

    Blocks of which the plan saves everything that backward reads are left alone.
    """
    ops, schedule = problem.trace.ops, problem.replay(plan.actions).schedule
    there = schedule.made_by(schedule.forward_steps)
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    saved: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    whole: dict[str, bool] = defaultdict(lambda: True)
    for op in range(problem.forward_end):
        path = block.get(ops.module[op])
        if path is None:
            continue
        makes, target = problem.creates[op], ops.target[op]
        if any(s in there for s in makes):
            saved[path][target].append(seen[path][target])
        whole[path] &= all(s in there for s in makes if problem.saved_by_default[s])
        seen[path][target] += 1
    partly = [path for path, all_of in whole.items() if not all_of]
    return {path: {op: tuple(calls) for op, calls in saved[path].items()} for path in partly}


def _measured(build: BuildStep, device: str, saved: Saved) -> tuple[int, set[str]]:
    """The peak of the ordinary loop with these blocks checkpointed as the file does it, and which ops it saves."""
    from torch.utils import checkpoint

    found: set[str] = set()

    def contexts(policy: Any) -> Any:
        def noted(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            answer = policy(ctx, op, *args, **kwargs)
            if answer is checkpoint.CheckpointPolicy.MUST_SAVE:
                found.add(str(op))
            return answer

        return checkpoint.create_selective_checkpoint_contexts(noted)

    made: dict[str, Any] = {}
    exec(FILE.format(model="", peak="", untouched="", saved=dict(saved)), made)
    made["create_selective_checkpoint_contexts"] = contexts

    def applied(device: str) -> TrainingStep:
        step = build.make(device)
        made["apply"](step.model)
        return step

    return untouched_loop(replace(build, make=applied), device)[0], found
