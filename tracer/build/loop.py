"""Run one iteration of the ordinary training loop: the one that is traced, measured and verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tracer.build.step import TrainingStep
from traces.trace import BACKWARD, FORWARD, OPTIMIZER


def run_step(
    step: TrainingStep,
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> torch.Tensor:
    """One iteration of the ordinary loop, under the step's autocast and with its scaler; returns the loss.

    Args:
        step: what to run.
        model: `step.model`, or what stands in for it.
        optimizer: None leaves the parameters as they are.
        on_phase: told when forward, backward and the optimizer begin.
    """
    for p in (*step.model.parameters(), *step.loss_parameters.values(), *step.tensors()):
        p.grad = None  # a tensor of the batch may want one too; the next batch comes without
    on_phase(FORWARD)
    with step.autocast.region():
        loss = step.loss_of(model(*step.args, **step.kwargs))
    on_phase(BACKWARD)
    if step.scaler is None:
        loss.backward()
    else:
        step.scaler.scale(loss).backward()
    on_phase(OPTIMIZER)
    if optimizer is not None:
        if step.scaler is None:
            optimizer.step()
        else:
            step.scaler.step(optimizer)
            step.scaler.update()
    return loss


def fit_tangent(given: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """An incoming gradient in the layout that the backward graph was captured for; zeros if there is none."""
    if given is None:
        # Not zeros_like: `like` is the capture's fake tensor, and so would its zeros be.
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
    if given.stride() == like.stride():
        return given
    return torch.empty_strided(like.shape, like.stride(), dtype=given.dtype, device=given.device).copy_(given)
