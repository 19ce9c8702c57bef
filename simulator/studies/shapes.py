"""Work out what a plan needs at other sizes than those it was made at: each shape's peak, and what random ones reserve
in turn.

`executor.apply_plan` applies a plan to a graph of other sizes by its structure, op by op; so does this. Where a size of
one makes other ops, the step runs with everything saved if that takes no more than the planned one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from simulator.allocator.caching import OutOfMemory
from simulator.allocator.requests import requests_of
from simulator.allocator.reserved import reserved_over
from simulator.core.limits import MOST_BYTES
from simulator.core.problem import Problem, Replay
from simulator.levers import rewritten_problem
from simulator.prediction.step import Prediction
from simulator.studies.tracing import of_one_structure, run_command
from traces.errors import PlanError, SpecError, TraceError
from traces.model_spec import IN_HAND, split_reference
from traces.progress import Say
from traces.records.plan import RESERVED
from traces.records.store import load
from traces.records.trace import Trace, TraceMeta
from traces.shapes import Shapes, Sizes, in_words, label
from traces.units import show_bytes

STEPS: Final = 200  # of random shapes
PLAN: Final = "plan"  # how a shape runs
SAVED: Final = "everything saved"
REFUSED: Final = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePeak:
    """One shape."""

    sizes: Sizes
    runs: str  # PLAN, SAVED or REFUSED: the plan is for another graph
    peak_allocated_bytes: int  # refused, with everything saved

    def to_json(self) -> dict[str, Any]:
        return {**self.sizes, "runs": self.runs, "peak_allocated_bytes": self.peak_allocated_bytes}


class RandomSteps(NamedTuple):
    """Steps of random shapes in one allocator."""

    steps: int
    peak_reserved_bytes: int
    out_of_memory: str  # why the device that was named is too small; "": it is not, or none was


@dataclass(frozen=True, slots=True, kw_only=True)
class OverShapes:
    """The answer. What was not looked at is not told of."""

    shapes: Shapes
    budget_bytes: int | None
    budget_of: str
    peaks: tuple[ShapePeak, ...]  # of each shape that was looked at
    reserved: RandomSteps | None  # None: a CPU

    @property
    def worst(self) -> ShapePeak:
        return max(self.peaks, key=lambda p: p.peak_allocated_bytes)

    @property
    def over(self) -> list[ShapePeak]:
        """The shapes that exceed a budget of allocated memory."""
        limit = MOST_BYTES if self.budget_bytes is None or self.budget_of == RESERVED else self.budget_bytes
        return [p for p in self.peaks if p.peak_allocated_bytes > limit]

    def running(self, way: str) -> list[ShapePeak]:
        return [p for p in self.peaks if p.runs == way]

    @property
    def holds(self) -> bool:
        """True if every shape that was looked at runs within the budget, and the random steps in it and the device."""
        limit = self.budget_bytes if self.budget_of == RESERVED else None
        r = self.reserved
        too_much = r and (r.out_of_memory or r.peak_reserved_bytes > (limit or MOST_BYTES))
        return not (self.over or self.running(REFUSED) or too_much)

    def to_json(self) -> dict[str, Any]:
        r = self.reserved
        return {
            "asked": self.shapes.text,
            "count": self.shapes.count,
            "looked_at": len(self.peaks),
            "holds": self.holds,
            "worst": self.worst.to_json(),
            "over_budget": [p.sizes for p in self.over],
            "refused": [p.sizes for p in self.running(REFUSED)],
            "everything_saved": [p.sizes for p in self.running(SAVED)],
            "reserved": r and r._asdict(),
            "peaks": [p.to_json() for p in self.peaks],
        }

    def lines(self) -> list[str]:
        count, looked, worst, r = self.shapes.count, len(self.peaks), self.worst, self.reserved
        which = f"all {count:,}" if looked == count else f"{looked} of {count:,}"
        lines = [
            f"shapes  {which} shapes of {self.shapes.text} looked at: the highest peak is "
            f"{show_bytes(worst.peak_allocated_bytes)}, at {in_words(worst.sizes)}"
        ]
        for peaks, what in (
            (self.over, "over the budget"),
            (self.running(REFUSED), "for which the plan is refused, since they have another graph"),
            (self.running(SAVED), "that run with everything saved, since a size of one makes other ops"),
        ):
            shown = "; ".join([*(in_words(p.sizes) for p in peaks[:4]), *(["..."] if len(peaks) > 4 else [])])
            lines += [f"        {len(peaks)} {what}: {shown}"] if peaks else []
        if r is not None:
            why = f"; {r.out_of_memory}" if r.out_of_memory else ""
            lines.append(
                f"        {r.steps} steps of random shapes reserve {show_bytes(r.peak_reserved_bytes)}{why}"
            )
        return lines


def over_shapes(
    c: Prediction, shapes: Shapes, traces: Sequence[tuple[Sizes, Trace]], seed: int = 0
) -> OverShapes:
    """Return what a plan for the largest shape comes to at each of some shapes, and what steps of random ones reserve.
    Raises TraceError: the largest shape's trace is not that of the plan's step.

    Counts: of each shape what `simulator.core.problem` counts; of random steps what `simulator.allocator.reserved`
    counts, the batch as large as at the largest shape. Ignores: shapes that are not looked at; what the executor keeps
    of each graph on the host.
    """
    planned_peak = c.planned.timeline.peak_allocated_bytes
    peaks, asked = [], []
    for sizes, trace in traces:
        step, replay, runs = _run(c, Problem(trace), sizes)
        peak = replay.timeline.peak_allocated_bytes
        if sizes == shapes.largest and (runs != PLAN or peak != planned_peak):
            raise TraceError(
                f"recorded again at {in_words(sizes)}, the step needs {show_bytes(peak)} with this plan, and by "
                f"the trace {show_bytes(planned_peak)}: they were recorded with other versions. "
                "Record the trace and its shapes again."
            )
        peaks.append(ShapePeak(sizes=sizes, runs=runs, peak_allocated_bytes=peak))
        if c.setting.settings is not None and runs != REFUSED:
            asked.append(requests_of(step, replay.schedule))
    return OverShapes(
        shapes=shapes,
        budget_bytes=c.budget_bytes,
        budget_of=c.plan.budget_of,
        peaks=tuple(peaks),
        reserved=_random_steps(c, asked, seed) if asked else None,
    )


def _run(c: Prediction, problem: Problem, sizes: Mapping[str, int]) -> tuple[Problem, Replay, str]:
    """The step at other sizes as it runs there, its replay, and how it runs."""
    if of_one_structure(problem.trace, c.trace):
        try:
            step = rewritten_problem(problem, c.plan.rewrites)
            return step, step.replay(c.plan.actions), PLAN
        except PlanError:  # a single row, which has no tiles
            return problem, problem.saved, REFUSED
    small = problem.saved.timeline.peak_allocated_bytes <= c.planned.timeline.peak_allocated_bytes
    runs = SAVED if not c.plan.changes or (1 in sizes.values() and small) else REFUSED
    return problem, problem.saved, runs


def _random_steps(c: Prediction, asked: Sequence[Any], seed: int) -> RandomSteps:
    largest = requests_of(c.step, c.planned.schedule)
    rng = random.Random(seed)
    order = [rng.choice(asked) for _ in range(STEPS - 1)]
    order.insert(rng.randrange(STEPS), largest)
    device, reserved = c.setting.device, partial(reserved_over, settings=c.setting.settings)
    steps, told = reserved(order, largest.residents), ""
    if device is not None:
        try:
            reserved(order, largest.residents, device_memory_bytes=device.usable_bytes)
        except OutOfMemory as error:
            told = str(error)
    return RandomSteps(
        steps=STEPS,
        peak_reserved_bytes=max(f.peak_reserved_bytes for f in steps),
        out_of_memory=told,
    )


def check_shapes(meta: TraceMeta, name: str, shapes: Shapes) -> None:
    """Raise SpecError if a trace is not of the largest shape, or nothing says how to record its step again."""
    here = {k: meta.options.get(k, 0) for k in shapes.ranges}
    if here != shapes.largest:
        raise SpecError(
            f"--shapes {shapes.text}: the plan is made for the largest shape, {in_words(shapes.largest)}, and {name} "
            f"is of {in_words(here)}; trace the step at that shape."
        )
    if meta.model.startswith(IN_HAND) or meta.mode == "real":
        raise SpecError(
            f"--shapes {shapes.text}: the step of {name} was {'measured' if meta.mode == 'real' else 'in hand'}, and "
            "so cannot be recorded at other sizes; record a model by its name or file without --device."
        )


def traces_of(trace: Trace, name: str, shapes: Shapes, say: Say) -> list[tuple[Sizes, Trace]]:
    """The step of a trace at the shapes that are looked at: those in the directory NAME-shapes, where `trace --shapes`
    puts them, or if one is missing or is of another step, recorded by it now. Raises SpecError: a user's own file would
    have to run for that; LowtideError: `trace` failed; with what it wrote."""
    meta, place = trace.meta, Path(f"{name}-shapes")
    sizes = shapes.looked_at()
    if (found := _found(trace, place, sizes)) is not None:
        say(f"shapes: using {place}")
        return found
    words = [meta.model, *_words(meta.options, shapes), "--seed", str(meta.seed), "--target", meta.target]
    words += ["--shapes", shapes.text, "-o", str(place), "--force"]
    if split_reference(meta.model):
        raise SpecError(
            f"--shapes {shapes.text}: {place} does not hold the traces of these shapes, and no file that a trace names "
            f"is run unasked: run `trace {' '.join(words)}` first."
        )
    say(f"shapes: recording {len(sizes)} traces")
    run_command(["tracer", *words], "the shapes")
    if (found := _found(trace, place, sizes)) is None:
        raise TraceError(f"{place}: recorded now, with other versions than {name}; record that again, too.")
    return found


def _found(trace: Trace, place: Path, sizes: Sequence[Sizes]) -> list[tuple[Sizes, Trace]] | None:
    """The traces in a directory, if all are there and of this step."""
    try:
        found = [(s, load(place / label(s))) for s in sizes]
    except TraceError:
        return None
    same = attrgetter("model", "seed", "target", "versions")
    of_this = (
        same(other.meta) == same(trace.meta) and other.meta.options == {**trace.meta.options, **s}
        for s, other in found
    )
    return found if all(of_this) else None


def _words(options: Mapping[str, Any], shapes: Shapes) -> list[str]:
    """The options of a trace as `trace` takes them, those left out that the shapes say."""
    words = []
    for key, value in options.items():
        if key not in shapes.ranges:
            flag = ("no-" if value is False else "") + key.replace("_", "-")
            words += [f"--{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words
