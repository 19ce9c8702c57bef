"""Make a module that trains by a plan: the same parameters, buffers and call as the model, another step inside.

from executor import apply_plan
model = apply_plan(model, "plan.json")
for x, y in data:                                 # the loop stays as it was
    loss = criterion(model(x), y)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, Final, cast

import torch
from torch import fx, nn
from torch.autograd import forward_ad

from executor.graphs.graph import Graph, compile_graph
from executor.training import bypass
from executor.training.match import (
    Fitted,
    check_autocast,
    device_kind,
    elements_of,
    fitted,
    left_out,
    planned_elements,
)
from executor.training.mismatch import HINT, check_parameters
from executor.training.planning import Wanted, plan_call, wanted_of
from executor.training.receipt import EXACT, REPLANNED, RESIZED, SAVED, CaptureNote, Receipt
from executor.training.twin import OWN_CLASS, STATE, own_class, twin_of
from tracer.capture.compiling import by_dynamo, calling, differentiable
from tracer.capture.refusals import check_capturable, refusal
from tracer.precision.policy import ambient
from tracer.record.program import Program
from tracer.record.sketch import sketch
from tracer.step.batch import split_batch
from tracer.step.context import is_fake
from tracer.step.joined import WithLoss
from tracer.step.loop import scalar
from tracer.step.loop_options import JOIN_LOSS
from tracer.torch_api import (
    TorchDynamoException,
    disable_dynamo,
    inside_torch_func,
    one_at_a_time,
    pytree,
)
from traces.errors import CaptureError, LowtideError, PlanError, SpecError
from traces.records.plan import Action, Plan

ERROR: Final = "error"  # what to do with a call that the plan is not for: raise,
EAGER: Final = "eager"  # run the model's own forward,
REPLAN: Final = "replan"  # or plan it within the same budget, and run its own forward if that is impossible
MOST_REPLANS: Final = 8  # of one model; each takes seconds
MOST_WARNINGS: Final = 8
MOST_REASONS: Final = 64  # why calls ran without the plan, that are told apart
UNPLANNED: Final = "inside `with unplanned`"
NOTHING: Final = "torch compiled nothing of this call, and ran the model's own forward"


class _ManySizes(PlanError):
    """The plan is not for a graph of many sizes; it may be for that of the call's own."""


@dataclass(slots=True)
class _Compiled:
    """A graph of a planned module, and what is told of it."""

    graph: Graph
    fit: str
    seconds: float


@dataclass(slots=True)
class _State:
    """What a planned module knows beside the model: its plan, what was compiled for it, what was done."""

    plan: Plan
    on_mismatch: str = ERROR
    loss: Callable[..., Any] | None = None  # of what the model returns
    compiled: list[_Compiled] = field(default_factory=list)
    run: Callable[..., Any] | None = None  # calls the model, compiled
    of_calls: list[Plan] = field(default_factory=list)  # made for calls that the plan was not for
    static: bool = False  # each call's sizes are compiled by themselves
    call: tuple[Any, Any] = ((), {})  # the arguments of the call that is being compiled
    larger: int = 0  # planned calls that were larger than the plan's
    planned_elements: int = -1  # of the tensors of the plan's call
    unplanned: int = 0  # how many `with unplanned(...)` are open
    wanted: Wanted | None = None  # of plans to come; None: what the plan says
    without: Counter[str] = field(default_factory=Counter)  # training calls without a plan, by the reason
    warned: int = 0
    entered: int = 0  # how often the planned forward was reached
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

    # Compiling

    def backend(self, owner: nn.Module) -> Callable[..., Any]:
        """The backend of torch.compile for the module."""

        @one_at_a_time
        def compiling(module: fx.GraphModule, examples: Any, **_: Any) -> Any:
            began = time.monotonic()

            def decide(graph: Graph) -> tuple[Program, tuple[Action, ...]]:
                found, fit = self._fitted(graph, owner)
                note.append(fit)
                return found.program, found.actions

            refused: list[str] = []
            for gone in left_out(self.plan, differentiable(module)):
                note: list[str] = []
                try:
                    graph, run = compile_graph(module, examples, decide, owner, gone)
                    break
                except PlanError as error:
                    refused.append(str(error))
            else:
                if any(isinstance(x, torch.SymInt) for x in examples) and not self.static:
                    raise _ManySizes(refused[0])
                raise PlanError(refused[0])
            if graph.rewritten is not None:
                self.compiled.append(_Compiled(graph, note[0], time.monotonic() - began))
            return run

        return compiling

    def _fitted(self, graph: Graph, owner: nn.Module) -> tuple[Fitted, str]:
        """The plan, or one that was made for another call, fitted to a graph; and how it fits."""
        args, kwargs = self.call

        def seen(program: Program) -> dict[str, Any]:
            return sketch(program, owner, args, kwargs)

        try:
            made = fitted(graph, self.plan, seen)
        except PlanError:
            for plan in self.of_calls:
                try:
                    return fitted(graph, plan, seen), REPLANNED
                except PlanError:
                    continue
            raise
        return made, EXACT if made.exact else SAVED if made.all_saved else RESIZED

    def steps(self) -> int:
        return sum(c.graph.steps for c in self.compiled)

    def outputs(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """What a training call returns, by the plan, or as `on_mismatch` says. Raises PlanError or CaptureError if the
        call cannot be by the plan and that is to be an error."""
        refused = ""
        while True:
            try:
                return self._at_its_sizes(module, forward, args, kwargs)
            except (PlanError, CaptureError) as error:
                if self.on_mismatch == ERROR:
                    raise
                refused, again = str(error), bool(refused)
            if self.on_mismatch != REPLAN or again or refused in self.without:
                break
            try:
                seconds = self._replan(module, args, kwargs)
            except LowtideError as error:
                self._warn(f"{refused} No plan could be made for it: {error}", "without the plan")
                break
            self._warn(refused, f"by a plan of its own, made in {seconds:.1f} s")
        if refused not in self.without and self.on_mismatch == EAGER:
            self._warn(refused, "without the plan")
        self.without[refused if len(self.without) < MOST_REASONS else "further reasons"] += 1
        return forward(*args, **kwargs)

    def _at_its_sizes(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """As `_by_plan`, by a graph of many sizes if the plan is for one, and otherwise by that of the call's own."""
        with contextlib.suppress(_ManySizes):
            return self._by_plan(module, forward, args, kwargs)
        self.static, self.run = True, None
        gc.collect()  # the error holds frames, and with them states and small tensors
        return self._by_plan(module, forward, args, kwargs)

    def _by_plan(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if inside_torch_func() is not None or forward_ad._current_level >= 0:
            raise PlanError(
                "the model was called inside torch.func (grad, jvp, vmap) or forward_ad, which see through no planned "
                "step; run it without the plan there: inside `with unplanned(model):`."
            )
        if self.of_both and not self.of_calls:
            raise PlanError(
                "the plan makes the loss, too, in tiles, so that what the model returns does not exist: call "
                f"planned_loss(model, batch) in place of loss(model(x), y){HINT}"
            )
        if self.planned_elements < 0:
            self.planned_elements = planned_elements(self.plan)
        now = ambient(device_kind(module, pytree.tree_leaves((args, kwargs))))
        if not now.cache or now.dtype not in {p.meta.amp for p in self.of_calls}:
            check_autocast(self.plan, now)
        if self.run is None:
            dynamic = False if self.static else None
            self.run = by_dynamo(self.backend(module), dynamic=dynamic)
        self.call, before = (args, kwargs), self.steps()
        try:
            with calling(kwargs):
                made = self.run(forward, args, kwargs)
        except TorchDynamoException as error:
            raise refusal(type(module).__name__, error, HINT) from error
        finally:
            self.call = (), {}
        if self.steps() == before:
            if self.on_mismatch == ERROR:
                raise PlanError(f"{NOTHING}{HINT}")
            self.without[NOTHING] += 1
        self.larger += 0 < self.planned_elements < elements_of(pytree.tree_leaves((args, kwargs)))
        return made

    def _replan(self, module: nn.Module, args: Any, kwargs: Any) -> float:
        """Plan this call alone; returns the seconds that it took. LowtideError if there is no plan."""
        if len(self.of_calls) >= MOST_REPLANS:
            raise PlanError(f"there are {MOST_REPLANS} such plans already, each of which takes seconds.")
        began, wanted = time.monotonic(), self.wanted or wanted_of(self.plan)
        amp = ambient(device_kind(module, pytree.tree_leaves((args, kwargs)))).dtype
        plan, _ = plan_call(module, args, kwargs, self.plan, wanted, amp)
        self.of_calls.append(plan)
        return time.monotonic() - began

    def _warn(self, why: str, done: str) -> None:
        """Say once of a refusal what is done instead."""
        self.warned += 1
        if self.warned > MOST_WARNINGS:
            return
        last = " What follows is only counted: see receipt()." if self.warned == MOST_WARNINGS else ""
        warnings.warn(
            f"a training call runs {done}: {why.replace(HINT, '.')}{last}", stacklevel=_callers_level()
        )

    def receipt(self) -> Receipt:
        states = [self, *([self.whole._lowtide] if isinstance(self.whole, PlannedModule) else [])]
        compiled = [c for state in states for c in state.compiled]
        without = sum((state.without for state in states), Counter[str]())
        why = ["first call", *["another kind of call, or another state of the model"] * len(compiled)]
        captures = [
            CaptureNote(why=w, fit=c.fit, steps=c.graph.steps, seconds=c.seconds)
            for c, w in zip(compiled, why, strict=False)
        ]
        on_gpu = any(c.graph.kind == "cuda" for c in compiled)
        return Receipt(
            plan=self.plan,
            planned_steps=sum(c.graph.steps for c in compiled),
            larger_steps=sum(state.larger for state in states),
            unplanned_steps=without.total(),
            unplanned_because=dict(without),
            captures=tuple(captures),
            peak_allocated_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
            peak_reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else None,
        )


def _callers_level() -> int:
    """The `stacklevel` at which `_warn` warns of the line that called the model."""
    level, frame, inside = 1, sys._getframe(1), ("torch", "executor")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    return level


class PlannedModule(nn.Module):
    """Mixed in before the model's own class by `apply_plan`: only `forward` differs, and only while training.

    In evaluation mode, without gradients, on fake tensors and inside `unplanned`, the model's own forward runs. In
    training torch.compile captures it, with guards on what it depends on, and the plan is applied to each graph that
    has the structure that it was made for. A plan of a step under autocast runs under that autocast only.
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
        if not bypass.trains(self) or is_fake() or state.inside:
            return self._as_written(*args, **kwargs)
        if state.unplanned:
            state.without[UNPLANNED] += 1
            return self._as_written(*args, **kwargs)
        bypass.check_replica(self)
        first = next(self.parameters(), None)
        if first is not None and first.device.type == "cuda" and not state.ahead:
            state.ahead = True
            torch.empty(state.plan.ahead_bytes, dtype=torch.uint8, device=first.device)
        own = vars(self).get(bypass.FORWARD)
        return state.outputs(self, own or super().forward, args, kwargs)

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
        state = getattr(self, STATE, None)
        # What wraps this stayed behind when the plan was removed; or the model is captured with its loss.
        if state is None or state.whole_runs:
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


@contextlib.contextmanager
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


def apply_recorded(
    model: nn.Module,
    plan: Plan,
    wanted: Wanted | None = None,
    loss: Callable[..., Any] | None = None,
    *,
    in_place: bool,
    on_mismatch: str,
) -> nn.Module:
    """`apply_plan` of a plan for a step of this model, in training mode.

    Args:
        wanted: of plans to come; None: what the plan says.
    """
    planned = apply_plan(model, plan, loss=loss, in_place=in_place, on_mismatch=on_mismatch)
    assert isinstance(planned, PlannedModule)
    planned._lowtide.wanted = wanted
    if not planned.training:
        planned.train()
    return planned
