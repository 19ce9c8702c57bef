"""A captured call of a model as plain records, and the passes that make its joint graph plain.

What the graph is made to be:

- the model alone, from its arguments to its outputs. The loss code around it stays the user's own;
- only those outputs take part in backward that the loss differentiates; the others are returned without gradient;
- a parameter that several modules share is one input;
- `detach` is gone (it is the identity here), and dropout is split into its random mask and the rest;
- a buffer that forward overwrites is written by a `copy_` right after its new value exists, as the eager step does, so
  that nobody holds the new value any longer.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tracer.capture.passes.batch_norm import put_cudnn
from tracer.capture.passes.dropout import split_dropout
from tracer.torch_api import OpOverload, pytree
from traces.devices import Device
from traces.errors import CaptureError

aten = torch.ops.aten
Known = Mapping[Any, Any]  # symbol -> size


@dataclass(frozen=True, slots=True)
class At:
    """The place of a tensor among the outputs, or the gradients, of a captured graph."""

    number: int
    base: int | None = None  # the output that has its gradient, whose memory it shares

    def of(self, tensors: Sequence[Any]) -> Any:
        """The tensor in this place."""
        x = tensors[self.number]
        if self.base is None:
            return x
        return tensors[self.base].as_strided(x.shape, x.stride(), x.storage_offset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A joint graph and the meaning of its inputs and outputs.

    `graph_module.graph` has the placeholders parameters, buffers, tensor arguments, tangents, in this order, and behind
    them the sizes of a graph for calls of many. Its output is one flat tuple: the tensor outputs, then one gradient (or
    None) for each parameter, then one for each tensor argument.
    """

    graph_module: fx.GraphModule
    forward: tuple[fx.Node, ...]  # call nodes in execution order
    backward: tuple[fx.Node, ...]
    parameters: tuple[str, ...]  # names, in placeholder order
    buffers: tuple[str, ...]
    arguments: int  # how many tensor arguments
    outputs: tuple[fx.Node, ...]  # the tensor outputs
    grad_outputs: tuple[int, ...]  # indices into `outputs` that have a tangent
    parameter_grads: tuple[fx.Node | None, ...]
    argument_grads: tuple[fx.Node | None, ...]
    output_spec: pytree.TreeSpec  # of what the model returns,
    output_template: tuple[Any, ...] = ()  # and its leaves: `At` of `outputs`, or the constant itself
    # By their numbers among the tensors that dynamo's graph returns, those that the loss differentiates.
    differentiated: tuple[int, ...] = ()
    target: Device | None = None  # the GPU whose ops these are, if the capture's tensors are on the CPU
    numbers: tuple[fx.Node, ...] = ()  # placeholders that stand for sizes
    known: Known = field(default_factory=dict)  # of symbols in sizes, in the call that is meant
    # Outputs that do not exist in a changed graph, and why.
    not_made: Mapping[int, str] = field(default_factory=dict)

    def outputs_from(self, tensors: Sequence[Any]) -> Any:
        """Return what the model returns, with `tensors` in the places of its tensor outputs."""
        leaves = [x.of(tensors) if isinstance(x, At) else x for x in self.output_template]
        return pytree.tree_unflatten(leaves, self.output_spec)

    def marked(self, ctx: Any, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the same outputs, of which those that the loss differentiates alone get gradients, None among them."""
        ctx.mark_non_differentiable(*(x for k, x in enumerate(outputs) if k not in self.grad_outputs))
        ctx.set_materialize_grads(False)
        return outputs

    def tensors_of(self, parameters: Mapping[str, Any], buffers: Mapping[str, Any]) -> list[Any]:
        """A model's own among the graph's inputs, in placeholder order."""
        return [*(parameters[n] for n in self.parameters), *(buffers[n] for n in self.buffers)]

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        nodes = self.graph_module.graph.find_nodes(op="placeholder")
        return tuple(n for n in nodes if n not in self.numbers)

    @property
    def tangents(self) -> tuple[fx.Node, ...]:
        """The placeholders of gradients of outputs, as many as `grad_outputs`."""
        return tuple(n for n in self.placeholders if "tangent_of" in n.meta)


def number(x: Any, known: Known) -> int:
    """The value of a size or stride."""
    return x if isinstance(x, int) else int(x.node.expr.xreplace(known))


def at(x: torch.Tensor, known: Known) -> torch.Tensor:
    """A fake tensor like `x`, at sizes that are known; `x` itself if none of its own varies."""
    if all(isinstance(n, int) for n in (*x.shape, *x.stride())):
        return x
    shape, stride = (tuple(number(n, known) for n in ns) for ns in (x.shape, x.stride()))
    with x.fake_mode:
        return torch.empty_strided(
            shape, stride, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad
        )


def plain(
    graph: fx.Graph, mutations: list[tuple[fx.Node, fx.Node]], *, on_gpu: bool
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """Make a joint graph what this module's docstring says, in place.

    Args:
        mutations: pairs of an overwritten placeholder and its new value.
        on_gpu: batch norms are cuDNN's where torch takes it.

    Returns:
        the calls of forward and of backward, in their order.
    """
    # Detached identities first, so that every later rule sees the real producers.
    for n in graph.find_nodes(op="call_function", target=aten.detach.default):
        n.replace_all_uses_with(n.args[0])
        mutations = [(t, n.args[0] if v is n else v) for t, v in mutations]
        graph.erase_node(n)
    split_dropout(graph)
    if on_gpu:
        mutations = put_cudnn(graph, mutations)
    _write_buffers(graph, mutations)
    # Picks and views that nobody uses go; every op that computes or draws random numbers stays.
    for n in reversed(list(graph.nodes)):
        looks = n.op == "call_function" and (n.target is operator.getitem or is_view(n))
        if not n.users and (n.op == "get_attr" or looks):
            graph.erase_node(n)
    graph.lint()  # nobody calls the module, so its code is not written anew
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    for n in graph.nodes:
        if n.op == "call_function":
            (backward if n.meta.get("partitioner_tag") == "is_backward" else forward).append(n)
        elif n.op not in ("placeholder", "output", "get_attr"):
            raise CaptureError(
                f"the captured graph has a node of the unknown kind {n.op}; please report this."
            )
    late = set(backward)
    for n in forward:
        if any(a in late for a in n.all_input_nodes):
            raise CaptureError(
                f"the model cannot be captured: a backward of its own writes into a tensor that is no gradient "
                f"({n.name}), as fused gradients do (main_grad), which no plan can hold; let it return gradients."
            )
    return tuple(forward), tuple(backward)


def _write_buffers(graph: fx.Graph, mutations: list[tuple[fx.Node, fx.Node]]) -> None:
    """Write each mutated input as soon as its new value exists and nothing in forward needs the old one."""
    order = {n: k for k, n in enumerate(graph.nodes)}
    for target, value in mutations:
        readers = [
            n for n in target.users if n.meta.get("partitioner_tag") != "is_backward" and n.op != "output"
        ]
        last = max([value, *readers], key=order.__getitem__)
        while last.next.op == "call_function" and last.next.target is operator.getitem:
            last = last.next  # keep the parts of one op together
        late = [n for n in target.users if order[n] > order[last] and n.op != "output"]
        if late:
            with graph.inserting_after(last):
                old = graph.call_function(aten.clone.default, (target,))
            old.meta = _meta_like(last, target.meta.get("val"))
            for n in late:
                n.replace_input_with(target, old)
            last = old
        with graph.inserting_after(last):
            copy = graph.call_function(aten.copy_.default, (target, value))
        copy.meta = _meta_like(value, target.meta.get("val"))
        # Whoever comes later reads the buffer itself, as the eager step does.
        for n in list(value.users):
            if n is not copy and order.get(n, -1) > order[last if last in order else value]:
                n.replace_input_with(value, target)


def _meta_like(node: fx.Node, val: Any) -> dict[str, Any]:
    meta = {k: v for k, v in node.meta.items() if k in ("custom", "seq_nr")}
    return {**meta, "partitioner_tag": "is_forward", "val": val}


def is_view(node: fx.Node) -> bool:
    """Return whether a node only looks at its input's storage, by its schema."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
