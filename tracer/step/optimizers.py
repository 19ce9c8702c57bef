"""Optimizers by name, and the implementation that torch would choose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from tracer.torch_api import pytree
from traces.errors import SpecError

# Learning rates that keep random labels on random weights finite; no figure of Lowtide depends on them.
OPTIMIZERS: Final[dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 1e-4}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
}
NO_OPTIMIZER: Final = "none"


def make_optimizer(name: str, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer | None:
    """An optimizer over those of the parameters that require a gradient: sgd (momentum 0.9), adam, adamw, or none (the
    step ends with the backward pass). Raises SpecError: unknown name."""
    check_optimizer(name)
    if name == NO_OPTIMIZER:
        return None
    cls, settings = OPTIMIZERS[name]
    return cls([p for p in parameters if p.requires_grad], **settings)


def check_optimizer(name: str) -> None:
    """Raise SpecError for an unknown optimizer."""
    if name not in OPTIMIZERS and name != NO_OPTIMIZER:
        raise SpecError(f"optimizer {name!r} is unknown; known are {', '.join([*OPTIMIZERS, NO_OPTIMIZER])}.")


def move_state(optimizer: torch.optim.Optimizer, device: str) -> None:
    """Move the state with which an optimizer began (Adagrad's) to where its parameters went, as if made there."""
    for state in optimizer.state.values():
        for name, x in state.items():
            if isinstance(x, torch.Tensor):  # of a fake device, step counters are there too
                state[name] = x.to("cpu" if stays_on_cpu(x, optimizer) else device)


def stays_on_cpu(x: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether a tensor of the optimizer is on the CPU, as step counters are, when parameters are on a GPU."""
    groups = [] if optimizer is None else optimizer.param_groups
    return x.dim() == 0 and not any(g.get("fused") or g.get("capturable") for g in groups)


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


def optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The tensors of an optimizer's state and settings."""
    if optimizer is None:
        return []
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    leaves = pytree.tree_leaves((list(optimizer.state.values()), groups))
    return [x for x in leaves if isinstance(x, torch.Tensor)]
