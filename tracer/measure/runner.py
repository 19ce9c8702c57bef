"""Run training steps in which every op of the captured model can be watched, inside the ordinary training loop.

Under a timer the model runs as code that ticks after each op (`tracer.measure.stepcode`); under any other
probe it runs node by
node as the graph has it, every value dropped after its last use. The loss code and the optimizer run under a dispatch
mode.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tracer.build.loop import TrainingStep, fit_tangent, run_step
from tracer.build.user_errors import explained
from tracer.measure.probes import Names, Probe, Timer
from tracer.measure.stepcode import StepCode, step_code
from tracer.precision.policy import without_autocast
from tracer.record.eager import is_op
from tracer.record.program import Program
from tracer.torch_api import TorchDispatchMode, disable_current_modes, pytree

PATIENCE = 40  # rounds in which a gradient scaler may lower its scale until a step is taken


class GraphRunner:
    """Runs training steps in which the captured model is executed op by op under a probe."""

    def __init__(self, program: Program, step: TrainingStep, in_place: frozenset[int] = frozenset()) -> None:
        """in_place: the program's ops whose in-place twin runs under a timer."""
        self.program = program
        self.step = step
        self._in_place = in_place
        self._targets = [str(op.node.target) for op in program.ops]
        self._codes: dict[Timer, StepCode] = {}
        captured = program.captured
        self._position = {op.node: k for k, op in enumerate(program.ops)}
        last: dict[fx.Node, fx.Node] = {}
        for op in program.ops:
            for a in op.node.all_input_nodes:
                last[a] = op.node
        # What backward returns is needed to the end.
        finals = {g for g in (*captured.parameter_grads, *captured.argument_grads) if g is not None}
        self._dies: dict[fx.Node, list[fx.Node]] = {}
        for n, user in last.items():
            if n not in finals and n.op != "get_attr":
                self._dies.setdefault(user, []).append(n)
        self._unused = {m for op in program.ops for m in (op.node, *op.parts) if m not in last} - finals
        self._outputs = set(captured.outputs)
        self._crossing = {
            n for n, user in last.items()
            if self._position[user] >= program.forward_ops
        }  # fmt: skip

    def round(self, probe: Probe) -> None:
        """One training step."""
        with explained(self.step.name), _EagerProbe(probe) as eager:
            run_step(self.step, _Callable(self, probe, eager), self.step.optimizer)

    def whole(self, timer: Timer) -> None:
        """One training step in which the timer, if it watches at all, watches the captured model's ops only."""
        with explained(self.step.name):
            run_step(self.step, _Callable(self, timer, None), self.step.optimizer)
        timer.finish()

    def settle(self, targets: Sequence[str]) -> None:
        """Run steps until a gradient scaler takes one that is as recorded.

        It begins with a scale that may make gradients overflow; such a step leaves the optimizer out.
        """
        for _ in range(PATIENCE if self.step.scaler is not None else 0):
            names = Names()
            self.round(names)
            if names.targets == list(targets):
                return

    def forward(self, values: Sequence[Any], probe: Probe) -> tuple[Sequence[Any], Any]:
        """The model's outputs, and what backward needs of it."""
        program, captured = self.program, self.program.captured
        if isinstance(probe, Timer):
            code = self._coded(probe)
            probe.targets += self._targets[: program.forward_ops]
            given = list(values)
            probe.begin()
            return code.forward(given)
        env = dict(zip(captured.placeholders, values, strict=False))
        self.execute(env, program.ops[: program.forward_ops], probe, self._outputs)
        return [env[n] for n in captured.outputs], {n: x for n, x in env.items() if n in self._crossing}

    def backward(self, state: Any, tangents: Sequence[Any], probe: Probe) -> list[Any]:
        """The gradients of the parameters and then of the arguments; `state` is what forward said that it needs."""
        program, captured = self.program, self.program.captured
        if isinstance(probe, Timer):
            code = self._coded(probe)
            probe.targets += self._targets[program.forward_ops :]
            given = [*state, *tangents]
            state.clear()
            probe.begin()
            return [g for group in code.backward(given) for g in group]
        holders = [n for n in captured.placeholders if "tangent_of" in n.meta]
        state.update(zip(holders, tangents, strict=True))
        self.execute(state, program.ops[program.forward_ops :], probe, set())
        wanted = (*captured.parameter_grads, *captured.argument_grads)
        return [None if g is None else state[g] for g in wanted]

    def _coded(self, timer: Timer) -> StepCode:
        if timer not in self._codes:
            self._codes[timer] = step_code(self.program, self._in_place, timer.tick)
        return self._codes[timer]

    def execute(self, env: dict[fx.Node, Any], ops: Any, probe: Probe, keep: set[fx.Node]) -> None:
        gm = self.program.captured.graph_module

        def value(n: fx.Node) -> Any:
            return getattr(gm, str(n.target)) if n.op == "get_attr" else env[n]

        for op in ops:
            args, kwargs = fx.node.map_arg((op.node.args, op.node.kwargs), value)
            target = op.node.target
            out = probe.run(target, functools.partial(target, *args, **kwargs))
            del args, kwargs
            values = {op.node: out}
            for part in op.parts:
                values[part] = operator.getitem(values[part.args[0]], part.args[1])
            del out
            env.update((n, x) for n, x in values.items() if n not in self._unused or n in keep)
            del values
            if op.parts and op.node in env:
                del env[op.node]
            for n in self._dies.get(op.node, ()):
                if n not in keep:
                    env.pop(n, None)


class _Callable:
    """Called as the model is; runs the graph under the probe."""

    def __init__(self, runner: GraphRunner, probe: Probe, eager: _EagerProbe | None) -> None:
        self.runner, self.probe, self.eager = runner, probe, eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner, probe = self.runner, self.probe
        unwatched = contextlib.nullcontext if self.eager is None else self.eager.paused
        captured, model = runner.program.captured, runner.step.model
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        inputs = (
            [parameters[n] for n in captured.parameters] + [buffers[n] for n in captured.buffers] + tensors
        )
        holders = [n for n in captured.placeholders if "tangent_of" in n.meta]

        class Model(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *values: torch.Tensor) -> Any:
                with unwatched(), without_autocast():
                    results, ctx.state = runner.forward(values, probe)
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
                    for k, n in zip(captured.grad_outputs, holders, strict=True)
                ]
                with unwatched():
                    grads = runner.backward(state, fitting, probe)
                n_parameters = len(captured.parameters)
                return (*grads[:n_parameters], *(None for _ in captured.buffers), *grads[n_parameters:])

        return captured.outputs_from(Model.apply(*inputs))


class _EagerProbe(TorchDispatchMode):
    """Puts the probe around the ops outside the captured model."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.probe = probe

    def paused(self) -> contextlib.AbstractContextManager[Any]:
        """A context without this mode, in which ops take their usual path."""
        return disable_current_modes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default or not is_op(func):
            return func(*args, **kwargs)
        return self.probe.run(func, lambda: func(*args, **kwargs))
