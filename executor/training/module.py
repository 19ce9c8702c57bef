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
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any, Final, cast

import torch
from torch import nn

from executor.guards import bypass
from executor.guards.mismatch import HINT, check_parameters
from executor.guards.state import OWN_CLASS, own_class
from executor.guards.twin import STATE, twin_of
from executor.training import hand_over
from executor.training.autograd import run
from executor.training.engine import Engine, device_kind, engine_of
from executor.training.engines import Engines, engine_for
from executor.training.planning import Recorded, Wanted, on_stderr, plan_call, wanted_of
from executor.training.receipt import EXACT, REPLANNED, RESIZED, SAVED, SYMBOLIC, CaptureNote, Receipt
from tracer.capture.refusals import check_capturable
from tracer.precision.policy import Autocast, ambient
from tracer.record.program import Program
from tracer.step.batch import split_batch
from tracer.step.context import is_fake
from tracer.step.joined import WithLoss
from tracer.step.loop import scalar
from tracer.step.loop_options import JOIN_LOSS
from tracer.torch_api import disable_dynamo, pytree
from traces.errors import CaptureError, LowtideError, PlanError, SpecError
from traces.records.plan import Plan

ERROR: Final = "error"  # what to do with a call that the plan is not for: raise,
EAGER: Final = "eager"  # run the model's own forward,
REPLAN: Final = "replan"  # or plan it within the same budget, and run its own forward if that is impossible
A_WHILE_S: Final = 1.0  # after which it is said what a step has waited for
MOST_REPLANS: Final = 8  # of one model; each takes seconds
MOST_WARNINGS: Final = 8
MOST_REASONS: Final = 64  # why calls ran without the plan, that are told apart
UNPLANNED: Final = "inside `with unplanned`"
_ONE_BY_ONE: Final = threading.RLock()  # a capture changes torch for the whole process


@dataclass(slots=True)
class _State:
    """What a planned module knows beside the model: its plan, what was captured for it, what was done."""

    plan: Plan
    on_mismatch: str = ERROR
    loss: Callable[..., Any] | None = None  # of what the model returns
    engines: Engines = field(default_factory=Engines)
    unplanned: int = 0  # how many `with unplanned(...)` are open
    wanted: Wanted | None = None  # of plans to come; None: what the plan says
    without: Counter[str] = field(default_factory=Counter)  # training calls without a plan, by the reason
    warned: int = 0
    larger: int = 0  # planned calls that were larger than the plan's
    entered: int = 0  # how often the planned forward was reached
    pool: hand_over.Pool = field(default_factory=hand_over.Pool)  # of a module inside DistributedDataParallel
    inside: bool = False  # the instance's own forward runs, which may lead back to the planned one
    ahead: bool = False  # whether what the plan asks for ahead of all steps was asked for
    whole: nn.Module | None = None  # the model with its loss, planned, where the plan is of both
    whole_runs: bool = False

    @property
    def of_both(self) -> bool:
        """Whether the plan is of model and loss function as one, and this of the model alone."""
        return bool(self.plan.meta.options.get(JOIN_LOSS)) and self.loss is not None

    def fresh(self) -> _State:
        return _State(self.plan, self.on_mismatch, self.loss if self.of_both else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return _State(self.plan, self.on_mismatch, copy.deepcopy(self.loss, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _State, (self.plan, self.on_mismatch, self.loss if self.of_both else None)

    def with_loss(self, module: nn.Module) -> PlannedModule:
        """The module with its loss function, planned; made once."""
        assert self.loss is not None
        if self.whole is None:
            made = WithLoss(module, self.loss)
            self.whole = _planned(made, _State(self.plan, self.on_mismatch, wanted=self.wanted))
        assert isinstance(self.whole, PlannedModule)
        return self.whole

    def engine(self, module: nn.Module, leaves: list[Any], spec: pytree.TreeSpec) -> Engine | None:
        """What serves a training call; None: the model's own forward. Raises PlanError or CaptureError if nothing does,
        and that is to be an error.
        """
        now = replace(ambient(device_kind(module, leaves)), cache=torch.is_autocast_cache_enabled())
        try:
            if self.of_both:
                raise PlanError(
                    "the plan makes the loss, too, in tiles, so that what the model returns does not exist: call "
                    f"planned_loss(model, batch) in place of loss(model(x), y){HINT}"
                )
            before = self.engines.made
            made = engine_for(self.engines, self.plan, module, leaves, spec, now)
            if made.of is not None and self.engines.made > before and made.of.seconds > A_WHILE_S:
                on_stderr(
                    f"a call of another size: captured for all sizes, in {made.of.seconds:.1f} s; fit(..., "
                    "smaller=BATCH) does so before the first step"
                )
            return made
        except (PlanError, CaptureError) as error:
            if self.on_mismatch == ERROR:
                raise
            refusal = str(error)
        if refusal not in self.without:
            engine, why_not = None, ""
            if self.on_mismatch == REPLAN:
                try:
                    engine = self._replanned(module, leaves, spec, now)
                except LowtideError as error:
                    why_not = f" No plan could be made for it: {error}"
            self._warn(f"{refusal}{why_not}", engine)
            if engine is not None:
                return engine
        self.without[refusal if len(self.without) < MOST_REASONS else "further reasons"] += 1
        return None

    def _replanned(
        self, module: nn.Module, leaves: list[Any], spec: pytree.TreeSpec, now: Autocast
    ) -> Engine:
        """An engine by a plan for this call alone; LowtideError if there is none."""
        if sum(e.replanned for e in self.engines.values()) >= MOST_REPLANS:
            raise PlanError(f"there are {MOST_REPLANS} such plans already, each of which takes seconds.")
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        began, wanted = time.monotonic(), self.wanted or wanted_of(self.plan)
        plan, program = plan_call(module, args, kwargs, self.plan, wanted, now.dtype)
        engine = engine_for(self.engines, plan, module, leaves, spec, now, program)
        engine.replanned, engine.seconds = True, time.monotonic() - began
        return engine

    def _warn(self, why: str, engine: Engine | None) -> None:
        """Say once of a refusal what is done instead."""
        self.warned += 1
        if self.warned > MOST_WARNINGS:
            return
        done = (
            "without the plan" if engine is None else f"by a plan of its own, made in {engine.seconds:.1f} s"
        )
        last = " What follows is only counted: see receipt()." if self.warned == MOST_WARNINGS else ""
        warnings.warn(
            f"a training call runs {done}: {why.replace(HINT, '.')}{last}", stacklevel=_callers_level()
        )

    def receipt(self) -> Receipt:
        states = [self, *([self.whole._lowtide] if isinstance(self.whole, PlannedModule) else [])]
        engines = [e for state in states for e in sorted(state.engines.values(), key=lambda e: e.number)]
        without = sum((state.without for state in states), Counter[str]())
        captures = [CaptureNote(why=e.why, fit=_fit(e), steps=e.steps, seconds=e.seconds) for e in engines]
        on_gpu = any(e.kind == "cuda" for e in engines)
        families = [f for state in states for f in state.engines.families.values()]
        return Receipt(
            plan=self.plan,
            planned_steps=sum(e.steps for e in engines),
            larger_steps=sum(state.larger for state in states),
            unplanned_steps=without.total(),
            unplanned_because=dict(without),
            captures=tuple(captures),
            one_by_one=tuple(f.why_not for f in families if f.why_not),
            peak_allocated_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
            peak_reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else None,
        )


def _callers_level() -> int:
    """The `stacklevel` at which `_warn` warns of the line that called the model."""
    level, frame, inside = 1, sys._getframe(1), ("torch", "executor")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    return level


def _fit(engine: Engine) -> str:
    if engine.replanned or engine.sizes is not None:
        return REPLANNED if engine.replanned else SYMBOLIC
    return EXACT if engine.exact else SAVED if engine.all_saved else RESIZED


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

    @disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._lowtide
        state.entered += 1
        if not bypass.trains(self) or is_fake() or state.whole_runs:
            return self._as_written(*args, **kwargs)
        if state.unplanned:
            state.without[UNPLANNED] += 1
            return self._as_written(*args, **kwargs)
        bypass.check_replica(self)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        with _ONE_BY_ONE:
            engine = state.engine(self, leaves, spec)
        if engine is None:
            return self._as_written(*args, **kwargs)
        (engine.of or engine).steps += 1
        state.larger += engine.larger
        given = [x for x in leaves if isinstance(x, torch.Tensor)]
        tensors = state.engines.tensors(engine)
        of_parameters = tensors[: len(engine.program.captured.parameters)]
        if engine.kind == "cuda" and not state.ahead:
            state.ahead = True
            torch.empty(state.plan.ahead_bytes, dtype=torch.uint8, device=of_parameters[0].device)
        pool = state.pool if hand_over.wanted(self, of_parameters) else None
        outputs = run(engine, tensors + given, pool)
        state.engines.set_attributes(engine)
        return outputs

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

    def receipt(self) -> Receipt:
        """What was done so far."""
        return self._lowtide.receipt()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The model's own way to be copied and pickled, and the plan; what was captured stays behind."""
        make, args, *rest = super().__reduce_ex__(protocol)
        bare = tuple(own_class(x) if isinstance(x, type) else x for x in args)
        if rest and isinstance(rest[0], dict):
            rest[0] = {k: v for k, v in rest[0].items() if k != STATE}
        return _made_again, (self._lowtide.fresh(), make, bare), *rest


def _made_again(state: _State, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    return _planned(make(*args), state)


@functools.lru_cache(maxsize=64)
def _planned_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of planned models of this class, under its name and with its signature."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if STATE not in vars(self):  # what wraps this stayed behind when the plan was removed
            return kind.forward(self, *args, **kwargs)
        return PlannedModule.forward(self, *args, **kwargs)

    functools.update_wrapper(forward, kind.forward)
    del forward.__wrapped__  # type: ignore[attr-defined]
    return bypass.mixed_in(PlannedModule, kind, forward=forward, **{OWN_CLASS: kind})


def _planned(model: nn.Module, state: _State) -> nn.Module:
    bypass.take_forward(model)
    model.__class__ = _planned_class(own_class(type(model)))
    object.__setattr__(model, STATE, state)
    return model


def apply_plan(
    model: nn.Module,
    plan: Plan | str | Path,
    *,
    loss: Callable[..., Any] | None = None,
    in_place: bool = False,
    on_mismatch: str = ERROR,
) -> nn.Module:
    """A module that has the model's parameters and buffers and trains by `plan`.

    The result is an instance of the model's class, with its name, signature and `state_dict` keys, and returns what
    the model returns. What is captured is what is called: its attributes, modes and hooks count. A model that has a
    plan already gets this one instead.

    Args:
        model: in the state in which it will train; on CPU or CUDA.
        plan: a Plan or the path of one.
        loss: for `planned_loss`: the loss function, or module, that the step was traced with. A plan that runs a loss
            head in tiles which the model does not hold itself needs it.
        in_place: make this very object train by the plan, until `remove_plan`. Otherwise the result has submodules of
            its own around the model's tensors, so that neither's modes and attributes change with the other's.
        on_mismatch: of a training call that the plan is not for (another set of arguments, a block that was frozen
            since, another autocast, a model that cannot be captured so): "error" raises; "eager" runs the model's own
            forward; "replan" makes a plan for that call within the same budget, or does as "eager" if there is none.
            Both say so once, in a warning, and count it (`receipt`).

    Raises:
        SpecError: no such `on_mismatch`.
        PlanError: the file is no plan, the model a wrapper that plans go inside of, or one with other parameters than
            the plan's; at a training call, its graph is not the plan's, or the autocast around it: says what differs.
        CaptureError: the model, or a part of it, is compiled or scripted; at the first training call, it cannot be
            captured.
    """
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    bypass.check_wrapped(model)
    check_capturable(model)
    if on_mismatch not in (ERROR, EAGER, REPLAN):
        raise SpecError(f"on_mismatch {on_mismatch!r}: give {ERROR}, {EAGER} or {REPLAN}.")
    both = bool(plan.meta.options.get(JOIN_LOSS)) and not isinstance(model, WithLoss)
    if both and loss is None:
        raise PlanError(
            "the plan is of model and loss function as one: apply_plan(model, plan, loss=...), and train with "
            "planned_loss(model, batch)."
        )
    if on_mismatch == ERROR:
        check_parameters(WithLoss(model, loss) if both and loss is not None else model, plan)
    made = model if in_place else twin_of(model)
    if isinstance(loss, MethodType) and loss.__self__ is model:
        loss = MethodType(loss.__func__, made)
    return _planned(made, _State(plan, on_mismatch, loss))


def planned_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a planned model, in training by its plan; the model's own code and the loss function's otherwise.

        loss = planned_loss(model, (x, y))                # in place of criterion(model(x), y)

    It is the way to train by a plan that makes the loss, too, in tiles, and does the same by any other. A training call
    of the model itself is by such a plan one that the plan is not for (`on_mismatch`), since it returns what the tiled
    step does not make. In `unplanned`, in evaluation mode and without gradients nothing is planned.

    Args:
        model: what `fit` or `apply_plan` returned, which was given the loss function.
        batch: as `fit` and `tracer.trace` take it.

    Raises:
        PlanError: no plan, or no loss function, or a distributed step, whose gradients nobody would average; at a
            training call, as the model itself.
        SpecError: the batch or the loss is of no known kind.
    """
    if not isinstance(model, PlannedModule):
        raise PlanError(
            f"planned_loss takes what fit or apply_plan returned, and this {type(model).__name__} is not."
        )
    state = model._lowtide
    if state.loss is None:
        raise PlanError(
            "the planned model was given no loss function: fit(..., loss=...), apply_plan(..., loss=...)."
        )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise PlanError(
            "planned_loss calls the model itself and not the DistributedDataParallel around it, so that no gradients "
            "would be averaged; put the loss into the model's forward, and plan that."
        )
    given = split_batch(model, batch, state.loss)
    if not state.of_both or state.unplanned or not bypass.trains(model):
        return scalar(given.loss(model(*given.args, **given.kwargs)), type(model).__name__)
    whole = state.with_loss(model)
    whole.training, state.whole_runs = True, True
    try:
        return cast(torch.Tensor, whole(given.args, given.kwargs, given.loss_inputs))
    finally:
        state.whole_runs = False


def remove_plan(model: nn.Module) -> nn.Module:
    """The same object without the plan, as are the planned modules inside it. Raises PlanError if there is no plan in
    it.
    """
    for module in planned_in(model):
        module.__class__ = own_class(type(module))
        bypass.give_back_forward(module)
        module.__dict__.pop(STATE, None)
    return model


@contextmanager
def unplanned(model: nn.Module) -> Iterator[None]:
    """In the body the model's own forward runs, in training too. Raises PlanError if there is no plan in the model."""
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
    """The same model under another plan; what was captured for the first is not captured again. Raises PlanError if the
    plan is for a graph of another structure.
    """
    before, other = engines_of(planned), apply_plan(planned, plan)
    engines = engines_of(other)
    engines.unread = before.unread
    own = {key: e for key, e in before.items() if not e.replanned and e.sizes is None}
    engines.update((key, engine_of(e.program, plan, e.kind)) for key, e in own.items())
    return other


def apply_recorded(
    model: nn.Module,
    plan: Plan,
    step: Recorded,
    wanted: Wanted | None = None,
    loss: Callable[..., Any] | None = None,
    *,
    in_place: bool,
    on_mismatch: str,
) -> nn.Module:
    """`apply_plan` of a step that was recorded for its plan: what was captured then serves the calls like it. `wanted`:
    of plans to come; None: what the plan says.
    """
    planned = apply_plan(model, plan, loss=loss, in_place=in_place, on_mismatch=on_mismatch)
    assert isinstance(planned, PlannedModule)
    planned._lowtide.wanted, planned._lowtide.engines.unread = wanted, step.unread
    if not planned.training:
        planned.train()
    called: nn.Module = planned
    if planned._lowtide.of_both and step.joined is not None:
        called, step = planned._lowtide.with_loss(planned), step.joined
        called._lowtide.engines.unread = step.unread
    if torch.is_autocast_cache_enabled():  # with which it was captured
        capture_now(called, step.given.args, step.given.kwargs, step.program)
    return planned


def capture_now(
    planned: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], program: Program | None = None
) -> Engine:
    """Capture and rewrite for these arguments without running anything, as the first training call would.

    Args:
        program: what was captured of this call already.

    Raises:
        PlanError, CaptureError: as that call would.
    """
    assert isinstance(planned, PlannedModule)
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    state = planned._lowtide
    autocast = Autocast(dtype=state.plan.meta.amp, kind=device_kind(planned, leaves))
    return engine_for(state.engines, state.plan, planned, leaves, spec, autocast, program)
