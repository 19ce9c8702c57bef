"""Capture a model's forward and backward as one joint FX graph of functional aten ops, without running it.

The capture is `torch._functorch.aot_autograd.aot_export_joint_with_descriptors` (private API).
Under a `FakeTensorMode` nothing is allocated, so the size of the model does not matter.

What the captured graph is made to be:

- the model alone, from its arguments to its outputs. The loss code around it stays the user's own;
- only those outputs take part in backward that the loss differentiates; the others are returned without gradient;
- a parameter that several modules share is one input;
- `detach` is gone (it is the identity here), and dropout is split into its random mask and the rest;
- a buffer that forward overwrites is written by a `copy_` right after its new value exists, as the eager step does, so
  that nobody holds the new value any longer.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Final

import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback

from tracer.capture.attention import gpu_attention
from tracer.capture.looks import looking, refuse_values, settle
from tracer.capture.passes.batch_norm import put_cudnn
from tracer.capture.passes.dropout import split_dropout
from tracer.capture.passes.effects import checks_kept, is_token, without_tokens
from tracer.capture.passes.shared_outputs import shared, without_clone
from tracer.capture.refusals import check_capturable, tangent_of
from tracer.capture.scopes import (
    as_compiled,
    fake_constants,
    fake_mode_of,
    fake_parameters,
    forget_constants,
    library_code,
    module_scopes,
    retied,
    tied_slots,
)
from tracer.capture.state import (
    Effects,
    check_constants,
    check_effects,
    nothing_changed,
    plain_tensors,
    run_watched,
)
from tracer.capture.torch_fixes.caches import emptied_caches, holds_kept_tensor
from tracer.capture.torch_fixes.grouped import true_results
from tracer.precision.cast_cache import cached_casts
from tracer.precision.policy import OFF, Autocast, without_autocast
from tracer.step.user_errors import explain, is_data_dependent, without_torch_log
from tracer.torch_api import (
    FakeTensorMode,
    OpOverload,
    aot_export_joint_with_descriptors,
    no_garbage,
    one_at_a_time,
    pytree,
)
from traces.devices import Device
from traces.errors import CaptureError

aten = torch.ops.aten
INPUT_KINDS: Final = {"ParamAOTInput": "param", "BufferAOTInput": "buffer", "PlainAOTInput": "input"}
TENSOR: Final = object()  # marks a tensor's place among a model's flat outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A joint graph and the meaning of its inputs and outputs.

    `graph_module.graph` has the placeholders parameters, buffers, tensor arguments, tangents, in this order, and behind
    them the numbers of a graph for calls of many sizes (`tracer.capture.sizes`). Its
    output is one flat tuple: the model's tensor outputs, then one gradient (or None) for each parameter, then one
    for each tensor argument.
    """

    graph_module: fx.GraphModule
    forward: tuple[fx.Node, ...]  # call nodes in execution order
    backward: tuple[fx.Node, ...]
    parameters: tuple[str, ...]  # names, in placeholder order
    buffers: tuple[str, ...]
    arguments: int  # how many tensor arguments
    outputs: tuple[fx.Node, ...]  # the model's tensor outputs
    grad_outputs: tuple[int, ...]  # indices into `outputs` that have a tangent
    other_outputs: tuple[int, ...]  # those that could have one, had the loss differentiated them
    parameter_grads: tuple[fx.Node | None, ...]
    argument_grads: tuple[fx.Node | None, ...]
    output_spec: pytree.TreeSpec
    output_template: tuple[Any, ...]  # flat outputs: TENSOR where a tensor stands, else the constant
    writes: tuple[tuple[str, str, Any], ...] = ()  # attributes that forward sets: module, name, value
    target: Device | None = None  # the GPU whose ops these are, if the capture's tensors are on the CPU
    numbers: tuple[fx.Node, ...] = ()  # placeholders that stand for what follows from the arguments' sizes
    # Outputs that do not exist in a changed graph, and why.
    not_made: Mapping[int, str] = field(default_factory=dict)

    def outputs_from(self, tensors: Iterable[Any]) -> Any:
        """What the model returns, with `tensors` in the places of its tensor outputs."""
        rest = iter(tensors)
        leaves = [next(rest) if x is TENSOR else x for x in self.output_template]
        return pytree.tree_unflatten(leaves, self.output_spec)

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


def only_these(numbers: Collection[int]) -> Callable[[Any], list[bool]]:
    """For `capture`: the loss differentiates those of the model's tensor outputs that have these numbers and can be."""

    def flags(outputs: Any) -> list[bool]:
        number = count()
        leaves = pytree.tree_leaves(outputs)
        return [isinstance(x, torch.Tensor) and next(number) in numbers and x.requires_grad for x in leaves]

    return flags


@one_at_a_time
@no_garbage()
def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    wants_gradient: Callable[[Any], Sequence[bool]],
    target: Device | None = None,
    autocast: Autocast = OFF,
) -> Captured:
    """Capture `model(*args, **kwargs)` and its backward.

    Args:
        model: in training mode; fake or real parameters (real ones are only looked at).
        args, kwargs: example arguments; tensors anywhere inside become graph inputs, all else is baked in.
        wants_gradient: maps the model's outputs to one bool per flat output: whether the loss differentiates it.
        target: the GPU whose ops are wanted of a model on the CPU; None: those of the model's own device.
        autocast: under which the model runs; its casts become ops of the graph. What is on around this call does not
            count, and backward is captured without.

    Raises:
        CaptureError: the model does something that a static graph cannot hold; names the op and the user's line.
    """
    check_capturable(model)
    fake_mode = fake_mode_of(model, args, kwargs) or FakeTensorMode(allow_non_fake_inputs=True)
    attempt = partial(_capture, model, args, kwargs, wants_gradient, fake_mode, target, autocast)
    try:
        with emptied_caches(model):
            return attempt(compiled=False)
    except Exception as error:
        if not is_data_dependent(error) and not holds_kept_tensor(error):
            raise explain(error, model) from error
    try:
        # Library code that looks at the data of a mask takes its data-independent branch, and leaves its caches
        # alone, when it believes that it is being compiled.
        return attempt(compiled=True)
    except Exception as error:
        if holds_kept_tensor(error) and (names := plain_tensors(model)):
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: it holds tensors that are neither parameters nor "
                f"buffers ({', '.join(names[:5])}), which a graph would take for constants. Register them: "
                "self.register_buffer(name, tensor, persistent=False), or nn.Parameter(tensor) if they are trained."
            ) from error
        if not is_data_dependent(error):
            raise explain(error, model) from error
    try:
        return attempt(compiled=True, looks=True)
    except Exception as error:
        raise explain(error, model) from error


def _capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    wants_gradient: Callable[[Any], Sequence[bool]],
    fake_mode: FakeTensorMode,
    target: Device | None,
    autocast: Autocast,
    *,
    compiled: bool,
    looks: bool = False,  # which of the model's looks at data are no branches is to be settled first
) -> Captured:
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    where = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    notes: dict[str, Any] = {}
    effects = Effects()
    on_gpu = target is not None or any(p.device.type == "cuda" for p in model.parameters())

    class Flat(nn.Module):
        """The model from flat tensors to flat tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            object.__setattr__(self, "_ties", tied_slots(model))

        # aot_export asks for duplicates, which would make one input of each alias of a shared parameter and
        # leave their gradients unsummed.
        def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):  # type: ignore[no-untyped-def]
            return super().named_parameters(prefix, recurse, True)

        def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):  # type: ignore[no-untyped-def]
            return super().named_buffers(prefix, recurse, True)

        def outputs(self, *tensors: torch.Tensor) -> Any:
            full = list(leaves)
            for k, x in zip(where, tensors, strict=True):
                full[k] = x
            a, kw = pytree.tree_unflatten(full, in_spec)
            with (
                retied(self._ties),
                gpu_attention() if target is not None else contextlib.nullcontext(),
                autocast.captured_region(),
                cached_casts(autocast.kind, (*self.parameters(), *tensors)),
                looking(model),
            ):
                return run_watched(model, lambda: self.model(*a, **kw), effects)

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = (*self.parameters(), *tensors)
            outputs = self.outputs(*tensors)
            for k, x in zip(where, tensors, strict=True):
                if x.requires_grad and not leaves[k].requires_grad:
                    raise CaptureError(
                        f"{type(model).__name__} cannot be captured: forward sets requires_grad on a tensor of shape "
                        f"{tuple(x.shape)} that it is given, which the caller's own tensor would not have afterwards. "
                        "Set it before the call, or in forward on x.detach()."
                    )
            flat, notes["spec"] = pytree.tree_flatten(outputs)
            refuse_values(flat)
            wanted = list(wants_gradient(outputs))
            notes["template"] = tuple(TENSOR if isinstance(x, torch.Tensor) else x for x in flat)
            # An output that is itself an argument or a parameter still needs a node of its own.
            pairs = [(x, w) for x, w in zip(flat, wanted, strict=True) if isinstance(x, torch.Tensor)]
            notes["cloned"] = shared([x for x, _ in pairs], given)
            notes["other"] = tuple(k for k, (x, w) in enumerate(pairs) if x.requires_grad and not w)
            return tuple(
                (x.clone() if alias else x) if w else x.detach()
                for (x, w), alias in zip(pairs, notes["cloned"], strict=True)
            )

    flat_model = Flat()
    flat_model.training = model.training  # not train(), which would switch frozen batch norms on again
    tensors = tuple(leaves[k] for k in where)
    built_of_fakes = fake_mode_of(model, (), {}) is not None
    with contextlib.ExitStack() as stack:
        stack.enter_context(nothing_changed(model))
        swapped = stack.enter_context(fake_parameters(flat_model, fake_mode))
        fakes = tuple(swapped(x) for x in tensors)
        if built_of_fakes:
            stack.enter_context(fake_constants())
        for context in (
            without_torch_log(),
            without_autocast(),
            true_results(),
            checks_kept(),
            fake_mode,
            fx_traceback.preserve_node_meta(),
            library_code(),
            module_scopes(model),
        ):
            stack.enter_context(context)
        if compiled:
            stack.enter_context(as_compiled())
        if looks:
            settle(model, lambda: flat_model.outputs(*fakes))
        # What is called in Python is of no use here but for sizes that are symbols.
        unnamed = fake_mode.shape_env is None
        joint = aot_export_joint_with_descriptors(
            stack, flat_model, fakes, _disable_torch_fn_metadata_mode=unnamed
        )
    check_effects(model, effects)
    check_constants(model, joint.graph_module)
    if not built_of_fakes:
        forget_constants(fake_mode)
    captured = _normalise(joint.graph_module, notes, on_gpu=on_gpu)
    return replace(captured, target=target, writes=effects.writes)


def forward_once(model: nn.Module, run: Callable[[], None]) -> None:
    """Call `run`, which runs the model eagerly on fake tensors, under what the capture would use around it."""
    try:
        with without_torch_log(), emptied_caches(model), true_results(), library_code(), looking(model):
            run()
    except Exception as error:
        if not is_data_dependent(error):
            raise explain(error, model) from error
        try:
            with without_torch_log(), true_results(), library_code(), as_compiled(), looking(model):
                run()
        except Exception as again:
            raise explain(again, model) from again


# The graph, made plain


def _normalise(gm: fx.GraphModule, notes: dict[str, Any], *, on_gpu: bool) -> Captured:
    graph = gm.graph
    without_tokens(graph)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    output = next(n for n in graph.nodes if n.op == "output")
    by_key = _inputs(placeholders)
    outputs: dict[int, fx.Node] = {}
    cloned: list[int] = []
    grads: dict[tuple[str, Any], fx.Node | None] = {}
    mutations: list[tuple[fx.Node, fx.Node]] = []
    for value, d in zip(pytree.tree_leaves(output.args[0]), output.meta["desc"], strict=True):
        kind = type(d).__name__
        if kind == "PlainAOTOutput":
            outputs[d.idx] = value
            cloned += [d.idx] if notes["cloned"][d.idx] else []
        elif kind == "GradAOTOutput":
            grads[_input_key(d.grad_of)] = value
        elif kind == "InputMutationAOTOutput":
            mutations.append((by_key[_input_key(d.mutated_input)], value))
        elif d is not None and not is_token(d):
            raise _unknown("an output", kind)

    tangents = tuple(n.meta["tangent_of"] for n in placeholders if "tangent_of" in n.meta)
    for k in cloned:
        outputs[k] = without_clone(outputs[k]) if k in tangents else outputs[k]
    model_outputs = tuple(outputs[k] for k in sorted(outputs))
    param_keys = [k for k in by_key if k[0] == "param"]
    input_keys = sorted(k for k in by_key if k[0] == "input")
    graph.erase_node(output)
    result = graph.output(
        (model_outputs, tuple(grads.get(k) for k in param_keys), tuple(grads.get(k) for k in input_keys))
    )
    forward, backward = plain(graph, mutations, on_gpu=on_gpu)
    out_nodes, param_grads, input_grads = result.args[0]
    return Captured(
        graph_module=gm,
        forward=forward,
        backward=backward,
        parameters=tuple(_fqn(name) for kind, name in by_key if kind == "param"),
        buffers=tuple(_fqn(name) for kind, name in by_key if kind == "buffer"),
        arguments=len(input_keys),
        outputs=tuple(out_nodes),
        grad_outputs=tangents,
        other_outputs=notes["other"],
        parameter_grads=tuple(param_grads),
        argument_grads=tuple(input_grads),
        output_spec=notes["spec"],
        output_template=notes["template"],
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
    for n in list(graph.nodes):
        if n.op == "call_function" and n.target is aten.detach.default:
            n.replace_all_uses_with(n.args[0])
            mutations = [(t, n.args[0] if v is n else v) for t, v in mutations]
            graph.erase_node(n)
    split_dropout(graph)
    if on_gpu:
        mutations = put_cudnn(graph, mutations)
    _write_buffers(graph, mutations)
    _drop_unused(graph)
    graph.lint()  # nobody calls the module, so its code is not written anew
    return _phases(graph)


def _inputs(placeholders: Iterable[fx.Node]) -> dict[tuple[str, Any], fx.Node]:
    """The placeholders of parameters, buffers and arguments by what they stand for; tangents are marked as such."""
    by_key: dict[tuple[str, Any], fx.Node] = {}
    for n in placeholders:
        d = n.meta["desc"]
        kind = type(d).__name__
        if kind == "TangentAOTInput":
            n.meta["tangent_of"] = tangent_of(d.output)
        elif kind in INPUT_KINDS:
            by_key[_input_key(d)] = n
        else:
            raise _unknown("an input", kind)
    return by_key


def _phases(graph: fx.Graph) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """The graph's calls: forward's, backward's."""
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    for n in graph.nodes:
        if n.op == "call_function":
            (backward if n.meta.get("partitioner_tag") == "is_backward" else forward).append(n)
        elif n.op not in ("placeholder", "output", "get_attr"):
            raise _unknown("a node", n.op)
    late = set(backward)
    for n in forward:
        if any(a in late for a in n.all_input_nodes):
            raise CaptureError(f"the forward op {n.name} takes a value of backward; please report this.")
    return tuple(forward), tuple(backward)


def _unknown(what: str, kind: str) -> CaptureError:
    return CaptureError(f"the captured graph has {what} of the unknown kind {kind}; please report this.")


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


def _drop_unused(graph: fx.Graph) -> None:
    """Erase picks and views that nobody uses; every op that computes or draws random numbers stays."""
    for n in reversed(list(graph.nodes)):
        if (n.op == "get_attr" and not n.users) or (
            n.op == "call_function" and not n.users and (n.target is operator.getitem or is_view(n))
        ):
            graph.erase_node(n)


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at its input's storage, by its schema."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _input_key(d: Any) -> tuple[str, Any]:
    return INPUT_KINDS[type(d).__name__], getattr(d, "target", getattr(d, "idx", None))


def _fqn(target: str) -> str:
    return target.removeprefix("model.")
