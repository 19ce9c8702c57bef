"""What a framework's loop has around the model: its torch optimizer, and how it accumulates and clips gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def bare_optimizer(optimizer: Any, model: nn.Module) -> Any:
    """The torch optimizer inside one that Accelerate or Lightning has wrapped; None for none.

    One that steps more than this model's parameters is given as what makes its like for them.
    """
    seen = set()
    while id(optimizer) not in seen and hasattr(optimizer, "optimizer"):
        seen.add(id(optimizer))
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    own = {id(p) for p in model.parameters()}
    if all(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        return optimizer
    kind, defaults = type(optimizer), optimizer.defaults
    return lambda parameters: kind(parameters, **defaults)


def loop_around(accumulate: int, clip_grad_norm: float | None) -> dict[str, Any]:
    """The options of the loop (`tracer.build.loop_options`); frameworks say 0 or None where they do not clip."""
    found: dict[str, Any] = {"accumulate": accumulate} if accumulate > 1 else {}
    return found | ({"clip_grad_norm": float(clip_grad_norm)} if clip_grad_norm else {})
