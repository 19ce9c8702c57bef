"""Train a model that no graph holds whole within a budget: by a plan for each part that can be captured, the rest as
it is.

The parts are the largest submodules that can be captured, found from the top down with the arguments that they get in
one forward of the batch. What the rest needs nobody can know without running it, so one forward and backward runs for
real, with as little saved in the parts as can be, and the allocator is watched; what other plans for the parts would
need in place of that is simulated.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from executor.guards import bypass
from executor.guards.twin import twin_of
from executor.training.engine import Engine
from executor.training.module import apply_recorded, engines_of
from executor.training.planning import Recorded, Say, Wanted, loss_of, record
from simulator import api as simulator
from simulator.core.budget import parse_budget
from simulator.core.problem import Problem
from simulator.core.replay import Replay
from simulator.planners.outcome import Infeasible
from tracer.api import left_as_found
from tracer.capture.sizes import Layout
from tracer.measure.probes import cpu_live, memory_profiler
from tracer.precision.policy import Autocast, ambient
from tracer.step.batch import SplitBatch, split_batch, to_device
from tracer.torch_api import RecordFunctionFast, pytree
from traces.errors import CaptureError, OptimizerError, SpecError
from traces.records.plan import ALLOCATED, Plan
from traces.records.trace import INPUT, OPTIMIZER, OPTIMIZER_STATE, Trace
from traces.units import show_bytes

MARK: Final = "#lowtide region "
POINTS: Final = 8  # budgets of a part for which plans are made
LEAST: Final = 0.01  # of what all parts save: a part that saves less runs as it is

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A plan for a part, and what the part needs with it."""

    plan: Plan
    added_ns: int
    held: Mapping[int, int]  # storages that stay from its forward to its backward, arguments too -> bytes
    forward_bytes: int  # the most that its forward needs beyond what is there when it begins
    backward_bytes: int

    @property
    def held_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def figures(self) -> tuple[int, ...]:
        return self.held_bytes, self.forward_bytes, self.backward_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A submodule that is captured and planned by itself."""

    path: str
    step: Recorded
    options: tuple[Option, ...]  # the fastest first; that saves everything


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionsPlan:
    """Plans for the parts of a model, and what the step is predicted to need with them.

    Counts: the allocator's account of one forward and backward that ran, and the optimizer. Ignores: what an argument
    of a part that no plan holds any more frees, so the peak may be lower; and other batches, whose parts may be larger.
    """

    parts: tuple[Part, ...]
    chosen: tuple[int, ...]  # option of each part
    peak_bytes: int
    saved_peak_bytes: int  # with everything saved in the parts
    lowest_peak_bytes: int
    refused: Mapping[str, str]  # why modules above and beside the parts are none

    def __str__(self) -> str:
        most = sum(p.options[0].held_bytes for p in self.parts)
        held = sum(p.options[k].held_bytes for p, k in zip(self.parts, self.chosen, strict=True))
        return (
            f"{len(self.parts)} parts ({', '.join(p.path for p in self.parts[:4])}{', ...' if self.parts[4:] else ''}) "
            f"hold {show_bytes(held)} of {show_bytes(most)}; allocated peak {show_bytes(self.saved_peak_bytes)} -> "
            f"{show_bytes(self.peak_bytes)}, from one step that ran here and the parts' simulation"
        )

    def apply(self, model: nn.Module, on_mismatch: str) -> None:
        """Make the parts of this very model train by their plans."""
        _apply(self.parts, self.chosen, model, on_mismatch)


def plan_regions(
    model: nn.Module, batch: Any, loss: Callable[..., Any] | None, wanted: Wanted, amp: str | None, say: Say
) -> RegionsPlan:
    """Find the parts of a model and plan them so that the step's allocated memory stays within a budget.

    Two forwards and a backward run; parameters, buffers, gradients and random states are afterwards as they were.

    Raises:
        Infeasible: no plans for the parts keep to the budget; its figures name the lowest peak.
        CaptureError: no part can be captured. SpecError: a budget of reserved memory, or as `tracer.trace`.
    """
    bypass.check_wrapped(model)
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    if (wanted.budget_of or ALLOCATED) != ALLOCATED:
        raise SpecError("parts are planned within a budget of allocated memory only: leave budget_of out.")
    if wanted.scaler is not None or wanted.loop:
        raise SpecError("parts are planned for a loop without a gradient scaler and accumulation.")
    state_bytes, step_bytes = _optimizer_bytes(model, wanted)
    given = split_batch(model, to_device(batch, str(where), None), loss)
    autocast = ambient(where.type) if amp is None else Autocast(dtype=amp, kind=where.type)
    twin = twin_of(model).train()
    with _untouched(twin), autocast.region():
        calls = _calls(twin, given)
        parts, refused = _parts(twin, calls, wanted, autocast.dtype)
    if not parts:
        told = "; ".join(f"{path or 'the model'}: {why}" for path, why in list(refused.items())[:3])
        raise CaptureError(f"no part of the model can be captured ({told}).")
    say(f"found {len(parts)} parts that can be captured")
    # The options that save the fewest bytes; of equals the fastest.
    low = [min(range(len(p.options)), key=lambda k, p=p: p.options[k].held_bytes) for p in parts]  # type: ignore[misc]
    _apply(parts, low, twin, "error")
    with _untouched(twin):
        course = _Course(parts, low, _watched_step(twin, parts, given, autocast, where.type))
    leaves = pytree.tree_leaves((given.args, given.kwargs, given.loss_inputs))
    there = (x for x in (*model.parameters(), *model.buffers(), *leaves) if isinstance(x, torch.Tensor))
    resident = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in there}
    base = sum(resident.values()) + state_bytes
    return _within(course, base, base + step_bytes, wanted, refused)


# Which parts there are


def _calls(model: nn.Module, given: SplitBatch) -> dict[str, list[Any]]:
    """The arguments, of tensors the layouts alone, of every training call of a submodule in one forward, of which
    nothing is saved for a backward."""
    found: dict[str, list[Any]] = {}
    handles: list[RemovableHandle] = []

    def watch(path: str, module: nn.Module) -> RemovableHandle:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if bypass.trains(module):
                made = pytree.tree_map_only(torch.Tensor, Layout.of, (args, kwargs))
                found.setdefault(path, []).append(made)

        return module.register_forward_pre_hook(note, with_kwargs=True)

    try:
        for path, module in model.named_modules():
            if path and any(p.requires_grad for p in module.parameters()):
                handles.append(watch(path, module))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: None):
            model(*given.args, **given.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _parts(
    model: nn.Module, calls: dict[str, list[Any]], wanted: Wanted, amp: str
) -> tuple[tuple[Part, ...], dict[str, str]]:
    """The largest submodules that can be captured, with plans for each; and why the others are none."""
    refused: dict[str, str] = {}
    steps: dict[str, Recorded] = {}

    def like(layout: Layout) -> torch.Tensor:  # of which indices are within bounds
        x = layout.made()
        return x if x.is_floating_point() or x.is_complex() else x.zero_()

    def look(path: str, module: nn.Module) -> None:
        seen = calls.get(path, [])
        if len(seen) == 1:
            args, kwargs = pytree.tree_map_only(Layout, like, seen[0])
            call = SplitBatch(args=tuple(args), kwargs=kwargs, loss=loss_of, loss_inputs=())
            try:
                steps[path] = record(module, call, None, replace(wanted, optimizer=None), amp)
                return
            except (CaptureError, SpecError) as error:
                refused[path] = str(error).partition("\n")[0]
        elif seen:
            refused[path] = f"it is called {len(seen)} times in a step"
        for name, child in module.named_children():
            look(f"{path}.{name}" if path else name, child)

    look("", model)
    saved = {path: Problem(step.trace).saved for path, step in steps.items()}
    bytes_of = {path: _option(steps[path], r).held_bytes for path, r in saved.items()}
    large = [path for path, n in bytes_of.items() if n >= LEAST * sum(bytes_of.values())]
    kinds = {steps[path].trace.meta.graph_fingerprint for path in large}
    share = replace(wanted, seconds=wanted.seconds / max(1, len(kinds)))
    known: dict[str, list[Plan]] = {}
    parts = []
    for path in large:
        step = steps[path]
        if (graph := step.trace.meta.graph_fingerprint) not in known:
            known[graph] = _plans(step.trace, share)
        parts.append(Part(path=path, step=step, options=_options(step, known[graph])))
    return tuple(parts), refused


def _plans(trace: Trace, wanted: Wanted) -> list[Plan]:
    """Plans that keep the part's own peak low, and others that save little while the rest of the step runs: where a
    part of the model waits for its backward, all that the others need comes on top of what it saved."""
    waiting = _with_load(trace, Problem(trace).saved.timeline.peak_allocated_bytes)
    ask = partial(simulator.pareto, points=POINTS, planner=wanted.planner, seconds=wanted.seconds / 2)
    return [plan for t in (trace, waiting) for plan in ask(t).plans if plan is not None]


def _with_load(trace: Trace, nbytes: int) -> Trace:
    """The trace with so many bytes more that are needed for a moment between forward and backward."""
    k, ops = trace.meta.forward_ops, trace.ops
    created = sum(n for n, p in zip(trace.storages.nbytes, trace.storages.producer, strict=True) if p == k)
    events = list(ops.events)
    events[k] = (*(events[k] or (created,)), nbytes, -nbytes)
    return replace(trace, ops=replace(ops, events=tuple(events)))


def _options(step: Recorded, plans: Sequence[Plan]) -> tuple[Option, ...]:
    """What the part needs with each plan, and with none; those that another is never worse than are left out."""
    problem = Problem(step.trace)
    made = [_option(step, problem.saved)]
    made += [_option(step, problem.replay(p.actions), replace(p, meta=step.trace.meta)) for p in plans]
    out: list[Option] = []
    for o in sorted(made, key=lambda o: (o.added_ns, o.held_bytes)):
        if not any(all(a <= b for a, b in zip(x.figures, o.figures, strict=True)) for x in out):
            out.append(o)
    return tuple(out)


def _option(step: Recorded, replay: Replay, plan: Plan | None = None) -> Option:
    """A plan's figures. Its backward begins where what forward left, and the loss code after it, have run."""
    trace, schedule, line = step.trace, replay.schedule, replay.timeline
    ops, sts, meta = trace.ops, trace.storages, trace.meta
    first = [
        k + 1
        for k, (op, again) in enumerate(zip(schedule.op, schedule.recompute, strict=True))
        if op < meta.first_backward_graph_op and not again
    ][-1]
    there = schedule.made_by(first)
    read = {s for op in schedule.op[first:] for s in ops.reads[op] if sts.category[s] == INPUT}
    held = {s for s in there if 0 <= sts.producer[s] < meta.forward_ops} | read
    forward = max(line.peak_bytes[: schedule.forward_steps], default=line.resident_bytes)
    before = line.live_bytes[first - 1]
    return Option(
        plan=plan or Plan(meta=meta),
        added_ns=line.step_time_ns - sum(ops.time_ns),
        held={s: sts.nbytes[s] for s in held},
        forward_bytes=forward - line.resident_bytes,
        backward_bytes=max(line.peak_bytes[first:], default=before) - before,
    )


def _apply(parts: Sequence[Part], chosen: Sequence[int], model: nn.Module, on_mismatch: str) -> None:
    for part, k in zip(parts, chosen, strict=True):
        module, plan = model.get_submodule(part.path), part.options[k].plan
        apply_recorded(module, plan, part.step, in_place=True, on_mismatch=on_mismatch)


# What the whole step needs

BEGIN, FORWARD, FORWARD_END, BACKWARD, BACKWARD_END, END = range(6)


class _Watch:
    """Marks of one step, in order: at each, what was allocated then, and at most since the mark before."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.marks: list[tuple[int, int]] = []  # what begins or ends, and of which part
        self.live: list[int] = []
        self.peak: list[int] = []
        self.outputs: dict[tuple[int, int], StorageWeakRef] = {}  # by part and storage
        self.gone: list[frozenset[tuple[int, int]]] = []  # of the outputs

    def mark(self, what: int, part: int) -> None:
        if self.kind == "cuda":
            self.live.append(torch.cuda.memory_stats()["requested_bytes.all.current"])
            self.peak.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
            torch.cuda.reset_peak_memory_stats()
        else:
            with RecordFunctionFast(f"{MARK}{len(self.marks)}"):
                pass
        self.marks.append((what, part))
        self.gone.append(frozenset(key for key, ref in self.outputs.items() if ref.expired()))

    def account(self, prof: Any) -> None:
        """Fill in a CPU's figures: the running sum of the allocator's events."""
        moments, live, spans = cpu_live(prof, MARK)
        before = 0
        for k in range(len(self.marks)):
            now = bisect_right(moments, spans[f"{MARK}{k}"][0])
            self.live.append(live[now])
            self.peak.append(max(live[before : now + 1]))
            before = now

    def put_around(self, part: int, engine: Engine) -> Engine:
        """The engine with marks around its forward and its backward."""
        mark, outputs, inner = self.mark, self.outputs, engine.rewritten.forward

        def forward(values: list[Any]) -> Any:
            mark(FORWARD, part)
            made, saved = inner(values)
            for s, x in zip(engine.program.output_storages, made, strict=True):
                outputs[part, s] = StorageWeakRef(x.untyped_storage())
            mark(FORWARD_END, part)
            return made, saved

        class Watched(Engine):
            __slots__ = ()

            def backward(self, missing: tuple[bool, ...]) -> Any:
                run = engine.backward(missing)

                def backward(values: list[Any]) -> Any:
                    mark(BACKWARD, part)
                    gradients = run(values)
                    mark(BACKWARD_END, part)
                    return gradients

                return backward

        given = {f.name: getattr(engine, f.name) for f in fields(engine)}
        return Watched(**{**given, "rewritten": replace(engine.rewritten, forward=forward)})


def _watched_step(
    model: nn.Module, parts: Sequence[Part], given: SplitBatch, autocast: Autocast, kind: str
) -> _Watch:
    """Run forward and backward of a model whose parts have plans."""
    watch = _Watch(kind)
    for k, part in enumerate(parts):
        engines = engines_of(model.get_submodule(part.path))
        engines.update({key: watch.put_around(k, engine) for key, engine in engines.items()})
    with contextlib.nullcontext() if kind == "cuda" else memory_profiler() as prof:
        watch.mark(BEGIN, -1)
        with autocast.region():
            loss = given.loss(model(*given.args, **given.kwargs))
        loss.backward()
        del loss
        watch.mark(END, -1)
    if prof is not None:
        watch.account(prof)
    missed = [p.path for k, p in enumerate(parts) if (FORWARD_END, k) not in watch.marks]
    if missed:
        raise CaptureError(f"{missed[0]} gets other arguments each time, so no plan is made for it.")
    return watch


class _Course:
    """What is allocated in the intervals between the marks of a step, whatever plans the parts have.

    In an interval outside of the parts, that is the watched step's peak there, and inside one what it had when the
    interval began; a part's option adds what it holds more than the watched one did, and inside the part what runs.
    """

    def __init__(self, parts: Sequence[Part], low: Sequence[int], watch: _Watch) -> None:
        self.parts, self.low, self.watch = parts, low, watch
        self.at = {mark: k for k, mark in enumerate(watch.marks)}
        inside = [what in (FORWARD, BACKWARD) for what, _ in watch.marks[:-1]]
        self.bytes = np.where(inside, watch.live[:-1], watch.peak[1:])
        self.adds = [[self._adds(k, o) for o in part.options] for k, part in enumerate(parts)]

    def _adds(self, k: int, option: Option) -> Ints:
        part, low = self.parts[k], self.parts[k].options[self.low[k]]
        adds = np.zeros(len(self.bytes), np.int64)
        producer = part.step.trace.storages.producer
        outputs = {s for s in part.step.program.output_storages if producer[s] >= 0}
        begin, end = self.at[FORWARD_END, k], self.at.get((BACKWARD, k), len(adds) - 1)
        own = {s for s, p in enumerate(producer) if p >= 0} - outputs
        more = sum(option.held.get(s, 0) - low.held.get(s, 0) for s in own)
        # An argument that this option does not hold may be held by what made it.
        more += sum(n for s, n in option.held.items() if producer[s] < 0 and s not in low.held)
        adds[begin : end + 1] += more
        for s in outputs & option.held.keys():
            for i in range(begin, end + 1):
                # Who takes an output may hold it, too, and be through with it before this part's backward.
                adds[i] += option.held[s] * ((k, s) in self.watch.gone[i + (i < end)])
        adds[self.at[FORWARD, k]] += option.forward_bytes
        if (BACKWARD, k) in self.at:
            adds[end] += option.backward_bytes
        return adds

    def peak_bytes(self, chosen: Sequence[int]) -> int:
        return int((self.bytes + sum(a[o] for a, o in zip(self.adds, chosen, strict=True))).max())


def _within(
    course: _Course, base: int, least: int, wanted: Wanted, refused: Mapping[str, str]
) -> RegionsPlan:
    """The cheapest options found that keep to the budget.

    First the lowest peak is looked for, one part after another until none changes; then the part whose option for a
    byte more saves the most time gets it, as long as there is room.

    Args:
        base: bytes that are there throughout; least: that the optimizer needs at its peak.
    """
    parts = course.parts

    def peak(chosen: Sequence[int]) -> int:
        return max(base + course.peak_bytes(chosen), least)

    def others(chosen: list[int]) -> Iterator[tuple[int, int, list[int]]]:
        for k, part in enumerate(parts):
            for o in range(len(part.options)):
                if o != chosen[k]:
                    yield k, o, [*chosen[:k], o, *chosen[k + 1 :]]

    chosen, everything = list(course.low), [0] * len(parts)
    lowest, better = peak(chosen), True
    while better:
        better = False
        for _, _, other in others(chosen):
            if (n := peak(other)) < lowest:
                chosen, lowest, better = other, n, True
                break
    saved = peak(everything)
    limit = parse_budget(str(wanted.budget), saved)
    if lowest > limit:
        raise Infeasible(
            f"no plans for the {len(parts)} parts that can be captured keep the step within {show_bytes(limit)}; the "
            f"lowest peak that they reach is {show_bytes(lowest)}, of {show_bytes(saved)} with everything saved.",
            {"budget_bytes": limit, "lowest_peak_bytes": lowest},
        )
    while True:
        best: tuple[float, list[int]] | None = None
        for k, o, other in others(chosen):
            new, old = parts[k].options[o], parts[k].options[chosen[k]]
            gain = old.added_ns - new.added_ns
            price = gain / max(1, new.held_bytes - old.held_bytes)
            if gain > 0 and (best is None or price > best[0]) and peak(other) <= limit:
                best = price, other
        if best is None:
            break
        chosen = best[1]
    return RegionsPlan(
        parts=tuple(parts),
        chosen=tuple(chosen),
        peak_bytes=peak(chosen),
        saved_peak_bytes=saved,
        lowest_peak_bytes=lowest,
        refused=refused,
    )


class _AllParameters(nn.Module):
    """A model whose step has nothing but the optimizer."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.all = nn.ParameterList(parameters)

    def forward(self) -> torch.Tensor:
        return torch.stack([p.sum().abs().float() for p in self.all]).sum()


def _optimizer_bytes(model: nn.Module, wanted: Wanted) -> tuple[int, int]:
    """What the optimizer needs: its state, and at its peak the gradients and what it makes meanwhile."""
    call = SplitBatch(args=(), kwargs={}, loss=loss_of, loss_inputs=())
    try:
        trace = record(_AllParameters(list(model.parameters())), call, None, wanted, "").trace
    except CaptureError as error:
        raise OptimizerError(
            f"{error} To plan the parts without it: optimizer=None, with room for its state."
        ) from error
    sts, line = trace.storages, Problem(trace).saved.timeline
    state = sum(
        n
        for n, c, p in zip(sts.nbytes, sts.category, sts.producer, strict=True)
        if c == OPTIMIZER_STATE and p < 0
    )
    peaks = [n for n, op in zip(line.peak_bytes, line.op, strict=True) if trace.ops.phase[op] == OPTIMIZER]
    return state, max(peaks, default=trace.resident_bytes) - trace.resident_bytes


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """The body may run the model: buffers, gradients and random states are restored after it."""
    parameters, buffers = list(model.parameters()), list(model.buffers())
    gradients, values = [p.grad for p in parameters], [b.detach().clone() for b in buffers]
    for p in parameters:
        p.grad = None
    try:
        with left_as_found(False):
            yield
    finally:
        with torch.no_grad():
            for b, value in zip(buffers, values, strict=True):
                b.copy_(value)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
