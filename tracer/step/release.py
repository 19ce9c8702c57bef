"""Gradients that are freed in backward: each parameter's optimizer step runs as soon as its gradient is accumulated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tracer.torch_api import will_execute
from traces.errors import LowtideError, SpecError
from traces.records.trace import BACKWARD, OPTIMIZER

OPTION = "--release-gradients"


@contextmanager
def released(optimizer: torch.optim.Optimizer, tell: Callable[[str], None]) -> Iterator[None]:
    """In the body, backward steps each of the optimizer's parameters once its gradient is accumulated, and frees that.

    The state, and the groups with their learning rates, stay the one optimizer's, so checkpoints and schedulers do.
    """

    def step(p: torch.Tensor, group: dict[str, Any]) -> None:
        tell(OPTIMIZER)
        whole, alone = optimizer.param_groups, {**group, "params": [p]}
        optimizer.param_groups = [alone]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = whole
        if changed := [k for k, v in alone.items() if k != "params" and v is not group.get(k)]:
            raise SpecError(
                f"{OPTION}: {type(optimizer).__name__} counts in its groups ({changed[0]!r}), so the step of one "
                "parameter depends on others."
            )
        p.grad = None
        tell(BACKWARD)

    wanted = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(lambda p, g=group: step(p, g)) for p, group in wanted]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_release(name: str, optimizer: torch.optim.Optimizer | None, scaler: Any) -> None:
    """Raise SpecError if the steps of a step's parameters cannot run one by one in its backward."""
    why, kind = "", type(optimizer).__name__
    if optimizer is None:
        why = "there is no optimizer, whose steps would run in backward"
    elif scaler is not None:
        why = "a gradient scaler looks at all gradients for an overflow before any step; use bfloat16, or no autocast"
    elif needs_closure(optimizer):
        why = f"{kind} wants a closure, which runs the model again, and steps all parameters together"
    elif any(group.get("max_grad_norm") for group in optimizer.param_groups):
        why = f"{kind} clips by the norm of all gradients (max_grad_norm)"
    if why:
        raise SpecError(f"{name}: {OPTION} cannot be: {why}.")


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step runs the model itself, as that of LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def hands_over(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether something waits for a parameter's gradient inside backward."""
    return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)


def hand(
    parameter: torch.Tensor, box: list[torch.Tensor], around: AbstractContextManager[Any] | None = None
) -> None:
    """Give a parameter the gradient in the box, as autograd would. `around`: what leads there, in no untouched step."""
    with around or nullcontext(), torch.enable_grad():
        token = _Gradient.apply(box, parameter)
        given = token.new_empty(0)
    torch.autograd.backward(token, given)


class _Gradient(torch.autograd.Function):
    """Its backward gives a parameter the gradient in the box, which then is autograd's alone: it takes it uncopied."""

    @staticmethod
    def forward(ctx: Any, box: list[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
        ctx.box = box
        return parameter.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _token: torch.Tensor) -> Any:
        return None, ctx.box.pop()


def check_alone(parameters: Iterable[torch.Tensor], error: type[LowtideError]) -> None:
    """Raise an error, inside a backward, if a parameter gets a gradient from other code than the model, too: its hooks
    would run for each part."""
    for p in parameters:
        if p.requires_grad and will_execute(torch.autograd.graph.get_gradient_edge(p).node):
            raise error(
                f"the loss uses a parameter of the model (of shape {tuple(p.shape)}) beside its outputs, so that the "
                "parameter's hook for accumulated gradients would run for a part; put that into the model, or take the "
                "hook off and step the optimizer after backward."
            )
