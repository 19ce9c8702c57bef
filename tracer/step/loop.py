"""One iteration of the ordinary training loop, which is traced, measured and verified: its parts, and how it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tracer.precision.policy import OFF, Autocast
from tracer.step.loop_options import AFTER, BEFORE, KEEP, ORDINARY, Loop
from tracer.step.release import released
from tracer.torch_api import pytree, replaced
from traces.errors import SpecError
from traces.records.trace import BACKWARD, FORWARD, OPTIMIZER


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """One training iteration, ready to run: `loss_of(model(*args, **kwargs)).backward(); optimizer.step()`.

    With `autocast` the model and the loss run under it; with a `scaler` the loss is scaled and the optimizer stepped by
    it; `loop` says what else happens: see `run_step`.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any]  # what the model returned -> the loss; prefer `loss_of`, which checks it
    loss_inputs: tuple[Any, ...]  # what only the loss sees (targets); tensors in any nesting
    optimizer: torch.optim.Optimizer | None  # None: the step ends with the backward pass
    batch_size: int
    name: str
    options: dict[str, Any] = field(default_factory=dict)  # enough to build the same step again
    autocast: Autocast = OFF
    scaler: torch.amp.GradScaler | None = None
    loss_parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # of a loss that has some, by name
    loop: Loop = ORDINARY

    def loss_of(self, outputs: Any) -> torch.Tensor:
        """The scalar loss for what `model(*args, **kwargs)` returned; SpecError if it is not a scalar."""
        loss = self.loss(outputs)
        if not isinstance(loss, torch.Tensor):
            raise SpecError(
                f"{self.name}: the loss is a {type(loss).__name__}, not a tensor; return a scalar tensor."
            )
        if loss.numel() != 1:
            raise SpecError(
                f"{self.name}: the loss has the shape {tuple(loss.shape)}; reduce it to a scalar, for example with "
                ".mean()."
            )
        return loss.reshape(()) if loss.dim() else loss

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the batch, in order: the model's arguments, then what only the loss sees."""
        leaves = pytree.tree_leaves((self.args, self.kwargs, self.loss_inputs))
        return tuple(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))


def run_step(
    step: TrainingStep,
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None,
    on_phase: Callable[[str], None] | None = None,
) -> torch.Tensor:
    """One iteration of the step's loop, under its autocast and with its scaler; returns the last loss.

    Each of several parts that accumulate gradients runs on the same batch, and its loss is divided by their number.
    `model`: what stands in for `step.model`; `on_phase`: told when forward, backward and the optimizer begin.
    """
    tell = on_phase or (lambda phase: None)
    loop, scaler = step.loop, step.scaler
    trained = (*step.model.parameters(), *step.loss_parameters.values())
    # A tensor of the batch may want a gradient too; the next batch comes without.
    forget_gradients((*trained, *step.tensors()) if loop.zero_grad == BEFORE else step.tensors())
    stepped = released(optimizer, tell) if loop.release_gradients and optimizer else contextlib.nullcontext()
    with stepped:
        for _ in range(loop.accumulate):
            tell(FORWARD)
            with step.autocast.region():
                loss = step.loss_of(model(*step.args, **step.kwargs))
            if loop.accumulate > 1:
                loss = loss / loop.accumulate
            tell(BACKWARD)
            (loss if scaler is None else scaler.scale(loss)).backward()
    tell(OPTIMIZER)
    if loop.clip_grad_norm is not None:
        if scaler is not None and optimizer is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained, loop.clip_grad_norm)
    if optimizer is not None and not loop.release_gradients:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    if loop.zero_grad == AFTER:
        forget_gradients(trained)
    elif loop.zero_grad == KEEP:
        torch.optim.SGD(trained, foreach=True).zero_grad(set_to_none=False)
    return loss


class Phases:
    """Where an iteration of anybody's loop is: backward is what runs in `torch.autograd.backward` (or `grad`), the
    optimizer's phase goes on from there until a module is called with gradients on, the rest is forward."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """tell: called with the phase that begins."""
        self._tell = tell
        self._now = FORWARD
        self._inside = 0  # calls of backward, whose hooks may step an optimizer

    def enter(self, phase: str) -> None:
        """It begins."""
        self._now = phase
        self._tell(phase)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell while the body runs."""
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        def called(*_: Any) -> None:
            if torch.compiler.is_compiling():  # this is captured with the module, and must guard nothing
                return
            if self._now == OPTIMIZER and torch.is_grad_enabled():  # the next part of an accumulated step
                self.enter(FORWARD)

        hooks = [
            register_module_forward_pre_hook(called),
            register_optimizer_step_pre_hook(lambda *_: self.enter(OPTIMIZER)),
            register_optimizer_step_post_hook(lambda *_: self.enter(BACKWARD) if self._inside else None),
        ]
        autograd = torch.autograd
        try:
            with replaced(
                autograd, backward=self._around(autograd.backward), grad=self._around(autograd.grad)
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(BACKWARD)
            self._inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1
                self.enter(BACKWARD if self._inside else OPTIMIZER)

        return call


class Enough(BaseException):
    """Raised when as much was seen as was asked for. Not an Exception, which the user's code might catch."""


def forget_gradients(tensors: Iterable[torch.Tensor]) -> None:
    """Return what `zero_grad(set_to_none=True)` does."""
    for x in tensors:
        x.grad = None


def fit_tangent(given: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """An incoming gradient in the layout that the backward graph was captured for; zeros if there is none."""
    if given is not None and given.stride() == like.stride():
        return given
    of = like if given is None else given
    # Not zeros_like: `like` is the capture's fake tensor, and so would its zeros be.
    made = torch.empty_strided(like.shape, like.stride(), dtype=of.dtype, device=of.device)
    return made.zero_() if given is None else made.copy_(given)
