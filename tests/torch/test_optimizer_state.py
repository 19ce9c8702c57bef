"""When an optimizer makes its state, how autograd adds gradients up, and in which order a model's tensors are moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from simulator.allocator.reserved import reserved_peak
from simulator.core.problem import Problem
from tests.torch.steps import build_of, peaks
from tracer.record.step import trace_step
from tracer.recording import record_real
from traces.devices import device

CPU = device("cpu")


class Replacing(torch.optim.Optimizer):
    """Puts new tensors in the place of the old ones: moments in the state, others that only it knows, parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.own: dict[torch.Tensor, torch.Tensor] = {}

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            moment = 0.9 * self.state[p].get("m", torch.zeros_like(p)) + 0.1 * p.grad
            self.own[p] = self.own.get(p, torch.zeros_like(p)) + moment * moment
            p.data = p.data - 0.1 * moment / (torch.sqrt(self.own[p]) + 1e-8)
            self.state[p]["m"] = moment


def wide_step(optimizer: Callable[[Any], Any], rows: int = 2, width: int = 256) -> tuple[Any, ...]:
    """Weights of 256 KiB each, and so few activations that the peak is in the optimizer."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, width))
    batch = torch.randn(rows, 256), torch.randn(rows, width)
    return model, batch, functional.mse_loss, optimizer(model.parameters())


def test_an_optimizer_may_replace_its_state() -> None:
    """Both are there until the old one is gone; when the step ends, everything is there once, as when it began."""
    build = build_of(lambda: wide_step(Replacing))
    trace = trace_step(build, CPU).finish()
    parameters = 4 * 2 * (256 * 256 + 256)
    assert trace.resident_bytes == 3 * parameters + 2 * 4 * 2 * 256
    assert Problem(trace).saved.timeline.peak_allocated_bytes == pytest.approx(peaks(build)[2], abs=128)


def test_the_first_iteration_makes_state_when_the_optimizer_steps() -> None:
    build = build_of(lambda: wide_step(torch.optim.Adam))
    problem = Problem(trace_step(build, CPU).finish())
    first = reserved_peak(problem, problem.saved.schedule).iterations[0]
    assert first.peak_requested_bytes == pytest.approx(peaks(build)[0], abs=128)


class Sum(nn.Module):
    """The gradient of its weight is one number, expanded; autograd makes 1,000 of it before it becomes `.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def test_a_gradient_that_autograd_copies_is_a_gradient() -> None:
    build = build_of(lambda: (Sum(), torch.randn(3), lambda y: y.sum(), None))
    sts = trace_step(build, CPU).finish().storages
    found = {
        n: name for n, name, c in zip(sts.nbytes, sts.name, sts.category, strict=True) if c == "gradient"
    }
    assert found[4000] == "gradient of weight"


def test_a_measured_trace_has_the_peak_of_the_untouched_loop() -> None:
    build = build_of(lambda: wide_step(torch.optim.Adam))
    trace = record_real(build, CPU, "cpu", rounds=1, warmup=1)
    assert trace.meta.untouched_peak_bytes == peaks(build)[2]
