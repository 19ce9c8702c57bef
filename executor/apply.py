"""Make a module that trains by a plan: the same parameters, buffers and call as the model, another step inside.

from executor import apply_plan
model = apply_plan(model, "plan.json")
for x, y in data:                                 # the loop stays as it was
    loss = criterion(model(x), y)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.matching import check_kind
from executor.rewrite import Rewritten, rewrite
from simulator.core.problem import Problem
from simulator.core.schedule import build
from tracer.build.loop import fit_tangent
from tracer.capture.capture import capture
from tracer.precision.policy import Autocast, ambient, without_autocast
from tracer.record.program import Program, program_of
from tracer.torch_api import pytree
from traces.errors import PlanError
from traces.plan import Action, Plan
from traces.trace import TraceMeta


@dataclass(slots=True)
class Engine:
    """One captured and rewritten step, for one set of argument shapes."""

    program: Program
    rewritten: Rewritten
    exact: bool  # the graph is the plan's to the byte, not only in structure
    kind: str = "cpu"  # the type of the device that it runs on


@dataclass(slots=True)
class _State:
    original: nn.Module
    plan: Plan
    engines: Engines = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return _State(copy.deepcopy(self.original, memo), self.plan)


class PlannedModule(nn.Module):
    """Mixed in before the model's own class by `apply_plan`: only `forward` differs, and only while training.

    In evaluation mode, or without gradients, the model's own forward runs. The first training call with arguments of
    new shapes captures the model again (seconds, no activation memory) and applies the plan if the graph has the
    structure that the plan was made for. A plan of a step under autocast runs under that autocast only.
    """

    _lowtide: _State

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._lowtide
        if not (self.training and torch.is_grad_enabled()):
            # The model's own code, but on this module: the original's mode is another one.
            return super().forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        kind = device_kind(self, leaves)
        check_autocast(state.plan, ambient(kind), kind)
        engine = engine_for(state, self, leaves, spec, cache=torch.is_autocast_cache_enabled())
        return _run(engine, self, [x for x in leaves if isinstance(x, torch.Tensor)])


Engines = dict[Any, Engine]  # by the arguments and the state of the model that they are for


def engines_of(planned: nn.Module) -> Engines:
    """What a module has captured and rewritten so far, and what it captures from now on."""
    assert isinstance(planned, PlannedModule)
    return planned._lowtide.engines


def apply_plan(model: nn.Module, plan: Plan | str | Path) -> nn.Module:
    """A module that shares the model's parameters, buffers and submodules and trains by `plan`.

    The result has the model's class among its bases, its `state_dict` keys and its call signature, and returns what
    the model returns. The model itself is left as it is.

    Args:
        model: in the state in which it will train; on CPU or CUDA.
        plan: a Plan or the path of one.

    Raises:
        PlanError: the file is no plan; at the first training call, the plan belongs to another model; at any, it
            was made under another state of autocast.
        CaptureError: at the first training call, the model cannot be captured.
    """
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    planned = copy.copy(model)
    kind = type(model)
    planned.__class__ = type(
        f"Planned{kind.__name__}", (PlannedModule, kind), {"__module__": kind.__module__}
    )
    object.__setattr__(planned, "_lowtide", _State(model, plan))
    return planned


def planned_otherwise(planned: nn.Module, plan: Plan) -> nn.Module:
    """The same model under another plan; what was captured for the first is not captured again.

    Raises:
        PlanError: the plan is for a graph of another structure.
    """
    assert isinstance(planned, PlannedModule)
    state = planned._lowtide
    other = apply_plan(state.original, plan)
    assert isinstance(other, PlannedModule)
    other._lowtide.engines.update(
        (key, engine_of(engine.program, plan, engine.kind)) for key, engine in state.engines.items()
    )
    return other


def capture_now(planned: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Engine:
    """Capture and rewrite for these arguments without running anything, as the first training call would.

    Raises:
        PlanError, CaptureError: as that call would.
    """
    assert isinstance(planned, PlannedModule)
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    return engine_for(planned._lowtide, planned, leaves, spec)


def engine_for(
    state: _State, module: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec, *, cache: bool = True
) -> Engine:
    """The engine for these arguments, made at their first use, under the plan's autocast.

    Args:
        cache: whether autocast keeps the casts of parameters, as it does unless told otherwise.
    """
    autocast = Autocast(dtype=state.plan.meta.amp, kind=device_kind(module, leaves), cache=cache)
    key = (
        spec,
        tuple((x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else repr(x)
              for x in leaves),
        tuple((p.requires_grad, p.dtype) for p in module.parameters()),
        tuple(m.training for m in module.modules()),
        next((p.device for p in module.parameters()), None),
        autocast,
    )  # fmt: skip
    if key not in state.engines:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        state.engines[key] = make_engine(state.original, args, kwargs, state.plan, autocast)
    return state.engines[key]


def device_kind(module: nn.Module, leaves: Sequence[Any]) -> str:
    """The type of the device that a model runs on: that of its arguments, or without any, of its parameters."""
    tensors = (x for x in (*leaves, *module.parameters()) if isinstance(x, torch.Tensor))
    return next((x.device.type for x in tensors), "cpu")


def check_autocast(plan: Plan, now: Autocast, kind: str) -> None:
    """Raise PlanError if a model is called under another autocast than the plan's step."""
    if now.dtype == plan.meta.amp:
        return
    made = Autocast(dtype=plan.meta.amp, kind=kind)
    call = f"call the model inside `with {made}:`" if made.dtype else "call the model outside of autocast"
    record = f"with --amp {now.dtype}" if now.dtype else "without --amp"
    raise PlanError(
        f"the plan was made for a step under {made}, and this call is under {now}; {call}, or trace the step "
        f"{record} and plan again."
    )


def make_engine(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], plan: Plan, autocast: Autocast
) -> Engine:
    """Capture the model for these arguments under autocast, check that the plan is for it, and rewrite.

    Raises:
        PlanError: the graph has another structure than the plan's, or the plan is for a GPU and the model is on the
            CPU.
    """
    check_kind(plan.meta, next((p.device.type for p in model.parameters()), "cpu"))
    wanted = set(plan.meta.grad_outputs)

    def gradient_flags(outputs: Any) -> list[bool]:
        flags, number = [], 0
        for x in pytree.tree_leaves(outputs):
            if isinstance(x, torch.Tensor):
                flags.append(number in wanted and x.requires_grad)
                number += 1
            else:
                flags.append(False)
        return flags

    mode = model.training
    model.training = True
    try:
        program = program_of(capture(model, args, kwargs, gradient_flags, autocast=autocast))
    finally:
        model.training = mode
    return engine_of(program, plan, autocast.kind)


def engine_of(program: Program, plan: Plan, kind: str = "cpu") -> Engine:
    """Rewrite a program by a plan; raises PlanError if the plan is for a graph of another structure."""
    exact = program.fingerprint() == plan.meta.graph_fingerprint
    if not exact and program.fingerprint(sizes=False) != plan.meta.structure_fingerprint:
        raise PlanError(
            f"the plan was made for another graph: {describe(plan.meta)}, structure {plan.meta.structure_fingerprint}; "
            f"this model's has {len(program.ops)} ops and structure {program.fingerprint(sizes=False)}. Trace this "
            "model with this version of torch and this device, and plan again."
        )
    schedule = build(Problem(program.trace()), program_actions(plan, program))
    return Engine(program=program, rewritten=rewrite(program, schedule), exact=exact, kind=kind)


def program_actions(plan: Plan, program: Program) -> tuple[Action, ...]:
    """The plan's actions with op ids of the captured graph alone instead of those of the whole step.

    Between its forward and its backward the user's loss code runs, which takes nothing that may be evicted: what goes
    there is absent when backward begins, as what goes with the last op of forward is.
    """
    last_forward, first_backward = plan.meta.forward_ops - 1, plan.meta.first_backward_graph_op

    def local(op: int) -> int:
        return op - (first_backward - last_forward - 1) if op >= first_backward else min(op, last_forward)

    def locals_of(a: Action) -> tuple[int, ...]:
        return tuple(sorted({c for o in a.evict_after if (c := local(o)) < len(program.ops)}))

    return tuple(replace(a, evict_after=locals_of(a)) for a in plan.actions)


def describe(meta: TraceMeta) -> str:
    """A trace in a few words, for messages."""
    amp = f", autocast {meta.amp}" if meta.amp else ""
    return (
        f"{meta.model}, batch size {meta.batch_size}{amp}, torch {meta.torch_version}, device {meta.device}"
    )


def _run(engine: Engine, module: nn.Module, tensors: list[torch.Tensor]) -> Any:
    captured = engine.program.captured
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    inputs = [parameters[n] for n in captured.parameters] + [buffers[n] for n in captured.buffers] + tensors
    passing = _Passing(engine)
    token = _Model.apply(passing, *inputs)
    outputs, passing.outputs = passing.outputs, []
    results = list(_Outputs.apply(passing, token, *outputs))
    del outputs
    anchor = results[captured.grad_outputs[0]]
    for k in captured.other_outputs:
        results[k] = _Unplanned.apply(results[k], anchor, k)
    return captured.outputs_from(results)


@dataclass(slots=True)
class _Passing:
    """What one training step hands from one autograd function to the next, beside autograd's own tensors."""

    engine: Engine
    outputs: list[torch.Tensor] = field(default_factory=list)
    saved: list[torch.Tensor] | None = None
    tangents: list[torch.Tensor] = field(default_factory=list)


class _Model(torch.autograd.Function):
    """Runs the rewritten modules.

    Saved values travel in a list that backward empties as it goes, so that each is freed at its last use: what
    `save_for_backward` keeps lives until the whole backward has returned, and so do the gradients that autograd
    passes to a function. Those therefore arrive in a list too, by way of `_Outputs`, and autograd itself only passes
    an empty token.
    """

    @staticmethod
    def forward(ctx: Any, passing: _Passing, *inputs: torch.Tensor) -> torch.Tensor:
        # The casts are ops of the graph; autocast around this call must not add others.
        with without_autocast():
            outputs, saved = passing.engine.rewritten.forward(list(inputs))
        passing.outputs, passing.saved = list(outputs), list(saved)
        ctx.passing = passing
        return inputs[0].new_empty(0) if inputs[0].is_floating_point() else torch.empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _token: torch.Tensor) -> Any:
        passing: _Passing = ctx.passing
        values, passing.saved = passing.saved, None
        if values is None:
            raise PlanError(
                "backward ran twice through a planned step, whose saved values are freed as it goes; run the "
                "model again, or use it without a plan where the graph must be retained."
            )
        if torch.is_autocast_enabled(passing.engine.kind):
            raise PlanError(
                "backward of a planned step was called under autocast, which would cast in the untouched model's "
                "backward too; leave the region before loss.backward(), as torch recommends."
            )
        values += passing.tangents
        passing.tangents = []
        parameter_grads, argument_grads = passing.engine.rewritten.backward(values)
        buffers = (None,) * len(passing.engine.program.captured.buffers)
        return (None, *parameter_grads, *buffers, *argument_grads)


class _Outputs(torch.autograd.Function):
    """Makes the model's outputs of what `_Model` computed, and in backward puts their gradients aside for it."""

    @staticmethod
    def forward(ctx: Any, passing: _Passing, token: torch.Tensor, *outputs: torch.Tensor) -> Any:
        captured = passing.engine.program.captured
        ctx.passing = passing
        ctx.set_materialize_grads(False)
        out = tuple(x.view_as(x) for x in outputs)
        ctx.mark_non_differentiable(*(x for k, x in enumerate(out) if k not in captured.grad_outputs))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: Any) -> Any:
        passing: _Passing = ctx.passing
        captured = passing.engine.program.captured
        holders = [n for n in captured.placeholders if "tangent_of" in n.meta]
        passing.tangents = [
            fit_tangent(tangents[k], n.meta["val"])
            for k, n in zip(captured.grad_outputs, holders, strict=True)
        ]
        return (None, passing.tangents[0].new_empty(0), *(None for _ in captured.outputs))


class _Unplanned(torch.autograd.Function):
    """An output that the plan's loss does not differentiate: readable, but a loss that uses it must not pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise PlanError(
            f"the loss differentiates output {ctx.number} of the model, and the plan was made for a loss that does "
            "not; trace the step with this loss and plan again."
        )
