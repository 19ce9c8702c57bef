"""The peak memory that CUDA's caching allocator would allocate and reserve for a Schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

from simulator.allocator.caching import Allocator, AllocatorFigures, Block
from simulator.allocator.requests import Requests, requests_of
from simulator.allocator.settings import AllocatorSettings
from simulator.core.problem import Problem
from simulator.core.schedule import Schedule
from traces.records.measurement import ITERATIONS, steady

PEAK_NAMES = ("peak_block_bytes", "peak_requested_bytes", "peak_reserved_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedFigures:
    """The figures of torch.cuda.memory_stats(), with the peaks reset before each iteration."""

    iterations: tuple[AllocatorFigures, ...]  # up to the first that repeats the one before it
    steady: bool  # whether the last iteration asked for nothing new, so that all later ones are equal to it
    # The highest after the first iteration, with the peaks of each phase by itself.
    phases: Mapping[str, AllocatorFigures] = field(default_factory=dict, compare=False)

    @property
    def peak_block_bytes(self) -> int:
        """With the rounding of blocks, the highest after the first iteration.

        It may be of an iteration that still asks for new memory: what is too small to be split off counts as allocated.
        """
        return max(i.peak_block_bytes for i in steady(self.iterations))

    @property
    def peak_reserved_bytes(self) -> int:
        """The last iteration's peak of reserved bytes."""
        return self.iterations[-1].peak_reserved_bytes

    @property
    def highest_reserved_bytes(self) -> int:
        """The highest of all iterations; more than the last one's only if memory ran short and was given back."""
        return max(i.peak_reserved_bytes for i in self.iterations)

    @property
    def retries_a_step(self) -> int:
        """How often the last iteration gave all cached memory back to make room; each stops the GPU."""
        before = self.iterations[-2].num_alloc_retries if len(self.iterations) > 1 else 0
        return self.iterations[-1].num_alloc_retries - before

    @property
    def fragmentation(self) -> float:
        """Peak reserved over the peak in blocks, less one."""
        peak = self.peak_block_bytes
        return self.peak_reserved_bytes / peak - 1 if peak else 0.0


def reserved_peak(
    problem: Problem,
    schedule: Schedule,
    settings: AllocatorSettings | None = None,
    *,
    iterations: int = ITERATIONS,
    device_memory_bytes: int | None = None,
    requests: Requests | None = None,
) -> ReservedFigures:
    """Run a schedule several times through one simulated allocator, from the first iteration on; `requests` in place of
    its own. When an iteration asked for no new memory, the next would be the same, so it ends. Raises OutOfMemory: the
    device has less than this takes.

    Counts: rounding, splitting, fragmentation, cached segments that stay reserved, the order in which the first
    iteration asks; the ops' own temporaries where they are known. Ignores: side streams, what ran before the first
    step (a model that was initialised on the device), and what only the first iteration allocates beside the
    optimizer's state.
    """
    requests = requests or requests_of(problem, schedule)
    allocator = Allocator(settings, device_memory_bytes)
    events, before = allocator.segment_events, 0
    figures: list[AllocatorFigures] = []
    parts: list[tuple[str, AllocatorFigures]] = []
    for played in _played(repeat(requests, iterations), requests.residents, allocator):
        parts = parts + played if len(figures) > 1 else played
        figures.append(_highest(played))
        steady = len(figures) > 1 and len(events) == before
        if steady:
            break
        before = len(events)
    names = dict.fromkeys(name for name, _ in parts if name)
    phases = {name: _highest([p for p in parts if p[0] == name]) for name in names}
    return ReservedFigures(iterations=tuple(figures), steady=steady, phases=phases)


def reserved_over(
    iterations: Sequence[Requests],
    residents: Sequence[int],
    settings: AllocatorSettings | None = None,
    device_memory_bytes: int | None = None,
) -> tuple[AllocatorFigures, ...]:
    """Return what iterations that differ come to, one after the other in one allocator, with the peaks of each; the
    first makes the optimizer's state. Raises OutOfMemory: the device has less than this takes."""
    allocator = Allocator(settings, device_memory_bytes)
    return tuple(map(_highest, _played(iterations, residents, allocator)))


def _played(
    iterations: Iterable[Requests], residents: Sequence[int], allocator: Allocator
) -> Iterator[list[tuple[str, AllocatorFigures]]]:
    for size in residents:
        allocator.malloc(size)
    held: dict[int, list[Block]] = {}
    for k, asked in enumerate(iterations):
        yield _play(asked if k or asked.first is None else asked.first, allocator, held, first=not k)


def _play(
    requests: Requests, allocator: Allocator, held: dict[int, list[Block]], *, first: bool
) -> list[tuple[str, AllocatorFigures]]:
    """One iteration: its stretches in order, each of a phase or before the first (""), with the peaks reset before it.

    `held` are the blocks by number, the older first: one may be of the iteration before.
    """
    once = list(reversed(requests.once)) if first else []
    phases = list(reversed(requests.phases))
    parts: list[tuple[str, AllocatorFigures]] = []
    running = ""  # before the first

    def begin(phase: str) -> None:
        nonlocal running
        parts.append((running, allocator.figures()))
        allocator.reset_peaks()
        running = phase

    allocator.reset_peaks()
    for k, (block, size) in enumerate([*zip(requests.blocks, requests.sizes, strict=True), (0, -1)]):
        while phases and phases[-1][1] == k:
            begin(phases.pop()[0])
        while once and once[-1][0] == k:
            allocator.malloc(once.pop()[1])
        if size < 0:  # the end
            break
        if block >= 0:
            held.setdefault(block, []).append(allocator.malloc(size))
        else:
            allocator.free(held[~block].pop(0))
    begin("")
    return parts


def _highest(parts: Sequence[tuple[str, AllocatorFigures]]) -> AllocatorFigures:
    """The figures at the end of some stretches, with the highest peaks of all of them."""
    peaks = {name: max(getattr(f, name) for _, f in parts) for name in PEAK_NAMES}
    return replace(parts[-1][1], **peaks)
