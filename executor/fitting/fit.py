"""Plan the training of a model in hand within a budget, and apply the plan: no files, one capture."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from executor.backend import ERROR, REPLAN, Compiler, check_parts, on_stderr
from executor.fitting.ahead import compiled_ahead
from executor.training.module import bare, install, state_bytes
from simulator.core.limits import DEFAULTS
from simulator.core.problem import Problem
from simulator.prediction import ask as simulator
from simulator.prediction.step import UNTOUCHED_LESS, text, warnings_of
from tracer.api import GPU_UNKNOWN, in_hand, left_as_found
from tracer.precision.policy import ambient
from tracer.record.assemble import Draft
from tracer.record.step import trace_step
from traces.devices import board_of
from traces.devices import device as device_entry
from traces.errors import SpecError
from traces.progress import Say
from traces.provenance import alloc_conf
from traces.records.plan import ALLOCATED, RESERVED, Plan


def fit(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str | None = None,
    *,
    budget: str | int,
    budget_of: str | None = None,
    amp: str | None = None,
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

    Nothing runs: the step is captured, planned and compiled by the plan.

    Args:
        model, batch, loss, optimizer: the training step, as `tracer.trace` takes it. A model in evaluation mode
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
    if not model.training:
        say("the model is in evaluation mode; it is put into training mode, for which the plan is made")
    target = bare(model)
    made = plan_step(
        target,
        batch,
        loss,
        optimizer,
        budget=budget,
        budget_of=budget_of,
        amp=amp,
        loop={"release_gradients": release_gradients or None},
        # One capture serves calls of all sizes only if the step is not changed, which packing alone is not worth.
        levers=() if levers is None and allow == "bit" else levers,
        on_mismatch=on_mismatch,
        say=say,
        allow=allow,
        planner=planner,
        seconds=seconds,
    )
    return install(model, made)


def plan_step(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Any] | None,
    optimizer: Any,
    *,
    budget: str | int,
    budget_of: str | None = None,
    amp: str | None = None,
    loop: Mapping[str, Any],
    levers: Sequence[str] | None = (),
    on_mismatch: str = ERROR,
    say: Say,
    **how: Any,
) -> Compiler:
    """Compile the step of a model that has no plan by one that is made for it; the model stays as it is but for
    training mode.

    Args:
        loop: what the loop does beside calling the model (`tracer.step.loop_options`), such as accumulate.
        how: further arguments of `simulator.plan`. The others are those of `fit`.
    """
    began, where = time.monotonic(), next((p.device for p in model.parameters()), torch.device("cpu"))
    if where.type not in ("cpu", "cuda"):
        raise SpecError(
            f"the model is on {where}; move it to the device on which it trains, and fit it there."
        )
    if not model.training:
        model.train()
    options = {**loop, "amp": (ambient(where.type).dtype if amp is None else amp) or None}
    build, on_gpu = in_hand(model, batch, loss, optimizer, {}, options, 0), where.type == "cuda"
    name = torch.cuda.get_device_name(where) if on_gpu else ""
    target = device_entry((board_of(name) or GPU_UNKNOWN) if name else "cpu")

    def plan(draft: Draft) -> Plan:
        say(f"captured a step of {len(draft.rows)} ops")
        for warning in warnings_of(Problem(draft.trace)):
            if warning.code == UNTOUCHED_LESS:
                say(f"warning: {text(warning)}")
        found = simulator.plan(
            draft.trace,
            budget,
            levers=None if levers is None else tuple(levers),
            budget_of=budget_of or (RESERVED if on_gpu else ALLOCATED),
            alloc_conf=alloc_conf() if on_gpu else None,
            **how,
        )
        say(f"planned after {time.monotonic() - began:.1f} s: {found}")
        return found

    may_change = levers is None or bool(tuple(levers))
    made = Compiler(on_mismatch=on_mismatch, static=may_change, say=lambda _: None)
    with left_as_found():
        if not compiled_ahead(made, model, batch, loss, build, target, where, plan):
            made.plan = plan(trace_step(build, target, device=str(where)))
    assert made.plan is not None
    made.around_bytes = state_bytes(made.plan.meta.optimizer, model)
    return made
