"""A question about a trace: budget, planner, limits, levers, allocator settings and device, parsed once from words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from simulator.allocator.device import DeviceMemory, Setting, device_memory, kind_of, setting_of, size_of
from simulator.allocator.settings import parse_alloc_conf
from simulator.core.limits import (
    BIT_EXACT,
    DEFAULTS,
    HOST_BYTES,
    MOST_BYTES,
    NONE,
    Constraints,
    Levers,
    Limits,
    check_budget,
    parse_budget,
)
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
Device = str | int | DeviceMemory


class Words(TypedDict, total=False):
    """The words of a question: keywords of the API, options of the commands."""

    # ALLOCATED or RESERVED; None: reserved where a GPU is named, or its memory. Under a budget of reserved memory the
    # allocator's settings are chosen too, unless `alloc_conf` gives them; the plan carries them.
    budget_of: str | None
    planner: str | None  # a name of `simulate planners`, or `module:function`; None: the default
    seconds: float  # 5: processor time after which all searches for one answer end with the best plan so far
    seed: int  # 0: of random choices; equal seeds make equal plans
    never: Sequence[str]  # selectors of ops that must not run again
    always_save: Sequence[str]  # selectors of ops whose values must be saved
    # As PYTORCH_ALLOC_CONF would be; None: as the trace was recorded. GPUs' traces only.
    alloc_conf: str | None
    gpu: str | None  # the device as a command says it, by the words of `device_memory`
    memory: str | None
    context: str | None
    reserve: str | None
    # How a plan may change the step beside recomputing. "bit": gradients equal in every bit; "fp": but for rounding (a
    # loss head in tiles, whose logits then do not exist); "approximate": within a measured error.
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
    budget: str | int | None = None, device: Device | None = None, **words: Unpack[Words]
) -> Question:
    """The question that words mean.

    Args:
        budget: as `Question` has it.
        device: what the plan is to fit: a name such as "a100-40", a size such as "40GiB" or in bytes, or the memory.

    Raises:
        SpecError: one means nothing in any trace; before any trace is read.
        TypeError: there is no such word.
    """
    if unknown := words.keys() - Words.__annotations__.keys():
        raise TypeError(f"{sorted(unknown)[0]!r} is no word of a question.")
    budget_of, planner = words.get("budget_of"), words.get("planner")
    if budget is not None and budget != DEVICE:
        check_budget(str(budget))
    if budget_of not in (None, ALLOCATED, RESERVED):
        raise SpecError(f"budget_of {budget_of!r}: give {ALLOCATED} or {RESERVED}.")
    seconds = words.get("seconds", DEFAULTS.seconds)
    if not isinstance(seconds, int | float) or not 0 <= seconds <= sys.float_info.max:
        raise SpecError(f"--seconds {seconds!r}: give a number of seconds such as 5.")
    if planner is not None:
        find(planner)
    if (alloc_conf := words.get("alloc_conf")) is not None:
        parse_alloc_conf(alloc_conf)
    constraints = Constraints(
        never=tuple(words.get("never", ())), always_save=tuple(words.get("always_save", ()))
    )
    check_selectors(constraints)
    return Question(
        budget=min(budget, MOST_BYTES) if isinstance(budget, int) else budget,
        budget_of=budget_of,
        planner=planner,
        limits=Limits(seconds=seconds, seed=words.get("seed", DEFAULTS.seed)),
        constraints=constraints,
        levers=_levers(words),
        alloc_conf=alloc_conf,
        device=_device(device, words),
    )


def _levers(words: Words) -> Levers:
    kinds, errors = words.get("levers"), words.get("errors")
    memory, bandwidth = words.get("host_memory"), words.get("host_bandwidth")
    if isinstance(kinds, str):
        kinds = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    if isinstance(errors, str | Path):
        from traces.records.gradient_errors import GradientErrors

        errors = GradientErrors.load(errors)
    return Levers(
        allow=words.get("allow", BIT_EXACT.allow),
        kinds=None if kinds is None else tuple(kinds),
        host_bytes=HOST_BYTES if memory is None else size_of("--host-memory", memory),
        host_bytes_per_s=0 if bandwidth is None else size_of("--host-bandwidth", bandwidth),
        max_gradient_error=words.get("max_gradient_error"),
        errors=errors,
    )


def _device(device: Device | None, words: Words) -> Callable[[str | None], DeviceMemory | None]:
    gpu, memory = words.get("gpu"), words.get("memory")
    if isinstance(device, DeviceMemory):
        return lambda kind: device
    if isinstance(device, str) and not device.strip()[:1].isdigit():  # a size begins with a digit
        gpu = device
    elif device is not None:
        memory = str(device)
    of = partial(
        device_memory, gpu=gpu, memory=memory, context=words.get("context"), reserve=words.get("reserve")
    )
    of(None)  # which refuses what means nothing
    return of
