"""`verify` and `measure`: what `execute` does with a plan, for Python."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from executor.plans import Settings, measure_plan
from executor.verification import Verification
from traces.records.measurement import Measurement
from traces.records.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn


class Measuring(TypedDict, total=False):
    """How to measure; what is not given is `execute`'s default."""

    device: str
    steps: int  # of the verification; 0: none
    memory_steps: int  # iterations whose peak is measured
    warmup: int  # iterations before those that are timed
    runs: int  # iterations that are timed


def verify(
    plan: Plan | str | Path,
    model: nn.Module | str | None = None,
    batch: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str | None = None,
    *,
    device: str = "cpu",
    steps: int = 10,
) -> Verification:
    """Train twice from one state, untouched and by the plan, and compare every tensor after every step.

        verify(found, net, (x, y), F.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.1))
        verify("plan.json")

    In this process, on copies: the objects in hand stay as they are. `execute` does the same in a fresh process.

    Args:
        plan: or the file of one.
        model: of a plan for a model in hand, that and what `trace` was given with it. Otherwise what to build if not
            what the plan names.
        device: "cpu" or "cuda".
        steps: how many are compared.

    Raises:
        SpecError: the plan is of a model in hand, and none is given.
        PlanError: the plan is of another step.
    """
    from executor.verifying import verify as compare
    from tracer.api import in_hand, left_as_found
    from tracer.build.step import load_spec

    if isinstance(plan, str | Path):
        plan = Plan.load(Path(plan))
    options = dict(plan.meta.options)
    if model is None or isinstance(model, str):
        build = load_spec(model or plan.meta.model, options, seed=plan.meta.seed)
    else:
        build = in_hand(model, batch, loss, optimizer, None, {}, options, plan.meta.seed)
    with left_as_found(False):
        return compare(build, plan, device, steps)


def measure(
    plan: Plan | str | Path,
    model: str = "",
    *,
    say: Callable[[str], None] | None = None,
    **how: Unpack[Measuring],
) -> Measurement:
    """Measure the plan, the untouched model and the step with everything saved, each in a fresh process; verify first.

    Args:
        plan: or the file of one.
        model: what to build if not what the plan names, "my_training.py:build"; needed for a plan of a model in hand,
            which no other process has.
        say: called with a line before each part.
        how: see `Measuring`.

    Raises:
        SpecError, PlanError, EnvironmentProblem, OutOfMemoryProblem: as `execute`.
    """
    settings = Settings(model=model, **how)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(plan) if isinstance(plan, str | Path) else plan.save(Path(folder) / "plan.json")
        return measure_plan(path, settings, say or (lambda line: None)).measurement
