"""Fit a plan to a captured graph: the program to run, and the plan's actions on it; or say why it is for another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from executor.graphs.edited import rewritten
from executor.graphs.graph import Graph
from executor.matching import check_kind
from simulator.core.problem import Problem
from tracer.record.program import Program
from traces.errors import PlanError
from traces.records.plan import Action, Plan
from traces.records.trace import ALIAS, SLICE, TraceMeta

HINT: Final = ', or apply the plan with on_mismatch="replan" or "eager".'
# What of a sketch decides a graph: its key, and the word for what is in it.
TOLD: Final = {
    "arguments": "argument",
    "frozen": "frozen parameters (requires_grad is off)",
    "evaluated": "modules in evaluation mode",
    "dtypes": "parameters of type",
}
EXACT: Final = "exact"  # the graph is the plan's to the byte
RESIZED: Final = "resized"  # it has the plan's structure, and other sizes
SAVED: Final = "with all values saved"  # a size of one makes another graph, and takes less so


def fitted(
    graph: Graph, plan: Plan, sketch: Callable[[Program], dict[str, Any]]
) -> tuple[Program, tuple[Action, ...], str]:
    """Fit a plan to a graph; returns the program to run, the actions on it, and EXACT, RESIZED or SAVED.

    Args:
        sketch: makes the sketch of the call (`tracer.record.sketch`), for the message.

    Raises:
        PlanError: the graph has another structure than the plan's; says what differs.
    """
    check_kind(plan.meta, graph.kind)
    program = graph.read()
    targets, aliases = [row.target for row in program.rows], plan.meta.sketch.get("aliases")
    if aliases is not None:  # slices that take all are named as in the plan
        named = (ALIAS if k in aliases else SLICE for k in range(len(targets)))
        targets = [p if t in (ALIAS, SLICE) else t for t, p in zip(targets, named, strict=True)]
    if program.fingerprint(sizes=False, named_as=targets) == plan.meta.structure_fingerprint:
        return (
            *_by_plan(program, plan),
            EXACT if program.fingerprint() == plan.meta.graph_fingerprint else RESIZED,
        )
    now = sketch(program)
    planned = int(plan.predicted.get("plan", {}).get("peak_allocated_bytes", 0))
    before, here = _ones(plan.meta.sketch), _ones(now)
    ones = not graph.of_many_sizes and len(before) == len(here) and before != here
    # Of its forward and backward alone: parameters, buffers, arguments and what ops make.
    if ones and Problem(program.trace()).saved.timeline.peak_allocated_bytes <= planned:
        return program, (), SAVED
    told = "; ".join(_causes(plan.meta, now, graph.kind)) or (
        f"its ops are others (structure {plan.meta.structure_fingerprint}, and here "
        f"{program.fingerprint(sizes=False)})"
    )
    raise PlanError(
        f"the plan was made for another graph ({describe(plan.meta)}): {told}. Call the model as it was traced, or "
        f"trace it as it is now and plan again{HINT}"
    )


def left_out(plan: Plan, could: Mapping[int, int]) -> list[frozenset[int]]:
    """The outputs that a plan's loss does not differentiate, or none of them; `could`: those that it could, as
    `differentiable` has them."""
    places = frozenset(place for number, place in could.items() if number not in plan.meta.grad_outputs)
    return [places, frozenset()] if places and len(places) < len(could) else [frozenset()]


def _by_plan(program: Program, plan: Plan) -> tuple[Program, tuple[Action, ...]]:
    inputs = sum(s.producer < 0 for s in program.storages)
    more = inputs - plan.meta.inputs if plan.meta.inputs else 0
    changed = rewritten(program, tuple(replace(r, storage=r.storage + more) for r in plan.rewrites))
    more += sum(s.producer < 0 for s in changed.storages) - inputs
    actions = program_actions(plan, changed, more)
    return changed, tuple(a for a in actions if changed.storages[a.storage].nbytes)


def program_actions(plan: Plan, program: Program, more: int = 0) -> tuple[Action, ...]:
    """The plan's actions with op ids of the captured graph alone, rewritten as the plan says, instead of those of the
    whole step. What goes while the user's loss code runs in between, goes with the last op of forward.

    Args:
        more: how many values the program has more than the plan's had before the first op.
    """
    last_forward = program.forward_ops - 1
    loss_ops = plan.meta.first_backward_graph_op - plan.meta.forward_ops

    def local(op: int) -> int:
        if op - loss_ops <= last_forward:
            return min(op, last_forward)
        others = sum(max(0, min(count, op - first + 1)) for first, count in plan.meta.within_backward)
        return op - loss_ops - others

    def moved(a: Action) -> Action:
        ends = {c for o in a.evict_after if (c := local(o)) < len(program.ops)}
        return replace(a, storage=a.storage + more, evict_after=tuple(sorted(ends)))

    return tuple(map(moved, plan.actions))


def describe(meta: TraceMeta) -> str:
    """A trace in a few words, for messages."""
    amp = f", autocast {meta.amp}" if meta.amp else ""
    return (
        f"{meta.model}, batch size {meta.batch_size}{amp}, torch {meta.torch_version}, device {meta.device}"
    )


def _causes(meta: TraceMeta, now: dict[str, Any], device: str) -> Iterator[str]:
    """What differs, the likeliest cause first; `now`: the call's sketch and `amp`, or {}, unknown."""
    around = {
        "device": (meta.device.partition(":")[0], device),
        "autocast": (meta.amp, now.get("amp", meta.amp)),
        "torch": (meta.torch_version, torch.__version__),
    }
    yield from (f"{what} was {a or 'off'} and is {b or 'off'}" for what, (a, b) in around.items() if a != b)
    then = meta.sketch
    if not now or "aliases" not in then:
        return  # nothing to compare
    for key, word in TOLD.items():
        a, b = _names(then, key), _names(now, key)
        for names, verb in ((b - a, "new"), (a - b, "gone")):
            if names:
                yield f"{word}: {', '.join(sorted(names))} {verb}"
    if then["shares"] != now["shares"]:
        yield "arguments share memory otherwise"


def _names(sketch: dict[str, Any], key: str) -> set[str]:
    """What is in a sketch under a key, in words; arguments without their sizes, but for those of one."""
    if key != "arguments":
        return set(sketch[key]) if key == "dtypes" else {str(sketch[key])}
    number = re.compile(r"\d+(?=[,\]])")
    return {f"{name} ({number.sub(lambda n: '1' if n[0] == '1' else 'n', x)})" for name, x in sketch[key]}


def _ones(sketch: dict[str, Any]) -> list[list[bool]]:
    """Of each argument which sizes are one."""
    sizes = (x.partition("[")[2].partition("]")[0].split(", ") for _, x in sketch.get("arguments", ()))
    return [[n == "1" for n in each] for each in sizes]
