"""A callback with which a Lightning `Trainer` trains within a budget.

from executor.frameworks.lightning import PlanCallback
trainer = lightning.Trainer(callbacks=[PlanCallback(budget="8GiB", module="net")])
trainer.fit(module, data)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from executor.frameworks.first_batch import FirstBatch, await_first_batch, awaits, on_stderr, stop_awaiting
from executor.frameworks.surroundings import bare_optimizer, loop_around
from executor.training.module import PlannedModule, remove_plan
from executor.training.planning import Wanted
from simulator.core.limits import DEFAULTS
from tracer.build.loop_options import KEEP
from traces.errors import EnvironmentProblem, PlanError, SpecError
from traces.records.plan import Plan

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import Callback, LightningModule
elif importlib.util.find_spec("pytorch_lightning") is not None:
    from pytorch_lightning import Callback, LightningModule
else:
    Callback = LightningModule = object


class PlanCallback(Callback):
    """Plans the network inside a LightningModule at its first training batch, in place, until training ends."""

    def __init__(
        self,
        budget: str | int | None = None,
        *,
        module: str = "",
        plan: Plan | str | Path | None = None,
        budget_of: str | None = None,
        loss: Callable[[Any], Any] | None = None,
        on_mismatch: str = "replan",
        seconds: float = DEFAULTS.seconds,
        say: Callable[[str], None] = on_stderr,
    ) -> None:
        """
        Args:
            budget: of the step's memory: bytes, a size such as "8GiB", or a share of its own peak such as "60%".
            module: the attribute of the LightningModule that holds the network which `training_step` calls ("net",
                "model.backbone"); "": the one that has all parameters; if there is none, the LightningModule itself,
                whose `training_step` then calls `self(...)`.
            plan: one that was made before, or its file, instead of a budget.
            budget_of: "allocated" or "reserved" memory, as in `executor.fit`.
            loss: of the network's outputs, which decides which of them are differentiated and what the loss code
                allocates; None: all are, and nothing.
            on_mismatch: what to do with a batch that the plan is not for; as in `executor.apply_plan`.
            seconds: of the search for a plan.
            say: told what happens, a line each time.

        Raises:
            SpecError: neither budget nor plan, or both; PlanError: the file is no plan.
            EnvironmentProblem: Lightning is not installed.
        """
        if Callback is object:
            raise EnvironmentProblem("Lightning is not installed here: pip install lightning")
        super().__init__()
        if (budget is None) == (plan is None):
            raise SpecError("PlanCallback takes a budget or a plan.")
        self.plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
        self.budget, self.budget_of, self.seconds = budget, budget_of, seconds
        self.module, self.loss, self.on_mismatch, self.say = module, loss, on_mismatch, say
        self.receipt: Any = None  # what happened, once training has ended
        self._target: nn.Module | None = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        target = self._target = self._network(pl_module)
        wanted = None
        if self.budget is not None:
            optimizers = trainer.optimizers
            optimizer = bare_optimizer(optimizers[0], target) if len(optimizers) == 1 else None
            loop = loop_around(trainer.accumulate_grad_batches, trainer.gradient_clip_val)
            if not _forgets_gradients(pl_module):
                loop["zero_grad"] = KEEP
            wanted = Wanted(
                budget=self.budget,
                budget_of=self.budget_of,
                optimizer=optimizer,
                seconds=self.seconds,
                loop=loop,
            )
        await_first_batch(
            target,
            FirstBatch(
                wanted=wanted, plan=self.plan, loss=self.loss, on_mismatch=self.on_mismatch, say=self.say
            ),
        )

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Forget the gradients of the step before, which Lightning does only after forward."""
        if _forgets_gradients(pl_module) and batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *rest: Any) -> None:
        if self._target is not None and awaits(self._target):
            stop_awaiting(self._target)
            raise PlanError(
                f"training_step did not call the {type(self._target).__name__} that was to be planned, so the first "
                "step ran without a plan; name the attribute that holds what it calls: PlanCallback(module='net')."
            )

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        target, self._target = self._target, None
        if target is not None and awaits(target):
            stop_awaiting(target)
        elif isinstance(target, PlannedModule):
            self.receipt = target.receipt()
            remove_plan(target)

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
    """Whether Lightning itself sets the gradients to None before each backward, or each first of several."""
    own = type(pl_module).optimizer_zero_grad is not LightningModule.optimizer_zero_grad
    return bool(pl_module.automatic_optimization) and not own
