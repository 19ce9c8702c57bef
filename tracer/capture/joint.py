"""Read the joint graph that AOTAutograd makes of what dynamo captured as a `Captured`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from sympy import Integer  # type: ignore[import-untyped]
from torch import fx, nn

from tracer.capture.captured import At, Captured, plain
from tracer.torch_api import pytree
from traces.errors import CaptureError

aten = torch.ops.aten
PLACE: Final = "place"  # in the meta of a placeholder: its place among those of the joint graph
PARAMETER, BUFFER, ARGUMENT = "ParamAOTInput", "BufferAOTInput", "PlainAOTInput"
HELD: Final = "Held"  # a tensor that the model holds and that is neither: a constant of a recorded graph
RANK: Final = {PARAMETER: 0, BUFFER: 1, ARGUMENT: 2, HELD: 2}
TOKENS: Final = ("ForwardTokenAOTInput", "BackwardTokenAOTInput")


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a graph: the kind of its descriptor, and its name in the model."""

    kind: str
    name: str = ""
    number: int = 0  # in the order of those of its kind
    value: Any = None  # of a constant


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A joint graph, read: its program's graph, and the order in which AOTAutograd has outputs and gradients."""

    captured: Captured
    outputs: tuple[Any, ...]  # of forward: a place in `captured.outputs`, a size's node, or a constant
    # By the number of what dynamo's graph returns: its place among forward's outputs.
    returned: Mapping[int, int]
    # Of backward: a place in `captured.parameter_grads` and `argument_grads` behind it, or None.
    grads: tuple[Any, ...]


def inputs_of(graph: fx.Graph, examples: Sequence[Any]) -> list[Input]:
    """Return what the placeholders of dynamo's graph stand for; `examples`: their values, in their order."""
    found = []
    for n, x in zip(graph.find_nodes(op="placeholder"), examples, strict=True):
        path = getattr(getattr(n.meta.get("grapharg"), "source", None), "name", "")
        path = path() if callable(path) else path
        kind = PARAMETER if isinstance(x, nn.Parameter) else BUFFER if "._buffers[" in path else ARGUMENT
        # "L['self']._modules['a']._parameters['weight']" -> "a.weight"
        found.append(Input(kind, ".".join(path.split("'")[3::2]) or path))
    return found


def joint_of(
    module: fx.GraphModule,
    forward_outputs: int,
    inputs: Sequence[Input],
    *,
    unread: Sequence[tuple[Input, torch.Tensor]] = (),
    on_gpu: bool = False,
) -> Joint:
    """Read a joint graph, which stays as it is. Its placeholders are primals, as many as `inputs`, and tangents.

    Args:
        forward_outputs: how many of its outputs are forward's.
        unread: inputs of the call, and their values, that no op reads.
        on_gpu: batch norms are cuDNN's where torch takes it.

    Raises:
        CaptureError: the graph takes what is neither a tensor nor a size.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    holders = module.graph.find_nodes(op="placeholder")
    if any(type(n.meta.get("desc")).__name__ in TOKENS for n in holders):
        raise CaptureError(
            "the model calls an op that does something beside its outputs (torch.linalg.cholesky checks for errors), "
            "which torch ties to others by tokens, and no plan can hold those; call it outside of the planned module."
        )
    known: dict[Any, Any] = {}
    constants = {n.target: getattr(module, n.target) for n in module.graph.find_nodes(op="get_attr")}
    groups: tuple[list[fx.Node], ...] = ([], [], [], [], [])  # by RANK; tangents; sizes
    slots: list[tuple[Any, Any]] = [*zip(inputs, holders, strict=False), *unread]
    slots.sort(key=lambda x: (RANK[x[0].kind], x[0].number))
    slots += [(None, n) for n in holders[len(inputs) :]]
    place = {n: k for k, n in enumerate(holders)}
    for given, n in slots:
        if isinstance(n, torch.Tensor):
            val, copy = n, graph.placeholder(f"unread_{given.kind}_{given.number}")
            copy.meta = {"val": n, PLACE: None}
        elif given is not None and given.kind == HELD:
            copies[n] = graph.get_attr(f"held_{given.number}")
            copies[n].meta = dict(n.meta)
            constants[f"held_{given.number}"] = given.value
            continue
        else:
            copy = copies[n] = graph.placeholder(str(n.target))
            copy.meta, val = {**n.meta, PLACE: place[n]}, n.meta.get("val")
        if isinstance(val, torch.SymInt):
            known[val.node.expr] = Integer(val.node.hint)
            group = groups[4]
        elif not isinstance(val, torch.Tensor):
            raise CaptureError(f"the graph takes {n.name}, a {type(val).__name__}, which is no tensor.")
        elif given is None:
            copy.meta["tangent_of"], group = -1, groups[3]
        else:
            group = groups[RANK[given.kind]]
            # A descriptor as `program_of` reads them.
            kind = type(given.kind, (SimpleNamespace,), {})
            copy.meta["desc"] = kind(target=given.name, idx=len(group))
        group.append(copy)
    late = set(groups[3])
    for n in module.graph.nodes:
        if n.op not in ("placeholder", "output"):
            copies[n] = graph.node_copy(n, copies.__getitem__)
            if (path := _module_of(n)) is not None:
                copies[n].meta["custom"] = {"module": path}
            # torch does not see it behind a custom backward.
            if any(a in late for a in copies[n].all_input_nodes):
                copies[n].meta["partitioner_tag"] = "is_backward"
                late.add(copies[n])
    old = next(iter(module.graph.find_nodes(op="output")))
    leaves = [copies.get(x, x) for x in pytree.tree_leaves(old.args[0], is_leaf=lambda x: x is None)]
    output = graph.output((leaves[:forward_outputs], leaves[forward_outputs:]))
    mutations = _mutations(graph)
    forward, backward = plain(graph, mutations, on_gpu=on_gpu)
    outputs, grads = map(tuple, output.args[0])
    graph.erase_node(output)
    parameters, buffers, arguments, tangents, numbers = map(tuple, groups)
    nodes = (x for x in outputs if isinstance(x, fx.Node))
    tensors = dict.fromkeys(n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor))
    number = {n: At(k) for k, n in enumerate(tensors)}
    descriptors = list(old.meta.get("desc", ()))
    for n in tangents:
        of_output = getattr(n.meta.get("desc"), "output", None)
        if of_output in descriptors:
            n.meta["tangent_of"] = number[outputs[descriptors.index(of_output)]].number
    _check_held(inputs, grads)
    overwritten = {d.mutated_input for d in descriptors if hasattr(d, "mutated_input")}
    written = {n for n, _ in mutations} | {copies[n] for n in holders if n.meta.get("desc") in overwritten}
    _check_written(written, grads)
    of = [
        tuple(None if n.meta[PLACE] is None else grads[n.meta[PLACE]] for n in group)
        for group in (parameters, arguments)
    ]
    graph.output((tuple(tensors), *of))
    captured = Captured(
        graph_module=fx.GraphModule(constants, graph),
        forward=forward,
        backward=backward,
        parameters=tuple(n.meta["desc"].target for n in parameters),
        buffers=tuple(n.meta["desc"].target for n in buffers),
        arguments=len(arguments),
        outputs=tuple(tensors),
        grad_outputs=tuple(n.meta["tangent_of"] for n in tangents),
        parameter_grads=of[0],
        argument_grads=of[1],
        output_spec=pytree.tree_structure(None),
        numbers=numbers,
        known=known,
    )
    gradient = {n.meta[PLACE]: At(k) for k, n in enumerate((*parameters, *arguments))}
    return Joint(
        captured=captured,
        outputs=tuple(number.get(x, x) if isinstance(x, fx.Node) else x for x in outputs),
        returned={d.idx: k for k, d in enumerate(descriptors) if type(d).__name__ == "PlainAOTOutput"},
        grads=tuple(None if g is None else gradient[k] for k, g in enumerate(grads)),
    )


def _module_of(n: fx.Node) -> str | None:
    """The path of the innermost module that ran an op, or the op of forward that an op of backward belongs to; None of
    a sum of gradients, which belongs to no op."""
    stack = n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack")
    if not stack:
        return None if n.meta.get("partitioner_tag") == "is_backward" else ""
    return _ROOT.sub("", str(next(reversed(stack.values()))[0])).lstrip(".")


_ROOT: Final = re.compile(r"^L\['\w+'\](\.__self__|\.__func__)?")


def _check_held(inputs: Sequence[Input], grads: Sequence[Any]) -> None:
    """Raise CaptureError for a tensor that should be trained and is no parameter."""
    for given, grad in zip(inputs, grads, strict=False):
        if given.kind == HELD and grad is not None:
            raise CaptureError(
                f"forward uses a tensor of the shape {tuple(given.value.shape)} that requires a gradient and is no "
                "parameter of the model (a parameter or module in a list, say), so it would get none. Register it "
                "(nn.Parameter, nn.ModuleList), or give it requires_grad_(False)."
            )
        if given.kind == BUFFER and grad is not None:
            raise CaptureError(
                f"the buffer {given.name} requires a gradient: make it a parameter, or give it requires_grad_(False)."
            )


def _check_written(written: Collection[fx.Node], grads: Sequence[Any]) -> None:
    """Raise CaptureError for a tensor that forward overwrites and that takes part in backward."""
    for n in written:
        if n.meta[PLACE] is not None and grads[n.meta[PLACE]] is not None:
            name = n.meta["desc"].target if type(n.meta["desc"]).__name__ == PARAMETER else ""
            what = f"the parameter {name}" if name else "a tensor of the batch that requires a gradient"
            raise CaptureError(
                f"the model cannot be captured: forward overwrites {what}, as an embedding with max_norm does at "
                "every call. Only buffers and what takes no part in backward may be overwritten in forward; do it "
                "after the optimizer's step."
            )


def _mutations(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """The inputs that forward overwrites and their new values; the writes go."""
    found = []
    for n in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, value = n.args[:2]
        if target.op == "placeholder" and not n.users:
            found.append((target, value))
            graph.erase_node(n)
    return found
