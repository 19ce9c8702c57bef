"""Plan the training step of a model in hand."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast

import torch
from torch import nn

from executor.backend import Say
from simulator.core.limits import DEFAULTS
from simulator.prediction import ask as simulator
from tracer.api import GPU_UNKNOWN, in_hand, left_as_found
from tracer.precision.policy import ambient
from tracer.recording import record_fake
from tracer.step.batch import loss_in_outputs
from tracer.torch_api import pytree
from traces.devices import board_of
from traces.devices import device as device_entry
from traces.errors import SpecError
from traces.provenance import alloc_conf
from traces.records.plan import ALLOCATED, RESERVED, Plan
from traces.records.trace import Trace
from traces.units import show_bytes, show_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The limits that plans are to hold, and what the loop does beside calling the model."""

    budget: str | int
    budget_of: str | None = None
    optimizer: Any = None
    scaler: torch.amp.GradScaler | None = None
    allow: str = "bit"
    # As `simulator.plan`; None: recomputation alone if bits must be equal.
    levers: tuple[str, ...] | None = None
    planner: str | None = None
    seconds: float = DEFAULTS.seconds
    loop: Mapping[str, Any] = field(default_factory=dict)  # `tracer.step.loop_options`, such as accumulate


def record(
    model: nn.Module, batch: Any, loss: Callable[..., Any] | None, wanted: Wanted, amp: str | None = None
) -> Trace:
    """Record a step on fake tensors of the model's device; the model, which has no plan, stays as it is but for
    training mode. Model, batch, loss and errors are those of `tracer.trace`.

    Args:
        amp: the type of autocast, "" for none; None: that which is on.
    """
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    if not model.training:
        model.train()
    amp = ambient(where.type).dtype if amp is None else amp
    options = {**wanted.loop, "amp": amp or None}
    step = in_hand(model, batch, loss, wanted.optimizer, wanted.scaler, {}, options, 0)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else ""
    target = device_entry((board_of(name) or GPU_UNKNOWN) if name else "cpu")
    with left_as_found():
        return record_fake(step, target, device=str(where))


def plan_within(trace: Trace, wanted: Wanted) -> Plan:
    """The plan for a recorded step, by recomputation alone unless more than equal bits is allowed or levers are named;
    on CUDA under the allocator's settings of this process.

    Raises:
        BudgetError: no plan was found within the budget.
        SpecError: no such budget, planner or lever.
    """
    # One capture serves calls of all sizes only if the step is not changed, which packing alone is not worth.
    unnamed = () if wanted.allow == "bit" else None
    on_gpu = trace.meta.device == "cuda"
    return simulator.plan(
        trace,
        wanted.budget,
        allow=wanted.allow,
        levers=unnamed if wanted.levers is None else wanted.levers,
        planner=wanted.planner,
        budget_of=wanted.budget_of or (RESERVED if on_gpu else ALLOCATED),
        seconds=wanted.seconds,
        alloc_conf=alloc_conf() if on_gpu else None,
    )


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss that the module computes, if it does; else a sum that differentiates all its tensor outputs."""
    with suppress(SpecError):
        return cast(torch.Tensor, loss_in_outputs(outputs))
    chosen = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not chosen:
        raise SpecError("the model returns no loss, and no output of it requires a gradient.")
    return reduce(operator.add, ((x.abs() if x.is_complex() else x).float().mean() for x in chosen))


def in_words(plan: Plan) -> str:
    """Return what a plan costs and brings."""
    before, after, of = plan.predicted["baseline"], plan.predicted["plan"], plan.budget_of
    key = f"peak_{of}_bytes"
    tiles = [f" in {r.number} tiles" if r.number else "" for r in plan.rewrites]
    changes = "".join(f"{r.kind}: {r.op}{n}; " for r, n in zip(plan.rewrites, tiles, strict=True))
    return (
        f"{changes}{len(plan.actions)} values are recomputed; {of} peak {show_bytes(before[key])} -> "
        f"{show_bytes(after[key])} of {show_bytes(plan.budget_bytes or 0)}, step time "
        f"{show_percent(after['overhead_percent'], signed=True)}"
    )


class Clock:
    """Says what was done, and how long it took."""

    def __init__(self, say: Say) -> None:
        self.say, self.began = say, time.monotonic()

    def done(self, what: str) -> None:
        now = time.monotonic()
        self.say(f"{what} ({now - self.began:.1f} s)")
        self.began = now
