"""A callback with which transformers' `Trainer`, and trainers made of it such as TRL's, train within a budget.

from executor.frameworks.transformers import PlanCallback
trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[PlanCallback(budget="8GiB")])
trainer.train()
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.frameworks.first_batch import (
    FirstBatch,
    await_first_batch,
    awaits,
    on_stderr,
    stop_awaiting,
)
from executor.frameworks.surroundings import bare_optimizer, loop_around
from executor.training.module import PlannedModule, remove_plan
from executor.training.planning import Wanted, loss_of
from simulator.core.limits import DEFAULTS
from tracer.build.named.huggingface import import_transformers
from traces.errors import SpecError
from traces.records.plan import Plan

import_transformers()  # says if it is missing, and makes it importable beside a CPU-only torch
from transformers import TrainerCallback  # noqa: E402

COUNT = "num_items_in_batch"  # an argument that differs at every step


class PlanCallback(TrainerCallback):
    """Plans the model at the first training batch, in place, and takes the plan off when training ends.

    The plan takes the place of the model's own gradient checkpointing, which is switched off while it is there. With
    gradient accumulation the gradients of the batches before are there beside each step; they count.
    """

    def __init__(
        self,
        budget: str | int | None = None,
        *,
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
            plan: one that was made before, or its file, instead of a budget.
            budget_of: "allocated" or "reserved" memory, as in `executor.fit`.
            loss: of the model's outputs, where the model does not compute its own loss (label smoothing,
                `compute_loss_func`): what decides which outputs are differentiated and what the loss code allocates;
                None: all outputs are, and nothing.
            on_mismatch: what to do with a batch that the plan is not for; as in `executor.apply_plan`.
            seconds: of the search for a plan.
            say: told what happens, a line each time.

        Raises:
            SpecError: neither budget nor plan, or both; PlanError: the file is no plan.
        """
        if (budget is None) == (plan is None):
            raise SpecError("PlanCallback takes a budget or a plan.")
        self.plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
        self.budget, self.budget_of, self.seconds = budget, budget_of, seconds
        self.loss, self.on_mismatch, self.say = loss, on_mismatch, say
        self.receipt: Any = None  # what happened, once training has ended
        self._checkpointed = False
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model: nn.Module = given["model"]
        self._checkpointed = bool(getattr(model, "is_gradient_checkpointing", False))
        if self._checkpointed:
            model.gradient_checkpointing_disable()
            self.say("the plan takes the place of gradient checkpointing, which is switched off meanwhile")
        wanted = None
        if self.budget is not None:
            wanted = Wanted(
                budget=self.budget,
                budget_of=self.budget_of,
                optimizer=bare_optimizer(given.get("optimizer"), model),
                seconds=self.seconds,
                loop=loop_around(args.gradient_accumulation_steps, args.max_grad_norm),
            )
        self._hook = model.register_forward_pre_hook(_counted_by_tensor, with_kwargs=True)
        await_first_batch(
            model,
            FirstBatch(
                wanted=wanted,
                plan=self.plan,
                loss=self.loss or _loss,
                on_mismatch=self.on_mismatch,
                say=self.say,
            ),
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model: nn.Module = given["model"]
        if self._hook is not None:
            self._hook.remove()
        if awaits(model):
            stop_awaiting(model)
        elif isinstance(model, PlannedModule):
            self.receipt = model.receipt()
            remove_plan(model)
        if self._checkpointed:
            model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)


def _loss(outputs: Any) -> torch.Tensor:
    """What the trainer differentiates: the model's own loss; of TRL's fused outputs, of which it makes the loss itself,
    the log-probabilities of tokens and what a mixture of experts adds."""
    fused = getattr(outputs, "log_probs", None)
    if not isinstance(fused, torch.Tensor):
        return loss_of(outputs)
    more = getattr(outputs, "aux_loss", None)
    return -fused.sum() if more is None else more - fused.sum()


def _counted_by_tensor(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with the count of items as a tensor: a number is part of the graph, and each would be another."""
    if type(kwargs.get(COUNT)) is int:
        where = next(model.parameters()).device
        kwargs = {**kwargs, COUNT: torch.tensor(kwargs[COUNT], device=where)}
    return args, kwargs
