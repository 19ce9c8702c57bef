"""A training step whose model and loss function are one module, so that both are captured as one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from tracer.step.batch import WithTargets, loss_in_outputs
from tracer.step.loop import TrainingStep, scalar


class WithLoss(nn.Module):
    """Calls a model and returns the loss of what it returns."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.training = model.training

    def around(self) -> dict[str, Any]:
        """Return what the loss function names in its closure and among globals, with what its functions there name."""
        return around(self.loss.forward if isinstance(self.loss, nn.Module) else self.loss)

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_inputs: tuple[Any, ...]
    ) -> torch.Tensor:
        return scalar(self.loss(self.model(*args, **kwargs), *loss_inputs), type(self.model).__name__)


def around(*functions: Any) -> dict[str, Any]:
    """Return what functions name in their closures and among globals, with what the functions there name; torch's own
    are left out.
    """
    found: dict[str, Any] = {}

    def see(function: Any) -> None:
        function = function.func if isinstance(function, partial) else function
        function = function.__func__ if isinstance(function, MethodType) else function
        own = isinstance(function, FunctionType) and not (function.__module__ or "").startswith("torch.")
        if not own or function.__qualname__ in found:
            return
        found[function.__qualname__] = function
        code, space = function.__code__, function.__globals__
        named = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        held = {n: x.cell_contents for n, x in named.items() if x != CellType()}
        for name, value in ({n: space[n] for n in code.co_names if n in space} | held).items():
            see(value)
            if not isinstance(value, ModuleType):
                found[f"{name} of {function.__qualname__}"] = value

    for function in functions:
        see(function)
    return found


def can_be_joined(step: TrainingStep) -> bool:
    """Return whether the loss is a function of what the model returns and of what of the batch it is called with."""
    apart = step.own is None and step.loss is not loss_in_outputs
    return apart and (isinstance(step.loss, WithTargets) or not step.loss_inputs)


def joined(step: TrainingStep) -> TrainingStep:
    """Return the same step of one module (`WithLoss`), whose arguments hold what the loss sees, too."""
    function = step.loss.function if isinstance(step.loss, WithTargets) else step.loss
    return replace(
        step,
        model=WithLoss(step.model, function),
        args=(step.args, step.kwargs, step.loss_inputs),
        kwargs={},
        loss=loss_in_outputs,
        loss_inputs=(),
        loss_parameters={},
    )
