"""Make training steps of modules and plans of random numbers, for the tests of tracer and executor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from executor import apply_plan
from simulator.core.problem import Problem
from simulator.core.schedule import build
from tests.strategies import random_actions as random_actions
from tracer.measure.probes import cpu_loop
from tracer.measure.step import measure
from tracer.record.assemble import Draft
from tracer.record.program import Program, program_of
from tracer.record.step import capture_step, trace_step
from tracer.step.batch import split_batch
from tracer.step.loop import TrainingStep, run_step
from tracer.step.step import BuildStep, load_spec
from traces.devices import device
from traces.errors import PlanError
from traces.records.plan import Action, Plan, label_actions
from traces.records.trace import Trace


def reruns(made: Any) -> list[str]:
    """The names of the nodes of a rewritten step that run again."""
    return [n.name for m in (made.forward, made.backward) for n in m.graph.nodes if "recomputed" in n.meta]


def step_of(
    model: nn.Module, batch: Any, loss: Callable[..., Any] | None, optimizer: torch.optim.Optimizer | None
) -> TrainingStep:
    given = split_batch(model, batch, loss)
    taken: Any = {k: getattr(given, k) for k in ("args", "kwargs", "loss", "loss_inputs")}
    return TrainingStep(model=model, optimizer=optimizer, batch_size=1, name=type(model).__name__, **taken)


def build_of(make: Callable[[], tuple[Any, Any, Any, Any]], seed: int = 0) -> BuildStep:
    """A BuildStep of a function that returns (model, batch, loss, optimizer) on the CPU."""
    return BuildStep(model="test", options={}, seed=seed, make=lambda _device: step_of(*make()))


def peaks(build: BuildStep, plan: Plan | None = None, iterations: int = 3) -> list[int]:
    """The most bytes in each iteration of the ordinary loop, by the CPU allocator's own account."""
    with cpu_loop() as loop:
        step = build("cpu")
        model = step.model if plan is None else apply_plan(step.model, plan)
        for _ in range(iterations):
            with loop.iteration():
                run_step(step, model, step.optimizer)
    return loop.peaks


def recorded(spec: BuildStep) -> Draft:
    return trace_step(spec, device("cpu"))


def measured(spec: BuildStep, draft: Draft | None = None, rounds: int = 1) -> Trace:
    """The trace of some rounds on the CPU."""
    draft = draft or recorded(spec)
    costs, workspaces, header = measure(draft, spec, "cpu", rounds=rounds, warmup=1)
    return draft.finish(costs, workspaces, **header)


@cache
def _trace_of(model: str, options: tuple[tuple[str, Any], ...]) -> Trace:
    return recorded(load_spec(model, dict(options))).trace


def trace_of(model: str, options: dict[str, Any]) -> Trace:
    """The trace of a model by name, captured once for all tests that ask for it."""
    return _trace_of(model, tuple(sorted(options.items())))


def program(model: nn.Module, batch: Any, loss: Callable[..., Any] | None = None) -> Program:
    """The program of a real model; the loss is the sum of the output unless given."""
    return program_of(capture_step(step_of(model, batch, loss or (lambda y: y.sum()), None)))


def plan_of(trace: Trace, *actions: Action) -> Plan:
    return Plan(meta=trace.meta, actions=label_actions(trace, actions))


def recompute_all(problem: Problem, *, share: bool = True) -> tuple[Action, ...]:
    return tuple(Action(storage=s, retain=share) for s in problem.candidates)


def possible(trace: Trace, actions: tuple[Action, ...]) -> bool:
    try:
        build(Problem(trace), actions)
    except PlanError:
        return False
    return True
