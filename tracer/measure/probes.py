"""Watch one op after another while a step runs: how long each takes, and what it allocates.

On the CPU the profiler reports what is allocated inside a mark around each op; since it slows small ops down, times are
of rounds without it. On CUDA there are events around each op, and markers in the caching allocator's own history.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from tracer.costs.rows import LibraryWorkspace
from tracer.measure.cuda_history import OpWindow, mark, read_history, recording
from tracer.torch_api import RecordFunctionFast, pytree
from traces.provenance import rehearsing

MARK = "#lowtide op "
ITERATION = "#lowtide iteration "


class Watch:
    """Called around every op of a round: notes which ran, and when by the CPU's clock."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.spans: list[tuple[Any, Any]] = []

    def run(self, target: str, call: Callable[[], Any]) -> Any:
        """Run one op and return its result."""
        self.targets.append(target)
        begin = time.perf_counter_ns()
        out = call()
        self.spans.append((begin, time.perf_counter_ns()))
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The ops of a round in their order, and the findings of each."""

    targets: list[str]
    times_ns: list[int] = field(default_factory=list)
    events: list[tuple[int, ...]] = field(default_factory=list)  # +bytes and -bytes as requested, in order
    workspaces: tuple[LibraryWorkspace, ...] = ()  # that libraries made on CUDA and keep


class _CpuMarks(Watch):
    def run(self, target: str, call: Callable[[], Any]) -> Any:
        # The public `record_function` is itself dispatched, which would put the mark beside the op, not around it.
        with RecordFunctionFast(f"{MARK}{len(self.targets)}"):
            return super().run(target, call)


class _CudaMarks(Watch):
    def __init__(self) -> None:
        super().__init__()
        self.windows: list[OpWindow] = []
        self._timed = not rehearsing()

    def run(self, target: str, call: Callable[[], Any]) -> Any:
        self.targets.append(target)
        before = mark()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self._timed:
            begin.record()
        out = call()
        if self._timed:
            end.record()
            self.spans.append((begin, end))
        given = (x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_cuda)
        outputs = frozenset(x.untyped_storage().data_ptr() for x in given)
        self.windows.append(OpWindow(target, before, mark(), outputs))
        return out


def on_cuda(work: Callable[[Watch], None]) -> Round:
    """Watch each op that `work` runs. Its CUDA events are read in the end, so that nothing waits in between."""
    watch = _CudaMarks()
    with recording() as entries:
        work(watch)
    torch.cuda.synchronize()
    events, workspaces = read_history(entries, watch.windows)
    times = [int(begin.elapsed_time(end) * 1e6) for begin, end in watch.spans]
    return Round(targets=watch.targets, times_ns=times, events=events, workspaces=workspaces)


def timed_on_cpu(work: Callable[[Watch], None]) -> Round:
    """The times of the ops that `work` runs."""
    watch = Watch()
    work(watch)
    return Round(targets=watch.targets, times_ns=[end - begin for begin, end in watch.spans])


def on_cpu(work: Callable[[Watch], None]) -> Round:
    """The allocations of the ops that `work` runs."""
    watch = _CpuMarks()
    with memory_profiler() as prof:
        work(watch)
    # By time, not by place in the profiler's tree, where another thread's allocations for an op stand beside its mark.
    events, marks = cpu_account(prof, MARK)
    spans = [marks[f"{MARK}{k}"] for k in range(len(watch.targets))]
    moments, sizes = [moment for moment, _ in events], [size for _, size in events]
    inside = ((bisect.bisect_left(moments, a), bisect.bisect_right(moments, b)) for a, b in spans)
    return Round(targets=watch.targets, events=[tuple(sizes[first:last]) for first, last in inside])


@contextlib.contextmanager
def memory_profiler() -> Iterator[Any]:
    """torch's profiler with the CPU allocator's events.

    torch 2.11 and 2.12 warn at the first use in a process that a second cycle would drop the first one's events; here
    there is one. (`acc_events=True` would silence that, and make a Python object of every event.)
    """
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            yield prof


def cpu_account(prof: Any, prefix: str) -> tuple[list[tuple[int, int]], dict[str, tuple[int, int]]]:
    """The CPU allocator's events by time, as (ns, bytes; negative: freed), and when marks so named began and ended."""
    events: list[tuple[int, int]] = []
    spans: dict[str, tuple[int, int]] = {}
    stack = list(prof.profiler.kineto_results.experimental_event_tree())
    while stack:
        e = stack.pop()
        stack.extend(e.children)
        if e.tag.name == "Allocation":
            if e.extra_fields.device.type == "cpu":
                events.append((e.start_time_ns, e.extra_fields.alloc_size))
        elif e.name.startswith(prefix):
            spans[e.name] = (e.start_time_ns, e.end_time_ns)
    return sorted(events, key=lambda e: e[0]), spans


@dataclass
class CpuLoop:
    """Iterations of a loop as the CPU allocator saw them, once `cpu_loop` has ended."""

    iterations: int = 0
    peaks: list[int] = field(default_factory=list)  # the most bytes that were live in each
    highest: int = 0  # over all

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """The body is one."""
        with RecordFunctionFast(f"{ITERATION}{self.iterations}"):
            yield
        self.iterations += 1


@contextlib.contextmanager
def cpu_loop() -> Iterator[CpuLoop]:
    """Watch a loop whose iterations the body marks.

    Counts: from the beginning of the body, which must come before anything that matters is allocated. Ignores: what
    another thread frees, as gloo's do (it counts on).
    """
    gc.collect()  # what goes while the profiler runs would count as less than nothing
    loop = CpuLoop()
    with memory_profiler() as prof:
        yield loop
    events, spans = cpu_account(prof, ITERATION)
    del prof
    moments, live = [moment for moment, _ in events], list(accumulate((n for _, n in events), initial=0))
    loop.highest = max(live)
    for begin, end in (spans[f"{ITERATION}{k}"] for k in range(loop.iterations)):
        loop.peaks.append(
            max(live[bisect.bisect_left(moments, begin) : bisect.bisect_right(moments, end) + 1])
        )
    del events, spans, moments, live
    gc.collect()  # the profiler's results are millions of objects, which would be walked while steps are timed
