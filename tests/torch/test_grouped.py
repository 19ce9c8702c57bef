"""Grouped matrix products: fake tensors get what the kernels give, and a mixture of experts is planned and verified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from executor.verifying import verify
from simulator.core.problem import Problem
from tests.torch.steps import build_of, measured, plan_of, recompute_all, recorded
from tracer.capture.torch_fixes.grouped import true_results


def operands(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any) -> tuple[Any, Any, Any]:
    a, b = (torch.rand(*s).to(dtype) for s in shapes)
    if b.shape[-1] % 8:  # the kernels want each row, or each column, to begin at a multiple of 16 bytes
        b = b.mT.contiguous().mT
    groups = {2: 3, 3: None}[min(len(s) for s in shapes)]
    ends = torch.tensor([3, 4, 8], dtype=torch.int32) if groups else None
    return a, b, ends


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shapes",
    [
        ((8, 16), (3, 16, 24)),  # rows in groups
        ((8, 16), (3, 16, 30)),  # rows of 30, which are padded to 32
        ((3, 24, 16), (16, 8)),  # columns in groups
        ((24, 8), (8, 32)),  # what is summed over is in groups: a gradient of the weights
        ((3, 8, 16), (3, 16, 24)),
    ],
)
def test_fake_tensors_are_as_real_ones(shapes: Any, dtype: Any) -> None:
    a, b, ends = operands(shapes, dtype)
    real = functional.grouped_mm(a, b, offs=ends)
    with true_results(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = functional.grouped_mm(
            *(mode.from_tensor(x) if x is not None else None for x in (a, b)), offs=ends
        )
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


class Experts(nn.Module):
    """Each token goes to one of four experts, as transformers does it: sorted, multiplied in groups, put back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, 16, 32) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 32, 16) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        weight, expert = scores.max(-1)
        expert, order = torch.sort(expert)
        counts = torch.histc(expert.float(), bins=4, min=0, max=3)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        hidden = functional.silu(functional.grouped_mm(x[order], self.up, offs=ends))
        out = functional.grouped_mm(hidden, self.down, offs=ends) * weight[order, None]
        return torch.zeros_like(out).index_copy(0, order, out)


def test_a_mixture_of_experts_is_measured_planned_and_verified() -> None:
    def make() -> tuple[Any, ...]:
        model = Experts()
        batch = (torch.randn(64, 16), torch.randn(64, 16))
        return model, batch, functional.mse_loss, torch.optim.SGD(model.parameters())

    build = build_of(make)
    step = recorded(build)
    assert (
        step.trace.ops.target.count("aten._grouped_mm.default") == 5
    )  # 2 forward; 3 backward, since x has no gradient
    real = measured(build, step)
    plan = plan_of(real, *recompute_all(Problem(real)))
    found = verify(build, plan, "cpu", 2)
    assert found.bit_equal, found.first_difference
