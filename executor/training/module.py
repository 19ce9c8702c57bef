"""Make a module that trains by a plan: the same parameters, buffers and call as the model, another step inside.

from executor import apply_plan
model = apply_plan(model, "plan.json")
for x, y in data:                                 # the loop stays as it was
    loss = criterion(model(x), y)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from executor.training import bypass, hand_over
from executor.training.autograd import run
from executor.training.engines import (
    OF_MODULES,
    Engine,
    Engines,
    check_autocast,
    device_kind,
    engine_for,
    engine_of,
)
from tracer.build.context import is_fake
from tracer.capture.refusals import check_capturable
from tracer.precision.policy import ambient
from tracer.record.program import Program
from tracer.torch_api import pytree
from traces.errors import PlanError
from traces.plan import Plan

STATE: Final = "_lowtide"  # the attribute of a planned module that holds its `_State`
DEEPEST: Final = 4  # how many containers deep a module's attributes are searched for modules


@dataclass(slots=True)
class _State:
    """What a planned module knows beside the model: its plan, and what was captured for it."""

    plan: Plan
    engines: Engines = field(default_factory=Engines)
    unplanned: int = 0  # how many `with unplanned(...)` are open
    entered: int = 0  # how often the planned forward was reached
    pool: hand_over.Pool = field(default_factory=hand_over.Pool)  # of a module inside DistributedDataParallel
    inside: bool = False  # the instance's own forward runs, which may lead back to the planned one

    def fresh(self) -> _State:
        """The same plan for another object, for which nothing was captured yet."""
        return _State(self.plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return self.fresh()

    def __reduce__(self) -> tuple[Any, ...]:
        return _State, (self.plan,)


class PlannedModule(nn.Module):
    """Mixed in before the model's own class by `apply_plan`: only `forward` differs, and only while training.

    In evaluation mode, without gradients, on fake tensors and inside `unplanned`, the model's own forward runs. The
    first training call with arguments of new shapes captures the model again (seconds, no activation memory) and
    applies the plan if the graph has the structure that the plan was made for. A plan of a step under autocast runs
    under that autocast only.
    """

    _lowtide: _State

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "forward" not in vars(self) or not bypass.trains(self):
            return super().__call__(*args, **kwargs)
        before = self._lowtide.entered
        outputs = super().__call__(*args, **kwargs)
        bypass.check_bypassed(self, self._lowtide.entered > before)
        return outputs

    @torch._disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._lowtide
        state.entered += 1
        if state.unplanned or not bypass.trains(self) or is_fake():
            return self._as_written(*args, **kwargs)
        bypass.check_replica(self)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        kind = device_kind(self, leaves)
        check_autocast(state.plan, ambient(kind), kind)
        cache = torch.is_autocast_cache_enabled()
        engine = engine_for(state.engines, state.plan, self, leaves, spec, cache=cache)
        given = [x for x in leaves if isinstance(x, torch.Tensor)]
        pool = state.pool if hand_over.wanted(self) else None
        return run(engine, state.engines.tensors(engine) + given, pool)

    def _as_written(self, *args: Any, **kwargs: Any) -> Any:
        """The forward without the plan: the instance's own, if it had one, else the class's."""
        state, own = self._lowtide, vars(self).get(bypass.FORWARD)
        if own is None or state.inside:
            return super().forward(*args, **kwargs)
        state.inside = True
        try:
            return own(*args, **kwargs)
        finally:
            state.inside = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The model's own way to be copied and pickled, and the plan; what was captured stays behind."""
        make, args, *rest = super().__reduce_ex__(protocol)
        bare = tuple(own_class(x) if isinstance(x, type) else x for x in args)
        if rest and isinstance(rest[0], dict):
            rest[0] = {k: v for k, v in rest[0].items() if k != STATE}
        return _made_again, (self._lowtide.fresh(), make, bare), *rest


def _made_again(state: _State, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    return _planned(make(*args), state)


def own_class(kind: type) -> type:
    """The class of the model behind a planned module's; any other class as it is."""
    return kind.__bases__[1] if PlannedModule in kind.__bases__ else kind


@functools.lru_cache(maxsize=64)
def _planned_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of planned models of this class, under its name and with its signature."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if STATE not in vars(self):  # what wraps this stayed behind when the plan was removed
            return kind.forward(self, *args, **kwargs)
        return PlannedModule.forward(self, *args, **kwargs)

    # Who unwraps a forward, as Accelerate does, would find the model's own, which has no plan.
    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    del forward.__wrapped__
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (PlannedModule, kind), {**names, "forward": forward})


def _planned(model: nn.Module, state: _State) -> nn.Module:
    bypass.take_forward(model)
    model.__class__ = _planned_class(own_class(type(model)))
    object.__setattr__(model, STATE, state)
    return model


def _bare(model: nn.Module) -> nn.Module:
    model.__class__ = own_class(type(model))
    bypass.give_back_forward(model)
    vars(model).pop(STATE, None)
    return model


def apply_plan(model: nn.Module, plan: Plan | str | Path, *, in_place: bool = False) -> nn.Module:
    """A module that has the model's parameters and buffers and trains by `plan`.

    The result is an instance of the model's class, with its name, signature and `state_dict` keys, and returns what
    the model returns. What is captured is what is called: its attributes, modes and hooks count. A model that has a
    plan already gets this one instead.

    Args:
        model: in the state in which it will train; on CPU or CUDA.
        plan: a Plan or the path of one.
        in_place: make this very object train by the plan, until `remove_plan`. Otherwise the result has submodules of
            its own around the model's tensors, so that neither's modes and attributes change with the other's.

    Raises:
        PlanError: the file is no plan, or the model a wrapper that plans go inside of; at the first training call, the
            plan belongs to another model; at any, it was made under another state of autocast.
        CaptureError: the model, or a part of it, is compiled or scripted; at the first training call, it cannot be
            captured.
    """
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    bypass.check_wrapped(model)
    check_capturable(model)
    return _planned(model if in_place else twin_of(model), _State(plan))


def remove_plan(model: nn.Module) -> nn.Module:
    """The same object without the plan, as are the planned modules inside it.

    Raises:
        PlanError: there is no plan in it.
    """
    for module in planned_in(model):
        _bare(module)
    return model


@contextmanager
def unplanned(model: nn.Module) -> Iterator[None]:
    """In the body the model's own forward runs, in training too.

    Raises:
        PlanError: there is no plan in the model.
    """
    states = [module._lowtide for module in planned_in(model)]
    for state in states:
        state.unplanned += 1
    try:
        yield
    finally:
        for state in states:
            state.unplanned -= 1


def planned_in(model: nn.Module) -> list[PlannedModule]:
    """The modules of a model, itself included, that train by a plan; PlanError if there are none."""
    found = [m for m in model.modules() if isinstance(m, PlannedModule)]
    if not found:
        raise PlanError(
            f"this {type(model).__name__} has no plan; apply_plan returns the module that has one, and leaves the "
            "model that it was given as it is unless in_place=True."
        )
    return found


def engines_of(planned: nn.Module) -> Engines:
    """What a module has captured and rewritten so far, and what it captures from now on."""
    assert isinstance(planned, PlannedModule)
    return planned._lowtide.engines


def planned_otherwise(planned: nn.Module, plan: Plan) -> nn.Module:
    """The same model under another plan; what was captured for the first is not captured again.

    Raises:
        PlanError: the plan is for a graph of another structure.
    """
    engines = engines_of(planned)
    other = apply_plan(planned, plan)
    engines_of(other).adopt(engines, lambda engine: engine_of(engine.program, plan, engine.kind))
    return other


def capture_now(
    planned: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], program: Program | None = None
) -> Engine:
    """Capture and rewrite for these arguments without running anything, as the first training call would.

    Args:
        planned: the planned module.
        args, kwargs: of the call.
        program: what was captured of this call already.

    Raises:
        PlanError, CaptureError: as that call would.
    """
    assert isinstance(planned, PlannedModule)
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    state = planned._lowtide
    return engine_for(state.engines, state.plan, planned, leaves, spec, program=program)


def twin_of(model: nn.Module) -> nn.Module:
    """The same modules once more, without a plan, around the same parameters, buffers and other attributes."""
    twins: dict[int, nn.Module] = {}
    for m in model.modules():
        twin = twins[id(m)] = object.__new__(type(m))
        vars(twin).update((k, copy.copy(v) if k in OF_MODULES else v) for k, v in vars(m).items())
    for twin in twins.values():
        vars(twin).update((k, _with_twins(v, twins)) for k, v in list(vars(twin).items()))
        if isinstance(twin, PlannedModule):
            object.__setattr__(twin, STATE, twin._lowtide.fresh())
    return _bare(twins[id(model)])


def _with_twins(value: Any, twins: dict[int, nn.Module], depth: int = 0) -> Any:
    """A value with the modules in it replaced by their twins; one without any is not copied."""
    if isinstance(value, nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _with_twins(value.__self__, twins, DEEPEST))
    if depth == DEEPEST:
        return value

    def inside(x: Any) -> Any:
        return _with_twins(x, twins, depth + 1)

    made = value
    if type(value) is functools.partial:
        made = functools.partial(inside(value.func), *map(inside, value.args), **inside(value.keywords))
        return made if _differ((made.func, *made.args), (value.func, *value.args)) else value
    if type(value) in (list, tuple):
        made = type(value)(map(inside, value))
        return made if _differ(made, value) else value
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        found = [inside(x) for x in value.values()]
        if _differ(found, value.values()):
            made = copy.copy(value)
            made.update(zip(value, found, strict=True))
    return made


def _differ(new: Any, old: Any) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))
