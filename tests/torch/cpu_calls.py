"""Turn calls of ops and steps of modules into what the CPU's rules tell and what torch's profiler finds of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from tests.torch.steps import build_of, recorded
from tracer.costs.rules_cpu.workspaces import cpu_events
from tracer.costs.signature import TensorSpec, of_call
from tracer.measure.probes import CpuMarker, cpu_allocations
from tracer.measure.step import measure
from traces.records.trace import Trace

Events = tuple[int, ...]


def spec(*shape: int, dtype: str = "float32", last: bool = False, turned: bool = False) -> TensorSpec:
    """A dense tensor; last: in channels last; turned: its last two dimensions transposed in memory."""
    stride = [1]
    for n in reversed(shape[1:]):
        stride.insert(0, stride[0] * n)
    if last:
        _n, c, h, w = shape
        stride = [h * w * c, 1, w * c, c]
    if turned:
        stride = [*stride[:-2], 1, shape[-2]]
    return TensorSpec(shape=shape, stride=tuple(stride[: len(shape)]), dtype=dtype)


def peak(events: Iterable[int]) -> int:
    """The most bytes that are alive at once."""
    live = most = 0
    for event in events:
        live += event
        most = max(most, live)
    return most


def told_and_found(op: Any, *args: Any, **kwargs: Any) -> tuple[Events, Events]:
    """What the rules say that a call allocates, and what the profiler finds once the call has run before."""
    outs: list[Any] = []

    def work(marker: CpuMarker) -> None:
        outs.append(marker.run(op, lambda: op(*args, **kwargs)))

    with torch.no_grad():
        op(*args, **kwargs)
        (found,) = cpu_allocations(work, 1)
    told = cpu_events(of_call(op, args, kwargs, outs[0]))
    assert told is not None
    assert sum(told) == sum(found), (told, found)
    return told, found


def faked_and_measured(make: Callable[[], tuple[Any, ...]], **policy: str) -> tuple[Trace, Trace]:
    """A step's trace by the rules, and the measured one; policy: as `amp="bfloat16"`."""
    build = replace(build_of(make), policy=policy)
    step = recorded(build)
    return step.trace, measure(step, build, "cpu", rounds=1, warmup=1).finish()
