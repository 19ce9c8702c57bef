"""Measure a training step op by op on the real device: the time of each, and what it allocates while it runs.

Each op of the fake trace is watched once per round, in the same order (see `tracer.measure.runner`), and its row gets
its typical time and its allocations. Every op runs as the graph has it. Whole steps that nobody watches run in between:
by these the times are scaled, and what such a step takes beside all ops is shared by the ops.

On CUDA the first round also shows what libraries allocate once and keep (cuBLAS): these become storages of the category
"workspace" that are there throughout the step.

On a GPU that is not there (a rehearsal) nothing is timed: the allocations are those of torch's own code, and the times
those that the step was recorded with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from tracer.costs.cost import MEASURED, REHEARSED, Cost
from tracer.costs.rows import LibraryWorkspace
from tracer.measure.probes import Round, Watch, on_cpu, on_cuda, timed_on_cpu
from tracer.measure.runner import GraphRunner
from tracer.precision.policy import start_low
from tracer.record.assemble import Draft
from tracer.step.step import BuildStep
from traces.errors import TraceError
from traces.progress import Say, counted, silent
from traces.provenance import alloc_conf, rehearsing
from traces.records.trace import REHEARSED_MODE, VIEW, settle
from traces.units import show_time

SPREAD = 1.5  # slowest over fastest round from which a warning is due


# By op id; what libraries keep (None: not a CUDA device); what the step says in a trace's header.
Measured = tuple[tuple[Cost, ...], tuple[LibraryWorkspace, ...] | None, dict[str, Any]]


def measure(
    draft: Draft,
    build: BuildStep,
    device: str,
    *,
    rounds: int = 5,
    warmup: int = 2,
    say: Say = silent,
) -> Measured:
    """Times and allocations of a step that was recorded on fake tensors of the same device. In a rehearsal nothing is
    timed. `rounds`: timed ones, of which each op's median counts. Raises TraceError: the real step ran other ops than
    the recorded one; CaptureError: its loss code or optimizer failed.
    """
    cuda = device.startswith("cuda")
    rehearsed = cuda and rehearsing()
    step = build(device)
    start_low(step.scaler)
    expected, flags = [row.target for row in draft.rows], [row.flags for row in draft.rows]
    runner, kept = GraphRunner(draft, step), None
    if cuda:  # libraries make their workspaces in it; those of earlier work in this process are dropped
        from tracer.torch_api import clear_cublas_workspaces

        clear_cublas_workspaces()
        kept = on_cuda(runner.run).workspaces

    def one(watched: Callable[[Callable[[Watch], None]], Round]) -> Round:
        found = watched(runner.run)
        if (real := found.targets) != expected:
            pairs = enumerate(zip_longest(expected, real, fillvalue="nothing"))
            k, (a, b) = next((k, pair) for k, pair in pairs if pair[0] != pair[1])
            raise TraceError(
                f"the real step differs from the captured one: op {k} is {b} and was to be {a} ({len(real)} ops, "
                f"{len(expected)} captured). Code outside the model that branches on data, or does something else in "
                "some steps, cannot be traced in real mode; leave --device out, or write the branch with torch.where "
                "or clamp."
            )
        return found

    if rehearsed:
        times = [cost.time_ns for cost in draft.priced]
    else:
        found, wholes = list[list[int]](), list[int]()
        for k in counted(range(-max(warmup, 1), rounds), lambda k: "warming up" if k < 0 else "timing", say):
            if k < 0:
                _whole_ns(runner)
                continue
            found.append(one(on_cuda if cuda else timed_on_cpu).times_ns)
            wholes.append(_whole_ns(runner))
        totals = [sum(x) for x in found]
        if max(totals) > SPREAD * min(totals):
            say(
                f"warning: the rounds took between {show_time(min(totals))} and {show_time(max(totals))}; the machine "
                "is busy, and the times of this trace are not reliable (its sizes are)."
            )
        medians = [round(statistics.median(column)) for column in zip(*found, strict=True)]
        times = with_the_rest(medians, flags, int(statistics.median(wholes)))
    events = one(on_cuda if cuda else on_cpu).events
    source = REHEARSED if rehearsed else MEASURED
    costs = tuple(
        Cost(time_ns=t, events=settle(e, created), source="" if row.flags & VIEW else source)
        for t, e, created, row in zip(times, events, draft.created_bytes, draft.rows, strict=True)
    )
    header: dict[str, Any] = {
        "mode": REHEARSED_MODE if rehearsed else "real",
        "device": device.partition(":")[0],
        "alloc_conf": alloc_conf() if cuda else "",
        "threads": 0 if cuda else torch.get_num_threads(),
        "target": draft.target.name if rehearsed else torch.cuda.get_device_name() if cuda else "cpu",
    }
    return costs, kept, header


def with_the_rest(times_ns: Sequence[int], flags: Sequence[int], whole_ns: int) -> list[int]:
    """Times of ops that sum to the time of a whole step, which nobody watched.

    What a step takes beside its ops is Python, autograd's engine, the release of memory that nobody needs any more, and
    delays, which strike one op or another and are in no median. All ops but views share it evenly. If the ops alone
    took longer than the whole step, the watching cost that, and all are scaled.
    """
    rest, together = whole_ns - sum(times_ns), sum(times_ns)
    takers = [i for i, f in enumerate(flags) if not f & VIEW]
    if rest <= 0 or not takers:
        return [round(t * whole_ns / together) if together else 0 for t in times_ns]
    out = list(times_ns)
    for k, i in enumerate(takers):
        out[i] += rest * (k + 1) // len(takers) - rest * k // len(takers)
    return out


def _whole_ns(runner: GraphRunner) -> int:
    """The time of a step that nobody watches, from its last call of the model on."""
    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    begin = 0

    def start() -> None:
        nonlocal begin
        wait()
        begin = time.perf_counter_ns()

    start()
    runner.run(None, start)
    wait()
    return time.perf_counter_ns() - begin
