"""Turn a Schedule into the peak memory that CUDA's caching allocator would allocate and reserve for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.allocator.blocks import Block
from simulator.allocator.caching import Allocator, AllocatorFigures
from simulator.allocator.settings import AllocatorSettings
from simulator.graph import Graph, analyse
from simulator.schedule import Schedule
from traces.trace import OPTIMIZER, OPTIMIZER_STATE, WORKSPACE, Trace

ITERATIONS = 5  # as many as `execute` measures; the last is the one that counts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedFigures:
    """What torch.cuda.memory_stats() would say, with the peaks reset before each iteration."""

    iterations: tuple[AllocatorFigures, ...]  # up to the first that repeats the one before it
    segment_requests: int  # in all iterations; fragmentation that grows shows as requests after the first
    steady: bool  # whether the last iteration asked for nothing new, so that all later ones are equal to it

    @property
    def peak_allocated_bytes(self) -> int:
        """Of the last iteration; with the rounding of blocks."""
        return self.iterations[-1].peak_allocated_bytes

    @property
    def peak_requested_bytes(self) -> int:
        """Of the last iteration; tensors alone."""
        return self.iterations[-1].peak_requested_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Of the last iteration."""
        return self.iterations[-1].peak_reserved_bytes

    @property
    def highest_reserved_bytes(self) -> int:
        """Of all iterations; more than that of the last only if memory ran short and was given back."""
        return max(i.peak_reserved_bytes for i in self.iterations)

    @property
    def retries_a_step(self) -> int:
        """How often the last iteration gave all cached memory back to make room; each stops the GPU."""
        before = self.iterations[-2].num_alloc_retries if len(self.iterations) > 1 else 0
        return self.iterations[-1].num_alloc_retries - before

    @property
    def fragmentation(self) -> float:
        """Peak reserved over peak allocated, less one."""
        peak = self.peak_allocated_bytes
        return self.peak_reserved_bytes / peak - 1 if peak else 0.0


def reserved_peak(
    trace: Trace,
    schedule: Schedule,
    settings: AllocatorSettings | None = None,
    *,
    iterations: int = ITERATIONS,
    device_memory_bytes: int | None = None,
    total_memory_bytes: int | None = None,
    graph: Graph | None = None,
) -> ReservedFigures:
    """Run a schedule several times through one simulated allocator, from the first iteration on.

    Parameters, buffers and the batch come first, by id. Optimizer state comes when the first optimizer step begins,
    in whatever holes forward and backward left, and stays there; a library's workspace when the first op reads it.
    An op allocates and frees as its measured events say, or else allocates its outputs in order; what the schedule
    releases after a step is freed when the step has ended.

    Args:
        iterations: how many to run at most. When one asked for no new memory, the next would be the same, so it ends.
        device_memory_bytes: what the device has for the allocator; None: enough.
        total_memory_bytes: what the device has in all, which torch's own limits are counted from; None: the same.

    Raises:
        OutOfMemory: the device has less than this takes.

    Counts: rounding, splitting, fragmentation, cached segments that stay reserved, the order in which the first
    iteration asks; the ops' own temporaries where they are known. Ignores: side streams, what ran before the first
    step (a model that was initialised on the device), and what only the first iteration allocates beside the
    optimizer's state. Where an op allocates one size several times and frees it fewer times, the first ones are taken
    to be its outputs.
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; one at least must run")
    graph = graph or analyse(trace)
    run = _Run(trace, graph, Allocator(settings, device_memory_bytes, total_memory_bytes=total_memory_bytes))
    events = run.allocator.segment_events
    figures: list[AllocatorFigures] = []
    steady = False
    while len(figures) < iterations and not steady:
        before = len(events)
        run.allocator.reset_peaks()
        for step in range(len(schedule)):
            run.step(schedule, step)
        run.begin_optimizer()  # a step without an optimizer op has all its residents by then
        steady = len(figures) > 0 and len(events) == before
        figures.append(run.allocator.figures())
    requests = sum(1 for e in events if e.action in ("segment_alloc", "segment_map"))
    return ReservedFigures(iterations=tuple(figures), segment_requests=requests, steady=steady)


class _Run:
    """An allocator, and which block each storage has in it."""

    def __init__(self, trace: Trace, graph: Graph, allocator: Allocator) -> None:
        self.trace = trace
        self.graph = graph
        self.allocator = allocator
        self.there: dict[int, list[Block]] = {}  # storage -> its blocks, the older first
        sts = trace.storages
        residents = [s for s, producer in enumerate(sts.producer) if producer < 0 and sts.nbytes[s]]
        self.state = [s for s in residents if sts.category[s] == OPTIMIZER_STATE]
        self.workspaces = {s for s in residents if sts.category[s] == WORKSPACE}
        self.workspaces.intersection_update(s for reads in trace.ops.reads for s in reads)
        late = {*self.state, *self.workspaces}
        for s in residents:
            if s not in late:
                allocator.malloc(sts.nbytes[s])

    def begin_optimizer(self) -> None:
        """Allocate the optimizer's state, unless that was done."""
        for s in self.state:
            self.allocator.malloc(self.trace.storages.nbytes[s])
        self.state = []

    def step(self, schedule: Schedule, step: int) -> None:
        op, nbytes = schedule.op[step], self.trace.storages.nbytes
        if self.state and self.trace.ops.phase[op] == OPTIMIZER:
            self.begin_optimizer()
        if self.workspaces:
            for s in self.trace.ops.reads[op]:
                if s in self.workspaces:
                    self.workspaces.remove(s)
                    self.allocator.malloc(nbytes[s])
        wanted = [s for s in self.graph.creates[op] if nbytes[s]]
        made: dict[int, Block] = {}
        # Memory that the op takes over from its input: for an output of the same size, or else freed beforehand.
        taken = schedule.takes[step]
        events = list(self.trace.ops.events[op])
        if taken >= 0 and nbytes[taken]:
            heir = next((s for s in wanted if nbytes[s] == nbytes[taken]), None)
            block = self.there[taken].pop(0)
            if heir is None:
                self.allocator.free(block)
            else:
                made[heir] = block
                wanted.remove(heir)
                if positions := _kept(events).get(nbytes[heir]):
                    del events[positions[0]]
        made |= self._replay(events, wanted) if events else self._outputs(wanted)
        for s, block in made.items():
            if s in schedule.binds[step]:
                self.there.setdefault(s, []).append(block)
            else:  # a recompute step also makes outputs that nobody asked for
                self.allocator.free(block)
        frees = list(schedule.frees[step])
        if taken >= 0:
            frees.remove(taken)
        for s in frees:
            if nbytes[s]:
                self.allocator.free(self.there[s].pop(0))

    def _outputs(self, wanted: Sequence[int]) -> dict[int, Block]:
        return {s: self.allocator.malloc(self.trace.storages.nbytes[s]) for s in wanted}

    def _replay(self, events: Sequence[int], wanted: Sequence[int]) -> dict[int, Block]:
        """Allocate and free as measured; returns the outputs among what stays."""
        nbytes = self.trace.storages.nbytes
        stays = {k for positions in _kept(events).values() for k in positions}
        temporary: dict[int, list[Block]] = {}
        outputs: dict[int, list[Block]] = {}
        for k, size in enumerate(events):
            if size > 0:
                (outputs if k in stays else temporary).setdefault(size, []).append(
                    self.allocator.malloc(size)
                )
            elif temporary.get(-size):
                self.allocator.free(temporary[-size].pop())
        made = {s: outputs[nbytes[s]].pop(0) for s in wanted if outputs.get(nbytes[s])}
        # An output that was obtained in pieces, or in place of memory freed: one block of its size stands for it.
        for blocks in outputs.values():
            for block in blocks:
                self.allocator.free(block)
        return made | self._outputs([s for s in wanted if s not in made])


def _kept(events: Sequence[int]) -> dict[int, list[int]]:
    """Positions of the allocations that stay, by size: for each size as many of the first as are not freed."""
    positions: dict[int, list[int]] = {}
    freed: dict[int, int] = {}
    for k, size in enumerate(events):
        if size > 0:
            positions.setdefault(size, []).append(k)
        elif len(positions.get(-size, ())) > freed.get(-size, 0):
            freed[-size] = freed.get(-size, 0) + 1
    return {n: ks[: len(ks) - freed.get(n, 0)] for n, ks in positions.items() if len(ks) > freed.get(n, 0)}
