"""Wrappers that a plan must know of: those it goes inside of, and a `forward` of the instance's own, around or instead.

A module's call runs `self.forward`, and what hangs on the instance under that name goes before the class's: Accelerate
(mixed precision, hooks of offloading), TRL (its fused loss) and others put one there. One that is there when the plan
is applied is part of the model: it is what is captured. One that comes later may wrap the planned forward, and then
all is well; one that replaces it would train without the plan, which is found at its first training call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from traces.errors import PlanError

FORWARD: Final = "_lowtide_forward"  # where a planned module has the forward that its instance had before


def check_wrapped(model: nn.Module) -> None:
    """Raise PlanError for a wrapper that no plan can go around of, and say where the plan goes."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without which there is no model of it
    sharded: tuple[type, ...] = (fsdp.FullyShardedDataParallel,) if fsdp is not None else ()
    name = type(model).__name__
    if isinstance(model, DistributedDataParallel):
        raise PlanError(
            f"a plan goes inside of {name}, whose hooks see each gradient as it comes: "
            "DistributedDataParallel(apply_plan(model, plan)), or apply_plan(ddp.module, plan, in_place=True)."
        )
    if isinstance(model, DataParallel):
        raise PlanError(f"{name} copies the model to every device at every step, {DATA_PARALLEL}")
    if isinstance(model, sharded):
        raise PlanError(
            f"{name} keeps parameters flat and in shards, which no captured graph has; shard with fully_shard, after "
            "the plan: fully_shard(apply_plan(block, plan, in_place=True))."
        )
    if isinstance(inner := vars(model).get("_modules", {}).get("_orig_mod"), nn.Module):
        raise PlanError(
            f"the model was compiled by torch.compile, whose graphs no plan reaches into; apply the plan to the "
            f"{type(inner).__name__} itself (model._orig_mod), which torch.compile then leaves as it is."
        )
    for path, module in model.named_modules():
        if path and isinstance(module, (DataParallel, DistributedDataParallel, *sharded)):
            raise PlanError(
                f"the model holds a {type(module).__name__} ({path}), whose communication no captured graph has; "
                f"apply a plan to {path}.module instead."
            )


DATA_PARALLEL: Final = (
    "where there is nothing to plan for; use DistributedDataParallel, one process for each device."
)


def check_replica(module: nn.Module) -> None:
    """Raise PlanError for one of the copies that `nn.DataParallel` makes at every step."""
    if vars(module).get("_is_replica"):
        raise PlanError(
            f"nn.DataParallel copies the planned model to every device at every step, {DATA_PARALLEL}"
        )


def mixed_in(mixin: type, kind: type, **attributes: Any) -> type:
    """A class of the mixin before a model's own, under the name and with the signature of that.

    Who unwraps a forward, as Accelerate does, finds this one's.
    """
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    attributes["forward"].__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return type(kind.__name__, (mixin, kind), {**names, **attributes})


def take_forward(model: nn.Module) -> None:
    """Put the instance's own forward, if it has one, where the plan finds it and a call does not."""
    if "forward" in vars(model):
        vars(model)[FORWARD] = vars(model).pop("forward")


def give_back_forward(model: nn.Module) -> None:
    """Undo `take_forward`, but for a forward that came later."""
    own = vars(model).pop(FORWARD, None)
    if own is not None:
        vars(model).setdefault("forward", own)


@contextmanager
def later_forward_off(model: nn.Module) -> Iterator[None]:
    """In the body a planned module has no forward that came after the plan: it runs around the planned one, and so
    must not be captured."""
    later = vars(model).pop("forward", None)
    try:
        yield
    finally:
        if later is not None:
            vars(model)["forward"] = later


def check_bypassed(module: nn.Module, entered: bool) -> None:
    """Raise PlanError if a training call of a planned module, with a forward of the instance's own that was put there
    after the plan, ended without having entered the planned one."""
    if not entered:
        own: Any = vars(module)["forward"]
        own = getattr(own, "__func__", own)
        name = f"{getattr(own, '__module__', '?')}.{getattr(own, '__qualname__', type(own).__name__)}"
        raise PlanError(
            f"after the plan was applied, this {type(module).__name__} got another forward ({name}), which does not "
            "call the planned one, so that the step ran without the plan; apply the plan after what puts it there, or "
            "delete it (del model.forward)."
        )


def trains(module: nn.Module) -> bool:
    """Whether a call of this module now is one that a plan is for."""
    return module.training and torch.is_grad_enabled()
