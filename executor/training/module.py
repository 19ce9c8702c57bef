"""Let a model in hand train by a plan: the same object, its training calls compiled by the plan."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import itertools
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.autograd import forward_ad

from executor.backend import ERROR, Compiler, ManySizes
from executor.graphs.match import HINT, describe
from executor.training.wrapped import DATA_PARALLEL, inside
from tracer.capture.compiling import calling
from tracer.capture.refusals import check_capturable, in_words, raised_by_user
from tracer.precision.policy import ambient
from tracer.record.sketch import names_digest, sketch
from tracer.step.context import is_fake
from tracer.torch_api import (
    inside_torch_func,
    is_traceable_wrapper_subclass,
    pytree,
    saved_tensors_hooks,
)
from traces.errors import CaptureError, PlanError
from traces.records.plan import BlockPlans, Plan, load_plan

STATE: Final = "_lowtide"  # the attribute of a planned module that holds its `Planned`
COMPILED: Final = "_compiled_call_impl"  # where torch looks for what to call instead of `_call_impl`
AROUND: Final = ("torch._dynamo", "torch._compile", __name__)  # whose frames are around a call
MOST_REASONS: Final = 64  # why calls ran without the plan, that are told apart
UNPLANNED: Final = "inside `with unplanned`"
NO_GRADIENT: Final = "neither a parameter nor an argument requires a gradient"
NOTHING: Final = "torch compiled nothing of this call, and ran the model's own forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureNote:
    """One graph that serves calls."""

    fit: str  # "exact", "resized", "with all values saved" or "replanned"
    steps: int  # that it served


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The training calls of a planned model so far; evaluation does not count."""

    plan: Plan | None = None  # None: each part is planned to its share, or each block has its own
    planned_steps: int
    unplanned_steps: int
    unplanned_because: Mapping[str, int]  # why, and how many
    captures: tuple[CaptureNote, ...]
    breaks: tuple[str, ...] = ()  # why a graph ended before the model did, where parts are planned

    def __str__(self) -> str:
        lines = [f"{self.planned_steps} steps by the plan, {self.unplanned_steps} without"]
        lines += [f"  {n} without it: {why}" for why, n in self.unplanned_because.items()]
        lines += [f"  {c.steps} {c.fit}" for c in self.captures]
        return "\n".join([*lines, *(f"  a graph ends: {why}" for why in self.breaks)])


class Planned:
    """Stands in the place of a module's `forward`, and compiles it by the plan in training."""

    def __init__(self, module: nn.Module, compiler: Compiler) -> None:
        """compiler: by the plan; it is told of this module here."""
        self.module = module
        self.own: Any = None  # the instance's own forward, if it had one before the plan
        self.first: Callable[..., Compiler] | None = None  # makes the compiler at the first training call
        self.call: tuple[Any, Any] = ((), {})  # the arguments of the call that is being compiled,
        self.amp = ""  # and the type of autocast around it
        self.planned = self.entered = 0
        self.removed = False
        self.off = 0  # how many `with unplanned(...)` are open
        self.reshards: bool | None = None  # under fully_shard, after forward; None: as the script has it
        self.without: Counter[str] = Counter()  # training calls without a plan, by the reason
        self.__signature__ = inspect.signature(module.forward)
        self._take(compiler)

    def _take(self, compiler: Compiler) -> None:
        self.compiler, compiler.static = compiler, False

    def install(self) -> None:
        """Let the module's calls come here."""
        mine = vars(self.module)
        self.own = mine.pop("forward", None)
        receipt = functools.partial(receipt_in, self.module)
        mine |= {STATE: self, "forward": self, COMPILED: self.watched, "receipt": receipt}

    def remove(self) -> None:
        """Leave the module as it was, but for a forward that came later."""
        mine, self.removed = vars(self.module), True
        self._reshard(False)
        if mine.get("forward") is self:
            del mine["forward"]
        if self.own is not None:
            mine.setdefault("forward", self.own)
        for name in (STATE, COMPILED, "receipt"):
            mine.pop(name, None)

    def _reshard(self, by_plan: bool) -> None:
        """Let the module, once it is sharded, reshard after forward by the plan, or as the rehearsed script did."""
        if self.reshards is not None and hasattr(self.module, "set_reshard_after_forward"):
            self.module.set_reshard_after_forward(self.reshards == by_plan, recurse=False)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """In the body the module has its own forward alone: as it was before the plan."""
        mine = vars(self.module)
        there = {name: mine.pop(name) for name in (STATE, "forward", COMPILED, "receipt") if name in mine}
        if self.own is not None:
            mine["forward"] = self.own
        try:
            yield
        finally:
            mine.pop("forward", None)
            mine.update(there)

    # Copies: a module that is copied or pickled takes its plan along; what was compiled stays behind

    def __deepcopy__(self, memo: dict[int, Any]) -> Planned:
        made = Planned.__new__(Planned)
        memo |= {id(self): made, id(self.compiler.plan): self.compiler.plan}
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self) -> tuple[Any, ...]:
        c = self.compiler
        settings = (c.plan, c.budget, c.on_mismatch, c.parts, c.around_bytes)
        return (self.module, self.own, self.first, self.reshards, *settings)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        module, own, first, reshards, plan, budget, on_mismatch, parts, around = state
        settings: dict[str, Any] = {"on_mismatch": on_mismatch, "parts": parts, "around_bytes": around}
        Planned.__init__(self, module, Compiler(plan=plan, budget=budget, **settings))
        self.own, self.first, self.reshards = own, first, reshards
        vars(module)[COMPILED] = self.watched  # which nn.Module leaves out of its own state

    # Calls

    @property
    def __code__(self) -> Any:  # which torch.export asks for
        return self._written().__code__

    @torch.compiler.disable
    def watched(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the module. Raises PlanError if it should train by the plan and did not come to it."""
        self._check_own(nn.Module._wrapped_call_impl)
        before = self.entered
        outputs = self.module._call_impl(*args, **kwargs)
        if self.entered == before and trains(self.module) and not is_fake():
            own: Any = self.module.forward
            own = getattr(own, "__func__", own)
            name = f"{getattr(own, '__module__', '?')}.{getattr(own, '__qualname__', type(own).__name__)}"
            raise PlanError(
                f"after the plan was applied, this {type(self.module).__name__} got another forward ({name}), which "
                "does not call the planned one, so that the step ran without the plan; apply the plan after what puts "
                "it there, or delete it (del model.forward, then apply the plan again)."
            )
        return outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:
            args = args[1:]  # Accelerate's unwrapping binds it as a function
        if self.removed:  # what wraps this has stayed behind
            return self._written()(*args, **kwargs)
        return self._forward(args, kwargs)

    def _check_own(self, function: Any) -> None:
        """Raise PlanError if what calls this is a shallow copy of the module, which got it with all attributes.

        Args:
            function: of nn.Module's, which calls what may be another module's.
        """
        caller = sys._getframe(1)
        while caller.f_back is not None and caller.f_globals.get("__name__", "").startswith(AROUND):
            caller = caller.f_back
        module = caller.f_locals["self"] if caller.f_code is function.__code__ else self.module
        if module is not self.module and vars(module).get("_is_replica"):
            raise PlanError(f"nn.DataParallel {DATA_PARALLEL}")
        if module is not self.module:
            raise PlanError(
                f"this {type(module).__name__} is a shallow copy of a module with a plan, which is for that module: "
                "take copy.deepcopy of it, or copy it before it has a plan."
            )

    @torch.compiler.disable
    def _forward(self, args: Any, kwargs: Any) -> Any:
        self._check_own(nn.Module._call_impl)
        module = self.module
        self.entered += 1
        forward = self._written()
        if not trains(module) or is_fake() or torch.jit.is_tracing():
            return forward(*args, **kwargs)
        self._reshard(not self.off)
        given = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        tensors = itertools.chain(module.parameters(), module.buffers(), given)
        if self.off or not any(x.requires_grad for x in tensors):  # as of a frozen teacher
            self._count(UNPLANNED if self.off else NO_GRADIENT)
            return forward(*args, **kwargs)
        if self.first is not None:
            first, self.first = self.first, None
            with self.aside():
                self._take(first(module, args, kwargs))
        try:
            return self._by_plan(forward, args, kwargs)
        except (PlanError, CaptureError) as error:
            if self.compiler.on_mismatch == ERROR:
                if raised_by_user(error):
                    forward(*args, **kwargs)  # raises it as it is
                raise
            why = str(error).replace(HINT, ".")
        if why not in self.without:
            self._warn(f"without the plan: {why}")
        self._count(why)
        return forward(*args, **kwargs)

    def _written(self) -> Callable[..., Any]:
        """The forward without the plan: the instance's own, if it had one, else the class's."""
        return types.MethodType(type(self.module).forward, self.module) if self.own is None else self.own

    def _by_plan(self, forward: Any, args: Any, kwargs: Any) -> Any:
        """Return what a training call returns, by the plan, or as `on_mismatch` says where the plan is for another."""
        self._check_call(pytree.tree_leaves((args, kwargs)))
        with contextlib.suppress(ManySizes):
            return self._compiled(forward, args, kwargs)
        self.compiler.static, self.compiler.run = True, None
        gc.collect()  # the error held frames, and with them states and small tensors
        return self._compiled(forward, args, kwargs)

    def _compiled(self, forward: Any, args: Any, kwargs: Any) -> Any:
        compiler, whole, hint = self.compiler, not self.compiler.parts, f", plan its parts (parts=True){HINT}"
        compiler.sketch = lambda program: {**sketch(program, self.module, *self.call), "amp": self.amp}
        compiler.warn = self._warn
        compiler.run = compiler.run or compiler.runner()
        self.call, by, without = (args, kwargs), compiler.steps(), compiler.without.total()
        try:
            with in_words(self.module, hint, runs=True), calling(self.module, kwargs, whole=whole):
                made = compiler.run(forward, args, kwargs)
        finally:
            self.call = (), {}
        if compiler.steps() == by and compiler.without.total() == without:
            if compiler.on_mismatch == ERROR and not compiler.parts:
                raise PlanError(f"{NOTHING}{HINT}")
            self._count(NOTHING)
        elif compiler.without.total() == without:
            self.planned += 1
        return made

    def _check_call(self, leaves: list[Any]) -> None:
        """Raise PlanError for a call that no plan can be for."""
        if inside_torch_func() is not None or forward_ad._current_level >= 0:
            raise PlanError(
                "the model was called inside torch.func (grad, jvp, vmap) or forward_ad, which see through no planned "
                "step; run it without the plan there: inside `with unplanned(model):`."
            )
        hooks = saved_tensors_hooks(True)
        if hooks is not None and not str(getattr(hooks[0], "__module__", "")).startswith("torch."):
            raise PlanError(
                "the call is inside torch.autograd.graph.saved_tensors_hooks, and what those change a plan would "
                "recompute from: leave them out, or run the model without the plan, inside `with unplanned(model):`."
            )
        of_classes = (x for x in leaves if isinstance(x, torch.Tensor) and type(x) is not torch.Tensor)
        for x in of_classes:
            if x.is_nested or not (isinstance(x, nn.Parameter) or is_traceable_wrapper_subclass(x)):
                raise PlanError(
                    f"an argument is a {type(x).__name__}, whose class no graph keeps: give the model "
                    "x.as_subclass(torch.Tensor), or dense tensors in place of a nested one."
                )
        tensors = (
            x for x in itertools.chain(leaves, self.module.parameters()) if isinstance(x, torch.Tensor)
        )
        self.amp = ambient(next((x.device.type for x in tensors), "cpu")).dtype

    # What is told

    def _count(self, why: str) -> None:
        self.without[why if len(self.without) < MOST_REASONS else "further reasons"] += 1

    def _warn(self, what: str) -> None:
        """Say of a refusal what is done instead, as a warning of the line that called the model."""
        level, frame, own = 1, sys._getframe(), ("torch", "executor", "tracer")
        while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in own:
            level, frame = level + 1, frame.f_back
        warnings.warn(f"a training call runs {what.replace(HINT, '.')}", stacklevel=level)


def trains(module: nn.Module) -> bool:
    """True if a call of this module now is one that a plan is for."""
    return module.training and torch.is_grad_enabled()


def apply_plan(
    model: nn.Module, plan: Plan | BlockPlans | str | Path, *, on_mismatch: str = ERROR, parts: bool = False
) -> nn.Module:
    """Let a model train by `plan` from its next call on, and return it.

    Its class, name, signature and `state_dict` stay. In evaluation mode, without gradients, on fake tensors and inside
    `unplanned` its own forward runs. In training torch.compile captures that, with guards on what it depends on, and
    the plan is applied to each graph that has the structure it was made for. Copies of the model and pickles take the
    plan along. A model that has a plan already gets this one instead.

    Args:
        model: on CPU or CUDA; inside a DistributedDataParallel the plan goes to the module in it.
        plan: a Plan, or BlockPlans for the model's blocks, before or after `fully_shard`; or the path of one.
        on_mismatch: of a training call that the plan is not for (another set of arguments, a block that was frozen
            since, another autocast, a model that cannot be captured so): "error" raises; "eager" runs it without a
            plan; "replan" makes a plan for that graph within the same budget, or does as "eager" if there is none.
            Both say so in a warning, and count it (`model.receipt()`).
        parts: where torch.compile breaks the graph of the model, each part is planned to its share of the budget.

    Raises:
        SpecError: no such `on_mismatch`.
        PlanError: the file is no plan, the model a wrapper that plans go inside of, or one with other parameters than
            the plan's; at a training call, its graph is not the plan's: says what differs.
        CaptureError: the model, or a part of it, is compiled or scripted; at the first training call, it cannot be
            captured.
    """
    plan = plan if isinstance(plan, Plan | BlockPlans) else load_plan(plan)
    if isinstance(plan, Plan):
        return install(model, compiler_of(plan, inside(model), on_mismatch, parts))
    root = inside(model)
    modules = dict(root.named_modules())
    for module in modules.values():
        if STATE in vars(module):
            vars(module)[STATE].remove()
    if missing := [path for each in plan.plans for path in each.blocks if path not in modules]:
        raise PlanError(
            f"the plans are for blocks of {plan.model}, and this {type(root).__name__} has no {missing[0]}; plan for "
            "this model (execute rehearse --budget)."
        )
    for each in plan.plans:  # whose blocks are alike, so that they share what is compiled
        compiler = compiler_of(each.plan, root, on_mismatch, parts)
        for path in each.blocks:
            install(modules[path], compiler)
            vars(modules[path])[STATE].reshards = plan.reshard_after_forward.get(path)
    vars(root)["receipt"] = functools.partial(receipt_in, root)
    return model


def receipt_in(model: nn.Module) -> Receipt:
    """What a model did so far, or its blocks: as many steps by their plans as the one with the fewest."""
    planned = planned_in(model)
    compilers = {id(p.compiler): p.compiler for p in planned}.values()
    without = [p.without + p.compiler.without for p in planned]
    return Receipt(
        plan=planned[0].compiler.plan if len(planned) == 1 else None,
        planned_steps=min(p.planned for p in planned),
        unplanned_steps=max(each.total() for each in without),
        unplanned_because=dict(sum(without, Counter())),
        captures=tuple(CaptureNote(fit=c.fit, steps=c.steps) for k in compilers for c in k.compiled),
        breaks=tuple(why for k in compilers for why in k.breaks),
    )


def compiler_of(plan: Plan, model: nn.Module, on_mismatch: str = ERROR, parts: bool = False) -> Compiler:
    """Return what compiles a model by a plan."""
    around = state_bytes(plan.meta.optimizer, model)
    return Compiler(plan=plan, on_mismatch=on_mismatch, parts=parts, around_bytes=around, say=lambda _: None)


def bare(model: nn.Module) -> nn.Module:
    """The module that a plan is for, without the plan that it had."""
    target = inside(model)
    if STATE in vars(target):
        vars(target)[STATE].remove()
    return target


def install(model: nn.Module, compiler: Compiler, first: Callable[..., Compiler] | None = None) -> nn.Module:
    """`apply_plan` by a compiler; `first`: makes the one that counts at the first training call, from the module, its
    positional and its named arguments."""
    target, plan = bare(model), compiler.plan
    if within := [path for path, m in target.named_modules() if STATE in vars(m)]:
        raise PlanError(f"{within[0]} has a plan already: remove_plan(model) first, or plan only the parts.")
    check_capturable(target)
    if plan is not None and compiler.on_mismatch == ERROR:
        _check_parameters(target, plan)
    planned = Planned(target, compiler)
    planned.first = first
    planned.install()
    return model


def state_bytes(optimizer: str, model: nn.Module) -> int:
    """Return what an optimizer keeps beside the parameters, by its name in a trace."""
    kind = optimizer.partition("(")[0]
    each = {"SGD": "momentum=" in optimizer, "Adagrad": 1, "RMSprop": 1, "": 0, "none": 0}.get(kind, 2)
    return each * sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad)


def _check_parameters(model: nn.Module, plan: Plan) -> None:
    """Raise PlanError if a plan is for a model with other parameters, as far as the plan says."""
    told = plan.meta.sketch.get("parameters")
    names = [name for name, _ in model.named_parameters()]
    if not told or told == [len(names), names_digest(names)]:
        return
    raise PlanError(
        f"the plan was made for another model: {describe(plan.meta)}, has {told[0]} parameters, and this "
        f"{type(model).__name__} has {len(names)}{' of other names' * (len(names) == told[0])}; trace this model and "
        "plan again."
    )


def remove_plan(model: nn.Module) -> nn.Module:
    """Return the same object without the plan, as are the planned modules inside it; sharded blocks reshard again as in
    the script that was rehearsed. Raises PlanError if there is no plan in it.
    """
    for planned in planned_in(model):
        planned.remove()
    vars(inside(model)).pop("receipt", None)
    return model


@contextlib.contextmanager
def unplanned(model: nn.Module) -> Iterator[None]:
    """In the body the model's own forward runs, in training too. Raises PlanError if there is no plan in the model."""
    found = planned_in(model)
    for planned in found:
        planned.off += 1
    try:
        yield
    finally:
        for planned in found:
            planned.off -= 1


def planned_in(model: nn.Module) -> list[Planned]:
    """Return what stands for the forward of a model and of the modules in it that train by a plan; PlanError if none
    does.
    """
    found = [vars(m)[STATE] for m in model.modules() if STATE in vars(m)]
    if not found:
        raise PlanError(f"this {type(model).__name__} has no plan; apply_plan gives it one.")
    return found
