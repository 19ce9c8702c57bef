"""Plan the training of a model in hand within a budget, and apply the plan: no files, one capture.

from executor import fit
model = fit(model, (x, y), loss=criterion, optimizer=optimizer, budget="8GiB")
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor.training.engines import without_hooks
from executor.training.module import apply_plan, capture_now, twin_of
from simulator import api as simulator
from simulator.core.limits import DEFAULTS
from tracer.api import GPU_UNKNOWN, in_hand, left_as_found
from tracer.build.batch import SplitBatch, split_batch
from tracer.costs.profiles import board_of
from tracer.precision.policy import ambient
from tracer.record.program import Program
from tracer.recording import ProfileUse, record_drafted
from tracer.torch_api import pytree
from traces.alloc_conf import alloc_conf
from traces.devices import device as device_entry
from traces.plan import ALLOCATED, RESERVED, Plan
from traces.units import show_bytes, show_percent

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What plans are to hold, and what the loop does beside calling the model."""

    budget: str | int
    budget_of: str | None = None
    optimizer: Any = None
    scaler: torch.amp.GradScaler | None = None
    planner: str | None = None
    seconds: float = DEFAULTS.seconds


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
    planner: str | None = None,
    seconds: float = DEFAULTS.seconds,
    in_place: bool = False,
    say: Say | None = None,
) -> nn.Module:
    """The model, training within a budget of memory from its next call on.

    Nothing runs: the step is captured on fake tensors, planned, and what was captured serves the first call with
    arguments like those of `batch`.

    Args:
        model, batch, loss, optimizer, scaler: the training step, as `tracer.trace` takes it. A model in evaluation mode
            is put into training mode.
        budget: bytes, a size such as "8GiB", or a share of the step's own peak such as "60%".
        budget_of: "allocated" or "reserved" memory; None: reserved on CUDA, under the allocator's settings of this
            process, and allocated on the CPU.
        amp: the type of autocast around model and loss; None: that which is on around this call.
        planner, seconds: how plans are looked for, as in `simulator.plan`.
        in_place: as in `apply_plan`.
        say: told what happens, a line each time; None: stderr.

    Returns:
        what `apply_plan` returns.

    Raises:
        BudgetError: no plan was found within the budget; says the least one that would do.
        SpecError, CaptureError: as `tracer.trace`.
    """
    tell = say or _on_stderr
    wanted = Wanted(
        budget=budget,
        budget_of=budget_of,
        optimizer=optimizer,
        scaler=scaler,
        planner=planner,
        seconds=seconds,
    )
    if not model.training:
        tell("the model is in evaluation mode; it is put into training mode, for which the plan is made")
    began = time.monotonic()
    plan, program, given = planned_step(model, batch, loss, wanted, amp=amp, say=tell)
    planned = apply_plan(model, plan, in_place=in_place)
    if not planned.training:
        planned.train()
    capture_now(planned, given.args, given.kwargs, program)
    tell(f"ready after {time.monotonic() - began:.1f} s")
    return planned


def planned_step(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Any] | None,
    wanted: Wanted,
    *,
    amp: str | None = None,
    say: Say = lambda text: None,
) -> tuple[Plan, Program, SplitBatch]:
    """A plan for a training step of a model in hand, what was captured for it, and the call that it was captured of.

    Raises:
        BudgetError, SpecError, CaptureError: as `fit`.
    """
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    bare = twin_of(model)
    if not bare.training:
        bare.train()
    if amp is None:
        amp = ambient(where.type).dtype or None
    step = in_hand(bare, batch, loss, wanted.optimizer, wanted.scaler, {}, {"amp": amp}, 0)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else ""
    target = device_entry((board_of(name) or GPU_UNKNOWN) if name else "cpu")
    clock = _Clock(say)
    with left_as_found(False), without_hooks(bare):
        draft, trace = record_drafted(step, target, ProfileUse(), device=str(where), untouched=False)
    clock.done(f"captured {len(draft.program.ops)} ops")
    of = wanted.budget_of or (RESERVED if name else ALLOCATED)
    plan = simulator.plan(
        trace,
        wanted.budget,
        planner=wanted.planner,
        budget_of=of,
        seconds=wanted.seconds,
        alloc_conf=alloc_conf() if name else None,
    )
    clock.done(f"planned: {_in_words(plan, of)}")
    given = split_batch(bare, pytree.tree_map_only(torch.Tensor, lambda x: x.to(where), batch), loss)
    return plan, draft.program, given


def _in_words(plan: Plan, of: str) -> str:
    """What a plan costs and brings."""
    before, after = plan.predicted["baseline"], plan.predicted["plan"]
    key = f"peak_{of}_bytes"
    return (
        f"{len(plan.actions)} values are recomputed; {of} peak {show_bytes(before[key])} -> {show_bytes(after[key])} "
        f"of {show_bytes(plan.budget_bytes or 0)}, step time {show_percent(after['overhead_percent'], signed=True)}"
    )


class _Clock:
    """Says what was done, and how long it took."""

    def __init__(self, say: Say) -> None:
        self.say, self.began = say, time.monotonic()

    def done(self, what: str) -> None:
        now = time.monotonic()
        self.say(f"{what} ({now - self.began:.1f} s)")
        self.began = now


def _on_stderr(text: str) -> None:
    sys.stderr.write(f"lowtide: {text}\n")
    sys.stderr.flush()
