"""Turn a comparison into what the step needs when the model runs untouched, and whether that fits a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from simulator.allocator.device import CUDA
from simulator.allocator.question import Reserved, kind_of, reserve
from simulator.core.replay import run
from simulator.core.schedule import Schedule
from simulator.studies.prediction import Comparison
from traces.measurement import RunFigures
from traces.trace import Trace

DROPOUT_MASK = "lowtide.dropout_mask.default"  # a byte an element


@dataclass(frozen=True, slots=True, kw_only=True)
class Untouched:
    """The step of the untouched model in the ordinary loop. Its time is not known: the trace has the graph's."""

    peak_allocated_bytes: int
    reserved: Reserved | None = None  # None: no caching allocator, or not asked

    @property
    def figures(self) -> RunFigures:
        """The headline figures."""
        of = None if self.reserved is None else self.reserved.figures
        return RunFigures(
            peak_allocated_bytes=self.peak_allocated_bytes,
            peak_block_bytes=None if of is None else of.peak_allocated_bytes,
            peak_reserved_bytes=None if of is None else of.peak_reserved_bytes,
        )

    @property
    def needs_bytes(self) -> int:
        """With as much memory as it asks for: reserved where there is a caching allocator, else allocated."""
        return (
            self.peak_allocated_bytes
            if self.reserved is None
            else self.reserved.figures.highest_reserved_bytes
        )

    @property
    def retries_a_step(self) -> int:
        """How often a step gives all cached memory back to make room."""
        return self.reserved.figures.retries_a_step if self.reserved is not None and self.reserved.fits else 0

    def fits(self, usable_bytes: int) -> bool:
        """Whether so much is enough; the device of the question, where one was asked."""
        return self.peak_allocated_bytes <= usable_bytes if self.reserved is None else self.reserved.fits


def untouched_peak_bytes(c: Comparison) -> int:
    """The untouched model's peak of allocated bytes; the captured graph may need less, or more.

    The trace says so if its step was counted as it runs untouched (`tracer/record/untouched.py`): on the CPU,
    but for traces that are older than that. Otherwise it is concluded from the graph.

    Counts: that autograd's own code lets no op take over its input's memory; on the CPU, dropout masks in the type of
    what they mask (`_dropout_impl` in aten/src/ATen/native/Dropout.cpp), where the graph has a byte an element.
    Ignores: what else eager code holds longer. Measured on the CPU for six steps of BERT, GPT-2 and T5, whose eager
    peaks are 0.6 to 14 % above the graph's: right to within 96 bytes in each. No GPU has confirmed it there.
    """
    counted = c.trace.meta.untouched_peak_bytes
    if counted:
        return counted
    timeline = run(c.problem, untaken(c))
    wider = [0] * len(c.kept) if kind_of(c.trace.meta) == CUDA else _wider_masks(c.trace, c.kept)
    highest = max((n + more for n, more in zip(timeline.peak_bytes, wider, strict=True)), default=0)
    return max(highest, c.kept_timeline.peak_allocated_bytes)


def untouched(c: Comparison) -> Untouched:
    """What the untouched model needs, as `untouched_peak_bytes` says; and of a caching allocator, if `c` asks for that.

    Counts: for reserved memory, that no op takes over its input's memory. Ignores: there, all else.
    """
    reserved, plain = c.kept_reserved, untaken(c)
    if c.question is not None and plain != c.kept:
        reserved = reserve(c.problem, plain, c.question)
    return Untouched(peak_allocated_bytes=untouched_peak_bytes(c), reserved=reserved)


def untaken(c: Comparison) -> Schedule:
    """Everything kept, and no op takes over the memory of its input."""
    return replace(c.kept, takes=(-1,) * len(c.kept))


def _wider_masks(trace: Trace, schedule: Schedule) -> list[int]:
    """Step -> by how many bytes the live dropout masks grow if their elements are as wide as what they mask."""
    sts = trace.storages
    more = {
        s: (max((_item_bytes(trace, x) for x in trace.ops.reads[op]), default=1) - 1) * sts.nbytes[s]
        for s, op in enumerate(sts.producer)
        if op >= 0 and trace.ops.target[op] == DROPOUT_MASK
    }
    out, live = [], 0
    for binds, frees in zip(schedule.binds, schedule.frees, strict=True):
        live += sum(more.get(s, 0) for s in binds)
        out.append(live)
        live -= sum(more.get(s, 0) for s in frees)
    return out


def _item_bytes(trace: Trace, storage: int) -> int:
    """Bytes of an element, from the storage's size and shape (1 where they do not say)."""
    elements = math.prod(trace.storages.shape[storage])
    return max(1, trace.storages.nbytes[storage] // elements) if elements else 1
