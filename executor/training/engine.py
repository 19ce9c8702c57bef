"""One captured step of a model, rewritten by a plan: how it is made, and what it needs at a call."""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.fx import GraphModule

from executor.guards.bypass import later_forward_off
from executor.guards.mismatch import another_graph, by_ones_alone
from executor.matching import check_kind
from executor.rewrite import Rewritten, rewrite
from executor.rewriting import rewritten
from executor.training.unreached import without
from simulator.core.problem import Problem
from simulator.core.replay import replay
from simulator.core.schedule import build
from tracer.capture.capture import Captured, capture, only_these
from tracer.capture.sizes import Known, Sizes, at
from tracer.precision.policy import Autocast
from tracer.record.program import Program, program_of
from tracer.record.sketch import ops_of, sketch
from tracer.torch_api import generated_code
from traces.errors import PlanError
from traces.records.plan import Action, Plan
from traces.records.trace import TraceMeta

MOST_PARTIAL: Final = 8  # backwards of one engine that leave out some outputs


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
    # Numbers of the inputs that batch norms write.
    statistics: tuple[int, ...] = ()
    plan: Plan | None = None  # that it was rewritten by
    all_saved: bool = False  # or none of its actions, which are for a graph without sizes of one
    sizes: Sizes | None = None  # that it may have, if they vary
    of: Engine | None = None  # the one for many sizes that this is, at sizes that are known
    known: Known | None = None
    numbers: tuple[int, ...] = ()  # of the graph at those sizes
    larger: bool = False  # than the plan's call, so that what was predicted does not hold
    # Outputs that the plan does not make: fake ones.
    not_made: dict[int, torch.Tensor] = field(default_factory=dict)

    def backward(self, missing: tuple[bool, ...]) -> GraphModule:
        """The backward for a loss that leaves out these of the outputs that the plan's loss uses."""
        if not any(missing):
            return self.rewritten.backward
        key = missing, self.numbers
        if key not in self.partial:
            holders = zip(self.program.captured.tangents, missing, strict=True)
            absent = frozenset(n.name for n, gone in holders if gone)
            make_room(self.partial, MOST_PARTIAL)
            self.partial[key] = without(self.rewritten.backward, absent, self.at_sizes)
        return self.partial[key]

    def at_sizes(self, x: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the graph as it is in this call."""
        return x if self.known is None else at(x, self.known)


def make_engine(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    plan: Plan,
    autocast: Autocast,
    planned_bytes: Callable[[], int] = lambda: 0,
) -> Engine:
    """Capture the model for these arguments under autocast, check that the plan is for it, and rewrite.

    A size of one makes another graph. It runs with all values saved if that takes no more than the planned one does:
    `planned_bytes`, by the plan, at the plan's sizes; 0: not known. Raises PlanError if the graph has another structure
    than the plan's, or the plan is for a GPU and the model on the CPU.
    """
    check_kind(plan.meta, next((p.device.type for p in model.parameters()), "cpu"))
    program = program_of(captured_for(model, args, kwargs, plan, autocast))
    now = sketch(program, model, args, kwargs)
    try:
        return engine_of(program, plan, autocast.kind, lambda _: now)
    except PlanError:
        if not by_ones_alone(plan.meta.sketch, now) or model_bytes(program) > planned_bytes():
            raise
    return all_saved(program, plan, autocast.kind)


def engine_of(
    program: Program, plan: Plan, kind: str = "cpu", now: Callable[[Program], dict[str, Any]] | None = None
) -> Engine:
    """Rewrite a program by a plan. Which arguments share a storage is taken from the plan where it decides nothing:
    nobody writes into them.

    Args:
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
    more = _more_inputs([(r.storage, r.op) for r in plan.rewrites if r.op], program)
    changed = rewritten(program, tuple(replace(r, storage=r.storage + more) for r in plan.rewrites))
    engine = _rewritten(changed, plan, kind, program_actions(plan, changed))
    engine.exact = program.fingerprint() == meta.graph_fingerprint
    engine.not_made = {k: program.captured.outputs[k].meta["val"] for k in changed.captured.not_made}
    return engine


def all_saved(program: Program, plan: Plan, kind: str) -> Engine:
    engine = _rewritten(program, plan, kind, ())
    engine.all_saved = True
    return engine


def _rewritten(program: Program, plan: Plan, kind: str, actions: Iterable[Action]) -> Engine:
    return Engine(
        program=program,
        rewritten=rewrite(program, build(Problem(program.trace()), actions)),
        kind=kind,
        writes_arguments=_writes_arguments(program),
        statistics=_statistics(program.captured),
        plan=plan,
    )


def _statistics(captured: Captured) -> tuple[int, ...]:
    """Numbers of the inputs that batch norms alone write, without a new version in the untouched step."""
    number = {n: k for k, n in enumerate(captured.placeholders)}
    written: dict[int, bool] = {}
    for n in captured.forward:
        if n.target is torch.ops.aten.copy_.default and n.args[0] in number:
            value: Any = n.args[1]
            by_norm = value.target is operator.getitem and "batch_norm" in str(value.args[0].target)
            written[number[n.args[0]]] = by_norm and written.get(number[n.args[0]], True)
    return tuple(k for k, by_norm in written.items() if by_norm)


def captured_for(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], plan: Plan, autocast: Autocast
) -> Captured:
    """What is captured of the model for these arguments, with the outputs differentiated that the plan's loss uses."""
    known = set(generated_code.eval_cache)
    with later_forward_off(model):
        captured = capture(model, args, kwargs, only_these(plan.meta.grad_outputs), autocast=autocast)
    for file in generated_code.eval_cache.keys() - known:
        _forget_code(file)  # of graphs that were steps on the way
    return captured


def model_bytes(program: Program, actions: Iterable[Action] = ()) -> int:
    """The peak of a model's forward and backward.

    Counts: parameters, buffers, arguments, and what ops make. Ignores: what ops allocate inside, the loss code and the
    optimizer.
    """
    return replay(Problem(program.trace()), actions).timeline.peak_allocated_bytes


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


def _fits(program: Program, meta: TraceMeta) -> bool:
    planned = [target for target, _ in ops_of(meta.sketch)]
    return program.fingerprint(sizes=False, named_as=planned) == meta.structure_fingerprint


def _writes_arguments(program: Program) -> bool:
    arguments = {s for n in program.captured.placeholders if type(n.meta["desc"]).__name__ == "PlainAOTInput"
                 for s in program.storage_of[n]}  # fmt: skip
    return any(not arguments.isdisjoint(row.writes) for row in program.rows)


def program_actions(plan: Plan, program: Program) -> tuple[Action, ...]:
    """The plan's actions with op ids of the captured graph alone, rewritten as the plan says, instead of those of the
    whole step. What goes while the user's loss code runs in between, goes with the last op of forward.
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
    the graphs are the same, and all that ops make (`labelled`) has a number so much higher."""
    made_by = [program.ops[s.producer].node.name if s.producer >= 0 else "" for s in program.storages]

    def fits(more: int) -> bool:
        there = range(len(made_by))
        return all(s + more in there and made_by[s + more] == op for s, op in labelled)

    if not labelled or fits(0):
        return 0
    storage, op = labelled[0]
    found = [s - storage for s, name in enumerate(made_by) if name == op]
    return next((more for more in found if fits(more)), 0)


def make_room(known: dict[Any, Any], most: int) -> None:
    """Forget what was used longest ago of what would be too many."""
    while len(known) >= most:
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
