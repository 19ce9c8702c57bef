"""The captured and rewritten steps of a planned model: which one serves a call, and when another is made."""

from __future__ import annotations

import copy
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch.autograd import forward_ad

from executor.guards.mismatch import elements
from executor.guards.state import Path, State, Watch, argument, unread_of
from executor.training.engine import (
    Engine,
    check_autocast,
    engine_of,
    make_engine,
    make_room,
    model_bytes,
    program_actions,
)
from executor.training.families import Family, is_tensor, kind_of, layouts_of, many_sizes, size_of
from tracer.capture.sizes import number
from tracer.precision.policy import Autocast
from tracer.record.program import Program
from tracer.record.rows import shared_groups, storage_key
from tracer.torch_api import CAPTURING, inside_torch_func, pytree
from traces.errors import CaptureError, PlanError
from traces.records.plan import Plan

MOST: Final = 64  # engines of one model, of which each takes megabytes
OFTEN: Final = 4  # captures after which it is said what causes them


class Engines(dict[Any, Engine]):
    """The engines of one model, by the state of the model and the arguments that each is for.

    They are what was captured; which state the model is in now is the watch's to say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watch: Watch | None = None
        self.unread: frozenset[Path] = frozenset()  # what forward was seen not to read
        # By the arguments: the state of the model at the last capture for them.
        self.last: dict[Any, State] = {}
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
        leaves, spec: the flat arguments.
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
        if inside_torch_func() is not None or forward_ad._current_level >= 0:
            raise PlanError(
                "the model was called inside torch.func (grad, jvp, vmap) or forward_ad, which see through no planned "
                "step; run it without the plan there: inside `with unplanned(model):`."
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
            make_room(engines.refused, MOST)
            engines.refused[key] = error
            raise


def _larger(plan: Plan | None, call: Any) -> bool:
    """Whether the tensors of a call have more elements than those of the plan's."""
    planned = sum(elements(shown) for _, shown in (plan.meta.sketch.get("arguments", ()) if plan else ()))
    return 0 < planned < size_of(layouts_of(call))


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
    # Of a given program nothing was read here.
    unread = frozenset(left) if program is None else engines.unread
    if unread != engines.unread:
        engines.unread = unread
        watch.leave_out(unread)
        engines.last.clear()
        state = watch.state()
    _warn(engines, {*(changed - unread), *_other_values(engines.last, call)})
    engines.last[call] = state
    engine.why = why_captured(engines.first, (state, call))
    engines.first = engines.first or (state, call)
    engine.number = engines.made = engines.made + 1
    engine.seconds, engine.larger = time.monotonic() - began, _larger(engine.plan, call)
    if (same := engines.get((state, call))) is not None:  # but for what is known now not to be read
        engine.steps, engine.why = same.steps, same.why
    make_room(engines, MOST)
    engines[state, call] = engine
    engines.refused.pop((state, call), None)
    if not engine.replanned:
        kind = state, kind_of(call)
        if kind not in engines.families:
            make_room(engines.families, MOST)
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
            singles = {c: e for c in family.calls if (e := engines.get((state, c))) is not None}
            many = many_sizes(module, leaves, call, singles)
        except Exception as error:  # whatever stops it, each of the calls can be captured for itself
            family.why_not = f"{type(error).__name__}: {error}"
        else:
            many.number = engines.made = engines.made + 1
            many.seconds, family.why_not = time.monotonic() - began, ""
            make_room(engines, MOST)
            engines[kind] = many
    if many is None or many.sizes is None:
        return None
    if call not in family.resized:
        known = many.sizes.known(layouts_of(call))
        if known is None:
            return None
        make_room(family.resized, MOST)
        numbers = tuple([number(n.meta["val"], known) for n in many.program.captured.numbers])
        family.resized[call] = replace(
            many, of=many, known=known, numbers=numbers, larger=_larger(many.plan, call)
        )
    engines[kind] = engines.pop(kind)  # the last used is the last to go
    return family.resized[call]


def _few(changes: list[str]) -> str:
    return "; ".join(changes[:3]) + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")


def _other_values(captured: Iterable[Any], call: Any) -> Iterator[Path]:
    """The arguments beside tensors that have another value than in the call of that kind that was captured last."""
    alike = [c for c in captured if c[0] == call[0]]
    for k, (a, b) in enumerate(zip(alike[-1][1], call[1], strict=True) if alike else ()):
        if a != b and not is_tensor(a) and not is_tensor(b):
            yield "the call", f"argument {k}"


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
