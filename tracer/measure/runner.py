"""Training steps in which every op is watched, inside the ordinary training loop.

One dispatch mode shows all ops to a watch: those of the captured model, which runs as generated code, each value
released after its last use, and those of the loss code, autograd and the optimizer around it. Of a loop that calls the
model several times before the optimizer's step, it is shown what the trace is of: the last call and what follows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tracer.measure.probes import Watch
from tracer.record.assemble import Draft, arguments_of
from tracer.record.eager import is_op
from tracer.record.program import GraphOp, Program
from tracer.step.loop import TrainingStep, fit_tangent, run_step
from tracer.step.user_errors import explained
from tracer.torch_api import BoxedCodeGen, DisableAutocast, TorchDispatchMode, disable_current_modes, replaced

Code = Callable[[list[Any]], tuple[Sequence[Any], Sequence[Any]]]


class GraphRunner:
    """Runs training steps, real ones, in which the captured model of a recorded step takes the model's place."""

    def __init__(self, draft: Draft, step: TrainingStep) -> None:
        self.program, self.step = draft.program, step
        self._code = step_code(self.program)
        self._calls = 1  # of the model in a step, once the first has counted them

    def run(self, watch: Watch | None, at_last_call: Callable[[], object] = lambda: None) -> None:
        """One training step. The watch is shown the ops of the model's last call, and what follows; in the first step
        those of all. `at_last_call`: told when the last of several calls begins."""
        last = self._calls
        mode = None if watch is None else _Watched(watch, watches=last == 1)
        self._calls = 0

        def model(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            if self._calls == last > 1:
                at_last_call()
                if mode is not None:
                    mode.watches = True
            return self._call(mode, args, kwargs)

        with explained(self.step.name), mode or contextlib.nullcontext():
            run_step(self.step, model, self.step.optimizer)

    def _call(self, mode: _Watched | None, args: Any, kwargs: Any) -> Any:
        """Call the captured model as the model is."""
        captured, model = self.program.captured, self.step.model
        forward_code, backward_code = self._code
        own = captured.tensors_of(dict(model.named_parameters()), dict(model.named_buffers()))

        def running() -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext() if mode is None else replaced(mode, in_graph=True)

        class Model(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *values: torch.Tensor) -> Any:
                with running(), DisableAutocast():  # its casts are ops of its own
                    results, ctx.state = forward_code(list(values))
                with disable_current_modes():
                    # An input, or one tensor twice, would get a view from autograd, which is no op of the step.
                    before = [{id(x) for x in (*values, *results[:k])} for k in range(len(results))]
                    outs = tuple(
                        x.detach() if id(x) in b else x for x, b in zip(results, before, strict=True)
                    )
                del results
                return captured.marked(ctx, outs)

            @staticmethod
            def backward(ctx: Any, *tangents: Any) -> Any:
                state, ctx.state = ctx.state, None
                fitting = [
                    fit_tangent(tangents[k], n.meta["val"])
                    for k, n in zip(captured.grad_outputs, captured.tangents, strict=True)
                ]
                given = [*state, *fitting]
                state.clear()
                del fitting, tangents
                with running():
                    parameters, arguments = backward_code(given)
                return (*parameters, *(None for _ in captured.buffers), *arguments)

        return captured.outputs_from(Model.apply(*own, *arguments_of(args, kwargs)))


class _Watched(TorchDispatchMode):
    """Shows ops to the watch."""

    def __init__(self, watch: Watch, *, watches: bool) -> None:
        super().__init__()
        self.watch, self.watches = watch, watches
        self.in_graph = False  # whose ops count, whatever their kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counts = self.in_graph or (func is not torch.ops.aten._local_scalar_dense.default and is_op(func))
        if not self.watches or not counts:
            return func(*args, **kwargs)
        return self.watch.run(str(func), lambda: func(*args, **kwargs))


def step_code(program: Program) -> tuple[Code, Code]:
    """The code of a program, of forward and of backward.

    Forward takes the values of parameters, buffers and arguments in one list, which it empties, and returns the
    model's outputs and the values that backward needs. Backward takes those and the tangents in one list, which it
    empties, and returns the gradients of the parameters and of the arguments, None where there is none.
    """
    captured = program.captured
    forward, backward = program.ops[: program.forward_ops], program.ops[program.forward_ops :]
    inputs = [n for n in captured.placeholders if "tangent_of" not in n.meta]
    gradients = (list(captured.parameter_grads), list(captured.argument_grads))
    made = {n for op in forward for n in (op.node, *op.parts)} | set(inputs)
    wanted = [a for op in backward for n in (op.node, *op.parts) for a in n.all_input_nodes]
    wanted += [g for group in gradients for g in group if g is not None]
    crossing = [n for n in dict.fromkeys(wanted) if n in made]

    def code(given: Sequence[fx.Node], ops: Sequence[GraphOp], results: Any) -> Code:
        graph = fx.Graph()
        copies = {n: graph.placeholder(n.name) for n in given}

        def copy_of(n: fx.Node) -> fx.Node:
            if n.op == "get_attr" and n not in copies:
                copies[n] = graph.get_attr(str(n.target))
            return copies[n]

        for n in (n for op in ops for n in (op.node, *op.parts)):
            args, kwargs = fx.node.map_arg((n.args, n.kwargs), copy_of)
            copies[n] = graph.call_function(n.target, args, kwargs)
        graph.output(fx.node.map_arg(results, copy_of))
        # FX calls an argument by its target and everything else by its name; if the two differed for one placeholder,
        # another value could bear the name of that argument.
        assert all(n.name == n.target for n in graph.nodes if n.op == "placeholder")
        graph.set_codegen(BoxedCodeGen())
        return fx.GraphModule(captured.graph_module, graph)

    return (
        code(inputs, forward, (list(captured.outputs), crossing)),
        code([*crossing, *captured.tangents], backward, gradients),
    )
