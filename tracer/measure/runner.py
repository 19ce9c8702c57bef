"""Training steps in which every op is watched, inside the ordinary training loop.

One dispatch mode shows all ops to a probe: those of the captured model, which runs as generated code, each value
released after its last use, and those of the loss code, autograd and the optimizer around it. Of a loop that calls the
model several times before the optimizer's step, the probe watches what the trace is of: the last call and what follows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from tracer.measure.probes import Probe
from tracer.precision.policy import without_autocast
from tracer.record.draft import Draft
from tracer.record.eager import IN_PLACE, in_place, is_op
from tracer.record.program import GraphOp, Program, inplace_twin
from tracer.step.loop import TrainingStep, fit_tangent, run_step
from tracer.step.user_errors import explained
from tracer.torch_api import BoxedCodeGen, TorchDispatchMode, disable_current_modes, pytree

Code = Callable[[list[Any]], tuple[Sequence[Any], Sequence[Any]]]


class GraphRunner:
    """Runs training steps, real ones, in which the captured model of a recorded step takes the model's place."""

    def __init__(self, draft: Draft, step: TrainingStep) -> None:
        self.program, self.step = draft.program, step
        self._recorded = [row.target for row in draft.rows]
        twins = takeovers(draft)
        self._twins = {str(node.target): str(inplace_twin(node.target)) for node in twins}
        # As the step with everything kept runs it; and with each op as the graph has it.
        self._kept, self._plain = step_code(self.program, twins), step_code(self.program, frozenset())
        self._calls = 1  # of the model in a step, once the first has counted them

    def first(self, probe: Probe) -> None:
        """The first training step, in which the probe watches every call of the model."""
        self._calls = self._run(probe, 1)

    def round(self, probe: Probe) -> None:
        """One training step. A probe that takes times sees ops write into their input where its memory is free."""
        self._run(probe, self._calls)

    def whole(self, at_last_call: Callable[[], object]) -> None:
        """One training step that nobody watches; told when the last of several calls of the model begins."""
        self._run(None, self._calls, at_last_call)

    def _run(self, probe: Probe | None, since: int, at_since: Callable[[], object] = lambda: None) -> int:
        mode = None if probe is None else _Watched(probe, self._recorded, self._twins, watches=since == 1)
        code = self._kept if probe is None or probe.times else self._plain
        calls = 0

        def model(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if not torch.is_grad_enabled():
                return self.step.model(*args, **kwargs)
            calls += 1
            if calls == since > 1:
                at_since()
                if mode is not None:
                    mode.watches = True
            return self._call(code, mode, args, kwargs)

        with explained(self.step.name), mode or contextlib.nullcontext():
            run_step(self.step, model, self.step.optimizer)
        return calls

    def _call(self, code: tuple[Code, Code], mode: _Watched | None, args: Any, kwargs: Any) -> Any:
        """Call the captured model as the model is."""
        captured, model = self.program.captured, self.step.model
        leaves = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        tensors = dict.fromkeys(leaves)  # one that is given twice is one input of the graph
        own = captured.tensors_of(dict(model.named_parameters()), dict(model.named_buffers()))
        running: Any = contextlib.nullcontext if mode is None else mode.running_the_graph

        class Model(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *values: torch.Tensor) -> Any:
                with running(), without_autocast():
                    results, ctx.state = code[0](list(values))
                with disable_current_modes():
                    # An input, or one tensor twice, would get a view from autograd, which is no op of the step.
                    before = [{id(x) for x in (*values, *results[:k])} for k in range(len(results))]
                    outs = tuple(
                        x.detach() if id(x) in b else x for x, b in zip(results, before, strict=True)
                    )
                del results
                ctx.mark_non_differentiable(
                    *(x for k, x in enumerate(outs) if k not in captured.grad_outputs)
                )
                ctx.set_materialize_grads(False)
                return outs

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
                    parameters, arguments = code[1](given)
                return (*parameters, *(None for _ in captured.buffers), *arguments)

        return captured.outputs_from(Model.apply(*own, *tensors))


class _Watched(TorchDispatchMode):
    """Shows every op to the probe, by the name that it was recorded by: one that writes into its input in the graph, by
    that of its functional twin. Autograd, which writes in place where no mode is, does as recorded."""

    def __init__(
        self, probe: Probe, recorded: Sequence[str], twins: dict[str, str], *, watches: bool
    ) -> None:
        super().__init__()
        self.probe, self.recorded, self.twins, self.watches = probe, recorded, twins, watches
        self._in_graph = False

    @contextlib.contextmanager
    def running_the_graph(self) -> Iterator[None]:
        """The body runs ops of the graph, whatever their kind."""
        self._in_graph = True
        try:
            yield
        finally:
            self._in_graph = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counts = self._in_graph or (func is not torch.ops.aten._local_scalar_dense.default and is_op(func))
        if not self.watches or not counts:
            return func(*args, **kwargs)
        k = len(self.probe.targets)
        wanted = self.recorded[k] if k < len(self.recorded) else ""
        if func in IN_PLACE and wanted == str(IN_PLACE[func]):
            func, args = in_place(func, args)
        name = wanted if self.twins.get(wanted) == str(func) else str(func)
        return self.probe.run(name, lambda: func(*args, **kwargs))


def takeovers(draft: Draft) -> frozenset[fx.Node]:
    """The program's ops that write into their input's memory in the step with everything kept, as its schedule has it:
    nothing else reads that storage afterwards, and nothing holds it."""
    last: dict[int, int] = {}
    for i, row in enumerate(draft.rows):
        last.update(dict.fromkeys(row.reads, i))
    return frozenset(
        op.node
        for op, i in zip(draft.program.ops, draft.graph_ops, strict=True)
        if (s := draft.rows[i].overwrites) >= 0 and last[s] == i and draft.storages[s].hold <= i
    )


def step_code(program: Program, in_place: frozenset[fx.Node]) -> tuple[Code, Code]:
    """The code of a program, of forward and of backward.

    Forward takes the values of parameters, buffers and arguments in one list, which it empties, and returns the
    model's outputs and the values that backward needs. Backward takes those and the tangents in one list, which it
    empties, and returns the gradients of the parameters and of the arguments, None where there is none.

    Args:
        in_place: the ops whose in-place twin runs instead.
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
            target = inplace_twin(n.target) if n in in_place else n.target
            copies[n] = graph.call_function(target, args, kwargs)
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
