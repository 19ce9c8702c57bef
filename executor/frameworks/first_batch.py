"""Plan a module at its first training call, from the arguments that it then gets.

A framework's loop owns the batches: what the model really gets is known when it is called. Until then nothing is
planned, and evaluation runs as ever; the first training call is planned before it runs, so it holds the budget too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from executor.guards import bypass
from executor.training.module import apply_plan, apply_recorded
from executor.training.planning import Say, Wanted, loss_of, on_stderr, plan_within, record
from tracer.build.batch import SplitBatch
from tracer.build.context import is_fake
from traces.errors import PlanError
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
        """Apply the plan to a module in place, for this call and those that follow.

        Raises:
            BudgetError, SpecError, CaptureError, PlanError: as `executor.fit` and `apply_plan`.
        """
        if self.wanted is None:
            assert self.plan is not None
            apply_plan(module, self.plan, in_place=True, on_mismatch=self.on_mismatch)
            return
        call = SplitBatch(args=tuple(args), kwargs=kwargs, loss=self.loss or loss_of, loss_inputs=())
        step = record(module, call, None, self.wanted)
        plan = plan_within(step, self.wanted)
        self.say(f"planned {type(module).__name__} from its first batch: {plan}")
        apply_recorded(module, plan, step, self.wanted, in_place=True, on_mismatch=self.on_mismatch)


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
    """Plan a module in place at its first training call.

    Raises:
        PlanError: it is a wrapper that plans go inside of.
    """
    bypass.check_wrapped(module)
    kind = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Awaiting.forward(self, *args, **kwargs)

    bypass.take_forward(module)
    object.__setattr__(module, AWAITED, first)
    module.__class__ = bypass.mixed_in(Awaiting, kind, forward=forward)


def awaits(module: nn.Module) -> bool:
    """Whether a module still waits for its first training call."""
    return isinstance(module, Awaiting)


def stop_awaiting(module: nn.Module) -> FirstBatch:
    """The module as it was before `await_first_batch`; returns what it waited for."""
    if not isinstance(module, Awaiting):
        raise PlanError(f"this {type(module).__name__} does not wait for a first batch.")
    module.__class__ = type(module).__bases__[1]
    bypass.give_back_forward(module)
    first: FirstBatch = vars(module)[AWAITED]
    delattr(module, AWAITED)
    return first
