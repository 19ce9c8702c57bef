"""Let dynamo capture a call and AOTAutograd make its joint graph: on fake tensors for a trace, and for the step that
runs by a plan, which so cannot differ.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx, nn

from tracer.capture.library import known_to_dynamo, record_outputs
from tracer.capture.refusals import check_graph
from tracer.capture.torch_fixes.dropout import idle_dropout
from tracer.capture.torch_fixes.grouped import true_results
from tracer.capture.torch_fixes.whole_kernels import whole_kernels
from tracer.precision.cast_cache import casts_cached
from tracer.torch_api import backend_aot_autograd, dynamo_config, functorch_config

# What dynamo takes otherwise by default: it would run a call without its plan, unseen, or ignore a hook added later.
SETTINGS: Final = {
    "recompile_limit": 256,
    "accumulated_recompile_limit": 1024,
    "fail_on_recompile_limit_hit": True,
    "skip_nnmodule_hook_guards": False,
    "allow_unspec_int_on_nn_module": True,
    "optimize_ddp": False,
    "specialize_float": True,
    "trace_autograd_ops": True,
    "use_numpy_random_stream": True,  # otherwise torch draws in NumPy's place, from its own generator
    "allow_rnn": False,  # torch's decompositions of recurrent layers lose their dropout
    "suppress_errors": False,
}
Compiled = Callable[..., Any]


def by_dynamo(backend: Callable[..., Any], *, dynamic: bool | None = False, whole: bool = True) -> Compiled:
    """Return `run(forward, args, kwargs)`, which calls a forward in one graph that dynamo gives to the backend; or
    where it is not to be `whole`, in as many as it breaks into. Graphs go with the backend, which the caller keeps."""
    me = weakref.WeakMethod(backend) if inspect.ismethod(backend) else weakref.ref(backend)

    def compiler(module: fx.GraphModule, examples: Sequence[Any]) -> Any:
        found = me()  # dynamo never lets go of this function
        assert found is not None
        return found(module, examples)

    # With code and a name of its own: by these dynamo keeps what it compiled, and which sizes varied.
    code = _call.__code__.replace(co_name=f"_call_{next(_numbers)}")
    call = types.FunctionType(code, dict(globals()), code.co_name)
    scope = call.__globals__  # where dynamo puts what it compiled, which keeps the code that it is kept by
    weakref.finalize(getattr(backend, "__self__", backend), lambda: scope.update(dict.fromkeys(scope)))
    return torch.compile(call, backend=compiler, fullgraph=whole, dynamic=dynamic)


@contextlib.contextmanager
def calling(model: nn.Module, kwargs: Mapping[str, Any], *, whole: bool = True) -> Iterator[None]:
    """Around each call of what `by_dynamo` made; `kwargs`: of that call of the model.

    In parts numbers from data are inputs.
    """
    record_outputs(model, kwargs)
    # What transformers calls to say something once, which a graph leaves out.
    names = ("warning_once", "info_once", "warning_advice")
    logs = {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}
    settings = {**SETTINGS, "specialize_float": whole, "ignore_logging_functions": logs}
    with dynamo_config.patch(**settings), known_to_dynamo(kwargs):
        yield


def _call(forward: Any, args: Any, kwargs: Any) -> Any:
    """The function that is compiled."""
    return forward(*args, **kwargs)


_numbers: Final = itertools.count(1)
# Torch 2.11 cannot write down its settings with the functions of loggers among them, and says so in twenty lines.
logging.getLogger("torch._dynamo.metrics_context").disabled = True


def compile_joint(
    module: fx.GraphModule, examples: Sequence[Any], kind: str, left_out: Collection[int], **compilers: Any
) -> Compiled:
    """Compile what dynamo gave to its backend by way of its joint graph, with torch's kernels whole.

    Args:
        left_out: numbers of outputs that have no gradient.
        compilers: `fw_compiler`, `bw_compiler`, `inference_compiler` and `partition_fn` of AOTAutograd.

    Raises:
        CaptureError: see `check_graph`.
    """
    check_graph(module)
    compiler = backend_aot_autograd(**compilers, decompositions={}, keep_inference_input_mutations=True)
    with (
        whole_kernels(),
        idle_dropout(),
        true_results(),
        casts_cached(module, kind),
        _detached(module, left_out),
        functorch_config.patch(backward_pass_autocast="off"),  # which runs outside of the region
    ):
        return compiler(module, examples)


def kind_of(examples: Sequence[Any]) -> str:
    """The type of the device that a graph's inputs are on."""
    kinds = (x.device.type for x in examples if isinstance(x, torch.Tensor))
    return next((k for k in kinds if k != "cpu"), "cpu")


def differentiable(module: fx.GraphModule) -> dict[int, int]:
    """The outputs of dynamo's graph that a loss could differentiate: number among those that are tensors -> place among
    all."""
    vals = output_values(module)
    tensors = [k for k, x in enumerate(vals) if isinstance(x, torch.Tensor)]
    return {n: k for n, k in enumerate(tensors) if vals[k].requires_grad}


def output_values(module: fx.GraphModule) -> list[Any]:
    """The values of the outputs of dynamo's graph: fake tensors, sizes, constants."""
    (output,) = module.graph.find_nodes(op="output")
    return [x.meta.get("example_value") if isinstance(x, fx.Node) else x for x in output.args[0]]


@contextlib.contextmanager
def _detached(module: fx.GraphModule, left_out: Collection[int]) -> Iterator[None]:
    """In the body the outputs of dynamo's graph with these numbers have no gradient."""
    (output,) = module.graph.find_nodes(op="output")
    before = output.args
    with module.graph.inserting_before(output):
        made = {k: module.graph.call_method("detach", (before[0][k],)) for k in left_out}
    output.args = (tuple(made.get(k, x) for k, x in enumerate(before[0])),)
    module.recompile()
    try:
        yield
    finally:
        output.args = before
        for n in made.values():
            module.graph.erase_node(n)
