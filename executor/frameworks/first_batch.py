"""Plan a module at its first training call, from the arguments that it then gets: what all frameworks' callbacks share.

A framework's loop owns the batches: what the model really gets is known when it is called. Until then nothing is
planned, and evaluation runs as ever; the first training call is planned before it runs, so it holds the budget too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from executor.training import bypass
from executor.training.module import PlannedModule, apply_plan, apply_recorded, remove_plan
from executor.training.planning import Say, Wanted, loss_of, on_stderr, plan_within, record
from simulator.core.limits import DEFAULTS
from tracer.step.batch import SplitBatch
from tracer.step.context import is_fake
from traces.errors import PlanError, SpecError
from traces.records.plan import Plan

AWAITED: Final = "_lowtide_awaited"  # the attribute of a module that waits for its first training call


@dataclass(kw_only=True)
class FirstBatch:
    """How a module is to be planned once its first training call comes."""

    wanted: Wanted | None = None  # plan within this,
    plan: Plan | None = None  # or apply that
    loss: Callable[[Any], Any] | None = None  # of what the module returns; None: `loss_of`
    on_mismatch: str = "error"
    say: Say = field(default=on_stderr)

    def settle(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Apply the plan to a module in place, for this call and those that follow. Raises BudgetError, SpecError,
        CaptureError, PlanError: as `executor.fit` and `apply_plan`.
        """
        if self.wanted is None:
            assert self.plan is not None
            apply_plan(module, self.plan, in_place=True, on_mismatch=self.on_mismatch)
            return
        call = SplitBatch(args=tuple(args), kwargs=kwargs, loss=self.loss or loss_of, loss_inputs=())
        step = record(module, call, None, self.wanted)
        plan = plan_within(step, self.wanted)
        self.say(f"planned {type(module).__name__} from its first batch: {plan}")
        apply_recorded(module, plan, self.wanted, in_place=True, on_mismatch=self.on_mismatch)


class Awaiting(nn.Module):
    """Mixed in before the class of a module that waits for its first training call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().__call__(*args, **kwargs)
        if isinstance(self, Awaiting) and "forward" in vars(self) and bypass.trains(self):
            bypass.check_bypassed(self, entered=False)
        return outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not bypass.trains(self) or is_fake():
            own = vars(self).get(bypass.FORWARD)
            return super().forward(*args, **kwargs) if own is None else own(*args, **kwargs)
        first = stop_awaiting(self)
        first.settle(self, args, kwargs)
        return type(self).forward(self, *args, **kwargs)


def await_first_batch(module: nn.Module, first: FirstBatch) -> None:
    """Plan a module in place at its first training call. Raises PlanError if it wraps what plans go inside of."""
    bypass.check_wrapped(module)
    kind = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Awaiting.forward(self, *args, **kwargs)

    bypass.take_forward(module)
    object.__setattr__(module, AWAITED, first)
    module.__class__ = bypass.mixed_in(Awaiting, kind, forward=forward)


def stop_awaiting(module: nn.Module) -> FirstBatch:
    """The module as it was before `await_first_batch`; returns what it waited for."""
    if not isinstance(module, Awaiting):
        raise PlanError(f"this {type(module).__name__} does not wait for a first batch.")
    module.__class__ = type(module).__bases__[1]
    bypass.give_back_forward(module)
    first: FirstBatch = vars(module)[AWAITED]
    delattr(module, AWAITED)
    return first


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
        """Let a module wait for its first training call in a loop with this optimizer, which else does what
        `loop_around` says; the loss is for where none was given."""
        first = replace(self.first, loss=self.first.loss or loss)
        if first.wanted is not None:
            first.wanted = replace(first.wanted, optimizer=bare_optimizer(optimizer, module), loop=loop)
        await_first_batch(module, first)

    def end(self, module: nn.Module) -> None:
        """Leave a module as it was."""
        if isinstance(module, Awaiting):
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
    """The options of the loop (`tracer.step.loop_options`); frameworks say 0 or None where they do not clip."""
    found: dict[str, Any] = {"accumulate": accumulate} if accumulate > 1 else {}
    return found | ({"clip_grad_norm": float(clip_grad_norm)} if clip_grad_norm else {})
