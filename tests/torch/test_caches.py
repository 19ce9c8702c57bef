"""What is cached: a model's tables are captured as ops, and what dynamo compiled goes with the model."""

from __future__ import annotations

import gc
import weakref
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import fx, nn

from executor import apply_plan
from executor.verifying import verify
from tests.torch.steps import build_of, measured, plan_of, recorded


def cached_unless_compiling(function: Any) -> Any:
    """As transformers caches its tables of relative positions (`compile_compatible_method_lru_cache`)."""
    cached = lru_cache(maxsize=2)(function)

    @wraps(function)
    def wrapper(size: int) -> torch.Tensor:
        return function(size) if torch.compiler.is_compiling() else cached(size)

    wrapper.__code__ = wrapper.__code__.replace(co_filename="/site-packages/of_a_library.py")
    return wrapper


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6))
        self.linear = nn.Linear(6, 6)

    @staticmethod
    @cached_unless_compiling
    def table(size: int) -> torch.Tensor:
        return (torch.arange(size)[:, None] - torch.arange(size)).abs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + self.bias[self.table(6)]).square().mean()


def test_a_cached_table_is_made_by_the_step() -> None:
    def make() -> tuple[Any, ...]:
        model = Positions()
        return model, torch.randn(6, 6), None, torch.optim.SGD(model.parameters(), lr=0.1)

    build = build_of(make)
    step = recorded(build)
    assert step.trace.ops.target.count("aten.arange.default") == 2
    real = measured(build, step)
    assert verify(build, plan_of(real), "cpu", 2).bit_equal
    assert type(Positions.table(6)) is torch.Tensor  # the cache that eager fills is its own


def graphs() -> int:
    gc.collect()
    return sum(type(x) is fx.Graph for x in gc.get_objects())


def test_what_was_compiled_goes_with_the_capture_and_with_the_planned_model() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    build = build_of(lambda: (net(), torch.randn(6, 6), lambda y: y.sum(), None))
    plan, counts, weights = plan_of(recorded(build).trace), [], []
    for _ in range(3):
        recorded(build)
        model = apply_plan(net(), plan)
        model(torch.randn(6, 6)).sum().backward()
        weights.append(weakref.ref(model[0].weight))
        del model
        counts.append(graphs())
    assert max(counts[1:]) <= counts[0]
    assert not any(w() is not None for w in weights)
