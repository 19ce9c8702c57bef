"""Turn a schedule and a question about allocator settings and a device into reserved memory, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simulator.allocator.caching import OutOfMemory
from simulator.allocator.device import CUDA, DeviceMemory
from simulator.allocator.reserved import ReservedFigures, reserved_peak
from simulator.allocator.settings import AllocatorSettings, as_in, parse_alloc_conf
from simulator.core.problem import Problem
from simulator.core.schedule import Schedule
from traces.errors import SpecError
from traces.trace import TraceMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Under which settings, and on which device."""

    alloc_conf: str  # as PYTORCH_ALLOC_CONF would say
    settings: AllocatorSettings
    asked: bool  # whether the settings are the user's question, to be compared with torch's defaults
    device: DeviceMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What the caching allocator does with one schedule."""

    figures: (
        ReservedFigures  # on the device that was named, if it fits there; else with as much as it asks for
    )
    wanted_bytes: int  # reserved with as much memory as it asks for
    by_default: ReservedFigures | None = None  # under torch's default settings, if others were asked about
    fits: bool = True  # into the device that was named
    out_of_memory: str = ""  # why it does not fit

    def to_json(self) -> dict[str, Any]:
        f = self.figures
        return {
            "fragmentation_percent": round(100 * f.fragmentation, 4),
            "reserved_bytes_by_iteration": [i.reserved_bytes for i in f.iterations],
            "wanted_bytes": self.wanted_bytes,
            "segment_requests": f.segment_requests,
            "retries_a_step": f.retries_a_step,
            "steady": f.steady,
            "default_peak_reserved_bytes": None
            if self.by_default is None
            else self.by_default.peak_reserved_bytes,
        }


def kind_of(meta: TraceMeta) -> str:
    """cuda or cpu, whatever the device's number."""
    return meta.device.partition(":")[0]


def ask(
    meta: TraceMeta, alloc_conf: str | None = None, device: DeviceMemory | None = None
) -> Question | None:
    """The question about a trace; None for a CPU's, which has no caching allocator.

    Without `alloc_conf`, the settings are those that the trace was recorded under; with it they are what it says and
    torch's defaults, as if the environment variable were set to it.

    Raises:
        SpecError: settings that do not exist, or any for a CPU's trace.
    """
    if kind_of(meta) != CUDA:
        if alloc_conf is not None:
            raise SpecError(
                f"--alloc-conf: this trace holds the graph of a {meta.device.upper()}, where torch has no caching "
                "allocator; trace it with --target for a GPU, or with --device cuda."
            )
        return None
    text = meta.alloc_conf if alloc_conf is None else alloc_conf
    settings = as_in(parse_alloc_conf(text), meta.torch_version)
    return Question(alloc_conf=text, settings=settings, asked=alloc_conf is not None, device=device)


def reserve(problem: Problem, schedule: Schedule, question: Question) -> Reserved:
    """Answer the question for one schedule."""
    trace = problem.trace
    settings, device = question.settings, question.device
    figures = reserved_peak(problem, schedule, settings)
    wanted = figures.highest_reserved_bytes
    by_default = None
    if question.asked:
        plain = as_in(AllocatorSettings(), trace.meta.torch_version)
        by_default = figures if settings == plain else reserved_peak(problem, schedule, plain)
    out_of_memory = ""
    if device is not None and (settings.memory_fraction is not None or wanted > device.usable_bytes):
        try:
            figures = reserved_peak(
                problem,
                schedule,
                settings,
                device_memory_bytes=device.usable_bytes,
                total_memory_bytes=device.memory_bytes,
            )
        except OutOfMemory as error:
            out_of_memory = str(error)
    return Reserved(
        figures=figures,
        wanted_bytes=wanted,
        by_default=by_default,
        fits=not out_of_memory,
        out_of_memory=out_of_memory,
    )
