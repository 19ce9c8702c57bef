"""One planned step inside autograd: how the rewritten modules run, and what forward hands to backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from executor.training.engine import Engine
from executor.training.hand_over import Pool
from tracer.precision.policy import without_autocast
from tracer.step.loop import fit_tangent
from tracer.step.release import check_alone, hands_over
from tracer.torch_api import make_wrapper_subclass, preserved_versions
from traces.errors import PlanError


def run(engine: Engine, inputs: list[torch.Tensor], pool: Pool | None = None) -> Any:
    """The model's outputs by an engine, from its parameters, buffers and tensor arguments.

    With a pool, parameters get their gradients from it and not through autograd's graph.
    """
    captured = engine.program.captured
    passing = _Passing(engine)
    anchor = None
    if pool is not None:
        n = len(captured.parameters)
        passing.pool, passing.parameters = pool, inputs[:n]
        inputs = [p.detach() for p in inputs[:n]] + inputs[n:]
        anchor = torch.empty(0, requires_grad=True)  # what makes autograd call backward
        pool.pending.add(passing)
    token = _Model.apply(passing, anchor, *inputs)
    outputs, passing.outputs = passing.outputs, []
    results = list(_Outputs.apply(passing, token, *outputs))
    del outputs
    differentiated = results[captured.grad_outputs[0]]
    for k in captured.other_outputs:
        results[k] = _Unplanned.apply(results[k], differentiated, k)
    for k, why in captured.not_made.items():
        results[k] = NotMade(engine.not_made[k], why)
    return captured.outputs_from(results)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Passing:
    """What one training step hands from one autograd function to the next, beside autograd's own tensors."""

    engine: Engine
    outputs: list[torch.Tensor] = field(default_factory=list)
    saved: list[torch.Tensor] | None = None
    tangents: list[torch.Tensor | None] = field(default_factory=list)
    # Of the caller's own tensors among the saved ones, when forward ended.
    versions: list[tuple[int, int]] = field(default_factory=list)
    pool: Pool | None = None  # hands the parameters their gradients
    parameters: Sequence[Any] = ()  # whose gradients it hands over


def _versions(passing: _Passing, values: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Of each of the caller's own tensors that backward reads: how often it has been changed in place, and a digest.
    Raises PlanError if one was made in inference mode, where no tensor knows that; autograd refuses to save it, too.
    """
    held = [(values[k], name) for k, name in passing.engine.rewritten.held]
    for x, name in held:
        if x.is_inference():
            raise PlanError(
                f"{name} was made under torch.inference_mode(), and backward reads it: make it outside, or give the "
                "model a clone."
            )
    return [(x._version, _digest(x) if name.startswith("the argument") else 0) for x, name in held]


def _digest(x: torch.Tensor) -> int:
    """The sum of an argument's elements, read as whole numbers, each row as often as its place says: memory that is
    NumPy's or another process's, too, and writes through `.data`, change without a new version. Of a tensor on the CPU
    alone, where others write so. Ignores: the order within a row."""
    if x.device.type != "cpu":
        return 0
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    whole, total = _WHOLE[x.itemsize]
    if x.ndim < 2:
        return int(x.view(whole).sum(dtype=total))
    rows = x.view(whole).sum(tuple(range(1, x.ndim)), dtype=total)
    return int((rows * torch.arange(1, len(rows) + 1)).sum())


# By the size of an element: the numbers to read it as, and those to add them up in, which may overflow: a wider type
# for the long ones would take forty times as long.
_WHOLE: Final = {
    1: (torch.uint8, torch.int64),
    2: (torch.int16, torch.int64),
    4: (torch.int32, torch.int32),
    8: (torch.int64, torch.int64),
}


def _check_unchanged(passing: _Passing, values: list[torch.Tensor]) -> None:
    """Raise PlanError, as autograd does, if what backward reads is no longer what forward read. A recomputation reads
    more than the untouched model saves: the arguments, say, which a loader may refill in between."""
    held = passing.engine.rewritten.held
    for (_, name), before, now in zip(held, passing.versions, _versions(passing, values), strict=True):
        if now != before:
            how = f" (version {now[0]} instead of {before[0]})" if now[0] != before[0] else ""
            raise PlanError(
                f"{name} was changed in place between forward and backward, and the backward of a planned step reads "
                f"it{how}: change it after backward, or give the model a clone."
            )


class _Model(torch.autograd.Function):
    """Runs the rewritten modules.

    Saved values travel in a list that backward empties as it goes, so that each is freed at its last use: what
    `save_for_backward` keeps lives until the whole backward has returned, and so do the gradients that autograd
    passes to a function. Those therefore arrive in a list too, by way of `_Outputs`, and autograd itself only passes
    an empty token.
    """

    @staticmethod
    def forward(ctx: Any, passing: _Passing, _anchor: Any, *inputs: torch.Tensor) -> torch.Tensor:
        # The casts are ops of the graph; autocast around this call must not add others.
        statistics = tuple(inputs[k] for k in passing.engine.statistics)
        with without_autocast(), preserved_versions(statistics):
            outputs, saved = passing.engine.rewritten.forward([*inputs, *passing.engine.numbers])
        passing.outputs, passing.saved = list(outputs), list(saved)
        passing.versions = _versions(passing, passing.saved)
        ctx.passing = passing
        return torch.empty(0, device=inputs[0].device)  # not complex, as the outputs may be

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _token: torch.Tensor) -> Any:
        passing: _Passing = ctx.passing
        values, passing.saved = passing.saved, None
        if values is None:
            raise PlanError(
                "backward ran twice through a planned step, whose saved values are freed as it goes; run the "
                "model again, or use it without a plan where the graph must be retained."
            )
        if torch.is_autocast_enabled(passing.engine.kind):
            raise PlanError(
                "backward of a planned step was called under autocast, which would cast in the untouched model's "
                "backward too; leave the region before loss.backward(), as torch recommends."
            )
        if passing.pool is not None and hands_over(passing.parameters):
            check_alone(passing.parameters, PlanError)
        _check_unchanged(passing, values)
        tangents, passing.tangents = passing.tangents, []
        backward = passing.engine.backward(tuple(x is None for x in tangents))
        values += tangents
        del tangents
        pool = passing.pool
        buffers = (None,) * len(passing.engine.program.captured.buffers)
        if pool is not None:
            argument_grads = pool.backward(passing, backward, passing.parameters, values)
            return (None, None, *(None for _ in passing.parameters), *buffers, *argument_grads)
        parameter_grads, argument_grads = backward(values)
        return (None, None, *parameter_grads, *buffers, *argument_grads)


class _Outputs(torch.autograd.Function):
    """Makes the model's outputs of what `_Model` computed, and in backward puts their gradients aside for it."""

    @staticmethod
    def forward(ctx: Any, passing: _Passing, token: torch.Tensor, *outputs: torch.Tensor) -> Any:
        captured = passing.engine.program.captured
        ctx.passing = passing
        ctx.set_materialize_grads(False)
        # A view's gradient function is rebuilt when it is changed in place, which torch refuses of one from here; what
        # `detach` returns is none to autograd. Outputs that share memory stay views, whose change would reach others.
        behind, storages = passing.engine.program.output_storages, passing.engine.program.storages
        uses = Counter(s for k, s in enumerate(behind) if k not in captured.not_made)
        sharing = {k for k, s in enumerate(behind) if uses[s] > 1 or storages[s].producer < 0}
        out = tuple(x.view_as(x) if k in sharing else x.detach() for k, x in enumerate(outputs))
        ctx.mark_non_differentiable(*(x for k, x in enumerate(out) if k not in captured.grad_outputs))
        return out

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        if torch.is_grad_enabled():
            raise PlanError(
                "backward of a planned step was called with create_graph=True, and no gradient of its gradients was "
                "planned; call the model inside `with unplanned(model):` for that loss."
            )
        passing: _Passing = ctx.passing
        captured = passing.engine.program.captured
        passing.tangents = [
            None if tangents[k] is None else fit_tangent(tangents[k], passing.engine.at_sizes(n.meta["val"]))
            for k, n in zip(captured.grad_outputs, captured.tangents, strict=True)
        ]
        device = next(x.device for x in passing.tangents if x is not None)
        token = torch.empty(0, device=device)
        return None, token, *(None for _ in captured.outputs)


class _Unplanned(torch.autograd.Function):
    """An output that the plan's loss does not differentiate: readable, but a loss that uses it must not pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise PlanError(
            f"the loss differentiates output {ctx.number} of the model, and the plan was made for a loss that does "
            "not; trace the step with this loss and plan again."
        )


PASSED_ON = ("detach", "alias", "_to_copy", "view_as")  # by code that only hands outputs on


class NotMade(torch.Tensor):
    """The place of an output that the plan does not make: its shape and type are known, and any use of it raises."""

    why: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, why: str) -> NotMade:
        made: NotMade = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.why = why
        return made

    def __init__(self, like: torch.Tensor, why: str) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:
        return f"NotMade({tuple(self.shape)}: {self.why})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        if func.overloadpacket.__name__ in PASSED_ON:
            return cls(mine, mine.why)
        raise PlanError(f"{mine.why}, and {func} asked for it; use the loss alone, or plan without --allow.")
