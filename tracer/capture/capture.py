"""Capture one call of a model, and its backward, on fake tensors: nothing is run, and nothing allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from tracer.capture.attention import ATTENTION, attend
from tracer.capture.captured import At, Captured
from tracer.capture.compiling import by_dynamo, calling, compile_joint, differentiable, kind_of, output_values
from tracer.capture.joint import ARGUMENT, BUFFER, HELD, PARAMETER, Input, Joint, joint_of
from tracer.capture.refusals import check_capturable, check_graph, from_dynamo, refusal
from tracer.precision.cast_cache import kernels
from tracer.precision.policy import OFF, Autocast
from tracer.step.user_errors import explain, without_torch_log
from tracer.torch_api import TracingContext, no_garbage, one_at_a_time, pytree, tracing
from traces.devices import Device
from traces.errors import CaptureError

Wanted = Callable[[Any], Collection[int]]


class _Read(Exception):
    """The joint graph is read; nothing of it is compiled."""


@one_at_a_time
@no_garbage()
def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    wanted: Wanted,
    target: Device | None = None,
    autocast: Autocast = OFF,
) -> Captured:
    """Capture `model.forward(*args, **kwargs)` and its backward, as a planned step has them.

    Args:
        model: in training mode, of fake parameters.
        args, kwargs: fake arguments; tensors anywhere inside become graph inputs, all else is baked in.
        wanted: given what the model returns, on tensors that stand for its outputs, the ids of those that the loss
            differentiates.
        target: the GPU whose ops are wanted of a model on the CPU; None: those of the model's own device.
        autocast: under which the model runs; its casts become ops of the graph.

    Raises:
        CaptureError: the model does something that a static graph cannot hold; names the user's line.
    """
    check_capturable(model)
    own = _own(model, args, kwargs)  # before forward gives the model other buffers
    on_gpu = kernels("AutogradCPU", {ATTENTION: attend}) if target is not None else contextlib.nullcontext()
    graphs: list[tuple[fx.GraphModule, Sequence[Any], Any, list[Any]]] = []

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., list[Any]]:
        check_graph(module)
        outputs = [_like(x) for x in output_values(module)]
        graphs.append((module, examples, TracingContext.get(), outputs))
        return torch.compiler.disable(lambda *_: outputs)

    try:
        with autocast.region(), calling(model, kwargs), without_torch_log():
            returned = by_dynamo(backend)(model.forward, tuple(args), kwargs)
        if not graphs:
            raise CaptureError(f"{type(model).__name__}: forward runs no op, so there is nothing to plan.")
        ((module, examples, context, outputs),) = graphs  # the last are what stands for its outputs
        differentiated = wanted(returned)
        with on_gpu, autocast.region(), tracing(context), without_torch_log():
            joint = _joint(module, examples, outputs, own, differentiated, as_on_gpu=target is not None)
    except Exception as error:
        if not from_dynamo(error):
            raise explain(error, model) from error
        raise refusal(model, error) from error
    flat, spec = pytree.tree_flatten(returned)
    place = {id(outputs[k]): joint.outputs[p] for k, p in joint.returned.items()}
    template = tuple(_based(joint.captured, place.get(id(x), x), id(x) in differentiated) for x in flat)
    return replace(
        joint.captured,
        output_spec=spec,
        output_template=template,
        differentiated=tuple(
            n for n, k in differentiable(module).items() if id(outputs[k]) in differentiated
        ),
        target=target,
    )


def _own(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[int, tuple[Input, torch.Tensor]]:
    """Return what the model and the call give to the graph, by id."""
    leaves = (x for x in pytree.tree_leaves((tuple(args), kwargs)) if isinstance(x, torch.Tensor))
    kinds: dict[str, Iterable[tuple[str, torch.Tensor]]] = {
        ARGUMENT: (("", x) for x in dict.fromkeys(leaves)),
        BUFFER: model.named_buffers(),
        PARAMETER: model.named_parameters(),
    }
    found = ((kind, k, *named) for kind, of in kinds.items() for k, named in enumerate(of))
    return {id(x): (Input(kind, name, k), x) for kind, k, name, x in found}


def _joint(
    module: fx.GraphModule,
    examples: Sequence[Any],
    outputs: Sequence[Any],
    own: dict[int, tuple[Input, torch.Tensor]],
    wanted: Collection[int],
    *,
    as_on_gpu: bool,
) -> Joint:
    """The joint graph of what dynamo captured, with all of the call's inputs."""
    could = {k for k, x in enumerate(outputs) if isinstance(x, torch.Tensor) and x.requires_grad}
    kept = {k for k in could if id(outputs[k]) in wanted}
    read = {id(x) for x in examples}
    unread = [x for key, x in own.items() if key not in read]
    inputs = [
        own[id(x)][0] if id(x) in own else Input(HELD if isinstance(x, torch.Tensor) else ARGUMENT, "", k, x)
        for k, x in enumerate(examples)
    ]
    kind = kind_of(examples)
    found: list[Joint] = []

    def partition(made: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        found.append(
            joint_of(made, num_fwd_outputs, inputs, unread=unread, on_gpu=as_on_gpu or kind == "cuda")
        )
        raise _Read

    def nothing(*_: Any) -> Any:
        raise _Read

    with contextlib.suppress(_Read):
        compile_joint(
            module,
            examples,
            kind,
            could - kept,
            fw_compiler=nothing,
            bw_compiler=nothing,
            inference_compiler=nothing,
            partition_fn=partition,
        )
    if not found:
        raise CaptureError(
            "no output of the model that the loss differentiates depends on a parameter that requires a gradient, so "
            "there is no backward to plan."
        )
    return found[0]


def _based(captured: Captured, leaf: Any, differentiated: bool) -> Any:
    """A leaf of what the model returns; of one that shares the memory of another output, which has the gradient of
    both, with the number of that."""
    if not differentiated or (isinstance(leaf, At) and leaf.number in captured.grad_outputs):
        return leaf
    storages = [n.meta["val"].untyped_storage()._cdata for n in captured.outputs]
    for k in captured.grad_outputs if isinstance(leaf, At) else ():
        if storages[k] == storages[leaf.number]:
            return replace(leaf, base=k)
    raise CaptureError(
        "the model returns a parameter or an argument, or a view of one, which the loss differentiates and the graph "
        "does not make; return a clone of it."
    )


def _like(x: Any) -> Any:
    """Return what stands for an output; a loss can be computed of a tensor, and differentiated."""
    if not isinstance(x, torch.Tensor):
        return x
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return made.requires_grad_(x.requires_grad)
