"""What PyTorch's own partitioner would save of a captured graph under its activation memory budget.

Source: `torch._functorch.partitioners.min_cut_rematerialization_partition` under
`torch._functorch.config.activation_memory_budget` (private API). The
budget is a share between saving the inputs alone (0) and what the default minimum cut saves (1). It bounds the sum of
the saved bytes, not the peak.

What the partitioner is given is the graph that Lowtide captured, on a copy, since it leaves marks on nodes. What the
capture changed is changed back, because torch would not see it so: a buffer's new value is an output again, and
dropout one random op. Common subexpressions are not merged, so that every node stands for one of ours.

Counts: the values that torch's forward graph hands to its backward graph, by storage, and each op of forward that its
backward graph runs again. Ignores: what a compiler makes of the two graphs (fusion, another order), and that torch may
compute in forward, and save, what autograd computes in backward without the gradient; here backward computes that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tracer.capture.capture import Captured
from tracer.capture.passes.dropout import merged_dropout
from tracer.record.program import Program, is_random
from tracer.torch_api import OpOverload, functorch_config, min_cut_rematerialization_partition, pytree
from traces.errors import CaptureError
from traces.records.trace import VIEW

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What torch is asked for once."""

    budget: float  # between 0 and 1
    solver: str = "dp"  # or "ilp", which needs scipy, or "greedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSet:
    """One choice of the other system. Storages and ops by their ids in the trace."""

    label: str  # a name for this choice, such as `dp-0.5`
    settings: Mapping[str, Any]  # what it was asked for, such as budget and solver
    solve_seconds: float  # for this choice alone, the capture of the graph left out
    saved: tuple[int, ...]  # storages that forward makes and keeps for backward
    recomputed: tuple[int, ...]  # storages that forward makes and backward makes again
    recomputed_ops: int  # ops of forward, views left out, that its backward runs again
    # Of these, the ops that draw new random numbers: its gradients are wrong then.
    random_again: tuple[int, ...]

    @property
    def valid(self) -> bool:
        """Whether the other system would compute the gradients of the step as it is."""
        return not self.random_again


def saved_set(
    program: Program,
    setting: Setting,
    graph_ops: Sequence[int],
    joint: Joint | None = None,
    inputs: Sequence[Any] = (),
    **given: Any,
) -> SavedSet:
    """What torch saves of this program under this setting, in the ids of the trace.

    Args:
        graph_ops: program op -> op of the trace.
        joint: a copy of its graph; None: one is made of what was captured.
        inputs, given: further arguments of torch's partitioner.

    Raises:
        CaptureError: torch's partitioner fails on this graph.
    """
    joint = joint or as_torch_sees_it(program.captured)
    begin = time.perf_counter()
    try:
        with functorch_config.patch(
            activation_memory_budget=setting.budget, activation_memory_budget_solver=setting.solver, cse=False
        ):
            forward, backward = min_cut_rematerialization_partition(
                joint.module, inputs, num_fwd_outputs=joint.forward_outputs, **given
            )
    except Exception as error:
        raise CaptureError(
            f"torch's partitioner failed with budget {setting.budget} and solver {setting.solver}: "
            f"{type(error).__name__}: {error}"
        ) from error
    seconds = time.perf_counter() - begin
    return _read(program, joint, forward.graph, backward.graph, setting, seconds, graph_ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A copy of a captured graph in the form that torch's partitioner expects."""

    module: fx.GraphModule
    forward_outputs: int  # how many outputs are forward's: new values of buffers, then the model's outputs
    stands_for: dict[str, str]  # names of nodes that the copy has instead of ours -> our node's name


def as_torch_sees_it(captured: Captured) -> Joint:
    """Copy the captured graph, with buffers' new values as outputs and dropout as one random op."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(captured.graph_module.graph, copies)  # copies no output node
    written: list[fx.Node] = []
    for n in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, value = n.args
        for m in [m for m in target.users if n < m]:
            m.replace_input_with(target, value)
        n.replace_all_uses_with(value)
        graph.erase_node(n)
        written.append(value)
    stands_for = merged_dropout(graph)
    outputs = [copies[x] for x in captured.outputs]
    gradients = [
        None if x is None else copies[x] for x in (*captured.parameter_grads, *captured.argument_grads)
    ]
    graph.output((*written, *outputs, *gradients))
    graph.lint()
    module = fx.GraphModule(captured.graph_module, graph)
    return Joint(module=module, forward_outputs=len(written) + len(outputs), stands_for=stands_for)


def _read(
    program: Program,
    joint: Joint,
    forward: fx.Graph,
    backward: fx.Graph,
    setting: Setting,
    seconds: float,
    graph_ops: Sequence[int],
) -> SavedSet:
    """Read off the two graphs what is saved and what runs again."""
    ours = {n.name: n for n in program.storage_of}
    op_of = {n.name: k for k, op in enumerate(program.ops) for n in (op.node, *op.parts)}
    made_forward = {s for s, row in enumerate(program.storages) if 0 <= row.producer < program.forward_ops}

    def storages(name: str) -> set[int]:
        n = ours.get(joint.stands_for.get(name, name))
        return set() if n is None else made_forward.intersection(program.storage_of[n])

    outputs = pytree.tree_leaves(next(iter(forward.find_nodes(op="output"))).args)
    crossing = [n.name for n in outputs[joint.forward_outputs :] if isinstance(n, fx.Node)]
    saved = {s for name in crossing for s in storages(name)}
    again, recomputed, random = set[int](), set[int](), set[int]()
    for n in (n for n in backward.nodes if n.op == "call_function"):
        k = op_of.get(joint.stands_for.get(n.name, n.name))
        if k is not None and k < program.forward_ops and not program.rows[k].flags & VIEW:
            again.add(k)
            recomputed |= storages(n.name)
            random |= {k} if isinstance(n.target, OpOverload) and is_random(n) else set()
    return SavedSet(
        label=f"{setting.solver}-{setting.budget:g}",
        settings={"solver": setting.solver, "budget": setting.budget},
        solve_seconds=seconds,
        saved=tuple(sorted(saved)),
        recomputed=tuple(sorted(recomputed - saved)),
        recomputed_ops=len(again),
        random_again=tuple(sorted(graph_ops[k] for k in random)),
    )
