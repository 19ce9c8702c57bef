"""A question about a trace: budget, planner, limits, levers, allocator settings and device, parsed once from words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

from simulator.allocator.device import DeviceMemory, device_memory, size_of
from simulator.allocator.device_fit import Setting, kind_of, setting_of
from simulator.allocator.settings import parse_alloc_conf
from simulator.core.budget import MOST_BYTES, check_budget, parse_budget
from simulator.core.limits import BIT_EXACT, DEFAULTS, HOST_BYTES, NONE, Constraints, Levers, Limits
from simulator.core.selectors import check_selectors
from simulator.planners import DEFAULT, SAVE_ALL, find
from simulator.prediction.step import Prediction
from traces.errors import SpecError
from traces.records.plan import ALLOCATED, RESERVED
from traces.records.trace import TraceMeta

if TYPE_CHECKING:
    from traces.records.gradient_errors import GradientErrors

DEVICE: Final = "device"  # the budget that is the device's memory
NOTHING: Final = Levers(kinds=())
# A name such as "a100-40", a size such as "40GiB" or in bytes; or the memory as it is.
Device = str | int | DeviceMemory


class Planning(TypedDict, total=False):
    """How to look for plans; every function of the API that plans takes these words."""

    planner: str | None  # a name of `simulate planners`, or `module:function`; None: the default
    seconds: float  # 5: processor time after which all searches for one answer end with the best plan so far
    seed: int  # 0: of random choices; equal seeds make equal plans
    never: Sequence[str]  # selectors of ops that must not run again
    always_save: Sequence[str]  # selectors of ops whose values must be saved
    # As PYTORCH_ALLOC_CONF would be; None: as the trace was recorded. GPUs' traces only.
    alloc_conf: str | None


class Changing(Planning, total=False):
    """Options of plans, and how a plan may change the step beside recomputing."""

    # "bit": gradients equal in every bit; "fp": but for rounding (a loss head in tiles, whose logits then do not
    # exist); "approximate": within a measured error.
    allow: str
    levers: (
        Sequence[str] | str | None
    )  # names of `simulate levers`; None: all that are allowed and need no name
    host_memory: str | None  # the pinned host memory that "offload" may take; None: 32 GiB
    host_bandwidth: str | None  # what it copies either way in a second; None: what the device table has
    max_gradient_error: float | None  # of an approximate plan, relative L2, by the `errors` of its parts
    errors: GradientErrors | str | Path | None  # what `execute errors` measured of this step, or its file


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about any trace; nothing in it is of one trace."""

    budget: str | int | None = (
        None  # bytes, a size, a share of the step's own peak, or DEVICE; None: no limit
    )
    budget_of: str | None = None  # ALLOCATED or RESERVED; None: reserved where a GPU is named, or its memory
    planner: str | None = None  # None: everything saved where there is no budget, else the default
    limits: Limits = DEFAULTS
    constraints: Constraints = NONE
    levers: Levers = BIT_EXACT
    alone: bool = False  # the planner by itself: no levers, and no advice about them
    alloc_conf: str | None = None
    # The device's memory, by the kind of the trace that is to fit it (cuda or cpu, or None: as the device is).
    device: Callable[[str | None], DeviceMemory | None] = device_memory

    @property
    def planner_name(self) -> str:
        return self.planner or (SAVE_ALL if self.budget is None else DEFAULT)

    def setting(self, meta: TraceMeta) -> Setting:
        """The allocator settings and the device to ask about. Raises SpecError if the trace has none such."""
        return setting_of(meta, self.alloc_conf, self.device(kind_of(meta)))

    def limit(self, saved: Prediction) -> tuple[int | None, str]:
        """The budget in bytes (None: there is none), and what it limits, for the step with everything saved.

        Raises:
            SpecError: no device is named whose memory the budget is, or a CPU's trace reserves no memory.
        """
        device, on_gpu = saved.setting.device, saved.setting.settings is not None
        by_device = RESERVED if on_gpu and device is not None else ALLOCATED
        if self.budget == DEVICE:
            if device is None:
                raise SpecError("--budget device: name the device with --gpu or --device-memory.")
            return device.usable_bytes, by_device
        if self.budget is None:
            return None, self.budget_of or ALLOCATED
        of = self.budget_of or by_device
        whole = saved.whole_bytes(of)
        return self.budget if isinstance(self.budget, int) else parse_budget(self.budget, whole), of

    def of_planner(self) -> Question:
        """Return the same of a planner by itself. Raises SpecError if it is of changes of the step beside."""
        if self.levers not in (BIT_EXACT, NOTHING):
            raise SpecError("planners are looked at by themselves here: leave allow and levers out.")
        return replace(self, levers=NOTHING, alone=True)


def question(
    *,
    budget: str | int | None = None,
    budget_of: str | None = None,
    planner: str | None = None,
    seconds: float = DEFAULTS.seconds,
    seed: int = DEFAULTS.seed,
    never: Sequence[str] = (),
    always_save: Sequence[str] = (),
    allow: str = BIT_EXACT.allow,
    levers: Sequence[str] | str | None = None,
    host_memory: str | None = None,
    host_bandwidth: str | None = None,
    max_gradient_error: float | None = None,
    errors: GradientErrors | str | Path | None = None,
    alloc_conf: str | None = None,
    device: Device | None = None,
    gpu: str | None = None,
    memory: str | None = None,
    context: str | None = None,
    reserve: str | None = None,
) -> Question:
    """The question that words mean: those of `Changing`, and of a command's options.

    Args:
        budget, budget_of: as `Question` has them.
        device: what the plan is to fit; or, as a command says it, `gpu`, `memory`, `context` and `reserve`, which are
            those of `device_memory`.

    Raises:
        SpecError: a word means nothing in any trace; before any trace is read.
    """
    if budget is not None and budget != DEVICE:
        check_budget(str(budget))
    if budget_of not in (None, ALLOCATED, RESERVED):
        raise SpecError(f"budget_of {budget_of!r}: give {ALLOCATED} or {RESERVED}.")
    if not isinstance(seconds, int | float) or not 0 <= seconds <= sys.float_info.max:
        raise SpecError(f"--seconds {seconds!r}: give a number of seconds such as 5.")
    if planner is not None:
        find(planner)
    if alloc_conf is not None:
        parse_alloc_conf(alloc_conf)
    constraints = Constraints(never=tuple(never), always_save=tuple(always_save))
    check_selectors(constraints)
    if isinstance(levers, str):
        levers = tuple(x.strip() for x in levers.split(",") if x.strip())
    return Question(
        budget=min(budget, MOST_BYTES) if isinstance(budget, int) else budget,
        budget_of=budget_of,
        planner=planner,
        limits=Limits(seconds=seconds, seed=seed),
        constraints=constraints,
        levers=Levers(
            allow=allow,
            kinds=None if levers is None else tuple(levers),
            host_bytes=HOST_BYTES if host_memory is None else size_of("--host-memory", host_memory),
            host_bytes_per_s=0 if host_bandwidth is None else size_of("--host-bandwidth", host_bandwidth),
            max_gradient_error=max_gradient_error,
            errors=_errors(errors) if isinstance(errors, str | Path) else errors,
        ),
        alloc_conf=alloc_conf,
        device=_device(device, gpu, memory, context, reserve),
    )


def _errors(path: str | Path) -> GradientErrors:

    return GradientErrors.load(path)


def _device(
    device: Device | None, gpu: str | None, memory: str | None, context: str | None, reserve: str | None
) -> Callable[[str | None], DeviceMemory | None]:
    if isinstance(device, DeviceMemory):
        return lambda kind: device
    if isinstance(device, str) and not device.strip()[:1].isdigit():  # a size begins with a digit
        gpu = device
    elif device is not None:
        memory = str(device)
    of = partial(device_memory, gpu=gpu, memory=memory, context=context, reserve=reserve)
    of(None)  # which refuses what means nothing
    return of
