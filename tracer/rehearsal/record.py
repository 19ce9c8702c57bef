"""Hold what a rehearsal found, as frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import or_
from typing import Any, Final

from traces.files import to_json
from traces.provenance import REHEARSED
from traces.records.measurement import RunFigures, steady
from traces.records.plan import PredictionWarning

# Codes of warnings, and what they say.
HOST_READ: Final = "rehearsal-host-read"
MASK: Final = "rehearsal-mask"
ASSUMED: Final = "rehearsal-assumed"
MISSING: Final = "rehearsal-missing"
SENTENCES: Final = {
    HOST_READ: "{place} reads {bytes} bytes from the GPU, {times} times, and is told {told}.",
    MASK: "{place} asks what a mask selects, {times} times, and is told all: the most that it can take.",
    ASSUMED: "{place}'s buffers count as empty: only a GPU knows how large they are.",
    MISSING: "{place} was asked for, which the null driver has not; torch went on without.",
}


def describe(warning: PredictionWarning) -> str:
    """A rehearsal's warning as a sentence."""
    place = warning.subject or "code without a line in Python"
    return SENTENCES[warning.code].format(place=place, **warning.figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The highest figures of torch's allocator in a stretch of time, in bytes.

    In torch's memory_stats(): requested_bytes.all.peak, allocated_bytes.all.peak (torch.cuda.max_memory_allocated())
    and reserved_bytes.all.peak.
    """

    requested_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0

    def __or__(self, other: Peaks) -> Peaks:
        """The highest of both."""
        return Peaks(**{f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(Peaks)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration: its peaks by phase (forward, backward, optimizer), as far as it has them."""

    phases: Mapping[str, Peaks]

    @property
    def peaks(self) -> Peaks:
        """The peaks of the whole iteration."""
        return reduce(or_, self.phases.values(), Peaks())


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Blocks that were in use at the peak and that one line of Python asked for."""

    line: str  # "modeling_bert.py:362 forward"; "" if no Python ran, as in backward's thread
    phase: str  # in which they were made
    blocks: int
    requested_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One of NCCL's communicators."""

    ranks: int
    nbytes: int  # of the GPU's memory, outside of torch's allocator; assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """All that torch's own code allocated for one training loop on a GPU that was not there. There are no times."""

    model: str
    gpu: str
    memory_bytes: int  # of the GPU
    context_bytes: int  # of it, what the CUDA context takes; assumed
    environment: Mapping[str, str]  # torch, CUDA, the allocator's settings
    iterations: tuple[Iteration, ...]
    alive: tuple[Alive, ...] = ()  # at the peak of the last iteration, the largest first
    at_the_peak: Mapping[str, int] = field(default_factory=dict)  # all of it, by what it is to training
    warnings: tuple[PredictionWarning, ...] = ()
    # torch's message, if the GPU's memory did not suffice; the figures are then of a larger GPU
    out_of_memory: str = ""
    provenance: str = REHEARSED
    rank: int = 0
    ranks: int = 0  # of the distributed job; 0: the program was started alone
    communicators: tuple[Communicator, ...] = ()  # all that were made, in order
    communicators_bytes: int = 0  # of the GPU's memory, what they took together at most; assumed
    shard: str = ""  # how a model for one GPU was sharded: fsdp2 or ddp; the batch is each rank's own

    @property
    def outside_bytes(self) -> int:
        """What the process has of the GPU's memory outside of torch: the CUDA context and NCCL; assumed."""
        return self.context_bytes + self.communicators_bytes

    @property
    def gpu_bytes(self) -> int:
        """What nvidia-smi would show: all that torch reserves and what lies outside of it."""
        return (self.figures.peak_reserved_bytes or 0) + self.outside_bytes

    @property
    def fits(self) -> bool:
        """Into the GPU's memory, with what lies outside of torch."""
        return not self.out_of_memory and self.gpu_bytes <= self.memory_bytes

    @property
    def steady(self) -> Peaks:
        """The highest of the steady iterations."""
        return reduce(or_, (i.peaks for i in steady(self.iterations)))

    @property
    def figures(self) -> RunFigures:
        """Return the same in the form of what is measured and predicted."""
        return RunFigures(
            peak_allocated_bytes=self.steady.requested_bytes,
            peak_block_bytes=self.steady.allocated_bytes,
            peak_reserved_bytes=max(self.iterations[0].peaks.reserved_bytes, self.steady.reserved_bytes),
            peaks_bytes=tuple(i.peaks.requested_bytes for i in self.iterations),
            reserved_bytes=tuple(i.peaks.reserved_bytes for i in self.iterations),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as `execute rehearse --json` prints it."""
        told = {name: getattr(self, name) for name in ("fits", "outside_bytes", "gpu_bytes")}
        return {**to_json(self), **told, "steady": to_json(self.steady)}
