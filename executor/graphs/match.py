"""Fit a plan to a captured graph: the program to run, and the plan's actions on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from executor.graphs.edited import rewritten
from executor.graphs.graph import Graph
from executor.graphs.mismatch import another_graph, by_ones_alone
from executor.matching import check_kind
from simulator.core.problem import Problem
from tracer.capture.compiling import Could
from tracer.record.program import Program
from tracer.record.sketch import ops_of
from traces.records.plan import Action, Plan
from traces.records.trace import TraceMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The program that runs in the place of a captured graph."""

    program: Program  # rewritten as the plan says
    actions: tuple[Action, ...]
    exact: bool = False  # the graph is the plan's to the byte, not only in structure
    all_saved: bool = False  # by none of the plan's actions, which are for a graph without sizes of one


def fitted(graph: Graph, plan: Plan, sketch: Callable[[Program], dict[str, Any]]) -> Fitted:
    """Fit a plan to a graph.

    A size of one makes another graph. It runs with all values saved if that takes no more than the planned step does.

    Args:
        sketch: makes the sketch of the call (`tracer.record.sketch`), for the message.

    Raises:
        PlanError: the graph has another structure than the plan's; says what differs.
    """
    check_kind(plan.meta, graph.kind)
    program = graph.read()
    if _fits(program, plan.meta):
        return _by_plan(program, plan)
    now = sketch(program)
    planned = int(plan.predicted.get("plan", {}).get("peak_allocated_bytes", 0))
    ones = not graph.of_many_sizes and by_ones_alone(plan.meta.sketch, now)
    if ones and model_bytes(program) <= planned:
        return Fitted(program=program, actions=(), all_saved=True)
    raise another_graph(plan.meta, now, program.fingerprint(sizes=False), graph.kind)


def left_out(plan: Plan, could: Sequence[Could]) -> list[frozenset[int]]:
    """The outputs that a plan's loss does not differentiate, or none of them; `could`: those that it could."""
    places = frozenset(x.place for x in could if x.number not in plan.meta.grad_outputs)
    return [places, frozenset()] if places and len(places) < len(could) else [frozenset()]


def planned_elements(plan: Plan) -> int:
    """How many elements the tensors have that the plan's call takes; 0: it does not say."""
    shown = [x.partition("[")[2].partition("]")[0] for _, x in plan.meta.sketch.get("arguments", ())]
    sizes = [[n.strip() for n in x.split(",")] for x in shown if x]
    return sum(math.prod(map(int, x)) for x in sizes if all(n.isdigit() for n in x))


def elements_of(leaves: Sequence[Any]) -> int:
    """How many elements a call's tensors have."""
    return sum(x.numel() for x in leaves if isinstance(x, torch.Tensor))


def _by_plan(program: Program, plan: Plan) -> Fitted:
    inputs = sum(s.producer < 0 for s in program.storages)
    more = inputs - plan.meta.inputs if plan.meta.inputs else 0
    changed = rewritten(program, tuple(replace(r, storage=r.storage + more) for r in plan.rewrites))
    more += sum(s.producer < 0 for s in changed.storages) - inputs
    return Fitted(
        program=changed,
        actions=tuple(a for a in program_actions(plan, changed, more) if changed.storages[a.storage].nbytes),
        exact=program.fingerprint() == plan.meta.graph_fingerprint,
    )


def model_bytes(program: Program) -> int:
    """The peak of a model's forward and backward.

    Counts: parameters, buffers, arguments, and what ops make. Ignores: what ops allocate inside, the loss code and the
    optimizer.
    """
    return Problem(program.trace()).saved.timeline.peak_allocated_bytes


def _fits(program: Program, meta: TraceMeta) -> bool:
    planned = [target for target, _ in ops_of(meta.sketch)]
    return program.fingerprint(sizes=False, named_as=planned) == meta.structure_fingerprint


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

    def locals_of(a: Action) -> tuple[int, ...]:
        return tuple(sorted({c for o in a.evict_after if (c := local(o)) < len(program.ops)}))

    return tuple(replace(a, storage=a.storage + more, evict_after=locals_of(a)) for a in plan.actions)
