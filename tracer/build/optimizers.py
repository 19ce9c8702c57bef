"""Optimizers by name, and the implementation that torch would choose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from traces.errors import SpecError

# Learning rates that keep random labels on random weights finite; no figure of Lowtide depends on them.
OPTIMIZERS: Final[dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 1e-4}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
}
NO_OPTIMIZER: Final = "none"
IMPLEMENTATIONS: Final[dict[str, dict[str, bool]]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "for-loop": {"foreach": False, "fused": False},
}


def make_optimizer(
    name: str, parameters: Iterable[torch.Tensor], implementation: str | None = None
) -> torch.optim.Optimizer | None:
    """An optimizer over `parameters`.

    Args:
        name: sgd (momentum 0.9), adam, adamw, or none (the step ends with the backward pass).
        parameters: what it updates; those without requires_grad are left out.
        implementation: foreach, fused or for-loop; None leaves the choice to torch, which takes foreach on
            CUDA and the loop on the CPU.

    Raises:
        SpecError: unknown name or implementation.
    """
    check_optimizer(name, implementation)
    if name == NO_OPTIMIZER:
        return None
    cls, settings = OPTIMIZERS[name]
    chosen = IMPLEMENTATIONS[implementation] if implementation else {}
    return cls([p for p in parameters if p.requires_grad], **settings, **chosen)


def check_optimizer(name: str, implementation: str | None) -> None:
    """Raise SpecError for an unknown optimizer or implementation."""
    if name not in OPTIMIZERS and name != NO_OPTIMIZER:
        raise SpecError(f"optimizer {name!r} is unknown; known are {', '.join([*OPTIMIZERS, NO_OPTIMIZER])}.")
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise SpecError(
            f"optimizer implementation {implementation!r} is unknown; known are {', '.join(IMPLEMENTATIONS)}."
        )


def choose_as_on_cuda(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that leaves the implementation to torch take what torch takes on CUDA: foreach.

    Groups in which the user has said anything of foreach or fused (also `fused=False`, with which torch takes the
    loop), or asked for what foreach excludes (differentiable; of Adam, a learning rate in a tensor), stay as they
    are: torch/optim, `_default_to_fused_or_foreach` and its callers.
    """
    for group in optimizer.param_groups:
        undecided = group.get("foreach", False) is None and group.get("fused") is None
        looped = isinstance(optimizer, torch.optim.Adam) and isinstance(group["lr"], torch.Tensor)
        if undecided and not group.get("differentiable") and (not looped or group["capturable"]):
            group["foreach"] = True
