"""The graph that torch.compile traced of a model, forward and backward in one, as a program and as a trace.

It is not the graph that Lowtide captures: ops are decomposed, and random numbers come from seeds that are values of
the graph, so that a random op may run again on its seed.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from itertools import compress
from typing import Final

import torch
from sympy import Integer  # type: ignore[import-untyped]
from torch import fx

from tracer.capture.capture import Captured
from tracer.costs.calibration import Costs
from tracer.record.program import Program, program_of
from tracer.record.rows import created_bytes
from tracer.torch_api import pytree
from traces.devices import Device
from traces.errors import CaptureError
from traces.records.trace import Trace

WHERE: Final = "partitioner_tag"  # the key of a node's meta that says to which side it belongs
FORWARD_TAGS: Final = ("is_forward", "must_be_in_forward")
ORIGINAL: Final = "joint"  # the key under which a node of the program has the one that it stands for


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """Describes a placeholder; the name of its type says to `program_of` that it is an argument."""

    idx: int


def compiled_program(joint: fx.GraphModule, forward_outputs: int) -> Program:
    """The program of a joint graph as a partitioner is given it; sizes that are symbols are those of this call.

    Args:
        joint: left as it is. Each node of the program's graph has the one that it stands for in its meta.
        forward_outputs: how many of its outputs are forward's.

    Raises:
        CaptureError: the model checkpoints itself, or takes what is neither a tensor nor a size.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(joint.graph, copies)
    given, known = [], {}
    for k, (n, copy) in enumerate(copies.items()):
        copy.meta = {**n.meta, ORIGINAL: n}
        if n.meta.get("recompute") is not None:
            raise CaptureError(
                "the model says itself what runs again in backward (torch.utils.checkpoint), and so would a plan; take "
                "the checkpoints out of the model."
            )
        if n.op != "placeholder":
            continue
        val, copy.meta["desc"] = n.meta.get("val"), _Argument(idx=k)
        if isinstance(val, torch.SymInt):
            known[val.node.expr] = Integer(val.node.hint)
        elif not isinstance(val, torch.Tensor | int):
            raise CaptureError(
                f"the compiled model takes {n.name}, a {type(val).__name__}, which is no tensor."
            )
        if "tangents" in str(n.target):
            copy.meta["tangent_of"] = k
        given.append(copy)
    leaves = pytree.tree_leaves(next(iter(joint.graph.find_nodes(op="output"))).args)
    made = (isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor) for x in leaves)
    outputs = [copies[x] if is_tensor else None for x, is_tensor in zip(leaves, made, strict=True)]
    graph.output(tuple(outputs))
    calls = [n for n in copies.values() if n.op == "call_function"]
    last = max((k for k, n in enumerate(calls) if n.meta.get(WHERE) == FORWARD_TAGS[0]), default=-1)
    early = [k <= last or n.meta.get(WHERE) in FORWARD_TAGS for k, n in enumerate(calls)]
    captured = Captured(
        graph_module=fx.GraphModule(joint, graph),
        forward=tuple(compress(calls, early)),
        backward=tuple(compress(calls, map(operator.not_, early))),
        parameters=(),
        buffers=(),
        arguments=len(given),
        outputs=tuple(dict.fromkeys(n for n in outputs[:forward_outputs] if n is not None)),
        grad_outputs=(),
        other_outputs=(),
        parameter_grads=(),
        argument_grads=tuple(outputs[forward_outputs:]),
        output_spec=pytree.tree_structure(None),
        output_template=(),
        numbers=tuple(n for n in given if not isinstance(n.meta["val"], torch.Tensor)),
    )
    return program_of(captured, known=known)


def trace_of(program: Program, target: Device, device: str) -> Trace:
    """A program's forward and backward as a trace with the costs of its ops, each run by itself.

    Counts: what goes in and the gradients of the outputs, throughout; outputs until forward ends, or as long as
    backward reads them; gradients from where they are made to the end. Ignores: the optimizer, and what the compiler
    makes of the ops: those it fuses leave no values between them.
    """
    rows, sts = program.rows, [replace(s) for s in program.storages]
    for s in program.output_storages:
        sts[s].hold = program.forward_ops - 1
    for s in program.gradient_storages:
        sts[s].hold = len(rows) - 1
    costs = [Costs().of(row, made, target) for row, made in zip(rows, created_bytes(rows, sts), strict=True)]
    of = replace(program, storages=tuple(sts))
    return of.trace(
        costs, model="torch.compile", device=device, target=target.name, torch_version=torch.__version__
    )
