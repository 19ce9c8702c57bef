"""The captured and rewritten steps of a planned model: which one serves a call, and how it is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from executor.matching import check_kind
from executor.rewrite import Rewritten, rewrite
from simulator.core.problem import Problem
from simulator.core.schedule import build
from tracer.capture.capture import capture
from tracer.precision.policy import Autocast
from tracer.record.program import Program, program_of
from tracer.torch_api import pytree
from traces.errors import PlanError
from traces.plan import Action, Plan
from traces.trace import TraceMeta

OF_MODULES: Final = frozenset(vars(nn.Module()))  # the attributes that torch gives every module


@dataclass(slots=True)
class Engine:
    """One captured and rewritten step, for one set of argument shapes."""

    program: Program
    rewritten: Rewritten
    exact: bool  # the graph is the plan's to the byte, not only in structure
    kind: str = "cpu"  # the type of the device that it runs on


Engines = dict[Any, Engine]  # by the arguments and the state of the model that they are for


def engine_for(
    engines: Engines,
    plan: Plan,
    module: nn.Module,
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    *,
    cache: bool = True,
    program: Program | None = None,
) -> Engine:
    """The engine for these arguments, made at their first use, under the plan's autocast.

    Args:
        engines: those made so far, to which a new one is added.
        module: what is called, and captured.
        leaves, spec: the flat arguments.
        cache: whether autocast keeps the casts of parameters, as it does unless told otherwise.
        program: what was captured of this call already.
    """
    autocast = Autocast(dtype=plan.meta.amp, kind=device_kind(module, leaves), cache=cache)
    key = (
        spec,
        tuple((x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else repr(x)
              for x in leaves),
        tuple((name, p.requires_grad, p.dtype) for name, p in module.named_parameters()),
        tuple(name for name, _ in module.named_buffers()),
        tuple(m.training for m in module.modules()),
        next((p.device for p in module.parameters()), None),
        autocast,
    )  # fmt: skip
    if key not in engines:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        engines[key] = (
            make_engine(module, args, kwargs, plan, autocast)
            if program is None
            else engine_of(program, plan, autocast.kind)
        )
    return engines[key]


def device_kind(module: nn.Module, leaves: Sequence[Any]) -> str:
    """The type of the device that a model runs on: that of its arguments, or without any, of its parameters."""
    tensors = (x for x in (*leaves, *module.parameters()) if isinstance(x, torch.Tensor))
    return next((x.device.type for x in tensors), "cpu")


def check_autocast(plan: Plan, now: Autocast, kind: str) -> None:
    """Raise PlanError if a model is called under another autocast than the plan's step."""
    if now.dtype == plan.meta.amp:
        return
    made = Autocast(dtype=plan.meta.amp, kind=kind)
    call = f"call the model inside `with {made}:`" if made.dtype else "call the model outside of autocast"
    record = f"with --amp {now.dtype}" if now.dtype else "without --amp"
    raise PlanError(
        f"the plan was made for a step under {made}, and this call is under {now}; {call}, or trace the step "
        f"{record} and plan again."
    )


def make_engine(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], plan: Plan, autocast: Autocast
) -> Engine:
    """Capture the model for these arguments under autocast, check that the plan is for it, and rewrite.

    Raises:
        PlanError: the graph has another structure than the plan's, or the plan is for a GPU and the model is on the
            CPU.
    """
    check_kind(plan.meta, next((p.device.type for p in model.parameters()), "cpu"))
    wanted = set(plan.meta.grad_outputs)

    def gradient_flags(outputs: Any) -> list[bool]:
        flags, number = [], 0
        for x in pytree.tree_leaves(outputs):
            if isinstance(x, torch.Tensor):
                flags.append(number in wanted and x.requires_grad)
                number += 1
            else:
                flags.append(False)
        return flags

    with without_hooks(model):
        program = program_of(capture(model, args, kwargs, gradient_flags, autocast=autocast))
    return engine_of(program, plan, autocast.kind)


@contextlib.contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """The model's own hooks run around every planned call, and so must not be captured; those of submodules are."""
    found = {
        k: v for k, v in vars(model).items() if k in OF_MODULES and k.startswith(("_forward_", "_backward_"))
    }
    vars(model).update({k: type(v)() for k, v in found.items()})
    try:
        yield
    finally:
        vars(model).update(found)


def engine_of(program: Program, plan: Plan, kind: str = "cpu") -> Engine:
    """Rewrite a program by a plan; raises PlanError if the plan is for a graph of another structure."""
    exact = program.fingerprint() == plan.meta.graph_fingerprint
    if not exact and program.fingerprint(sizes=False) != plan.meta.structure_fingerprint:
        raise PlanError(
            f"the plan was made for another graph: {describe(plan.meta)}, structure {plan.meta.structure_fingerprint}; "
            f"this model's has {len(program.ops)} ops and structure {program.fingerprint(sizes=False)}. Trace this "
            "model with this version of torch and this device, and plan again."
        )
    schedule = build(Problem(program.trace()), program_actions(plan, program))
    return Engine(program=program, rewritten=rewrite(program, schedule), exact=exact, kind=kind)


def program_actions(plan: Plan, program: Program) -> tuple[Action, ...]:
    """The plan's actions with op ids of the captured graph alone instead of those of the whole step.

    Between its forward and its backward the user's loss code runs, which takes nothing that may be evicted: what goes
    there is absent when backward begins, as what goes with the last op of forward is.
    """
    last_forward, first_backward = plan.meta.forward_ops - 1, plan.meta.first_backward_graph_op

    def local(op: int) -> int:
        return op - (first_backward - last_forward - 1) if op >= first_backward else min(op, last_forward)

    def locals_of(a: Action) -> tuple[int, ...]:
        return tuple(sorted({c for o in a.evict_after if (c := local(o)) < len(program.ops)}))

    return tuple(replace(a, evict_after=locals_of(a)) for a in plan.actions)


def describe(meta: TraceMeta) -> str:
    """A trace in a few words, for messages."""
    amp = f", autocast {meta.amp}" if meta.amp else ""
    return (
        f"{meta.model}, batch size {meta.batch_size}{amp}, torch {meta.torch_version}, device {meta.device}"
    )
