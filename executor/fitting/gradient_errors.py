"""By how much approximate formats change the gradient of a step, measured on the user's batch, and plans by that."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from executor.training.module import apply_plan, remove_plan
from simulator.core.problem import Problem
from simulator.levers import LEVERS
from simulator.levers.edit import parts
from tracer.step.loop import run_step
from tracer.step.loop_options import BEFORE
from tracer.step.step import BuildStep
from traces.errors import SpecError
from traces.progress import Say, counted, silent
from traces.records.gradient_errors import GradientErrors, Part
from traces.records.plan import APPROXIMATE, Plan
from traces.records.trace import Trace

LOSSY: Final = tuple(name for name, lever in LEVERS.items() if lever.exactness == APPROXIMATE)


class Random(dict[str, torch.Tensor]):
    """States of torch's generators, by the kind of device."""

    @classmethod
    def now(cls, device: str) -> Random:
        made = cls(cpu=torch.get_rng_state())
        if device.startswith("cuda"):
            made["cuda"] = torch.cuda.get_rng_state()
        return made

    def set(self) -> None:
        torch.set_rng_state(self["cpu"])
        if "cuda" in self:
            torch.cuda.set_rng_state(self["cuda"])


class _Step:
    """A step whose gradient is taken untouched, then by plans, from the same random state; the optimizer never runs."""

    def __init__(self, build: BuildStep, device: str) -> None:
        step = build(device)
        loop = replace(step.loop, release_gradients=False, zero_grad=BEFORE)
        self.step = replace(step, optimizer=None, loop=loop)
        self.rng = Random.now(device)
        self.exact = self._gradient(step.model)

    def error(self, plan: Plan) -> float:
        """How far the gradient by a plan is from the untouched model's: relative L2."""
        planned = apply_plan(self.step.model, plan)
        try:
            return relative_error(list(zip(self.exact, self._gradient(planned), strict=True)))
        finally:
            remove_plan(planned)

    def _gradient(self, model: Callable[..., Any]) -> list[torch.Tensor | None]:
        self.rng.set()
        with deterministic():
            run_step(self.step, model, None)
        return [None if p.grad is None else p.grad.clone() for p in self.step.model.parameters()]


def gradient_errors(
    build: BuildStep,
    made: Trace,
    kinds: Sequence[str] = LOSSY,
    device: str = "cpu",
    say: Say = silent,
) -> GradientErrors:
    """By how much each approximate format changes the gradient of one step, of which `made` is the trace, on the user's
    batch, by parts of the values that it can hold, each alone. The untouched step must fit. Raises SpecError if a kind
    is none that is approximate, or the step is the user's own iteration.
    """
    if unknown := [k for k in kinds if k not in LOSSY]:
        raise SpecError(f"{unknown[0]} changes no gradient by an error; there are {', '.join(LOSSY)}.")
    step, problem, found = _Step(build, device), Problem(made), []
    offered = [(kind, part) for kind in kinds for part in parts(list(LEVERS[kind].offer(problem)))]
    for kind, part in counted(offered, lambda of: f"{of[0]}, {len(of[1])} values", say):
        error = step.error(Plan(meta=made.meta, rewrites=part, exactness=APPROXIMATE))
        found.append(Part(kind=kind, storages=tuple(r.storage for r in part), error=error))
    return GradientErrors(fingerprint=made.meta.graph_fingerprint, parts=tuple(found))


@contextlib.contextmanager
def deterministic(warn_only: bool = True) -> Iterator[None]:
    """Deterministic algorithms are on in the body; where there is none, a warning or torch's RuntimeError."""
    on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=only_warned)


def relative_error(gradients: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> float:
    """How far the second gradients are from the first, all together: relative L2; infinite if one side lacks some."""
    off = size = 0.0
    for x, y in gradients:
        if x is None or y is None or x.shape != y.shape:
            off = off if x is y else float("inf")
            continue
        wide = torch.complex128 if x.is_complex() else torch.float64
        whole = x.to(wide)
        off += float(torch.linalg.vector_norm(y.to(wide) - whole)) ** 2
        size += float(torch.linalg.vector_norm(whole)) ** 2
    error = (off / size) ** 0.5 if size else float(off > 0)
    return float("inf") if math.isnan(error) else error
