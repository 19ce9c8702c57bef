"""Work out what the user's loop needs, in its first and steady iteration and each phase: as it is, and with a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from simulator.allocator.caching import AllocatorFigures
from simulator.allocator.device import DeviceFit
from simulator.allocator.requests import Residents, phases_of
from simulator.allocator.reserved import ReservedFigures
from simulator.core.problem import Replay
from simulator.prediction.step import Prediction, untaken, untouched_fit
from simulator.show.tables import Table, table
from traces.records.measurement import RunFigures, steady
from traces.records.trace import OPTIMIZER, PHASES, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPeaks:
    """Peaks of allocated bytes, of blocks and of reserved memory; the last two are None on a CPU."""

    iterations: tuple[RunFigures, ...]  # from the first to the steady one; two on a CPU
    phases: Mapping[str, RunFigures]  # of those after the first, in order

    @property
    def steady(self) -> RunFigures:
        """The iterations after the first; one that asks for new memory may have larger blocks."""
        later = [f.peak_block_bytes or 0 for f in steady(self.iterations)]
        return replace(self.iterations[-1], peak_block_bytes=max(later) or None)

    def to_json(self) -> dict[str, Any]:
        return {**_json(self.steady), **self.parts()}

    def parts(self) -> dict[str, Any]:
        """The peaks of each iteration, and of each phase after the first one."""
        return {
            "iterations": [_json(f) for f in self.iterations],
            "phases": {phase: _json(f) for phase, f in self.phases.items()},
        }


def peaks_table(c: Prediction, saved: Prediction, **more: str) -> Table:
    """The untouched loop's peaks under the settings that were asked about, and beside them those of the planned step
    under the plan's, if something was planned. The peaks of the phases are allocated bytes, on a GPU in blocks."""
    loops = [("untouched", untouched_peaks(saved))]
    if c.plan.changes or c.budget_bytes is not None:
        loops.append(("planned", planned_peaks(c)))
    rows: list[tuple[str, RunFigures, Mapping[str, RunFigures]]] = []
    for name, loop in loops:
        rows.append((name, loop.steady, loop.phases))
        if _json(loop.iterations[0]) != _json(loop.steady):
            rows.append((f"{name}, first iteration", loop.iterations[0], {}))
    of_phase = [
        (phase, "bytes", lambda row, phase=phase: held_bytes(row[2][phase]) if phase in row[2] else None)
        for phase in PHASES
    ]
    title = "peak allocated" if c.setting.settings is None else "peak in blocks"
    return table(
        rows,
        (
            ("", "", lambda row: row[0]),
            (title, "bytes", lambda row: held_bytes(row[1])),
            ("reserved", "bytes", lambda row: row[1].peak_reserved_bytes),
            *of_phase,
        ),
        **more,
    ).known()


def held_bytes(f: RunFigures) -> int | None:
    """In blocks, where there are some: what torch calls allocated."""
    return f.peak_allocated_bytes if f.peak_block_bytes is None else f.peak_block_bytes


def untouched_peaks(c: Prediction) -> LoopPeaks:
    """Return what the step needs when the model runs untouched, in the ordinary loop.

    Counts: of a GPU's trace with the requests of the untouched loop, what the allocator makes of them. Otherwise the
    steady peak of allocated bytes as `untouched_peak_bytes` says; all else as in the captured graph whose ops take over
    no memory. Where the count is more, so much is added to each iteration and to the phase that has the peak; where it
    is less, nothing is above it. Ignores: how that changes other phases and what is reserved.
    """
    return _peaks(c.trace, untouched_fit(c), untaken(c))


def planned_peaks(c: Prediction) -> LoopPeaks:
    """Return what it needs with the plan; without one, what the captured graph needs with everything saved.

    Counts and ignores: as the replay does, and on a GPU as `reserved_peak` does; in the first iteration the optimizer's
    state comes when its first step begins.
    """
    return _peaks(c.step.trace, c.planned_fit, c.planned)


def _peaks(trace: Trace, fit: DeviceFit, replay: Replay) -> LoopPeaks:
    """The peaks of what `fit` is of; `fit.peak_allocated_bytes` is what its highest comes to."""
    found = _on_a_cpu(trace, replay) if fit.reserved is None else _on_a_gpu(fit.reserved)
    peak, simulated = fit.peak_allocated_bytes, found.steady.peak_allocated_bytes or 0

    def moved(f: RunFigures, highest: bool) -> RunFigures:
        """Return them with as much more at the peak as there is; nothing reserves less than its blocks."""
        allocated = f.peak_allocated_bytes or 0
        more = peak - simulated if highest and peak > simulated else min(0, peak - allocated)
        if not more:
            return f
        raised = replace(f, peak_allocated_bytes=allocated + more)
        if f.peak_block_bytes is None or f.peak_reserved_bytes is None:  # a CPU
            return raised
        blocks = f.peak_block_bytes + more
        reserved = max(f.peak_reserved_bytes, blocks)
        return replace(raised, peak_block_bytes=blocks, peak_reserved_bytes=reserved)

    return LoopPeaks(
        iterations=tuple(moved(f, True) for f in found.iterations),
        phases={p: moved(f, f.peak_allocated_bytes == simulated) for p, f in found.phases.items()},
    )


def _on_a_cpu(trace: Trace, replay: Replay) -> LoopPeaks:
    schedule, residents = replay.schedule, Residents.of(trace)
    state, later = sum(residents.state), {op: sum(sizes) for op, sizes in residents.workspaces.items()}
    missing = state + sum(later.values())  # in the first iteration, so far
    at_first = []
    phases: dict[str, int] = {}
    for phase, op, n in zip(phases_of(trace, schedule), schedule.op, replay.timeline.peak_bytes, strict=True):
        phases[phase] = max(n, phases.get(phase, 0))
        if phase == OPTIMIZER:
            missing, state = missing - state, 0
        missing -= later.pop(op, 0)
        at_first.append(n - missing)
    steady = max(phases.values(), default=replay.timeline.resident_bytes)
    first = max(at_first, default=steady)
    return LoopPeaks(
        iterations=tuple(RunFigures(peak_allocated_bytes=n) for n in (first, steady)),
        phases={p: RunFigures(peak_allocated_bytes=n) for p, n in phases.items()},
    )


def _on_a_gpu(reserved: ReservedFigures) -> LoopPeaks:
    def figures(f: AllocatorFigures) -> RunFigures:
        return RunFigures(
            peak_allocated_bytes=f.peak_requested_bytes,
            peak_block_bytes=f.peak_block_bytes,
            peak_reserved_bytes=f.peak_reserved_bytes,
        )

    phases = {phase: figures(f) for phase, f in reserved.phases.items()}
    return LoopPeaks(iterations=tuple(map(figures, reserved.iterations)), phases=phases)


def _json(f: RunFigures) -> dict[str, int | None]:
    return {name: n for name, n in f.headline().items() if name != "step_time_ns"}
