"""What the callbacks of all frameworks share: a module is planned at its first training batch, until training ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.frameworks.first_batch import FirstBatch, await_first_batch, awaits, stop_awaiting
from executor.training.module import PlannedModule, remove_plan
from executor.training.planning import Say, Wanted, on_stderr
from simulator.core.limits import DEFAULTS
from traces.errors import SpecError
from traces.records.plan import Plan


class FirstBatchCallback:
    """Mixed in before a framework's own class of callbacks."""

    def __init__(
        self,
        budget: str | int | None = None,
        *,
        plan: Plan | str | Path | None = None,
        budget_of: str | None = None,
        loss: Callable[[Any], Any] | None = None,
        on_mismatch: str = "replan",
        seconds: float = DEFAULTS.seconds,
        say: Say = on_stderr,
    ) -> None:
        """
        Args:
            budget: of the step's memory: bytes, a size such as "8GiB", or a share of its own peak such as "60%".
            plan: one that was made before, or its file, instead of a budget.
            budget_of: "allocated" or "reserved" memory, as in `executor.fit`.
            loss: of the outputs of what is planned, where that does not compute its own loss (label smoothing,
                `compute_loss_func`, a `training_step`): what decides which outputs are differentiated and what the
                loss code allocates; None: all outputs are, and nothing.
            on_mismatch: what to do with a batch that the plan is not for; as in `executor.apply_plan`.
            seconds: of the search for a plan.
            say: told what happens, a line each time.

        Raises:
            SpecError: neither budget nor plan, or both; PlanError: the file is no plan.
            EnvironmentProblem: the framework is not installed.
        """
        super().__init__()
        if (budget is None) == (plan is None):
            raise SpecError("PlanCallback takes a budget or a plan.")
        plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
        wanted = None if budget is None else Wanted(budget=budget, budget_of=budget_of, seconds=seconds)
        self.first = FirstBatch(wanted=wanted, plan=plan, loss=loss, on_mismatch=on_mismatch, say=say)
        self.receipt: Any = None  # what happened, once training has ended

    def begin(
        self,
        module: nn.Module,
        optimizer: Any,
        loop: dict[str, Any],
        loss: Callable[[Any], Any] | None = None,
    ) -> None:
        """Let a module wait for its first training call.

        Args:
            optimizer: of the framework's loop.
            loop: what else that does (`loop_around`).
            loss: in place of one that was not given.
        """
        first = replace(self.first, loss=self.first.loss or loss)
        if first.wanted is not None:
            first.wanted = replace(first.wanted, optimizer=bare_optimizer(optimizer, module), loop=loop)
        await_first_batch(module, first)

    def end(self, module: nn.Module) -> None:
        """Leave a module as it was."""
        if awaits(module):
            stop_awaiting(module)
        elif isinstance(module, PlannedModule):
            self.receipt = module.receipt()
            remove_plan(module)


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
