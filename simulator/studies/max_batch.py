"""The largest batch of a model that fits a device, without a plan and with one at a bounded price.

Two batch sizes are traced, and the search goes over steps on the straight line through them, which no process makes.
Where it ends is traced, and so is the next larger batch: the answer is confirmed on both sides, or the search goes on
along the line through these. On the way any plan within the price will do. Fragmentation can make a larger batch fit
where a smaller one does not; such islands are not looked for. One of several ranks is rehearsed in place of traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Final, Unpack

from simulator.allocator.device import CPU, DeviceMemory, kind_of
from simulator.core.problem import Problem
from simulator.prediction.ask import DEVICE, Device, Question, Words, ask, completed, question
from simulator.prediction.levers import lower_bound
from simulator.prediction.step import UNTOUCHED, Prediction, predict, provenance, texts, untouched_fit
from simulator.show.tables import NUMBER, UNKNOWN, Cell, Table, no, table, yes
from simulator.studies.rows import Study, columns
from simulator.studies.tracing import Traced, between, of_one_structure
from traces.errors import LowtideError, SpecError
from traces.isolated import keeping
from traces.progress import Say, silent
from traces.provenance import REHEARSED
from traces.records.measurement import RunFigures
from traces.records.plan import ALLOCATED, RESERVED
from traces.records.store import load
from traces.records.trace import Trace
from traces.units import show_bytes, show_percent

FIRST: Final = 8  # the first batch size that is traced; the second is STRIDE times that
STRIDE: Final = 4
RESERVE_PERCENT: Final = 2  # of a GPU stay free: the median error that the prediction is meant to have
RANKS: Final = (
    "Several ranks: fully_shard, a batch on each. Plans are of its blocks, by a line, with expandable segments; "
    "`execute rehearse --shard fsdp2 --budget` rehearses one."
)
SOONER: Final = 8  # any plan is looked for in half of the time, and on the line in so small a part


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One batch size: what the untouched model takes, and the cheapest plan that fits, if that was tried."""

    batch_size: int
    fits: bool  # the untouched model
    untouched: RunFigures
    plan_fits: bool | None = None  # within the device and the price; None: not tried
    plan: RunFigures | None = None
    overhead_percent: float | None = None  # of the plan, or what any must at least cost where none was made
    plan_path: str = ""
    message: str = ""  # why no plan fits
    traced: bool = True  # False: of the step on the straight line through two traces

    def to_json(self) -> dict[str, Any]:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {k: v.headline() if isinstance(v, RunFigures) else v for k, v in values}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MaxBatch(Study[Probe]):
    """The answer, with a row for each batch size that was looked at. A batch size of 0: not even the smallest fits."""

    directory: Path  # of traces and plans
    device: str
    without_plan: int
    with_plan: int

    def probe(self, batch_size: int) -> Probe:
        """The row of a batch size that was looked at."""
        return next(p for p in self.rows if p.batch_size == batch_size)


def _table(probes: Sequence[Probe], memory: str) -> Table:
    def overhead(p: Probe) -> Cell:
        least = ">= " if p.plan is None and p.overhead_percent is not None else ""
        return Cell(least + show_percent(p.overhead_percent, signed=True), p.overhead_percent)

    return table(
        probes,
        columns(
            "batch_size",
            (memory, "bytes", lambda p: p.untouched.peak_bytes(memory)),
            ("fits", "", lambda p: yes() if p.fits else no()),
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
    tracing: Executor
    traces: dict[int, Trace] = field(default_factory=dict)
    probes: dict[int, Probe] = field(default_factory=dict)
    said: dict[int, Prediction] = field(default_factory=dict)
    begun: dict[int, Future[list[Trace]]] = field(default_factory=dict)
    # The best plans, which are looked for meanwhile.
    better: dict[int, Future[tuple[Probe, Prediction]]] = field(default_factory=dict)
    planning: Executor = field(default_factory=partial(ThreadPoolExecutor, 1))

    def begin(self, *batch_sizes: int) -> list[int]:
        """Trace meanwhile what is to be tried and is not traced yet; returns which sizes these are."""
        sizes = sorted({n for n in batch_sizes if 0 < n <= self.top} - self.traces.keys())
        for n in [n for n in sizes if n not in self.begun]:
            self.begun[n] = self.tracing.submit(self.model.each, [n], self.say)
        return sizes

    def trace(self, *batch_sizes: int) -> None:
        """Have traced what is to be tried; what was concluded by the line is forgotten."""
        for n in self.begin(*batch_sizes):
            (self.traces[n],) = self.begun.pop(n).result()
        self.probes = {n: p for n, p in self.probes.items() if p.traced}
        self.said = {n: self.said[n] for n in self.probes}

    def step_at(self, batch_size: int) -> Trace:
        """The step as it was traced, or on the line through the two nearest traces of one structure; where there are
        none such it is traced now."""
        if batch_size not in self.traces:
            near = sorted(self.traces.items(), key=lambda item: abs(item[0] - batch_size))
            for a, b in combinations(near, 2):
                if of_one_structure(a[1], b[1]):
                    return between(a, b, batch_size)
            self.trace(batch_size)
        return self.traces[batch_size]

    def without(self, batch_size: int) -> bool:
        """Return whether the untouched model's step fits."""
        if batch_size not in self.probes:
            trace = self.step_at(batch_size)
            if (kind := kind_of(trace.meta)) != self.device.kind:
                raise SpecError(
                    f"the trace holds the graph of a {kind.upper()}, and {self.device.name} is a "
                    f"{self.device.kind.upper()}; leave --target and --device to --gpu."
                )
            c = predict(Problem(trace), self.question.setting(trace.meta))
            plain = untouched_fit(c)
            self.said[batch_size] = c
            self.probes[batch_size] = Probe(
                batch_size=batch_size,
                untouched=plain.figures(),
                fits=bool(plain.fits),
                traced=batch_size in self.traces,
            )
            self.tell(
                batch_size, f"{show_bytes(plain.needs_bytes)}, {'fits' if plain.fits else 'does not fit'}"
            )
        return self.probes[batch_size].fits

    def plan(self, batch_size: int, *, best: bool = False) -> bool:
        """Return whether a plan within the price fits, any or the best; of what was rehearsed nobody looks for one."""
        if self.without(batch_size):
            return True
        known, before = self.probes[batch_size], batch_size - self.step
        if batch_size not in self.said or known.plan_fits is False or (known.plan_fits and not best):
            return bool(known.plan_fits)
        if best:
            ahead = self.better.pop(batch_size, None)
            self._take(*(ahead.result() if ahead else self._planned(batch_size)))
        elif not self._take(*self._planned(batch_size, hasty=True)) and known.traced:
            if before in self.traces and self.probes[before].plan:  # it may be the answer
                self.better[before] = self.planning.submit(self._planned, before)
            self._take(*self._planned(batch_size, hasty=False))
        p = self.probes[batch_size]
        self.tell(batch_size, f"a plan fits at {p.overhead_percent:+.2f} %" if p.plan_fits else p.message)
        return bool(p.plan_fits)

    def _take(self, p: Probe, c: Prediction) -> bool:
        """Take what was found of plans, unless a cheaper plan is known; returns whether one fits."""
        n, known = p.batch_size, self.probes[p.batch_size]
        if not known.plan_fits or (p.plan_fits and (p.overhead_percent or 0) < (known.overhead_percent or 0)):
            if p.plan_fits and p.traced:
                self.said[n], path = c, f"plan-b{n}.json"
                c.plan.save(self.model.directory / path)
                p = replace(p, plan_path=path)
            self.probes[n] = p
        return bool(self.probes[n].plan_fits)

    def tell(self, batch_size: int, what: str) -> None:
        if batch_size in self.traces:
            self.say(f"batch {batch_size}: {what.split('. ')[0]}")

    def _planned(self, batch_size: int, **how: bool) -> tuple[Probe, Prediction]:
        """The probe with what was found of plans: of the best, or (`hasty`, or not) of any within the price."""
        probe, problem = self.probes[batch_size], self.said[batch_size].problem
        c = predict(problem, self.question.setting(problem.trace.meta))
        if c.saved_fit.fits:  # the captured graph alone makes room, which an empty plan runs
            c = completed(c)
            return replace(probe, plan=c.saved_figures, overhead_percent=0.0, plan_fits=True), c
        asks, none = self.question, replace(probe, plan_fits=False, message="no plan needs so little")
        bound = lower_bound(c.problem, self.device.usable_bytes, asks.levers)
        if not bound.feasible:
            return none, c
        if bound.overhead_percent > self.price_percent:
            return replace(none, overhead_percent=bound.overhead_percent, message=bound.least()), c
        seconds = asks.limits.seconds / ((2 if how else 1) if probe.traced else SOONER)
        enough_ns = int(c.saved.timeline.step_time_ns * (1 + self.price_percent / 100)) * bool(how)
        limits = replace(asks.limits, seconds=seconds, enough_ns=enough_ns, **how)
        answer = ask(c.problem, replace(asks, limits=limits))
        if answer.found is None:
            return replace(none, message=str(answer.refusal)), c
        c, cost = answer.found, answer.found.overhead_percent
        dear = cost > self.price_percent
        return replace(
            probe,
            plan=c.planned_figures,
            overhead_percent=cost,
            plan_fits=bool(c.planned_fit.fits) and not dear,
            message=f"the plan that was found adds {cost:.2f} %" if dear else c.planned_fit.out_of_memory,
        ), c

    def reckoned(self, fits: Callable[[int], bool], low: int, high: int, n: int, stride: int = 1) -> int:
        """The largest batch size that fits while the next does not, looked for from `n` on in growing strides; `low`
        fits, or is 0, and `high` does not."""
        stride = -(-stride // self.step) * self.step
        while high - low > self.step:
            if not low < n < high:
                n = max(low + self.step, (low + high) // 2 // self.step * self.step)
            low, high, n = (n, high, n + stride) if fits(n) else (low, n, n - stride)
            stride *= STRIDE
        return low

    def confirmed(self, fits: Callable[[int], bool], low: int, n: int) -> int:
        """The same, traced on both sides; `n`: where it is by the line, which is followed from a trace in vain the
        farther the more there were, or half of what is left: so it ends wherever the line leads."""
        high, away = self.top + self.step, self.step
        while True:
            self.trace(n, n + self.step)
            if down := n > low and not fits(n):
                high, begin = n, n - away
            elif n + self.step >= high or not fits(n + self.step):
                return n
            else:
                low, begin = n + self.step, n + self.step + away
            n = self.reckoned(fits, low, high, begin)
            least = min(away, max(1, (high - low) // self.step // 2) * self.step)
            n = min(n, high - least) if down else max(n, low + least - self.step)
            away *= 2


@dataclass(slots=True, kw_only=True)
class _Ranks(_Search):
    """The same of one of several ranks, which is rehearsed untouched; plans are made, by the line, of its blocks as two
    rehearsals recorded them. Counts: torch's memory and NCCL's. Ignores: how a plan changes fragmentation.
    """

    needs_bytes: dict[int, int] = field(default_factory=dict)
    # Of what is recorded, what is not asked of torch.
    beside_bytes: dict[int, int] = field(default_factory=dict)
    recordable: bool = True

    def trace(self, *batch_sizes: int) -> None:
        sizes = {n for n in batch_sizes if 0 < n <= self.top}
        new = sorted(sizes - self.needs_bytes.keys())
        found = self.model.rehearsed(new, self.say)
        self.needs_bytes |= {n: r["gpu_bytes"] - r["context_bytes"] for n, r in zip(new, found, strict=True)}
        self.probes.clear()  # of lines that were
        for n in self.needs_bytes:
            self.without(n)
        if self.traces:
            self._record(sorted(sizes - self.traces.keys()))

    def _record(self, batch_sizes: Sequence[int]) -> None:
        told = self.model.rehearsed(batch_sizes, self.say, recorded=True)
        self.traces |= {n: load(self.model.path(n)) for n in batch_sizes}
        for n, r in zip(batch_sizes, told, strict=True):
            asked = r["context_bytes"] + r["steady"]["requested_bytes"]
            self.beside_bytes[n] = r["gpu_bytes"] - asked

    def without(self, batch_size: int) -> bool:
        needs = _on_line(self.needs_bytes, batch_size)
        p = self.probes[batch_size] = Probe(
            batch_size=batch_size,
            fits=needs <= self.device.usable_bytes,
            untouched=RunFigures(peak_reserved_bytes=needs),
            traced=batch_size in self.needs_bytes,
        )
        return p.fits

    def plan(self, batch_size: int, *, best: bool = False) -> bool:
        if self.without(batch_size):
            return True
        if self.recordable and not self.traces:
            try:
                self._record(sorted(self.needs_bytes)[:2])
            except LowtideError as error:
                self.recordable = False
                self.say(f"no plan is looked for: {error}")
        if not self.traces:
            return False
        beside_bytes = max(0, _on_line(self.beside_bytes, batch_size))
        room = replace(self.device, reserve_bytes=self.device.reserve_bytes + beside_bytes)
        of = replace(self, device=room, question=replace(self.question.of_planner(), device=lambda _: room))
        trace = self.step_at(batch_size)
        self.said[batch_size] = predict(Problem(trace), of.question.setting(trace.meta))
        self.probes[batch_size], _ = of._planned(batch_size, **({} if best else {"hasty": True}))
        return bool(self.probes[batch_size].plan_fits)


def _on_line(known: Mapping[int, int], n: int) -> int:
    """What is known at some numbers at another, by the line through the nearest two."""
    a, b = (sorted(known, key=lambda k: abs(k - n)) * 2)[:2]
    return known[a] + (known[b] - known[a]) * (n - a) // (b - a or 1)


def max_batch(
    model: str,
    device: Device | None = None,
    *,
    budget_overhead_percent: float = 30.0,
    directory: str | Path | None = None,
    multiple_of: int = 1,
    maximum: int = 65536,
    batch_sizes: Sequence[int] = (),
    ranks: int = 1,
    trace_options: Sequence[str] = (),
    dask: str = "",
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
        batch_sizes: to answer for beside; if there are any, all answers of traces are by the line alone.
        ranks: of which one, under `fully_shard`, has the batch; plans of several are not rehearsed.
        trace_options: further words for `trace`, such as ["--seq-len", "512"].
        dask: the address of a Dask scheduler on whose workers `trace` runs; "": on this machine.
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
    if ranks > 1:
        alloc_conf = ("--alloc-conf", asks.alloc_conf) if asks.alloc_conf else ()
        options = (*options, "--gpu", memory.name, "--ranks", str(ranks), "--shard", "fsdp2", *alloc_conf)
    elif memory.kind != CPU and not any(w.partition("=")[0] in ("--target", "--device") for w in options):
        options = (*options, "--target", memory.name)
    top = maximum // step * step
    if top < step:
        raise SpecError(f"--max {maximum}: there is no multiple of {step} up to it.")
    traced = Traced.of(model, directory, "max-batch", options, dask)
    search = (_Ranks if ranks > 1 else _Search)(
        model=traced,
        step=step,
        top=top,
        question=asks,
        device=memory,
        price_percent=budget_overhead_percent,
        say=progress,
        tracing=ThreadPoolExecutor(traced.at_once),
    )
    first, ahead = min(top, -(-FIRST // step) * step), ranks == 1 and not batch_sizes
    with keeping(traced.key):
        search.trace(first, min(top, STRIDE * first))
        without = search.reckoned(search.without, 0, top + step, STRIDE * first, first)
        if ahead:
            search.begin(without, without + step)
        if ranks > 1:
            without = search.confirmed(search.without, 0, without)
        at, stride = 2 * max(first, without), max(first, without // 2)
        with_plan = search.reckoned(search.plan, without, top + step, at, stride)
        if ahead:
            progress(f"by the line through two traces, {without} fit, and {with_plan} with a plan")
            search.begin(with_plan, with_plan + step)
            without = search.confirmed(search.without, 0, without)
        if ahead or ranks > 1:
            with_plan = search.confirmed(search.plan, without, max(without, with_plan))
        for n in batch_sizes or [with_plan][:with_plan]:
            search.plan(n, best=True)
    return _answer(search, without, with_plan, ranks)


def _answer(search: _Search, without: int, with_plan: int, ranks: int) -> MaxBatch:
    traced, device, price = search.model, search.device, search.price_percent
    of = ALLOCATED if device.kind == CPU else RESERVED  # the memory that must fit
    probes = tuple(search.probes[b] for b in sorted(search.probes))
    shown = search.said[with_plan or without or min(search.said)] if search.said else None
    planned, stopped = search.probes.get(with_plan), with_plan == search.top
    notes = [
        f"without a plan: batch {without}",
        f"with a plan of at most +{price:g} %: batch {with_plan}" if shown else RANKS,
        *([f"plan: {traced.directory / planned.plan_path}"] if planned and planned.plan_path else []),
        *([f"The search stopped at {with_plan}; --max tries more."] if stopped else []),
    ]
    told = {p.batch_size: p.to_json() for p in probes}
    data = {
        "record": "max-batch",
        "model": traced.model,
        "device_memory": device.to_json(),
        "ranks": ranks,
        "alloc_conf": shown.setting.alloc_conf if shown else search.question.alloc_conf,
        "budget_overhead_percent": price,
        "planner": search.question.planner_name,
        "stopped_at_maximum": stopped,
        "without_plan": told.get(without, {"batch_size": without}),
        "with_plan": told.get(with_plan, {"batch_size": with_plan}) if shown else None,
        "provenance": provenance(shown.trace.meta) if shown else REHEARSED,
        # What the untouched model needs is in the figures here.
        "warnings": list(texts(shown, but=UNTOUCHED)) if shown else [],
        "probes": [*told.values()],
    }
    return MaxBatch(
        problem=shown.problem if shown else None,
        rows=probes,
        data=data,
        words=f"{traced.model} on {device.room()}",
        short=f"{traced.model} on {device.name}: batch {without} without a plan, {with_plan} with one of at most "
        f"+{price:g} %",
        table=_table(probes, of),
        aside=("plan fits", ""),
        notes=(*notes, str(data["provenance"])),
        directory=traced.directory,
        device=device.name if ranks == 1 else f"{ranks} x {device.name}",
        without_plan=without,
        with_plan=with_plan,
    )
