"""Read the joint graph that AOTAutograd makes of what dynamo captured as a `Captured`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from sympy import Integer  # type: ignore[import-untyped]
from torch import fx, nn

from tracer.capture.capture import Captured, plain
from tracer.capture.passes.effects import is_token
from tracer.torch_api import pytree
from traces.errors import CaptureError

aten = torch.ops.aten
PLACE: Final = "place"  # in the meta of a placeholder: its place among those of the joint graph
PARAMETER, BUFFER, ARGUMENT = "ParamAOTInput", "BufferAOTInput", "PlainAOTInput"


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a graph: the kind of its descriptor, and its name in the model."""

    kind: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class At:
    """The place of a tensor among the outputs, or the gradients, of a captured graph."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A joint graph, read: its program's graph, and the order in which AOTAutograd has outputs and gradients."""

    captured: Captured
    known: Mapping[Any, Any]  # symbols of sizes and their values in this call
    outputs: tuple[Any, ...]  # of forward: a place in `captured.outputs`, a size's node, or a constant
    returned: Mapping[
        int, int
    ]  # by the number of what dynamo's graph returns: its place among forward's outputs
    grads: tuple[
        Any, ...
    ]  # of backward: a place in `captured.parameter_grads` and `argument_grads` behind it, or None


def inputs_of(graph: fx.Graph, examples: Sequence[Any]) -> list[Input]:
    """What the placeholders of dynamo's graph stand for; `examples`: their values, in their order."""
    found = []
    for n, x in zip(graph.find_nodes(op="placeholder"), examples, strict=True):
        path = getattr(getattr(n.meta.get("grapharg"), "source", None), "name", "")
        path = path() if callable(path) else path
        kind = PARAMETER if isinstance(x, nn.Parameter) else BUFFER if "._buffers[" in path else ARGUMENT
        found.append(Input(kind, _dotted(path)))
    return found


def _dotted(path: str) -> str:
    """The name of a parameter or buffer: "L['self']._modules['a']._parameters['weight']" -> "a.weight"."""
    return ".".join(path.split("'")[3::2]) or path


def joint_of(
    module: fx.GraphModule,
    forward_outputs: int,
    inputs: Sequence[Input],
    *,
    on_gpu: bool = False,
) -> Joint:
    """Read a joint graph, which stays as it is.

    Args:
        module: its placeholders are primals, as many as `inputs`, and tangents.
        forward_outputs: how many of its outputs are forward's.
        on_gpu: batch norms are cuDNN's where torch takes it.

    Raises:
        CaptureError: the graph takes what is neither a tensor nor a size.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    if any(is_token(n.meta.get("desc")) for n in module.graph.find_nodes(op="placeholder")):
        raise CaptureError(
            "the model calls an op that does something beside its outputs (torch.linalg.cholesky checks for errors), "
            "which torch ties to others by tokens, and no plan can hold those; call it outside of the planned module."
        )
    rank = {PARAMETER: 0, BUFFER: 1, ARGUMENT: 2}
    holders = enumerate(module.graph.find_nodes(op="placeholder"))
    known: dict[Any, Any] = {}
    groups: tuple[list[fx.Node], ...] = (
        [],
        [],
        [],
        [],
        [],
    )  # parameters, buffers, arguments, tangents, sizes
    for k, n in sorted(holders, key=lambda x: (rank[inputs[x[0]].kind] if x[0] < len(inputs) else 3, x[0])):
        copy = copies[n] = graph.placeholder(str(n.target))
        copy.meta, val = {**n.meta, PLACE: k}, n.meta.get("val")
        if isinstance(val, torch.SymInt):
            known[val.node.expr] = Integer(val.node.hint)
            group = groups[4]
        elif not isinstance(val, torch.Tensor):
            raise CaptureError(f"the graph takes {n.name}, a {type(val).__name__}, which is no tensor.")
        elif k >= len(inputs):
            copy.meta["tangent_of"], group = -1, groups[3]
        else:
            group = groups[rank[inputs[k].kind]]
            copy.meta["desc"] = _described(inputs[k], len(group))
        group.append(copy)
    late = set(groups[3])
    for n in module.graph.nodes:
        if n.op not in ("placeholder", "output"):
            copies[n] = graph.node_copy(n, copies.__getitem__)
            copies[n].meta["custom"] = {"module": _module_of(n)}
            if any(
                a in late for a in copies[n].all_input_nodes
            ):  # which torch does not see behind a custom backward
                copies[n].meta["partitioner_tag"] = "is_backward"
                late.add(copies[n])
    old = next(iter(module.graph.find_nodes(op="output")))
    leaves = [copies.get(x, x) for x in pytree.tree_leaves(old.args[0], is_leaf=lambda x: x is None)]
    output = graph.output((leaves[:forward_outputs], leaves[forward_outputs:]))
    forward, backward = plain(graph, _mutations(graph), on_gpu=on_gpu)
    outputs, grads = map(tuple, output.args[0])
    graph.erase_node(output)
    parameters, buffers, arguments, tangents, numbers = map(tuple, groups)
    tensors = dict.fromkeys(x for x in outputs if isinstance(x, fx.Node) and _is_tensor(x))
    number = {n: At(k) for k, n in enumerate(tensors)}
    descriptors = list(old.meta.get("desc", ()))
    for n in tangents:
        of_output = getattr(n.meta.get("desc"), "output", None)
        if of_output in descriptors:
            n.meta["tangent_of"] = number[outputs[descriptors.index(of_output)]].number
    of = [tuple(grads[n.meta[PLACE]] for n in group) for group in (parameters, arguments)]
    graph.output((tuple(tensors), *of))
    captured = Captured(
        graph_module=fx.GraphModule(module, graph),
        forward=forward,
        backward=backward,
        parameters=tuple(inputs[n.meta[PLACE]].name for n in parameters),
        buffers=tuple(inputs[n.meta[PLACE]].name for n in buffers),
        arguments=len(arguments),
        outputs=tuple(tensors),
        grad_outputs=tuple(n.meta["tangent_of"] for n in tangents),
        other_outputs=(),
        parameter_grads=of[0],
        argument_grads=of[1],
        output_spec=pytree.tree_structure(None),
        output_template=(),
        numbers=numbers,
    )
    place = {n.meta[PLACE]: At(k) for k, n in enumerate((*parameters, *arguments))}
    return Joint(
        captured=captured,
        known=known,
        outputs=tuple(number.get(x, x) if isinstance(x, fx.Node) else x for x in outputs),
        returned={d.idx: k for k, d in enumerate(descriptors) if type(d).__name__ == "PlainAOTOutput"},
        grads=tuple(None if g is None else place[k] for k, g in enumerate(grads)),
    )


def _module_of(n: fx.Node) -> str:
    """The path of the innermost module that ran an op, or the op of forward that an op of backward belongs to."""
    stack = n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return _ROOT.sub("", path).lstrip(".")


_ROOT: Final = re.compile(r"^L\['\w+'\](\.__self__|\.__func__)?")


def _described(given: Input, number: int) -> Any:
    """A descriptor as `program_of` reads them."""
    kind = type(given.kind, (SimpleNamespace,), {})
    return kind(target=given.name, idx=number)


def _is_tensor(n: fx.Node) -> bool:
    return isinstance(n.meta.get("val"), torch.Tensor)


def _mutations(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """The inputs that forward overwrites and their new values; the writes go."""
    found = []
    for n in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, value = n.args[:2]
        if target.op == "placeholder" and not n.users:
            found.append((target, value))
            graph.erase_node(n)
    return found
