"""A callback with which a Lightning `Trainer` trains within a budget."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from torch import nn

from executor.frameworks.first_batch import FirstBatchCallback, loop_around
from tracer.step.loop_options import KEEP
from traces.errors import EnvironmentProblem, PlanError, SpecError

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import Callback, LightningModule
else:
    Callback = LightningModule = object


class PlanCallback(FirstBatchCallback, Callback):
    """Plans the network inside a LightningModule at its first training batch, in place, until training ends."""

    def __init__(self, budget: str | int, *, module: str = "", **settings: Any) -> None:
        """
        Args:
            module: the attribute of the LightningModule that holds the network which `training_step` calls ("net",
                "model.backbone"); "": the one that has all parameters; if there is none, the LightningModule itself,
                whose `training_step` then calls `self(...)`.
            budget, settings: as in `FirstBatchCallback`.
        """
        if Callback is object:
            raise EnvironmentProblem("Lightning is not installed here: pip install lightning")
        super().__init__(budget, **settings)
        self.module = module
        self._target: nn.Module | None = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._target = self._network(pl_module)
        loop = loop_around(trainer.accumulate_grad_batches, trainer.gradient_clip_val)
        if not _forgets_gradients(pl_module):
            loop["zero_grad"] = KEEP
        optimizers = trainer.optimizers
        self.begin(self._target, optimizers[0] if len(optimizers) == 1 else None, loop)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Forget the gradients of the step before, which Lightning does only after forward."""
        if _forgets_gradients(pl_module) and batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *rest: Any) -> None:
        target = self._target
        if target is not None and self.awaits(target):
            self.end(target)
            raise PlanError(
                f"training_step did not call the {type(target).__name__} that was to be planned, so the first "
                "step ran without a plan; name the attribute that holds what it calls: PlanCallback(module='net')."
            )

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        target, self._target = self._target, None
        if target is not None:
            self.end(target)

    def _network(self, pl_module: nn.Module) -> nn.Module:
        """The module that is to be planned."""
        if self.module:
            try:
                return pl_module.get_submodule(self.module)
            except AttributeError as error:
                raise SpecError(
                    f"{type(pl_module).__name__} has no module {self.module!r}: {error}"
                ) from None
        everything = {id(p) for p in pl_module.parameters()}
        whole = [m for m in pl_module.children() if {id(p) for p in m.parameters()} == everything]
        return whole[0] if len(whole) == 1 else pl_module


def _forgets_gradients(pl_module: Any) -> bool:
    """Return whether Lightning itself sets the gradients to None before each backward, or each first of several."""
    own = type(pl_module).optimizer_zero_grad is not LightningModule.optimizer_zero_grad
    return bool(pl_module.automatic_optimization) and not own
