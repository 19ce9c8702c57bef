"""Capture one call of a model, and its backward, on fake tensors: nothing is run, and nothing allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx, nn

from tracer.capture.attention import ATTENTION, attend
from tracer.capture.captured import At, Captured
from tracer.capture.compiling import by_dynamo, calling, compile_joint, kind_of, output_values
from tracer.capture.joint import ARGUMENT, BUFFER, HELD, PARAMETER, Input, joint_of
from tracer.capture.refusals import check_capturable, check_graph, in_words
from tracer.precision.cast_cache import kernels
from tracer.precision.policy import OFF, Autocast
from tracer.step.user_errors import without_torch_log
from tracer.torch_api import TracingContext, no_garbage, one_at_a_time, pytree, tracing
from traces.devices import Device
from traces.errors import CaptureError

Wanted = Callable[[Any], Collection[int]]
NO_BACKWARD: Final = (
    "no output of the model that the loss differentiates depends on a parameter that requires a gradient, so there is "
    "no backward to plan."
)


class _Read(Exception):
    """The joint graph is read; nothing of it is compiled."""


@dataclass(eq=False, kw_only=True)
class Call:
    """A call of a model that dynamo captured. Its graph did not run: `outputs` stood for what that returns.

    Attributes:
        module, examples, context: the graph, the values of its inputs, and what torch knows while it is compiled.
        own: what the model and the call give to the graph, by id.
        returned: what the model returned, of these outputs.
        wanted: the ids of the outputs that the loss differentiates.
        compiled: what runs in later calls; in a list, which dynamo's code shares.
    """

    module: fx.GraphModule
    examples: Sequence[Any]
    context: Any
    own: dict[int, tuple[Input, torch.Tensor]]
    outputs: list[Any]
    returned: Any = None
    wanted: Collection[int] = ()
    compiled: list[Callable[..., Any]]

    @property
    def left_out(self) -> set[int]:
        """The places of the outputs that could have a gradient and that the loss does not differentiate."""
        tensors = ((k, x) for k, x in enumerate(self.outputs) if isinstance(x, torch.Tensor))
        return {k for k, x in tensors if x.requires_grad and id(x) not in self.wanted}

    def read(self, joint: fx.GraphModule, forward_outputs: int, target: Device | None = None) -> Captured:
        """The joint graph that AOTAutograd made of it, with all of the call's inputs."""
        read = {id(x) for x in self.examples}
        inputs = [
            self.own[id(x)][0]
            if id(x) in self.own
            else Input(HELD if isinstance(x, torch.Tensor) else ARGUMENT, "", k, x)
            for k, x in enumerate(self.examples)
        ]
        unread = [x for key, x in self.own.items() if key not in read]
        on_gpu = target is not None or kind_of(self.examples) == "cuda"
        made = joint_of(joint, forward_outputs, inputs, unread=unread, on_gpu=on_gpu)
        flat, spec = pytree.tree_flatten(self.returned)
        place = {id(self.outputs[k]): made.outputs[p] for k, p in made.returned.items()}
        leaves = (_based(made.captured, place.get(id(x), x), id(x) in self.wanted) for x in flat)
        tensors = (x for x in self.outputs if isinstance(x, torch.Tensor))
        return replace(
            made.captured,
            output_spec=spec,
            output_template=tuple(leaves),
            differentiated=tuple(n for n, x in enumerate(tensors) if id(x) in self.wanted),
            target=target,
        )


def called(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    run: Callable[..., Any],
    autocast: Autocast,
    mode: contextlib.AbstractContextManager[Any],
) -> Call:
    """Let dynamo capture `model.forward(*args, **kwargs)`; nothing of it runs.

    Args:
        run: given what dynamo is to give its graph to, returns the compiled call, as `by_dynamo` does.
        autocast: under which the model runs; its casts become ops of the graph.
        mode: in which what stands for the outputs is made.
    """
    leaves = (x for x in pytree.tree_leaves((tuple(args), kwargs)) if isinstance(x, torch.Tensor))
    kinds: dict[str, Iterable[tuple[str, torch.Tensor]]] = {
        ARGUMENT: (("", x) for x in dict.fromkeys(leaves)),
        BUFFER: model.named_buffers(),  # before forward gives the model others
        PARAMETER: model.named_parameters(),
    }
    named = ((kind, k, name, x) for kind, of in kinds.items() for k, (name, x) in enumerate(of))
    own = {id(x): (Input(kind, name, k), x) for kind, k, name, x in named}
    found: list[Call] = []

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        check_graph(module)
        with mode:
            outputs = [_like(x) for x in output_values(module)]
        compiled: list[Callable[..., Any]] = [lambda *_: outputs]
        context = TracingContext.get()
        found.append(
            Call(
                module=module, examples=examples, context=context, own=own, outputs=outputs, compiled=compiled
            )
        )
        return torch.compiler.disable(lambda *values: compiled[0](*values))

    with autocast.region(), calling(model, kwargs), without_torch_log():
        returned = run(backend)(model.forward, tuple(args), kwargs)
    if not found:
        raise CaptureError(f"{type(model).__name__}: forward runs no op, so there is nothing to plan.")
    (call,) = found
    call.returned = returned
    return call


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
        autocast: see `called`.

    Raises:
        CaptureError: the model does something that a static graph cannot hold; names the user's line.
    """
    check_capturable(model)
    on_gpu = kernels("AutogradCPU", {ATTENTION: attend}) if target is not None else contextlib.nullcontext()
    found: list[Captured] = []

    def read(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        found.append(call.read(joint, num_fwd_outputs, target))
        raise _Read

    def nothing(*_: Any) -> Any:
        raise _Read

    compilers: Any = dict.fromkeys(("fw_compiler", "bw_compiler", "inference_compiler"), nothing)
    with in_words(model):
        call = called(model, args, kwargs, by_dynamo, autocast, contextlib.nullcontext())
        call.wanted = wanted(call.returned)
        with (
            on_gpu,
            autocast.region(),
            tracing(call.context),
            without_torch_log(),
            contextlib.suppress(_Read),
        ):
            given = call.module, call.examples, kind_of(call.examples), call.left_out
            compile_joint(*given, **compilers, partition_fn=read)
    if not found:
        raise CaptureError(NO_BACKWARD)
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
