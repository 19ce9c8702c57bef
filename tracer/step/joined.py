"""A training step whose model and loss function are one module, so that both are captured as one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tracer.step.batch import WithTargets, loss_in_outputs
from tracer.step.loop import TrainingStep, scalar
from traces.errors import SpecError


class WithLoss(nn.Module):
    """Calls a model and returns the loss of what it returns."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.training = model.training

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_inputs: tuple[Any, ...]
    ) -> torch.Tensor:
        return scalar(self.loss(self.model(*args, **kwargs), *loss_inputs), type(self.model).__name__)


def joined(step: TrainingStep) -> TrainingStep:
    """Return the same step of one module (`WithLoss`), whose arguments hold what the loss sees, too.

    Raises SpecError if the model computes its loss itself.
    """
    if step.loss is loss_in_outputs:
        raise SpecError(f"{step.name}: the model computes its loss itself, so leave --join-loss out.")
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
