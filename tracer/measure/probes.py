"""Watch one op after another while a step runs: the time of each, or what each allocates.

On the CPU the allocations are the allocator's own events as the profiler reports them; on CUDA they are the caching
allocator's own history.
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

from tracer.measure.cuda_history import MARK_BYTES, History, OpWindow, read_history
from tracer.torch_api import RecordFunctionFast, cuda_memory_snapshot, pytree, record_memory_history

MARK = "#lowtide op "
ITERATION = "#lowtide iteration "


class Probe:
    """Called around every op of a round, and notes which ran; subclasses measure."""

    times = False  # whether it takes times

    def __init__(self) -> None:
        self.targets: list[str] = []

    def run(self, target: str, call: Callable[[], Any]) -> Any:
        """Run one op and return its result."""
        self.targets.append(target)
        return call()


class Timer(Probe):
    """Takes the time of each op by the CPU's clock. One timer serves several rounds, each ended by `finish`."""

    times = True

    def __init__(self) -> None:
        super().__init__()
        self._spans: list[tuple[Any, Any]] = []

    def now(self) -> Any:
        return time.perf_counter_ns()

    def between_ns(self, begin: Any, end: Any) -> int:
        """The time from one moment to another, once the round is over."""
        return int(end - begin)

    def run(self, target: str, call: Callable[[], Any]) -> Any:
        self.targets.append(target)
        begin = self.now()
        out = call()
        self._spans.append((begin, self.now()))
        return out

    def finish(self) -> list[int]:
        """The times of the round's ops, in ns; `targets` and times begin anew."""
        times = [self.between_ns(begin, end) for begin, end in self._spans]
        self._spans, self.targets = [], []
        return times


class CudaTimer(Timer):
    """CUDA events around every op; they are read after the round, so that nothing waits in between."""

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ns(self, begin: Any, end: Any) -> int:
        end.synchronize()
        return int(begin.elapsed_time(end) * 1e6)


class CpuMarker(Probe):
    """Marks every op for the profiler, under which the round must run."""

    def run(self, target: str, call: Callable[[], Any]) -> Any:
        # The public `record_function` is itself dispatched, which would put the mark beside the op, not around it.
        with RecordFunctionFast(f"{MARK}{len(self.targets)}"):
            return super().run(target, call)


class CudaHistory(Probe):
    """Marks every op in the caching allocator's history; see `tracer.measure.cuda_history`."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: list[OpWindow] = []
        self._entries: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While this is open, the allocator writes its history (without stack traces)."""
        record_memory_history(enabled="all", context=None, clear_history=True)
        try:
            yield
            self._entries = cuda_memory_snapshot()["device_traces"][torch.cuda.current_device()]
        finally:
            record_memory_history(enabled=None)

    def run(self, target: str, call: Callable[[], Any]) -> Any:
        before = self._mark()
        out = super().run(target, call)
        given = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_cuda]
        outputs = frozenset(x.untyped_storage().data_ptr() for x in given)
        after = self._mark()
        self.windows.append(OpWindow(target=target, before=before, after=after, outputs=outputs))
        return out

    def _mark(self) -> int:
        return int(torch.empty(MARK_BYTES, dtype=torch.uint8, device="cuda").data_ptr())

    def finish(self) -> History:
        """Return what the round showed, once it is no longer recorded."""
        return read_history(self._entries, self.windows)


def cuda_allocations(work: Callable[[Probe], None]) -> History:
    """Return what each op that `work` runs under the probe allocates on CUDA, and what libraries keep."""
    history = CudaHistory()
    with history.recording():
        work(history)
    return history.finish()


@contextlib.contextmanager
def memory_profiler() -> Iterator[Any]:
    """torch's profiler with the CPU allocator's events.

    torch 2.11 and 2.12 warn at the first use in a process that a second cycle would drop the first one's events; here
    there is one. (`acc_events=True` would silence that, and make a Python object of every event.)
    """
    from torch.profiler import ProfilerActivity, profile

    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            prof = stack.enter_context(profile(activities=[ProfilerActivity.CPU], profile_memory=True))
        yield prof


def cpu_account(prof: Any, prefix: str) -> tuple[list[tuple[int, int]], dict[str, tuple[int, int]]]:
    """The CPU allocator's events, as (ns, bytes; negative where they are freed) in order of time, and when the marks
    whose names begin so began and ended.
    """
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
    curve: tuple[tuple[int, int], ...] = ()  # of the last: (ns since it began, live bytes)
    highest: int = 0  # over all

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """The body is one."""
        with RecordFunctionFast(f"{ITERATION}{self.iterations}"):
            yield
        self.iterations += 1

    def read(self, prof: Any) -> None:
        """Learn what the profiler noted."""
        events, spans = cpu_account(prof, ITERATION)
        moments, live = [moment for moment, _ in events], list(accumulate((n for _, n in events), initial=0))
        self.highest = max(live)
        for k in range(self.iterations):
            begin, end = spans[f"{ITERATION}{k}"]
            inside = range(bisect.bisect_left(moments, begin), bisect.bisect_right(moments, end))
            self.peaks.append(max(live[inside.start : inside.stop + 1]))
            self.curve = tuple((moments[i] - begin, live[i + 1]) for i in inside)


@contextlib.contextmanager
def cpu_loop() -> Iterator[CpuLoop]:
    """Watch a loop whose iterations the body marks.

    Counts: from the beginning of the body, which must come before anything that matters is allocated.
    """
    gc.collect()  # what goes while the profiler runs would count as less than nothing
    loop = CpuLoop()
    with memory_profiler() as prof:
        yield loop
    loop.read(prof)
    del prof
    gc.collect()  # the profiler's results are millions of objects, which would be walked while steps are timed


def cpu_allocations(work: Callable[[CpuMarker], None], n_ops: int) -> list[tuple[int, ...]]:
    """Do work under the profiler; the CPU allocator's events inside each op's mark, in order of time."""
    marker = CpuMarker()
    with memory_profiler() as prof:
        work(marker)
    # By time, not by place in the profiler's tree, where another thread's allocations for an op stand beside its mark.
    events, marks = cpu_account(prof, MARK)
    spans = [marks[f"{MARK}{k}"] for k in range(n_ops)]
    moments = [moment for moment, _ in events]
    places = [(bisect.bisect_left(moments, a), bisect.bisect_right(moments, b)) for a, b in spans]
    return [tuple(size for _, size in events[first:last]) for first, last in places]


def settle(events: tuple[int, ...], created: int) -> tuple[int, ...]:
    """Make an op's events end at the bytes of the storages that it creates.

    What an op leaves beyond them (a library's cache, an output that is dropped as the op returns) counts as
    workspace: it is part of the peak inside the op and gone afterwards.
    """
    left = sum(events)
    if left > created:
        return (*events, created - left)
    if left < created:
        # Outputs that live in memory which the op did not allocate itself, such as a constant.
        return (created - left, *events)
    return events
