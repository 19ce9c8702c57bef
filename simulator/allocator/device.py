"""The memory that one process can have of a device, and whether a schedule fits it under some allocator settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from simulator.allocator.caching import OutOfMemory
from simulator.allocator.requests import Requests
from simulator.allocator.reserved import ReservedFigures, reserved_peak
from simulator.allocator.settings import AllocatorSettings, as_in, parse_alloc_conf
from simulator.core.limits import parse_budget
from simulator.core.problem import Problem, Replay
from traces.errors import SpecError
from traces.records.measurement import RunFigures
from traces.records.trace import RANK, TraceMeta
from traces.units import show_bytes

CPU: Final = "cpu"
CUDA: Final = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A device's memory, and what of it the training step cannot have."""

    name: str
    kind: str  # cuda or cpu
    memory_bytes: int
    context_bytes: int = 0
    reserve_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """The bytes left for the allocator; at least 0."""
        return max(0, self.memory_bytes - self.context_bytes - self.reserve_bytes)

    def to_json(self) -> dict[str, Any]:
        sizes = ("memory_bytes", "context_bytes", "reserve_bytes", "usable_bytes")
        return {"device": self.name, **{k: getattr(self, k) for k in sizes}}

    def room(self) -> str:
        """`A100-40: 40.00 GiB, less 704.00 MiB for the CUDA context (assumed): 39.31 GiB to use`."""
        from traces.devices import CONTEXT_BYTES

        size = show_bytes(self.memory_bytes)
        text = self.name if self.name.endswith(size) else f"{self.name}: {size}"
        assumed = " (assumed)" * (self.context_bytes == CONTEXT_BYTES)
        if self.context_bytes:
            text += f", less {show_bytes(self.context_bytes)} for the CUDA context{assumed}"
        if self.reserve_bytes:
            text += f", less {show_bytes(self.reserve_bytes)} in reserve"
        less = self.usable_bytes != self.memory_bytes
        return text + f": {show_bytes(self.usable_bytes)} to use" * less


def device_memory(
    kind: str | None = None, *, gpu: str | None = None, memory: str | None = None, context: str | None = None
) -> DeviceMemory | None:
    """Return the memory that the user named; None if that is nothing. Raises SpecError: no such device, no size, or a
    device of another kind than the trace's.

    Args:
        kind: of the trace that is to fit, cuda or cpu; None: as the device is, and a size alone is of a CPU.
        gpu: an entry of the device table; memory: a size such as 40GiB, instead of the entry's or without one.
        context: what the CUDA context takes; None: the assumed value on a GPU, nothing on the CPU.
    """
    if gpu is None and memory is None:
        if context is not None:
            raise SpecError("--context is part of a device's memory; name one with --gpu or --device-memory.")
        return None
    from traces.devices import CONTEXT_BYTES, device

    entry = None if gpu is None else device(gpu)
    if kind is None:
        kind = CPU if entry is None else entry.kind
    if entry is not None and kind not in (entry.kind, RANK):
        other = "trace it with --target NAME" if entry.kind == CUDA else "give the GPU that it was traced for"
        raise SpecError(
            f"--gpu {gpu}: the trace holds the graph of a {kind.upper()} and this device is a "
            f"{entry.kind.upper()}; {other}."
        )
    total = size_of("--device-memory", memory) if memory is not None else entry.memory_bytes if entry else 0
    kept = 0 if kind == CPU else CONTEXT_BYTES
    if context is not None:
        kept = 0 if context.strip() == "0" else size_of("--context", context)
    name = entry.name if entry is not None else f"a device of {show_bytes(total)}"
    return DeviceMemory(name=name, kind=kind, memory_bytes=total, context_bytes=kept)


def size_of(option: str, text: str) -> int:
    """The bytes of an option that takes a size; raises SpecError if it is none."""
    if "%" in text:
        raise SpecError(f"{option} {text}: give a size, such as 40GiB; there is nothing to take a share of.")
    return parse_budget(text, 1, option)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Under which allocator settings, and on which device."""

    settings: AllocatorSettings | None = None  # None: a CPU, which has no caching allocator
    alloc_conf: str | None = None  # the same as PYTORCH_ALLOC_CONF would say it
    device: DeviceMemory | None = None  # None: enough memory


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """The needs of one schedule beside a device. On a GPU reserved memory decides, on a CPU allocated memory."""

    peak_allocated_bytes: int
    # On the device that was named, if it fits there; else with as much as it asks for. None: no caching allocator.
    reserved: ReservedFigures | None = None
    wanted_bytes: int = 0  # with as much memory as it asks for
    device: DeviceMemory | None = None
    out_of_memory: str = ""  # why it does not fit

    @property
    def fits(self) -> bool | None:
        """Into the device; None: none was named."""
        return None if self.device is None else not self.out_of_memory

    @property
    def needs_bytes(self) -> int:
        """The highest that the device must have room for."""
        return self.peak_allocated_bytes if self.reserved is None else self.reserved.highest_reserved_bytes

    @property
    def left_bytes(self) -> int | None:
        """The bytes that the device has left; None if it does not fit, or none was named."""
        if self.device is None or self.out_of_memory:
            return None
        return max(0, self.device.usable_bytes - self.needs_bytes)

    @property
    def retries_a_step(self) -> int:
        """How often a step gives all cached memory back to make room."""
        return 0 if self.reserved is None or self.out_of_memory else self.reserved.retries_a_step

    def figures(self, step_time_ns: int | None = None) -> RunFigures:
        of = self.reserved
        return RunFigures(
            peak_allocated_bytes=self.peak_allocated_bytes,
            peak_block_bytes=None if of is None else of.peak_block_bytes,
            peak_reserved_bytes=None if of is None else of.peak_reserved_bytes,
            step_time_ns=step_time_ns,
        )

    def allocator(self) -> dict[str, Any] | None:
        """The allocator's figures as JSON; None where there is none."""
        f = self.reserved
        if f is None:
            return None
        return {
            "fragmentation_percent": round(100 * f.fragmentation, 4),
            "reserved_bytes_by_iteration": [i.reserved_bytes for i in f.iterations],
            "wanted_bytes": self.wanted_bytes,
            "retries_a_step": f.retries_a_step,
            "steady": f.steady,
        }


def kind_of(meta: TraceMeta) -> str:
    """cuda or cpu, whatever the device's number."""
    return meta.device.partition(":")[0]


def setting_of(meta: TraceMeta, alloc_conf: str | None = None, device: DeviceMemory | None = None) -> Setting:
    """The setting to ask about for a trace.

    Without `alloc_conf`, the settings are those that the trace was recorded under; with it they are what it says and
    torch's defaults, as if the environment variable were set to it. Raises SpecError: settings that do not exist, or
    any for a CPU's trace.
    """
    if kind_of(meta) != CUDA:
        if alloc_conf is not None:
            raise SpecError(
                f"--alloc-conf: this trace holds the graph of a {meta.device.upper()}, where torch has no caching "
                "allocator; trace it with --target for a GPU, or with --device cuda."
            )
        return Setting(device=device)
    text = meta.alloc_conf if alloc_conf is None else alloc_conf
    settings = as_in(parse_alloc_conf(text), meta.torch_version)
    return Setting(settings=settings, alloc_conf=text, device=device)


# What helps most against fragmentation, where torch can map memory.
GROWING: Final = "expandable_segments:True"


def settings_to_try(meta: TraceMeta, setting: Setting) -> tuple[Setting, ...]:
    """The settings among which a plan may choose, the trace's own first; these alone if it was recorded under some."""
    if setting.settings is None or setting.alloc_conf:
        return (setting,)
    return setting, setting_of(meta, GROWING, setting.device)


def device_fit(
    problem: Problem,
    replay: Replay,
    setting: Setting,
    *,
    peak_bytes: int | None = None,
    requests: Requests | None = None,
) -> DeviceFit:
    """Return what a schedule needs under a setting, and if that fits; `peak_bytes`, `requests`: if not the replay's."""
    peak = replay.timeline.peak_allocated_bytes if peak_bytes is None else peak_bytes
    settings, device, schedule = setting.settings, setting.device, replay.schedule
    if settings is None:
        short = "" if device is None else _short(peak, device, "allocates")
        return DeviceFit(peak_allocated_bytes=peak, wanted_bytes=peak, device=device, out_of_memory=short)
    reserved = partial(reserved_peak, problem, schedule, requests=requests)
    figures = reserved(settings)
    wanted, out_of_memory = figures.highest_reserved_bytes, ""
    if device is not None and wanted > device.usable_bytes:
        try:
            figures = reserved(settings, device_memory_bytes=device.usable_bytes)
        except OutOfMemory as error:
            out_of_memory = _short(wanted, device, "reserves") or str(error)
    return DeviceFit(
        peak_allocated_bytes=peak,
        reserved=figures,
        wanted_bytes=wanted,
        device=device,
        out_of_memory=out_of_memory,
    )


def _short(needed: int, device: DeviceMemory, does: str) -> str:
    over = needed - device.usable_bytes
    told = f"the step {does} {show_bytes(needed)}, {show_bytes(over)} more than there is to use"
    return told if over > 0 else ""
