"""Rewrite a captured program by a Schedule into two FX modules: a forward, and a backward that recomputes.

The schedule decides everything; this module only copies nodes. A step that runs an op copies its node, with each
input resolved to its current copy. A step that runs it again copies it again, so the producing subgraph of an evicted
activation stands right before the op that needs it, under a name that ends in "_recomputed". A step that takes over
its input's memory becomes the op's in-place twin.

FX's generated code drops each value after its last use, which is when the schedule releases its storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from simulator.core.schedule import Schedule
from tracer.capture.passes.batch_norm import again as run_again
from tracer.record.program import Program, inplace_twin
from traces.errors import PlanError
from traces.trace import VIEW


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The two modules and how they fit together.

    `forward` takes the placeholders' values (parameters, buffers, arguments) in one list, which it empties, and returns
    (model outputs, saved values). `backward` takes saved values and tangents in one list, which it empties, and returns
    the gradients of the parameters and of the arguments; None where there is none.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[str, ...]  # names of the values that cross from forward to backward
    saved_storages: tuple[int, ...]  # the storages behind them that are not placeholders'
    recomputed: tuple[str, ...]  # names of the ops that backward runs again, in order, views included


def rewrite(program: Program, schedule: Schedule) -> Rewritten:
    """Copy the program's graph in the schedule's order.

    Args:
        program: the captured model.
        schedule: a schedule of `program.trace()`: the model's ops only.

    Raises:
        PlanError: a value is needed that the schedule has not made (a defect), or backward would keep a forward value
            that the schedule released.
    """
    captured = program.captured
    forward, backward = fx.Graph(), fx.Graph()
    current: dict[fx.Node, fx.Node] = {}  # program node -> its latest copy
    side: dict[fx.Node, fx.Graph] = {}  # copy -> graph that it stands in
    crossing: dict[fx.Node, fx.Node] = {}  # forward copy -> placeholder in backward
    crossing_of: dict[fx.Node, fx.Node] = {}  # forward copy -> program node

    inputs = [n for n in captured.placeholders if "tangent_of" not in n.meta]
    tangents = [n for n in captured.placeholders if "tangent_of" in n.meta]
    for n in inputs:
        copy = forward.placeholder(n.name)
        copy.meta = dict(n.meta)
        current[n], side[copy] = copy, forward
    for n in tangents:
        copy = backward.placeholder(n.name)
        copy.meta = dict(n.meta)
        current[n], side[copy] = copy, backward
    first_tangent = next(iter(backward.nodes), None)

    def get_attr(n: fx.Node, graph: fx.Graph) -> fx.Node:
        copy = graph.get_attr(str(n.target))
        copy.meta = dict(n.meta)
        return copy

    constants: dict[tuple[fx.Node, fx.Graph], fx.Node] = {}

    def resolve(n: fx.Node, graph: fx.Graph) -> fx.Node:
        if n.op == "get_attr":
            if (n, graph) not in constants:
                constants[n, graph] = get_attr(n, graph)
            return constants[n, graph]
        if n not in current:
            raise PlanError(f"the schedule needs the value of {n.name} before it exists; please report this.")
        copy = current[n]
        if side[copy] is graph:
            return copy
        if copy not in crossing:
            assert graph is backward, "a forward op takes a value of backward"
            with backward.inserting_before(first_tangent):
                twin = backward.placeholder(f"saved_{copy.name}")
            twin.meta = dict(copy.meta)
            crossing[copy] = twin
            crossing_of[copy] = n
            side[twin] = backward
        return crossing[copy]

    wanted = set(captured.outputs)
    recomputed: list[str] = []
    returned: dict[fx.Node, fx.Node] = {}  # model output -> its forward copy
    for step, op_id in enumerate(schedule.op):
        op = program.ops[op_id]
        graph = forward if op_id < program.forward_ops and not schedule.recompute[step] else backward
        taken = schedule.takes[step] >= 0
        copy = _copy(graph, op.node, lambda n, g=graph: resolve(n, g), again=schedule.recompute[step])
        if schedule.recompute[step]:
            recomputed.append(op.node.name)
        if taken:
            twin = inplace_twin(op.node.target)
            assert twin is not None
            copy.target = twin
        side[copy] = graph
        # A view that runs again looks at its base's new copy with all its parts; another op may run again for some
        # of its outputs only, while the others are still there.
        partial = schedule.recompute[step] and not program.rows[op_id].flags & VIEW
        if not op.parts or not partial:
            current[op.node] = copy
        parts: dict[fx.Node, fx.Node] = {op.node: copy}
        for part in op.parts:
            if partial and not any(s in schedule.binds[step] for s in op.storage_of[part]):
                continue
            pick = _copy(graph, part, parts.__getitem__, again=schedule.recompute[step])
            parts[part] = current[part] = pick
            side[pick] = graph
        if graph is forward:
            returned.update((n, x) for n, x in parts.items() if n in wanted)
    outputs = [returned[n] if n in returned else resolve(n, forward) for n in captured.outputs]
    grads = [
        [None if g is None else resolve(g, backward) for g in group]
        for group in (captured.parameter_grads, captured.argument_grads)
    ]
    saved = list(crossing)
    forward.output((tuple(outputs), tuple(saved)))
    backward.output((tuple(grads[0]), tuple(grads[1])))
    for graph in (forward, backward):
        # FX calls an argument by its target and everything else by its name; if the two differed for one placeholder,
        # another value could bear the name of that argument.
        assert all(n.name == n.target for n in graph.nodes if n.op == "placeholder")
        graph.set_codegen(fx.graph._BoxedCodeGen())
        graph.lint()
    fixed = set(range(len(program.storages))) - {s for s, r in enumerate(program.storages) if r.producer >= 0}
    kept = sorted({s for n in crossing_of.values() for s in program.storage_of[n]} - fixed)
    _check_kept(program, schedule, kept)
    return Rewritten(
        forward=_module(captured.graph_module, forward, "LowtideForward"),
        backward=_module(captured.graph_module, backward, "LowtideBackward"),
        saved=tuple(n.name for n in saved),
        saved_storages=tuple(kept),
        recomputed=tuple(recomputed),
    )


def _copy(graph: fx.Graph, node: fx.Node, resolve: Any, *, again: bool) -> fx.Node:
    args = run_again(node.target, node.args) if again else node.args
    args, kwargs = fx.node.map_arg((args, node.kwargs), resolve)
    name = f"{node.name}_recomputed" if again else node.name
    copy = graph.create_node("call_function", node.target, args, kwargs, name=name)
    copy.meta = dict(node.meta)
    if again:
        copy.meta["recomputed"] = True
    return copy


def _module(root: torch.nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    return fx.GraphModule(root, graph, class_name=name)


def _check_kept(program: Program, schedule: Schedule, kept: list[int]) -> None:
    """Nothing of forward may live on in backward that the schedule says is released."""
    released: set[int] = set()
    for step, op_id in enumerate(schedule.op):
        if op_id >= program.forward_ops or schedule.recompute[step]:
            break
        released.update(schedule.frees[step])
    held = [program.storages[s].name for s in kept if s in released]
    if held:
        raise PlanError(
            f"backward would hold values that the plan released: {', '.join(held[:5])}; please report this."
        )
