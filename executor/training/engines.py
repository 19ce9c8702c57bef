"""The captured and rewritten steps of a planned model: which one serves a call, and how it is made."""

from __future__ import annotations

import copy
import linecache
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.fx import GraphModule

from executor.matching import check_kind
from executor.rewrite import Rewritten, rewrite
from executor.rewriting import rewritten
from executor.training.bypass import later_forward_off
from executor.training.families import Family, kind_of, layouts_of
from executor.training.guards import Path, State, Watch, argument, unread_of
from executor.training.mismatch import another_graph, by_ones_alone, elements
from executor.training.unreached import without
from simulator.core.problem import Problem
from simulator.core.replay import replay
from simulator.core.schedule import build
from tracer.capture.capture import Captured, capture, only_these
from tracer.capture.sizes import Known, Layout, Sizes, at, number, symbolic, with_numbers
from tracer.precision.policy import Autocast
from tracer.record.one_graph import check_same
from tracer.record.program import Program, program_of
from tracer.record.rows import shared_groups, storage_key
from tracer.record.sketch import ops_of, sketch
from tracer.torch_api import CAPTURING, generated_code, inside_torch_func, pytree
from traces.errors import CaptureError, PlanError
from traces.records.plan import Action, Plan, Rewrite
from traces.records.trace import TraceMeta

MOST: Final = 64  # engines of one model, of which each takes megabytes
MOST_PARTIAL: Final = 8  # backwards of one engine that leave out some outputs
OFTEN: Final = 4  # captures after which it is said what causes them


@dataclass(slots=True)
class Engine:
    """One captured and rewritten step, for one set of argument shapes."""

    program: Program
    rewritten: Rewritten
    exact: bool = False  # the graph is the plan's to the byte, not only in structure
    kind: str = "cpu"  # the type of the device that it runs on
    replanned: bool = False  # by a plan of its own, since the model's was for another graph
    number: int = 0  # of this model's
    why: str = ""  # it was captured
    seconds: float = 0.0  # that making it took
    steps: int = 0  # that it served
    writes_arguments: bool = False  # so that it matters which of them share a storage
    partial: dict[Any, GraphModule] = field(default_factory=dict)  # backwards by what is missing
    plan: Plan | None = None  # that it was rewritten by
    all_saved: bool = False  # or none of its actions, which are for a graph without sizes of one
    sizes: Sizes | None = None  # that it may have, if they vary
    of: Engine | None = None  # the one for many sizes that this is, at sizes that are known
    known: Known | None = None
    numbers: tuple[int, ...] = ()  # of the graph at those sizes
    larger: bool = False  # than the plan's call, so that what was predicted does not hold
    not_made: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # outputs that the plan does not make: fake ones

    def backward(self, missing: tuple[bool, ...]) -> GraphModule:
        """The backward for a loss that leaves out these of the outputs that the plan's loss uses."""
        if not any(missing):
            return self.rewritten.backward
        key = missing, self.numbers
        if key not in self.partial:
            holders = zip(self.program.captured.tangents, missing, strict=True)
            absent = frozenset(n.name for n, gone in holders if gone)
            _make_room(self.partial, MOST_PARTIAL)
            self.partial[key] = without(self.rewritten.backward, absent, self.at_sizes)
        return self.partial[key]

    def at_sizes(self, x: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the graph as it is in this call."""
        return x if self.known is None else at(x, self.known)


class Engines(dict[Any, Engine]):
    """The engines of one model, by the state of the model and the arguments that each is for.

    They are what was captured; which state the model is in now is the watch's to say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watch: Watch | None = None
        self.unread: frozenset[Path] = frozenset()  # what forward was seen not to read
        self.last: dict[
            Any, State
        ] = {}  # by the arguments: the state of the model at the last capture for them
        self.refused: dict[Any, PlanError | CaptureError] = {}  # calls in a state that no engine can serve
        self.first: Any = None  # the key of the first
        self.made = 0  # how many there were
        self.causes: Counter[Path] = Counter()  # what had changed when it was captured again
        self.families: dict[Any, Family] = {}  # by the state and the kind of calls

    def tensors(self, engine: Engine) -> list[torch.Tensor]:
        """The model's parameters and buffers at this moment, in the order in which an engine takes them."""
        assert self.watch is not None
        with CAPTURING:
            parameters, buffers = self.watch.tensors()
        return engine.program.captured.tensors_of(parameters, buffers)

    def planned_bytes(self) -> int:
        """What the model takes by its plan in a call of the plan's sizes; 0 if there was none yet."""
        own = next((e for e in self.values() if e.exact and e.plan is not None), None)
        if own is None or own.plan is None:
            return 0
        return model_bytes(own.program, program_actions(own.plan, own.program))

    def set_attributes(self, engine: Engine) -> None:
        """Set the attributes of the model that its forward sets, where they have another value."""
        assert self.watch is not None
        for path, name, value in engine.program.captured.writes:
            module = self.watch.model.get_submodule(path)
            if name not in vars(module) or vars(module)[name] != value:
                setattr(module, name, copy.deepcopy(value))

    def watching(self, module: nn.Module) -> Watch:
        if self.watch is None or self.watch.model is not module:
            self.watch = Watch(module, self.unread)
        return self.watch

    def adopt(self, other: Engines, made: Callable[[Engine], Engine] = lambda engine: engine) -> None:
        """Take over what was captured for another module of the same model."""
        self.unread = other.unread
        own = {k: e for k, e in other.items() if not e.replanned and e.sizes is None}
        self.update((key, made(engine)) for key, engine in own.items())


def engine_for(
    engines: Engines,
    plan: Plan,
    module: nn.Module,
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    autocast: Autocast,
    program: Program | None = None,
) -> Engine:
    """The engine for these arguments and the model's state, made at their first use, under the plan's autocast.

    Args:
        engines: those made so far, to which a new one is added.
        module: what is called, and captured.
        leaves, spec: the flat arguments.
        autocast: under which the model is called.
        program: what was captured of this call already.

    Raises:
        PlanError: the plan is for another graph, or a step under another autocast; if it was for this one before
            something changed, says what did.
        CaptureError: the model cannot be captured.
    """
    call = (
        spec,
        tuple([(x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor)
               else argument(x, f"argument {k}") for k, x in enumerate(leaves)]),
        autocast,
    )  # fmt: skip
    with CAPTURING:
        if inside_torch_func() is not None:
            raise PlanError(
                "the model was called inside torch.func (grad, jvp, vmap), which sees through no planned step; run it "
                "without the plan there: inside `with unplanned(model):`."
            )
        state = engines.watching(module).state()
        key = (state, call)
        if (engine := engines.get(key)) is not None:
            if len(engines) > 1:
                engines[key] = engines.pop(key)  # the last used is the last to go
            return _sharing_alike(engine, leaves)
        if program is None and (refusal := engines.refused.get(key)) is not None:
            raise refusal.with_traceback(None)
        if program is None and (engine := _resized(engines, module, leaves, state, call)) is not None:
            return _sharing_alike(engine, leaves)
        try:
            return _made(engines, plan, module, leaves, call, state, program)
        except (PlanError, CaptureError) as error:
            _make_room(engines.refused)
            engines.refused[key] = error
            raise


def _larger(plan: Plan | None, call: Any) -> bool:
    """Whether the tensors of a call have more elements than those of the plan's."""
    planned = sum(elements(shown) for _, shown in (plan.meta.sketch.get("arguments", ()) if plan else ()))
    return 0 < planned < _elements(layouts_of(call))


def _elements(layouts: Sequence[Layout]) -> int:
    return sum(math.prod(x.shape) for x in layouts)


def _made(
    engines: Engines,
    plan: Plan,
    module: nn.Module,
    leaves: Sequence[Any],
    call: Any,
    state: State,
    program: Program | None,
) -> Engine:
    """A new engine for a call in this state; learns which of the attributes that changed forward does not read."""
    spec, _, autocast = call
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    watch, before = engines.watching(module), engines.last.get(call)
    changed = frozenset(state.changed(before) if before is not None else ())
    began = time.monotonic()
    try:
        check_autocast(plan, autocast)
        with unread_of(watch, changed | engines.unread) as left:
            if program is None:
                engine = make_engine(module, args, kwargs, plan, autocast, engines.planned_bytes)
            else:
                engine = engine_of(program, plan, autocast.kind)
    except PlanError as error:
        if before is None or not changed:
            raise
        raise PlanError(f"{error} Since the last planned step {_few(state.changes(before))}.") from error
    unread = (
        frozenset(left) if program is None else engines.unread
    )  # nothing was read here for a given program
    if unread != engines.unread:
        engines.unread = unread
        watch.leave_out(unread)
        engines.last.clear()
        state = watch.state()
    _warn(engines, changed - unread)
    engines.last[call] = state
    engine.why = why_captured(engines.first, (state, call))
    engines.first = engines.first or (state, call)
    engine.number = engines.made = engines.made + 1
    engine.seconds, engine.larger = time.monotonic() - began, _larger(engine.plan, call)
    if (same := engines.get((state, call))) is not None:  # but for what is known now not to be read
        engine.steps, engine.why = same.steps, same.why
    _make_room(engines)
    engines[state, call] = engine
    engines.refused.pop((state, call), None)
    if not engine.replanned:
        kind = state, kind_of(call)
        if kind not in engines.families:
            _make_room(engines.families)
        engines.families.setdefault(kind, Family()).add(call)
    return engine


def _resized(
    engines: Engines, module: nn.Module, leaves: Sequence[Any], state: State, call: Any
) -> Engine | None:
    """The engine for many sizes at those of this call, made once some calls were captured that differ in sizes alone;
    None: there is none, or it is not for these."""
    kind = state, kind_of(call)
    family = engines.families.get(kind)
    if family is None:
        return None
    many = engines.get(kind)
    if (
        many is None or many.sizes is None or many.sizes.known(layouts_of(call)) is None
    ) and family.worth_a_try(call):
        family.resized.clear()
        began = time.monotonic()
        try:
            many = _many_sizes(engines, module, leaves, state, family, call)
        except Exception as error:  # whatever stops it, each of the calls can be captured for itself
            family.why_not = f"{type(error).__name__}: {error}"
        else:
            many.number = engines.made = engines.made + 1
            many.seconds, family.why_not = time.monotonic() - began, ""
            _make_room(engines)
            engines[kind] = many
    if many is None or many.sizes is None:
        return None
    if call not in family.resized:
        known = many.sizes.known(layouts_of(call))
        if known is None:
            return None
        _make_room(family.resized)
        numbers = tuple([number(n.meta["val"], known) for n in many.program.captured.numbers])
        family.resized[call] = replace(
            many, of=many, known=known, numbers=numbers, larger=_larger(many.plan, call)
        )
    engines[kind] = engines.pop(kind)  # the last used is the last to go
    return family.resized[call]


def _many_sizes(
    engines: Engines, module: nn.Module, leaves: Sequence[Any], state: State, family: Family, call: Any
) -> Engine:
    """An engine for all calls of a family, compared with those that were captured for single ones.

    Raises:
        CaptureError: the model decides by sizes, so that none is for all of these calls.
    """
    spec, _, autocast = call
    singles = {c: e for c in family.calls if (e := engines.get((state, c))) is not None}
    first = next(iter(singles.values()), None)
    if first is None or first.plan is None or first.writes_arguments:
        raise CaptureError("the calls to compare it with are gone, or forward writes into its arguments.")
    # The smallest call decides: the largest may be where a slice takes all, and a graph with that is for it alone.
    sizes = symbolic(sorted(map(layouts_of, (*singles, call)), key=_elements))
    given = iter(sizes.arguments)
    args, kwargs = pytree.tree_unflatten(
        [next(given) if isinstance(x, torch.Tensor) else x for x in leaves], spec
    )
    captured = with_numbers(_captured(module, args, kwargs, first.plan, autocast), sizes)
    programs = []
    for single, engine in singles.items():
        known = sizes.known(layouts_of(single))
        if known is None:
            raise CaptureError("the model decides by sizes, and otherwise in another call.")
        programs.append(program_of(captured, engine.program.shares, known))
        check_same(programs[-1], engine.program.as_captured)
    make = _all_saved if first.all_saved else engine_of
    made = make(programs[0], first.plan, first.kind)
    made.sizes, made.why, made.exact = sizes, "sizes vary", False
    return made


def _make_room(known: dict[Any, Any], most: int | None = None) -> None:
    """Forget what was used longest ago of what would be too many."""
    while len(known) >= (most or MOST):
        gone = known.pop(next(iter(known)))
        modules: list[GraphModule] = [gone] if isinstance(gone, GraphModule) else []
        if isinstance(gone, Engine) and gone.of is None:
            modules = [gone.rewritten.forward, gone.rewritten.backward, *gone.partial.values()]
        for module in modules:
            _forget_code(type(module).forward.__code__.co_filename)


def _forget_code(file: str) -> None:
    """Take generated code out of what torch keeps for tracebacks, for ever otherwise."""
    generated_code.eval_cache.pop(file, None)
    linecache.cache.pop(file, None)


def _few(changes: list[str]) -> str:
    return "; ".join(changes[:3]) + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")


def _warn(engines: Engines, changed: Iterable[Path]) -> None:
    """Say once of each attribute that it makes the model be captured again and again."""
    for path in changed:
        engines.causes[path] += 1
        if engines.causes[path] == OFTEN:
            owner, name = path
            warnings.warn(
                f"{name} of {owner or 'the model'} has changed {OFTEN} times, and forward may read it: for each value "
                "the model is captured again, which takes seconds.",
                stacklevel=2,
            )


def why_captured(first: Any, now: Any) -> str:
    """In what a call and the state of the model differ from those of the first engine, if there is one."""
    if first is None:
        return "first call"
    (state, (spec, known, autocast)), (state_now, (spec_now, known_now, autocast_now)) = first, now
    if spec != spec_now:
        return "another set of arguments"
    changed = [
        f"argument {k} {_seen(b)}" for k, (a, b) in enumerate(zip(known, known_now, strict=True)) if a != b
    ]
    changed += [f"under {autocast_now}"] if autocast != autocast_now else []
    return _few(changed + state_now.changes(state))


def _seen(argument: Any) -> str:
    if not isinstance(argument, tuple) or not isinstance(argument[0], torch.Size):
        return f"is {argument[-1] if isinstance(argument, tuple) else argument}"
    shape, _, dtype, _, wants = argument
    return f"is {str(dtype).removeprefix('torch.')}{list(shape)}{' with a gradient' if wants else ''}"


def device_kind(module: nn.Module, leaves: Sequence[Any]) -> str:
    """The type of the device that a model runs on: that of its arguments, or without any, of its parameters."""
    return next(
        (x.device.type for x in chain(leaves, module.parameters()) if isinstance(x, torch.Tensor)), "cpu"
    )


def check_autocast(plan: Plan, now: Autocast) -> None:
    """Raise PlanError if a model is called under another autocast than the plan's step."""
    if now.dtype == plan.meta.amp:
        return
    made = Autocast(dtype=plan.meta.amp, kind=now.kind)
    call = f"call the model inside `with {made}:`" if made.dtype else "call the model outside of autocast"
    record = f"with --amp {now.dtype}" if now.dtype else "without --amp"
    raise PlanError(
        f"the plan was made for a step under {made}, and this call is under {now}; {call}, or trace the step "
        f"{record} and plan again."
    )


def make_engine(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    plan: Plan,
    autocast: Autocast,
    planned_bytes: Callable[[], int] = lambda: 0,
) -> Engine:
    """Capture the model for these arguments under autocast, check that the plan is for it, and rewrite.

    A size of one makes another graph. It runs with all values saved if that takes no more than the planned one does.

    Args:
        planned_bytes: what the model takes by the plan, at the plan's sizes; 0: not known.

    Raises:
        PlanError: the graph has another structure than the plan's, or the plan is for a GPU and the model is on the
            CPU.
    """
    check_kind(plan.meta, next((p.device.type for p in model.parameters()), "cpu"))
    program = program_of(_captured(model, args, kwargs, plan, autocast))
    now = sketch(program, model, args, kwargs)
    try:
        return engine_of(program, plan, autocast.kind, lambda _: now)
    except PlanError:
        if not by_ones_alone(plan.meta.sketch, now) or model_bytes(program) > planned_bytes():
            raise
    return _all_saved(program, plan, autocast.kind)


def model_bytes(program: Program, actions: Iterable[Action] = ()) -> int:
    """The peak of a model's forward and backward.

    Counts: parameters, buffers, arguments, and what ops make. Ignores: what ops allocate inside, the loss code and the
    optimizer.
    """
    return replay(Problem(program.trace()), actions).timeline.peak_allocated_bytes


def _captured(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], plan: Plan, autocast: Autocast
) -> Captured:
    """What is captured of the model for these arguments, with the outputs differentiated that the plan's loss uses."""
    known = set(generated_code.eval_cache)
    with later_forward_off(model):
        captured = capture(model, args, kwargs, only_these(plan.meta.grad_outputs), autocast=autocast)
    for file in generated_code.eval_cache.keys() - known:
        _forget_code(file)  # of graphs that were steps on the way
    return captured


def engine_of(
    program: Program, plan: Plan, kind: str = "cpu", now: Callable[[Program], dict[str, Any]] | None = None
) -> Engine:
    """Rewrite a program by a plan.

    Which arguments share a storage is taken from the plan where it decides nothing: nobody writes into them.

    Args:
        program: the captured model.
        plan: for a graph of this structure.
        kind: the type of the device that it runs on.
        now: makes the sketch of the call, for the message.

    Raises:
        PlanError: the plan is for a graph of another structure; says what differs.
    """
    meta, program = plan.meta, program.as_captured
    shares = tuple(map(tuple, meta.sketch.get("shares", ())))
    if not _fits(program, meta) and program.shares != shares and not _writes_arguments(program):
        program = program_of(program.captured, shares)
    if not _fits(program, meta):
        sketch = now(program) if now is not None else {}
        raise another_graph(meta, sketch, program.fingerprint(sizes=False), kind)
    changed = rewritten(program, program_rewrites(plan, program))
    engine = _rewritten(changed, plan, kind, program_actions(plan, changed))
    engine.exact = program.fingerprint() == meta.graph_fingerprint
    engine.not_made = {k: program.captured.outputs[k].meta["val"] for k in changed.captured.not_made}
    return engine


def _all_saved(program: Program, plan: Plan, kind: str) -> Engine:
    engine = _rewritten(program, plan, kind, ())
    engine.all_saved = True
    return engine


def _rewritten(program: Program, plan: Plan, kind: str, actions: Iterable[Action]) -> Engine:
    return Engine(
        program=program,
        rewritten=rewrite(program, build(Problem(program.trace()), actions)),
        kind=kind,
        writes_arguments=_writes_arguments(program),
        plan=plan,
    )


def _fits(program: Program, meta: TraceMeta) -> bool:
    planned = [target for target, _ in ops_of(meta.sketch)]
    return program.fingerprint(sizes=False, named_as=planned) == meta.structure_fingerprint


def _sharing_alike(engine: Engine, leaves: Sequence[Any]) -> Engine:
    """The engine; PlanError if forward writes into arguments, of which now others share memory than did."""
    if not engine.writes_arguments:
        return engine
    storages = [storage_key(x) for x in leaves if isinstance(x, torch.Tensor)]
    if shared_groups(storages) != engine.program.shares:
        raise PlanError(
            "forward writes into its arguments, and in this call others of them share memory than when it was "
            "captured; pass copies (x.clone())."
        )
    return engine


def _writes_arguments(program: Program) -> bool:
    arguments = {s for n in program.captured.placeholders if type(n.meta["desc"]).__name__ == "PlainAOTInput"
                 for s in program.storage_of[n]}  # fmt: skip
    return any(not arguments.isdisjoint(row.writes) for row in program.rows)


def program_rewrites(plan: Plan, program: Program) -> tuple[Rewrite, ...]:
    """The plan's rewrites with storages of the captured graph."""
    more = _more_inputs([(r.storage, r.op) for r in plan.rewrites if r.op], program)
    return tuple(replace(r, storage=r.storage + more) for r in plan.rewrites)


def program_actions(plan: Plan, program: Program) -> tuple[Action, ...]:
    """The plan's actions with op ids of the captured graph alone instead of those of the whole step.

    Between its forward and its backward the user's loss code runs, which takes nothing that may be evicted: what goes
    there is absent when backward begins, as what goes with the last op of forward is.

    Args:
        program: rewritten as the plan says.
    """
    last_forward = program.forward_ops - 1
    loss_ops = plan.meta.first_backward_graph_op - plan.meta.forward_ops

    def local(op: int) -> int:
        if op - loss_ops <= last_forward:
            return min(op, last_forward)
        others = sum(max(0, min(count, op - first + 1)) for first, count in plan.meta.within_backward)
        return op - loss_ops - others

    def locals_of(a: Action) -> tuple[int, ...]:
        return tuple(sorted({c for o in a.evict_after if (c := local(o)) < len(program.ops)}))

    more = _more_inputs([(a.storage, a.op) for a in plan.actions if a.op], program)
    return tuple(replace(a, storage=a.storage + more, evict_after=locals_of(a)) for a in plan.actions)


def _more_inputs(labelled: Sequence[tuple[int, str]], program: Program) -> int:
    """How many values the model has more than the plan's had before the first op: buffers that no op reads, so that
    the graphs are the same, and all that ops make has a number so much higher.

    Args:
        labelled: storages that the plan names, and the ops that make them.
    """
    made_by = [program.ops[s.producer].node.name if s.producer >= 0 else "" for s in program.storages]

    def fits(more: int) -> bool:
        there = range(len(made_by))
        return all(s + more in there and made_by[s + more] == op for s, op in labelled)

    if not labelled or fits(0):
        return 0
    storage, op = labelled[0]
    found = [s - storage for s, name in enumerate(made_by) if name == op]
    return next((more for more in found if fits(more)), 0)
