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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.training.autograd import run
from executor.training.engines import Engine, Engines, check_autocast, device_kind, engine_for, engine_of
from tracer.precision.policy import ambient
from tracer.torch_api import pytree
from traces.plan import Plan


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
        engine = engine_for(
            state.engines,
            state.plan,
            state.original,
            self,
            leaves,
            spec,
            cache=torch.is_autocast_cache_enabled(),
        )
        return run(engine, self, [x for x in leaves if isinstance(x, torch.Tensor)])


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
    state = planned._lowtide
    return engine_for(state.engines, state.plan, state.original, planned, leaves, spec)
