"""Plan the training of a model in hand within a budget, and apply the plan: no files, one capture.

from executor import fit
model = fit(model, (x, y), loss=criterion, optimizer=optimizer, budget="8GiB")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from executor.backend import REPLAN, Compiler, Say, check_parts, on_stderr
from executor.training.module import bare, compiler_of, install
from executor.training.planning import Clock, Wanted, in_words, plan_within, record
from simulator.core.limits import DEFAULTS
from simulator.core.problem import Problem
from simulator.prediction.step import UNTOUCHED_LESS, text, warnings_of
from traces.records.plan import RESERVED


def fit(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str | None = None,
    *,
    budget: str | int,
    budget_of: str | None = None,
    amp: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    release_gradients: bool = False,
    allow: str = "bit",
    levers: Sequence[str] | None = None,
    planner: str | None = None,
    seconds: float = DEFAULTS.seconds,
    on_mismatch: str = REPLAN,
    parts: bool = False,
    say: Say = on_stderr,
) -> nn.Module:
    """The model, training within a budget of memory from its next call on.

    Nothing runs: the step is captured on fake tensors and planned. The first call in training compiles it by the plan.

    Args:
        model, batch, loss, optimizer, scaler: the training step, as `tracer.trace` takes it. A model in evaluation mode
            is put into training mode.
        budget: bytes, a size such as "8GiB", or a share of the step's own peak such as "60%".
        budget_of: "allocated" or "reserved" memory; None: reserved on CUDA, under the allocator's settings of this
            process, and allocated on the CPU.
        amp: the type of autocast around model and loss; None: that which is on around this call.
        release_gradients: hooks of the loop (`register_post_accumulate_grad_hook`) step each parameter in backward, as
            this optimizer would, and free its gradient.
        allow, levers, planner, seconds: how plans are looked for, as in `simulator.plan`; but with allow="bit" and no
            lever named by recomputation alone. Values are saved in fewer bits by a plan alone whose errors were
            measured (`execute errors`, then `apply_plan`).
        on_mismatch: as in `apply_plan`.
        parts: where torch.compile breaks the graph of the model, each part is planned to this share, which the budget
            then has to be, once it runs; nothing is planned before, and what is of a whole step is refused.
        say: told what happens, a line each time.

    Returns:
        the model, as `apply_plan` does.

    Raises:
        BudgetError: no plan was found within the budget; says the least one that would do.
        SpecError, CaptureError: as `tracer.trace`. OptimizerError: the model without its optimizer may be planned.
    """
    if parts:
        check_parts(
            budget_of=budget_of == RESERVED,
            release_gradients=release_gradients,
            allow=allow != "bit",
            levers=levers,
        )
        made = Compiler(
            budget=budget, on_mismatch=on_mismatch, parts=True, planner=planner, seconds=seconds, say=say
        )
        return install(model.train(), made)
    wanted = Wanted(
        budget=budget,
        budget_of=budget_of,
        optimizer=optimizer,
        scaler=scaler,
        allow=allow,
        levers=None if levers is None else tuple(levers),
        planner=planner,
        seconds=seconds,
        loop={"release_gradients": release_gradients or None},
    )
    if not model.training:
        say("the model is in evaluation mode; it is put into training mode, for which the plan is made")
    began, clock, target = time.monotonic(), Clock(say), bare(model)
    trace = record(target, batch, loss, wanted, amp)
    clock.done(f"captured a step of {len(trace.ops)} ops")
    for warning in warnings_of(Problem(trace)):
        if warning.code == UNTOUCHED_LESS:
            say(f"warning: {text(warning)}")
    plan = plan_within(trace, wanted)
    clock.done(f"planned: {in_words(plan)}")
    install(model, compiler_of(plan, target, on_mismatch))
    say(f"ready after {time.monotonic() - began:.1f} s")
    return model
