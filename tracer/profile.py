"""Measure a training step op by op on the real device: the time of each, and what it allocates while it runs.

The captured model runs node by node as the graph has it, every value dropped after its last use, inside the ordinary
training loop; the loss code and the optimizer run under a dispatch mode. So each op of the fake trace is measured once
per round, in the same order, and its row gets the median time and the allocations.

In the timed rounds an op works in place where the step with everything kept does: it writes into its input's memory,
and is the faster for it. The round that shows the allocations runs every op as the graph has it.

On CUDA the first round also shows what libraries allocate once and keep (cuBLAS): these become storages of the category
"workspace" that are there throughout the step.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tracer.blame import explained
from tracer.calibration import MEASURED
from tracer.cuda_history import History
from tracer.device_profiles import with_workspaces
from tracer.eager import is_op
from tracer.loop import fit_tangent, run_step
from tracer.precision import without_autocast
from tracer.probes import CpuTimer, CudaHistory, CudaTimer, Probe, cpu_allocations, settle
from tracer.program import Program, inplace_twin
from tracer.spec import BuildStep, TrainingStep
from tracer.step import Recorded
from traces.errors import TraceError
from traces.profile import LibraryWorkspace
from traces.trace import VIEW, Trace

PATIENCE = 40  # rounds in which a gradient scaler may lower its scale until a step is taken
SPREAD = 1.5  # slowest over fastest round from which a warning is due


def measure(recorded: Recorded, build: BuildStep, device: str, *, rounds: int = 5, warmup: int = 2) -> Trace:
    """The recorded trace with measured times and allocations.

    Args:
        recorded: the fake trace of the same step on the same device.
        build: makes the step; here it makes it for real.
        device: "cpu" or "cuda".
        rounds: timed rounds, of which the median counts.
        warmup: rounds before the first timed one.

    Raises:
        TraceError: the real step ran other ops than the recorded one.
        CaptureError: the real step's loss code or optimizer failed.
    """
    cuda = device.startswith("cuda")
    step = build(device)
    runner = GraphRunner(recorded.program, step, in_place=takeovers(recorded))
    kept = _first_cuda_round(runner) if cuda else ()
    for _ in range(max(warmup, 1) - (1 if cuda else 0)):
        runner.round(CpuTimer())
    runner.settle(recorded.trace.ops.target)
    samples: list[list[int]] = []
    targets: list[str] = []
    for k in range(rounds):
        timer: Any = CudaTimer() if cuda else CpuTimer()
        runner.round(timer)
        samples.append(timer.finish())
        targets = timer.targets
        if sys.stderr.isatty():
            sys.stderr.write(f"\rmeasuring: round {k + 1} of {rounds}")
    if sys.stderr.isatty():
        sys.stderr.write("\r" + " " * 40 + "\r")
    totals = [sum(s) for s in samples]
    if max(totals) > SPREAD * min(totals):
        sys.stderr.write(
            f"warning: the rounds took between {min(totals) / 1e6:.0f} and {max(totals) / 1e6:.0f} ms; the machine is "
            "busy, and the times of this trace are not reliable (its sizes are).\n"
        )
    expected = list(recorded.trace.ops.target)
    _compare(expected, targets)
    events = _cuda_round(runner).events if cuda else cpu_allocations(runner.round, len(expected))
    times = [int(statistics.median(column)) for column in zip(*samples, strict=True)]
    trace = _filled(recorded.trace, times, events, device)
    return with_workspaces(trace, kept) if cuda else trace


def takeovers(recorded: Recorded) -> frozenset[int]:
    """The program's ops that write into their input's memory in the step with everything kept, as its schedule has it:
    nothing else reads that storage afterwards, and nothing holds it."""
    ops, hold = recorded.trace.ops, recorded.trace.storages.hold
    last: dict[int, int] = {}
    for i, reads in enumerate(ops.reads):
        last.update(dict.fromkeys(reads, i))
    return frozenset(
        k
        for k, i in enumerate(recorded.graph_ops)
        if (s := ops.overwrites[i]) >= 0 and last[s] == i and hold[s] <= i
    )


def _first_cuda_round(runner: GraphRunner) -> tuple[LibraryWorkspace, ...]:
    """The first round, in which libraries make their workspaces; those of earlier work in this process are dropped."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    return _cuda_round(runner).workspaces


def _cuda_round(runner: GraphRunner) -> History:
    history = CudaHistory()
    with history.recording():
        runner.round(history)
    return history.finish()


def _compare(expected: list[str], real: list[str]) -> None:
    if expected == real:
        return
    k = next(
        (k for k, (a, b) in enumerate(zip(expected, real, strict=False)) if a != b),
        min(len(expected), len(real)),
    )
    a = expected[k] if k < len(expected) else "nothing"
    b = real[k] if k < len(real) else "nothing"
    raise TraceError(
        f"the real step differs from the captured one: op {k} is {b} and was to be {a} ({len(real)} ops, "
        f"{len(expected)} captured). Code outside the model that branches on data cannot be traced in real mode."
    )


def _filled(trace: Trace, times: list[int], events: Sequence[tuple[int, ...]], device: str) -> Trace:
    ops, sts = trace.ops, trace.storages
    fixed = []
    for i in range(len(ops)):
        created = sum(sts.nbytes[s] for s in ops.writes[i] if sts.producer[s] == i)
        fixed.append(settle(events[i], created))
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    return replace(
        trace,
        ops=replace(ops, time_ns=tuple(times), events=tuple(fixed)),
        meta=replace(
            trace.meta,
            mode="real",
            device=device,
            alloc_conf=_alloc_conf() if device.startswith("cuda") else "",
            threads=0 if device.startswith("cuda") else torch.get_num_threads(),
            target=name,
            workspace={MEASURED: sum(1 for f in ops.flags if not f & VIEW)},
        ),
    )


def _alloc_conf() -> str:
    """The settings of CUDA's allocator, under either name of the variable."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


# ---------------------------------------------------------------------------------------------------------------------
# Running the graph node by node


class GraphRunner:
    """Runs training steps in which the captured model is executed op by op under a probe."""

    def __init__(self, program: Program, step: TrainingStep, in_place: frozenset[int] = frozenset()) -> None:
        """in_place: the program's ops whose in-place twin runs under a probe that measures time."""
        self.program = program
        self.step = step
        self._twins = {program.ops[k].node: inplace_twin(program.ops[k].node.target) for k in in_place}
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

    def settle(self, targets: Sequence[str]) -> None:
        """Run steps until a gradient scaler takes one that is as recorded.

        It begins with a scale that may make gradients overflow; such a step leaves the optimizer out.
        """
        for _ in range(PATIENCE if self.step.scaler is not None else 0):
            timer = CpuTimer()
            self.round(timer)
            if timer.targets == list(targets):
                return

    def execute(self, env: dict[fx.Node, Any], ops: Any, probe: Probe, keep: set[fx.Node]) -> None:
        gm = self.program.captured.graph_module

        def value(n: fx.Node) -> Any:
            return getattr(gm, str(n.target)) if n.op == "get_attr" else env[n]

        for op in ops:
            args, kwargs = fx.node.map_arg((op.node.args, op.node.kwargs), value)
            target = op.node.target
            # A twin has its op's place and name.
            runs = self._twins.get(op.node, target) if probe.times else target
            out = probe.run(target, functools.partial(runs, *args, **kwargs))
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

    def __init__(self, runner: GraphRunner, probe: Probe, eager: _EagerProbe) -> None:
        self.runner, self.probe, self.eager = runner, probe, eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner, probe, eager = self.runner, self.probe, self.eager
        program, captured, model = runner.program, runner.program.captured, runner.step.model
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        inputs = (
            [parameters[n] for n in captured.parameters] + [buffers[n] for n in captured.buffers] + tensors
        )
        placeholders = captured.placeholders
        holders = [n for n in placeholders if "tangent_of" in n.meta]

        class Model(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *values: torch.Tensor) -> Any:
                env = dict(zip(placeholders, values, strict=False))
                with eager.paused(), without_autocast():
                    runner.execute(env, program.ops[: program.forward_ops], probe, runner._outputs)
                outs = tuple(env[n] for n in captured.outputs)
                ctx.env = {n: x for n, x in env.items() if n in runner._crossing}
                ctx.mark_non_differentiable(
                    *(x for k, x in enumerate(outs) if k not in captured.grad_outputs)
                )
                ctx.set_materialize_grads(False)
                return outs

            @staticmethod
            def backward(ctx: Any, *tangents: Any) -> Any:
                env, ctx.env = ctx.env, None
                for k, n in zip(captured.grad_outputs, holders, strict=True):
                    env[n] = fit_tangent(tangents[k], n.meta["val"])
                with eager.paused():
                    runner.execute(env, program.ops[program.forward_ops :], probe, set())
                grads = [
                    None if g is None else env[g]
                    for g in (*captured.parameter_grads, *captured.argument_grads)
                ]
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
        return _disable_current_modes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default or not is_op(func):
            return func(*args, **kwargs)
        return self.probe.run(func, lambda: func(*args, **kwargs))
