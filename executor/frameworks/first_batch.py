"""Plan a module at its first training call, from the arguments that it then gets: what all frameworks' callbacks share.

A framework's loop owns the batches: what the model really gets is known when it is called. Until then nothing is
planned, and evaluation runs as ever; the first training call is planned before it runs, so it holds the budget too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from typing import Any, cast

import torch
from torch import nn

from executor.backend import REPLAN, Compiler, check_parts, on_stderr
from executor.fitting.fit import plan_step
from executor.training.module import STATE, install, receipt_in, remove_plan
from simulator.core.limits import DEFAULTS
from tracer.step.batch import SplitBatch, loss_in_outputs
from tracer.torch_api import pytree
from traces.errors import SpecError
from traces.progress import Say
from traces.records.plan import RESERVED


class FirstBatchCallback:
    """Mixed in before a framework's own class of callbacks."""

    def __init__(
        self,
        budget: str | int,
        *,
        budget_of: str | None = None,
        loss: Callable[[Any], Any] | None = None,
        on_mismatch: str = REPLAN,
        parts: bool = False,
        seconds: float = DEFAULTS.seconds,
        say: Say = on_stderr,
    ) -> None:
        """
        Args:
            budget: of the step's memory: bytes, a size such as "8GiB", or a share of its own peak such as "60%".
            budget_of: "allocated" or "reserved" memory, as in `executor.fit`.
            loss: of the outputs of what is planned, where that does not compute its own loss (label smoothing,
                `compute_loss_func`, a `training_step`): what decides which outputs are differentiated and what the
                loss code allocates; None: all outputs are, and nothing.
            on_mismatch: what to do with a batch that the plan is not for; as in `executor.apply_plan`.
            parts: plan what lies between graph breaks to its share of the budget, as in `executor.fit`. Excludes
                reserved memory and `loss`.
            seconds: of the search for a plan.
            say: told what happens, a line each time.

        Raises:
            SpecError: what parts exclude.
            EnvironmentProblem: the framework is not installed.
        """
        super().__init__()
        if parts:
            check_parts(budget_of=budget_of == RESERVED, loss=loss)
        self.budget, self.budget_of, self.seconds = budget, budget_of, seconds
        self.loss, self.on_mismatch, self.parts, self.say = loss, on_mismatch, parts, say
        self.receipt: Any = None  # what happened, once training has ended

    def begin(
        self,
        module: nn.Module,
        optimizer: Any,
        loop: dict[str, Any],
        loss: Callable[[Any], Any] | None = None,
    ) -> None:
        """Let a module be planned at its first training call, in a loop with this optimizer, which else does what
        `loop_around` says; the loss is for where none was given."""

        within: dict[str, Any] = {"budget": self.budget, "seconds": self.seconds, "say": self.say}

        def first(module: nn.Module, args: Any, kwargs: Any) -> Compiler:
            call = SplitBatch(args=args, kwargs=kwargs, loss=self.loss or loss or loss_of, loss_inputs=())
            bare = bare_optimizer(optimizer, module)
            how = {"budget_of": self.budget_of, "on_mismatch": self.on_mismatch, **within}
            return plan_step(module, call, None, bare, loop=loop, **how)

        made = Compiler(parts=self.parts, on_mismatch=self.on_mismatch, **within)
        install(module, made, first=None if self.parts else first)

    def awaits(self, module: nn.Module) -> bool:
        """True if a module has not been planned yet, since no training call of it has come."""
        return STATE in vars(module) and vars(module)[STATE].first is not None

    def end(self, module: nn.Module) -> None:
        """Leave a module as it was."""
        if STATE in vars(module):
            if not self.awaits(module):
                self.receipt = receipt_in(module)
            remove_plan(module)


def bare_optimizer(optimizer: Any, model: nn.Module) -> Any:
    """The torch optimizer inside one that Accelerate or Lightning has wrapped; None for none.

    One that steps more than this model's parameters is given as what makes its like for them.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    own = {id(p) for p in model.parameters()}
    if all(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        return optimizer
    kind, defaults = type(optimizer), optimizer.defaults
    return lambda parameters: kind(parameters, **defaults)


def loop_around(accumulate: int, clip_grad_norm: float | None) -> dict[str, Any]:
    """The options of the loop (`tracer.step.loop_options`); frameworks say 0 or None where they do not clip."""
    found: dict[str, Any] = {"accumulate": accumulate} if accumulate > 1 else {}
    return found | ({"clip_grad_norm": float(clip_grad_norm)} if clip_grad_norm else {})


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss that the module computes, if it does; else a sum that differentiates all its tensor outputs."""
    with suppress(SpecError):
        return cast(torch.Tensor, loss_in_outputs(outputs))
    chosen = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not chosen:
        raise SpecError("the model returns no loss, and no output of it requires a gradient.")
    return reduce(operator.add, ((x.abs() if x.is_complex() else x).float().mean() for x in chosen))
