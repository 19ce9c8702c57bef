"""A training step of what the user made: her model, batch, loss and optimizer, checked and put together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from tracer.step.batch import split_batch, to_device
from tracer.step.context import NEEDS_VALUES, moved
from tracer.step.loop import TrainingStep
from tracer.step.optimizers import move_state
from tracer.step.user_errors import blame, first_line
from tracer.torch_api import detect_fake_mode, pytree
from traces.errors import CaptureError, LowtideError, SpecError


class UserStep:
    """The common part of steps from a function and steps of objects in hand. `label` begins every message."""

    __slots__ = ()

    @property
    def label(self) -> str:
        raise NotImplementedError

    def _where(self, error: BaseException) -> str:
        """Where the user's code failed, as a message begins."""
        return f"{self.label}{blame(error)}"

    def _check(self, model: Any, loss: Any) -> None:
        """Refuse what is no model, a model whose lazy modules have not seen an input yet, and what is no loss."""
        if not isinstance(model, nn.Module):
            raise SpecError(f"{self.label}: the model is a {type(model).__name__}, not a torch.nn.Module.")
        for name, module in model.named_modules():
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                raise SpecError(
                    f"{self.label}: the module {name!r} ({type(module).__name__}) does not know its sizes yet; call "
                    "the model once with an example, or give the module its sizes."
                )
        if loss is not None and not callable(loss):
            raise SpecError(
                f"{self.label}: the loss is a {type(loss).__name__}, not a function of the model's output; if "
                "the model computes it, return None in its place."
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise SpecError(f"{self.label}: no parameter of the model is trainable (requires_grad).")

    def _assemble(
        self,
        model: nn.Module,
        batch: Any,
        loss: Any,
        optimizer: Any,
        options: dict[str, Any],
        device: str,
    ) -> TrainingStep:
        mode = detect_fake_mode()
        moved(device, model)
        if mode is None and isinstance(loss, nn.Module):
            loss.to(device)
        with self._explained("the batch could not be prepared"):
            batch = to_device(batch, device, mode)
        optimizer = self._optimizer(model, loss, optimizer)
        if optimizer is not None:
            move_state(optimizer, device)
        tensors = (x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor))
        examples = (x.shape[0] for x in tensors if x.dim())
        try:
            given = split_batch(model, batch, loss)
        except SpecError as error:
            raise SpecError(f"{self.label}: {error}") from None
        return TrainingStep(
            model=model,
            args=given.args,
            kwargs=given.kwargs,
            loss=given.loss,
            loss_inputs=given.loss_inputs,
            optimizer=optimizer,
            batch_size=int(options.get("batch_size") or next(examples, 1)),
            name=self.label,
            options=dict(options),
            loss_parameters={f"loss.{n}": p for n, p in _named_parameters(loss)},
        )

    def _optimizer(self, model: nn.Module, loss: Any, optimizer: Any) -> torch.optim.Optimizer | None:
        if optimizer is None:
            return None
        if not isinstance(optimizer, torch.optim.Optimizer):
            if not callable(optimizer):
                raise SpecError(
                    f"{self.label}: the optimizer is a {type(optimizer).__name__}; return a "
                    "torch.optim.Optimizer, or a class or function that makes one from parameters."
                )
            with self._explained("making the optimizer failed"):
                optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise SpecError(
                    f"{self.label}: the optimizer's function returned a {type(optimizer).__name__}."
                )
        known = {id(p) for _, p in (*_named_parameters(model), *_named_parameters(loss))}
        strangers = sum(id(p) not in known for g in optimizer.param_groups for p in g["params"])
        if strangers:
            raise SpecError(
                f"{self.label}: {strangers} of the optimizer's parameters are not parameters of the returned "
                "model; make the optimizer from model.parameters() after the model is complete."
            )
        return optimizer

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Say what the user's code raises in one message that names its line."""
        try:
            yield
        except LowtideError:
            raise
        except NEEDS_VALUES as error:
            raise CaptureError(
                f"{self._where(error)}: {what}: it reads the values of tensors ({error}), which a fake trace "
                "does not have; move that out of the function."
            ) from error
        except (Exception, SystemExit) as error:
            raise SpecError(
                f"{self._where(error)}: {what}: {type(error).__name__}: {first_line(error)}"
            ) from error


def _named_parameters(module: Any) -> list[tuple[str, nn.Parameter]]:
    """Return those of a module, or of a loss that is one."""
    return list(module.named_parameters()) if isinstance(module, nn.Module) else []
