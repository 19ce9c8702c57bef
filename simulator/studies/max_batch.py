"""The largest batch of a model that fits a device, without a plan and with one at a bounded price.

Two batch sizes are traced, and the search goes over steps on the straight line through them, which no process makes.
Where it ends is traced, and so is the next larger batch: the answer is confirmed on both sides, or the search goes on
along the line through these. Fragmentation can make a larger batch fit where a smaller one does not; such islands
beyond the first boundary are not looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final, NamedTuple, Unpack

from simulator.allocator.device import CPU, DeviceMemory, kind_of
from simulator.core.problem import Problem
from simulator.planners.outcome import Infeasible
from simulator.prediction.ask import (
    DEVICE,
    Device,
    Question,
    Say,
    Words,
    ask,
    completed,
    question,
    silent,
)
from simulator.prediction.levers import lower_bound, lowest_floor
from simulator.prediction.step import UNTOUCHED, Prediction, predict, provenance, texts, untouched_fit
from simulator.show.tables import NUMBER, UNKNOWN, Cell, Table, no, table, yes
from simulator.studies.rows import Study, columns
from simulator.studies.tracing import Traced, between, of_one_structure
from traces.errors import SpecError
from traces.records.measurement import RunFigures
from traces.records.plan import ALLOCATED, RESERVED
from traces.records.trace import Trace
from traces.units import show_bytes, show_percent

FIRST: Final = (
    8  # the first batch size that is traced, if nothing forbids it; the second is STRIDE times that
)
PATIENCE: Final = 4  # guesses by a straight line in a row before the bracket is halved
STRIDE: Final = 4  # from one batch size to the next, when there is no line yet
RESERVE_PERCENT: Final = 2  # of a GPU stay free: the median error that the prediction is meant to have
SLIGHTLY: Final = 0.02  # how far over the limit something is counted that is over it by an unknown amount
SOONER: Final = 8  # a plan on the line is looked for in so small a part of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One batch size: what the untouched model takes, and the cheapest plan that fits, if that was tried.

    `baseline` is of the captured graph with everything saved, which an empty plan runs.
    """

    batch_size: int
    fits: bool  # the untouched model
    retries_a_step: int  # how often all cached memory must be given back for that
    untouched: RunFigures
    baseline: RunFigures
    baseline_fits: bool
    plan_fits: bool | None = None  # within the device and the price; None: not tried
    plan: RunFigures | None = None
    overhead_percent: float | None = None  # of the plan, or what any must at least cost where none was made
    plan_path: str = ""
    message: str = ""  # why no plan fits
    traced: bool = True  # False: of the step on the straight line through two traces


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MaxBatch(Study[Probe]):
    """The answer, with a row for each batch size that was looked at. A batch size of 0: not even the smallest fits."""

    directory: Path  # of traces and plans
    without_plan: int
    with_plan: int

    def probe(self, batch_size: int) -> Probe | None:
        return next((p for p in self.rows if p.batch_size == batch_size), None)


def _table(probes: Sequence[Probe], memory: str) -> Table:
    def fits(p: Probe) -> Cell:
        retries = f", {p.retries_a_step} retries" if p.retries_a_step else ""
        return yes(f"yes{retries}") if p.fits or retries else no()

    def overhead(p: Probe) -> Cell:
        least = ">= " if p.plan is None and p.overhead_percent is not None else ""
        return Cell(least + show_percent(p.overhead_percent, signed=True), p.overhead_percent)

    return table(
        probes,
        columns(
            "batch_size",
            (memory, "bytes", lambda p: p.untouched.peak_bytes(memory)),
            ("fits", "", fits),
            (f"{memory} with plan", "bytes", lambda p: p.plan and p.plan.peak_bytes(memory)),
            ("overhead", NUMBER, overhead),
            ("plan fits", "", lambda p: {True: yes(), False: no(), None: Cell("")}[p.plan_fits]),
            ("", "", lambda p: p.message or UNKNOWN),
        ),
        caption="Every batch size that was looked at. Where no plan was made, the overhead is what any plan must at "
        "least cost.",
    ).known()


@dataclass(slots=True, kw_only=True)
class _Search:
    """The question, and all that is known so far about each batch size."""

    model: Traced
    step: int  # all batch sizes are multiples of it
    top: int  # the largest to try
    question: Question  # of the device, whose memory is the budget
    device: DeviceMemory
    price_percent: float  # of a plan, at most
    say: Say
    exact: bool = True  # of what is traced; otherwise of steps on the line through traces
    traces: dict[int, Trace] = field(default_factory=dict)
    probes: dict[int, Probe] = field(default_factory=dict)
    said: dict[int, Prediction] = field(default_factory=dict)

    def over(self, nbytes: int) -> float:
        """How far so many bytes are over what there is, as a share of it."""
        return nbytes / max(1, self.device.usable_bytes) - 1

    def trace(self, *batch_sizes: int) -> None:
        """Trace what is to be tried and is not traced yet."""
        sizes = sorted({n for n in batch_sizes if 0 < n <= self.top} - self.traces.keys())
        self.traces |= zip(sizes, self.model.each(sizes, self.say), strict=True)

    def line(self, batch_size: int) -> tuple[tuple[int, Trace], tuple[int, Trace]] | None:
        """The two nearest traces of one structure; None: there are none."""
        near = sorted(self.traces.items(), key=lambda item: abs(item[0] - batch_size))
        return next(
            (pair for pair in combinations(near, 2) if of_one_structure(pair[0][1], pair[1][1])), None
        )

    def by_line(self, sooner: int = 1) -> _Search:
        """The same of steps on the line, with so small a part of the time for each plan."""
        limits = replace(self.question.limits, seconds=self.question.limits.seconds / sooner)
        asks = replace(self.question, limits=limits)
        return replace(self, question=asks, say=silent, exact=False, probes={}, said={})

    def reckoned(self, way: str, low: int, high: int, sooner: int = 1) -> int | None:
        """Where the boundary is by steps on the line; None: there is no line.

        Args:
            way: the question, a method's name.
            low, high: a batch size that fits, and one that does not.
        """
        if self.line(low) is None:
            return None
        by_line, last = self.by_line(sooner), high - self.step
        ask, begin = getattr(by_line, way), max(low + self.step, min(last, by_line.beyond(low)))
        excess = ask(low).excess if low else -1.0
        return boundary(ask, first=begin, step=self.step, top=last, fits=low, fits_excess=excess)

    def largest(self, way: str, low: int, reckoned: int | None) -> int:
        """The boundary, confirmed by traces on both sides of it; `reckoned`: where it is by the line."""
        if low >= self.top:
            return low

        def guess(low: int, high: int) -> int | None:
            nonlocal reckoned
            if reckoned is None or not low <= reckoned < high:
                reckoned = self.reckoned(way, low, high)
            return reckoned

        first = max(low + self.step, min(reckoned or FIRST, self.top))
        return boundary(getattr(self, way), first=first, step=self.step, top=self.top, fits=low, guess=guess)

    def saved(self, batch_size: int) -> Prediction:
        """The step with everything saved, which is an empty plan's."""
        if batch_size not in self.said:
            self.said[batch_size] = self._saved(batch_size)
        return self.said[batch_size]

    def _saved(self, batch_size: int) -> Prediction:
        if self.exact:
            self.trace(batch_size)
        pair, asks = self.line(batch_size), self.question
        trace = self.traces[batch_size] if self.exact or pair is None else between(*pair, batch_size)
        if (kind := kind_of(trace.meta)) != self.device.kind:
            raise SpecError(
                f"the trace holds the graph of a {kind.upper()}, and {self.device.name} is a "
                f"{self.device.kind.upper()}; leave --target and --device to --gpu."
            )
        return completed(predict(Problem(trace), asks.setting(trace.meta)))

    def without(self, batch_size: int) -> Verdict:
        """Return whether the untouched model's step fits."""
        if batch_size not in self.probes:
            c = self.saved(batch_size)
            plain = untouched_fit(c)
            self.probes[batch_size] = Probe(
                batch_size=batch_size,
                untouched=plain.figures(),
                fits=bool(plain.fits),
                retries_a_step=plain.retries_a_step,
                baseline=c.saved_figures,
                baseline_fits=bool(c.saved_fit.fits),
                traced=self.exact,
            )
            retries = f" with {plain.retries_a_step} retries a step" if plain.retries_a_step else ""
            outcome = f"fits{retries}" if plain.fits else "does not fit"
            room = show_bytes(self.device.usable_bytes)
            self.say(f"batch {batch_size}: {show_bytes(plain.needs_bytes)} of {room}, {outcome}")
        probe = self.probes[batch_size]
        # On a GPU that runs short the allocator gives cached memory back and goes on, so what is in use decides.
        used = probe.untouched.peak_block_bytes or probe.untouched.peak_allocated_bytes
        return Verdict(fits=probe.fits, excess=self.over(used or 0))

    def plan(self, batch_size: int) -> Verdict:
        """Return whether a plan within the price fits."""
        if self.without(batch_size).fits:
            return Verdict(fits=True, excess=self.floor_excess(batch_size))
        probe, excess = self._plan(self.said[batch_size], self.probes[batch_size])
        self.probes[batch_size] = probe
        added = f"a plan fits at {probe.overhead_percent:+.2f} %" if probe.plan_fits else ""
        self.say(f"batch {batch_size}: {added or probe.message.split('. ')[0]}")
        return Verdict(fits=bool(probe.plan_fits), excess=max(excess, self.floor_excess(batch_size)))

    def floor_excess(self, batch_size: int) -> float:
        """How far the peak that no plan can go below is over what there is, as a share of it."""
        problem = self.saved(batch_size).problem
        return self.over(problem.once("lowest", lambda p: lowest_floor(p, self.question.levers)))

    def beyond(self, low: int) -> int:
        """The batch size up to which the line through two floors stays within what there is."""
        a = max(low, self.step)
        at_a, at_b = self.floor_excess(a), self.floor_excess(STRIDE * a)
        more = -at_a * (STRIDE - 1) * a / (at_b - at_a) if at_b > at_a else 0.0
        return max(0, int((a + more) // self.step) * self.step)

    def _plan(self, c: Prediction, probe: Probe) -> tuple[Probe, float]:
        """The probe with what was found of plans, and by how much, as a share, memory or price are exceeded."""
        asks, price = self.question, self.price_percent
        if probe.baseline_fits:  # the captured graph alone makes room
            probe = replace(probe, plan=probe.baseline, overhead_percent=0.0, plan_fits=True)
            return self._kept(probe, c), _over(0.0, price)
        none = replace(probe, plan_fits=False, message="no plan needs so little")
        if self.floor_excess(probe.batch_size) > 0:
            return none, 0.0
        bound = lower_bound(c.problem, self.device.usable_bytes, asks.levers)
        least = bound.overhead_percent
        if not bound.feasible:
            return none, SLIGHTLY
        if least > price:
            return replace(none, overhead_percent=least, message=bound.least()), _over(least, price)
        answer = ask(c.problem, asks)
        if answer.found is None:
            refused = answer.refusal
            lowest = refused.figures.get("lowest_peak_bytes") if isinstance(refused, Infeasible) else None
            return replace(none, message=str(refused)), max(SLIGHTLY, self.over(lowest or 0))
        c, cost = answer.found, answer.found.overhead_percent
        fits, over = bool(c.planned_fit.fits) and cost <= price, _over(cost, price)
        why = f"the plan that was found adds {cost:.2f} %" if cost > price else c.planned_fit.out_of_memory
        probe = replace(probe, plan=c.planned_figures, overhead_percent=cost, plan_fits=fits, message=why)
        return (self._kept(probe, c), over) if fits else (probe, max(SLIGHTLY, over))

    def _kept(self, probe: Probe, c: Prediction) -> Probe:
        """The probe with the file of the plan that fits."""
        self.said[probe.batch_size] = c
        if not self.exact:
            return probe
        path = f"plan-b{probe.batch_size}.json"
        c.plan.save(self.model.directory / path)
        return replace(probe, plan_path=path)


def _over(cost: float, price: float) -> float:
    """How far a cost is above the price, as a share of it."""
    return cost / price - 1 if price else cost


def max_batch(
    model: str,
    device: Device | None = None,
    *,
    budget_overhead_percent: float = 30.0,
    directory: str | Path | None = None,
    multiple_of: int = 1,
    maximum: int = 65536,
    batch_sizes: Sequence[int] = (),
    trace_options: Sequence[str] = (),
    progress: Say = silent,
    **words: Unpack[Words],
) -> MaxBatch:
    """The largest batch of a model that fits a device, without a plan and with one.

    Args:
        model: a name of `trace models`, or `file.py:function`; `trace` runs in processes of its own.
        device: as for `simulate`; a size alone is of a CPU's memory. On a GPU reserved memory must fit.
        budget_overhead_percent: what a plan may add to the time of a step.
        directory: of traces and plans, which are used again; None: `MODEL-max-batch`.
        multiple_of, maximum: of the batch sizes that are tried.
        batch_sizes: further ones to answer for; those that the search does not trace by the line.
        trace_options: further words for `trace`, such as ["--seq-len", "512"].
        words: as for `plan`; `seconds` is for each plan.

    Returns:
        both batch sizes (0: not even the smallest fits) and everything that was tried.

    Raises:
        SpecError: no such device or planner, or allocator settings for a CPU.
        LowtideError: the model cannot be traced; with what `trace` said.
    """
    asks, step, options = question(DEVICE, device, **words), multiple_of, tuple(trace_options)
    if (memory := asks.device(None)) is None:
        raise SpecError("name the device with --gpu, or its memory with --memory.")
    if memory.kind != CPU and not isinstance(device, DeviceMemory):
        memory = replace(memory, reserve_bytes=memory.memory_bytes * RESERVE_PERCENT // 100)
        asks = replace(asks, device=lambda kind: memory)
    if memory.kind == CPU and asks.alloc_conf is not None:
        raise SpecError("--alloc-conf: a CPU has no caching allocator; name a GPU with --gpu.")
    if memory.kind != CPU and not any(w.partition("=")[0] in ("--target", "--device") for w in options):
        options = (*options, "--target", memory.name)
    top = maximum // step * step
    if top < step:
        raise SpecError(f"--max {maximum}: there is no multiple of {step} up to it.")
    search = _Search(
        model=Traced.of(model, directory, "max-batch", options),
        step=step,
        top=top,
        question=asks,
        device=memory,
        price_percent=budget_overhead_percent,
        say=progress,
    )
    first = min(top, -(-FIRST // step) * step)
    search.trace(first, min(top, STRIDE * first))
    plain = search.reckoned("without", 0, top + step)
    planned = plain if plain is None or plain >= top else search.reckoned("plan", plain, top + step, SOONER)
    if plain is not None and planned is not None:
        progress(f"by the line through two traces, batch {plain} fits, and with a plan batch {planned}")
        search.trace(plain, plain + step, planned, planned + step)
    without = search.largest("without", 0, plain)
    with_plan = search.largest("plan", without, planned)
    by_line = search.by_line()
    for n in dict.fromkeys((*search.traces, *batch_sizes)):
        asked = search if n in search.traces or search.line(n) is None else by_line
        (asked.plan if n in batch_sizes else asked.without)(n)
        search.probes[n] = asked.probes[n]
    return _answer(search, maximum, without, with_plan)


def _answer(search: _Search, maximum: int, without: int, with_plan: int) -> MaxBatch:
    traced, device, price, stopped = (
        search.model,
        search.device,
        search.price_percent,
        with_plan == search.top,
    )
    of = ALLOCATED if device.kind == CPU else RESERVED  # the memory that must fit
    probes = tuple(search.probes[b] for b in sorted(search.probes))
    shown = search.said[with_plan or without or min(search.said)]
    best, planned = search.probes.get(without), search.probes.get(with_plan)

    def room(figures: RunFigures) -> str:
        return f"({of} {show_bytes(figures.peak_bytes(of))} of {show_bytes(device.usable_bytes)})"

    notes = [
        f"without a plan: not even batch {search.step} fits"
        if best is None
        else f"without a plan: batch {without} {room(best.untouched)}"
    ]
    at = f"with a plan of at most +{price:g} %: batch {with_plan}"
    if planned is not None and planned.plan is not None:
        added = show_percent(planned.overhead_percent, signed=True)
        notes.append(f"{at} at {added} {room(planned.plan)}: {traced.directory / planned.plan_path}")
    elif best is not None:
        notes.append(f"{at}; no plan makes room for more")
    notes += [f"The search stopped at {with_plan}; --max tries more."] * stopped
    told = {p.batch_size: {f.name: _plain(getattr(p, f.name)) for f in fields(p)} for p in probes}
    data = {
        "record": "max-batch",
        "model": traced.model,
        "trace_options": list(traced.words),
        "device_memory": device.to_json(),
        "alloc_conf": shown.setting.alloc_conf,
        "budget_overhead_percent": price,
        "planner": search.question.planner_name,
        "allow": search.question.levers.allow,
        "multiple_of": search.step,
        "maximum": maximum,
        "stopped_at_maximum": stopped,
        "without_plan": told.get(without, {"batch_size": without}),
        "with_plan": told.get(with_plan, {"batch_size": with_plan}),
        "provenance": provenance(shown.trace.meta),
        # What the untouched model needs is in the figures here.
        "warnings": list(texts(shown, but=UNTOUCHED)),
        "probes": [*told.values()],
    }
    return MaxBatch(
        problem=shown.problem,
        rows=probes,
        data=data,
        words=f"{traced.model} on {device.room()}",
        short=f"{traced.model} on {device.name}: batch {without} without a plan, {with_plan} with one of at most "
        f"+{price:g} %",
        table=_table(probes, of),
        aside=("plan fits", ""),
        notes=(*notes, str(data["provenance"])),
        directory=traced.directory,
        without_plan=without,
        with_plan=with_plan,
    )


def _plain(value: Any) -> Any:
    return value.headline() if isinstance(value, RunFigures) else value


class Verdict(NamedTuple):
    """One answer. `excess` says how far over the limit the number is, as a share of it: the line crosses 0 there."""

    fits: bool
    excess: float


def boundary(
    ask: Callable[[int], Verdict],
    *,
    first: int,
    step: int = 1,
    top: int = 1 << 20,
    fits: int = 0,
    fits_excess: float = -1.0,
    guess: Callable[[int, int], int | None] = lambda low, high: None,
) -> int:
    """The largest number that gets a yes before the first no, found in few questions.

    Args:
        ask: asked at most once for each number.
        first: where to begin, more than `fits`.
        step: all numbers are multiples of it.
        top: the largest number to try.
        fits: known to fit without asking, with `fits_excess`; 0 stands for nothing at all.
        guess: where it lies between a number that fits and one that does not; None: by a straight line.

    Returns:
        a number b that fits (0: not even `step` does), while b + step does not, or b = top.
    """
    low, high = fits, top + step
    known: dict[int, float] = {fits: fits_excess} if fits else {}
    b, guesses = first, 0
    while True:
        verdict = ask(b)
        known[b] = verdict.excess
        if verdict.fits:
            low = b
        else:
            high = b
        if high - low <= step:
            return low
        told = guess(low, high)
        near = _crossing(known, low, high) if told is None else told
        guesses += 1
        if near is not None and guesses <= PATIENCE and low <= near < high + step:
            b = int(near // step) * step
        elif high <= top:
            b, guesses = (low + high) // 2 // step * step, 0
        else:  # everything has fitted so far
            b = STRIDE * low
        b = min(max(b, low + step), high - step)


def _crossing(known: dict[int, float], low: int, high: int) -> float | None:
    """Where the line through the last that fits and the first that does not crosses the limit; None if none does.

    Where only one of these was asked about, the line goes through the two that are nearest to the limit.
    """
    ends = [b for b in (low, high) if b in known]
    if len(ends) < 2:
        ends = sorted(sorted(known, key=lambda b: (abs(known[b]), b))[:2])
    if len(ends) < 2:
        return None
    a, b = ends
    rise = known[b] - known[a]
    return a - known[a] * (b - a) / rise if rise > 0 else None
