"""Training steps in which every op of the captured model is watched, inside the ordinary training loop.

The model runs as code (`tracer.measure.stepcode`): under a timer as it does outside a trace, with ops in place, under
any other probe as the graph has it. The loss code and the optimizer run under a dispatch mode. Of a loop that calls the
model several times before the optimizer's step, the probe watches what the trace is of: the last call and what follows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tracer.measure.probes import Probe, Silent, Timer
from tracer.measure.stepcode import Code, step_code
from tracer.precision.policy import without_autocast
from tracer.record.eager import IN_PLACE, in_place, is_op
from tracer.record.program import Program
from tracer.step.loop import TrainingStep, fit_tangent, run_step
from tracer.step.user_errors import explained
from tracer.torch_api import TorchDispatchMode, disable_current_modes, pytree


class GraphRunner:
    """Runs training steps in which the captured model is executed op by op under a probe."""

    def __init__(
        self,
        program: Program,
        step: TrainingStep,
        in_place: frozenset[int] = frozenset(),
        recorded: Sequence[str] = (),
    ) -> None:
        """in_place: the program's ops whose in-place twin runs under a timer; recorded: the targets of all ops of the
        recorded step."""
        self.program = program
        self.step = step
        self._in_place = in_place
        self._recorded = recorded
        self._targets = [str(op.node.target) for op in program.ops]
        self._codes: dict[Timer, tuple[Code, Code]] = {}
        self.unwatched = Silent()  # in earlier calls of the model than the last
        self._calls = 1  # of the model in a step, once the first round has counted them

    def first(self, probe: Probe) -> None:
        """The first training step, in which the probe watches every call of the model."""
        self._calls = self._run(probe, 1)

    def round(self, probe: Probe) -> None:
        """One training step."""
        self._run(probe, self._calls)

    def _run(self, probe: Probe, since: int) -> int:
        with explained(self.step.name), _EagerProbe(probe, since == 1, self._recorded) as eager:
            model = _Callable(self, probe, eager, since)
            run_step(self.step, model, self.step.optimizer)
        return model.calls

    def whole(self, timer: Timer, at_last_call: Callable[[], object] = lambda: None) -> None:
        """One training step in which the timer, if it watches at all, watches the captured model's ops only.

        at_last_call: told when the last of several calls of the model begins.
        """
        with explained(self.step.name):
            model = _Callable(self, timer, None, self._calls, at_last_call)
            run_step(self.step, model, self.step.optimizer)
        timer.finish()

    def code(self, probe: Probe) -> tuple[Code, Code]:
        """The model's code under a probe, of forward and of backward."""
        if not isinstance(probe, Timer):
            return step_code(self.program, frozenset(), run=probe.run)
        if probe not in self._codes:
            self._codes[probe] = step_code(self.program, self._in_place, tick=probe.tick)
        return self._codes[probe]

    def begin(self, probe: Probe, *, backward: bool) -> None:
        """Forward or backward follows."""
        if isinstance(probe, Timer):
            n = self.program.forward_ops
            probe.targets += self._targets[n:] if backward else self._targets[:n]
            probe.begin()


class _Callable:
    """Called as the model is; runs the graph under the probe."""

    def __init__(
        self,
        runner: GraphRunner,
        probe: Probe,
        eager: _EagerProbe | None,
        since: int,
        at_since: Callable[[], object] = lambda: None,
    ) -> None:
        """since: the call from which on the probe watches; at_since: told when that begins, if it is not the first."""
        self.runner, self.probe, self.eager = runner, probe, eager
        self.since, self.at_since, self.calls = since, at_since, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.runner.step.model(*args, **kwargs)
        self.calls += 1
        runner, probe = self.runner, self.probe if self.calls >= self.since else self.runner.unwatched
        if self.calls == self.since > 1:
            self.at_since()
            if self.eager is not None:
                self.eager.watches = True
        run_forward, run_backward = runner.code(probe)
        # Without the mode, ops take their usual path.
        unwatched: Any = contextlib.nullcontext if self.eager is None else disable_current_modes
        captured, model = runner.program.captured, runner.step.model
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        inputs = captured.tensors_of(parameters, buffers) + tensors

        class Model(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *values: torch.Tensor) -> Any:
                with unwatched(), without_autocast():
                    given = list(values)
                    runner.begin(probe, backward=False)
                    results, ctx.state = run_forward(given)
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
                with unwatched():
                    runner.begin(probe, backward=True)
                    parameters, arguments = run_backward(given)
                return (*parameters, *(None for _ in captured.buffers), *arguments)

        return captured.outputs_from(Model.apply(*inputs))


class _EagerProbe(TorchDispatchMode):
    """Puts the probe around the ops outside the captured model; autograd, which writes in place where no mode is, does
    as recorded."""

    def __init__(self, probe: Probe, watches: bool, recorded: Sequence[str]) -> None:
        super().__init__()
        self.probe, self.watches, self.recorded = probe, watches, recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.watches or func is torch.ops.aten._local_scalar_dense.default or not is_op(func):
            return func(*args, **kwargs)
        k = len(self.probe.targets)
        if func in IN_PLACE and k < len(self.recorded) and self.recorded[k] == str(IN_PLACE[func]):
            func, args = in_place(func, args)
        return self.probe.run(func, lambda: func(*args, **kwargs))
