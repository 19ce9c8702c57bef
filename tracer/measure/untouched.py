"""Measure what the untouched loop takes: the ordinary loop runs on the device, and its allocator says what was asked of
it.

The captured graph is not what eager runs. There Python's names and autograd's nodes decide how long a tensor lives, an
op rarely writes into its input, and libraries run kernels that no graph holds.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from tracer.measure.cuda_history import mark, marked, recording
from tracer.measure.probes import cpu_loop
from tracer.precision.policy import start_low
from tracer.step.loop import run_step
from tracer.step.step import BuildStep
from traces.records.trace import FIRST, FORWARD, LATER, Untouched

ITERATIONS: Final = 3  # what the second gives back is the first's; the third and all further ones are alike
MOST_PARTS: Final = 3  # of those that accumulate gradients: the third and all further ones ask the same
Ask = tuple[int, int, int, str]  # a row of Untouched


def untouched_loop(build: BuildStep, device: str) -> tuple[int, Untouched]:
    """The peak of requested bytes in the third iteration of the ordinary loop, and on a GPU what the loop asks of the
    allocator, in order; nothing of that if its second and third iteration do not ask alike.

    Counts: all that happens on the device meanwhile. Ignores: what was there before the step was built.
    """
    if not device.startswith("cuda"):
        with cpu_loop() as loop:
            step = build(device)
            for _ in range(ITERATIONS):
                with loop.iteration():
                    run_step(step, step.model, step.optimizer)
        return loop.peaks[-1], Untouched()
    from tracer.torch_api import clear_cublas_workspaces

    def requested(which: str) -> int:
        return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])

    gc.collect()
    clear_cublas_workspaces()  # which the loop makes
    before = requested("current")
    step = build(device)
    gc.collect()  # what building left is not given back by an iteration
    start_low(step.scaler)
    step = replace(step, loop=replace(step.loop, accumulate=min(step.loop.accumulate, MOST_PARTS)))
    marks: list[tuple[int, str]] = []  # (address of a marker, phase that begins; "": an iteration)

    def begin(phase: str) -> None:
        marks.append((mark(), phase))

    with recording() as entries:
        for _ in range(ITERATIONS):
            begin("")
            torch.cuda.reset_peak_memory_stats()
            run_step(step, step.model, step.optimizer, begin)
        peak_bytes = requested("peak") - before
    return peak_bytes, _asked(entries, marks)


def _asked(entries: Sequence[Mapping[str, Any]], marks: Sequence[tuple[int, str]]) -> Untouched:
    """The history of three iterations as rows; none if one gave back what was there before, as parameters."""
    asks: list[Ask] = []
    begins: list[tuple[int, int]] = []  # where iterations begin: so many rows and blocks come before
    blocks: dict[int, int] = {}  # address -> its block
    count, phase = 0, ""
    for part, (_, name) in zip(marked(entries, [address for address, _ in marks]), marks, strict=True):
        if not name:
            begins.append((len(asks), count))
        # Before its forward begins an iteration gives back what the one before it made, in that one's last phase.
        phase = name or phase or FORWARD
        for alloc, address, size in part:
            if alloc:
                blocks[address] = count
                asks.append((count, size, 0, phase))
                count += 1
            elif address in blocks:
                asks.append((~blocks.pop(address), 0, 0, phase))
            else:
                return Untouched()
    rows = repeating(asks, begins)
    block, nbytes, once, phases = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Untouched(block=block, nbytes=nbytes, once=once, phase=phases)


def repeating(asks: list[Ask], marks: list[tuple[int, int]]) -> list[Ask]:
    """The rows of Untouched of three iterations: those of the first, and those of the third for all later ones.

    A block of the third has its number by the order there. What an iteration gives back of the one before it has, in
    the one before it, the number that it has in that order; so the first's blocks get theirs from what the second gives
    back of them where the third gives back the second's. Returns none at all if the second and the third do not ask
    alike.
    """
    (one, _), (two, second), (three, third) = marks
    count = third - second
    later, last = asks[two:three], asks[three:]
    number: dict[int, int] = {}  # of the first's blocks
    rows = []
    if len(later) != len(last):
        return []
    for (old, old_bytes, *_), (new, new_bytes, _, phase) in zip(later, last, strict=True):
        given = not (old_bytes or new_bytes)  # back
        old, new = (~old, ~new) if given else (old, new)
        before = given and old < second and new < third  # of the iteration before
        if old_bytes != new_bytes or (given and new < second) or not (before or old - second == new - third):
            return []
        block = new - (second if given and new < third else third)
        if given and new < third:
            number[old] = block
        rows.append((~block if given else block, new_bytes, LATER, phase))
    first = []
    for block, n, _, phase in asks[one:two]:
        of = block if n else ~block
        named = -1 if n and block < 0 else number.get(of, count + of)
        first.append((named if n else ~named, n, FIRST, phase))
    return [*first, *rows]
