"""Storages behind a captured graph: who shares one, what an op may take over, and sizes worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from simulator.core.problem import Problem
from tests.torch import small_nets
from tests.torch.steps import build_of, program, recorded
from tracer.record.program import Program, inplace_twin
from tracer.step.step import load_spec
from traces.records.trace import FORWARD, VIEW, Trace

aten = torch.ops.aten


class Apply(nn.Module):
    """A linear layer, then a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def row_of(p: Program, target: str) -> int:
    (i,) = [i for i, r in enumerate(p.rows) if r.target == target and r.phase == FORWARD]
    return i


@pytest.mark.parametrize(
    ("target", "function"),
    [
        ("aten.split.Tensor", lambda y: sum(torch.chunk(y, 3, dim=1))),
        ("aten.split_with_sizes.default", lambda y: torch.split(y, [2, 4], dim=1)[1].exp()),
        ("aten.transpose.int", lambda y: y.transpose(0, 1).exp()),
        ("aten.expand.default", lambda y: y.unsqueeze(0).expand(3, -1, -1).sum(0)),
    ],
)
def test_a_view_shares_its_base_s_storage(
    target: str, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    p = program(Apply(function), torch.randn(4, 6))
    linear = p.storage_of[p.ops[row_of(p, "aten.addmm.default")].node]
    i = row_of(p, target)
    row, op = p.rows[i], p.ops[i]
    assert row.flags & VIEW
    assert row.writes == ()
    assert row.flops == row.bytes_moved == 0
    for node in (op.node, *op.parts):
        assert p.storage_of[node] == linear


def test_an_op_of_several_outputs_has_a_storage_for_each() -> None:
    p = program(small_nets.Residual(), torch.randn(2, 3, 8, 8))
    row = p.rows[row_of(p, "aten._native_batch_norm_legit_functional.default")]
    # The output, mean and reciprocal deviation, and the new running statistics.
    assert len(row.writes) == 5
    assert p.storages[row.writes[0]].nbytes == 2 * 8 * 8 * 8 * 4


def takeovers(p: Program) -> dict[str, str]:
    return {r.name: p.storages[r.overwrites].name for r in p.rows if r.overwrites >= 0}


def test_an_op_may_take_over_what_another_op_made() -> None:
    p = program(Apply(lambda y: y.exp().relu()), torch.randn(4, 6))
    assert takeovers(p)["relu"] == "exp"


@pytest.mark.parametrize(
    ("why", "function"),
    [
        ("an argument of the model", lambda x, w: x.relu() @ w),
        ("smaller than the output", lambda x, w: (x.exp().sum(0) + x) @ w),
        ("larger than the output", lambda x, w: (x.exp()[:2] * 2) @ w),
        ("read twice by the op", lambda x, w: _square(x.exp()) @ w),
        ("of another dtype", lambda x, w: (x.exp() > 0).to(torch.float32) @ w),
    ],
)
def test_what_may_not_be_taken_over(
    why: str, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    class Weighted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x, self.weight)

    p = program(Weighted(4, 4, bias=False), torch.randn(4, 4))
    assert not [r.name for r in p.rows if r.phase == FORWARD and r.overwrites >= 0], why


def _square(y: torch.Tensor) -> torch.Tensor:
    return y * y


def test_outputs_and_tangents_are_never_taken_over() -> None:
    class Steps(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x).tanh()
            return y, y.exp()

    p = program(Steps(6, 6), torch.randn(4, 6), lambda out: out[0].sum() + out[1].sum())
    fixed = {*p.output_storages, *p.tangent_storages}
    assert not fixed & {r.overwrites for r in p.rows}


def test_in_place_twins() -> None:
    assert inplace_twin(aten.relu.default) is aten.relu_.default
    assert inplace_twin(aten.add.Tensor) is aten.add_.Tensor
    assert inplace_twin(aten.mm.default) is None
    assert inplace_twin(aten.bernoulli.default) is None
    assert inplace_twin(torch.ops.lowtide.dropout_mask.default) is None


# Sizes by hand


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [functional.mse_loss, functional.smooth_l1_loss, functional.l1_loss])
def test_the_memory_behind_a_loss(loss: Callable[..., torch.Tensor], reduction: str) -> None:
    """torch computes some losses into memory for all predictions, and keeps it for the reduced result."""
    x, y = torch.randn(7, 5), torch.randn(7, 5)
    real = loss(x, y, reduction=reduction).untyped_storage().nbytes()

    class Inside(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return loss(super().forward(x), y, reduction=reduction)

    p = program(Inside(5, 5), x)
    assert p.storages[p.output_storages[0]].nbytes == real


def bytes_of(trace: Trace, category: str) -> int:
    sts = trace.storages
    return sum(b for b, c in zip(sts.nbytes, sts.category, strict=True) if c == category)


def test_the_bytes_of_a_small_mlp() -> None:
    # float32, so 4 bytes each. Linear 8 -> 16: 8*16 + 16 = 144; Linear 16 -> 4: 16*4 + 4 = 68 parameters.
    trace = recorded(load_spec(small_nets.spec("mlp"))).trace
    parameters = 4 * (144 + 68)  # 848
    assert bytes_of(trace, "parameter") == parameters
    assert bytes_of(trace, "optimizer state") == parameters  # SGD's momentum
    batch = 4 * (32 * 8 + 32 * 4)  # 1536: images of 8 and targets of 4, 32 of each
    assert bytes_of(trace, "input") == batch
    assert trace.resident_bytes == 2 * parameters + batch
    gradients = parameters
    assert bytes_of(trace, "gradient") == gradients
    # The backward of Linear 2 and that of the ReLU need the ReLU's output; that of Linear 1 needs its input, which is
    # the batch; that of the loss the model's output.
    problem = Problem(trace)
    model = {
        s
        for s, wanted in enumerate(problem.saved_by_default)
        if wanted and trace.storages.producer[s] < trace.meta.forward_ops
    }
    assert {trace.storages.name[s]: trace.storages.nbytes[s] for s in model} == {
        "relu": 4 * 32 * 16,  # 2048
        "addmm_1": 4 * 32 * 4,  # 512
    }


def test_the_peak_of_a_small_mlp() -> None:
    # Without an optimizer; the bytes beside the resident ones:
    #   forward   addmm    2048                                          alive 2048
    #             relu     takes over that memory                        2048
    #             addmm_1  512                                           2560
    #   loss      mse_loss 512: its memory is that of the squares        3072, to the end
    #   backward  ones     4, autograd's first gradient                  3076, to the end
    #             mse_loss_backward 512; the output (512) goes after it  3076
    #             mm       2048, the gradient of the hidden layer        5124
    #             mm       256, of the second weight                     5380
    #             sum      16, of the second bias; minus 512             4884
    #             threshold_backward 2048: the peak is 4884 + 2048 = 6932
    trace = recorded(load_spec(small_nets.spec("mlp"), {"optimizer": "none"})).trace
    problem = Problem(trace)
    timeline = problem.replay(()).timeline
    above = timeline.peak_allocated_bytes - trace.resident_bytes
    assert above == 6932
    assert trace.ops.target[timeline.op[timeline.peak_step]] == "aten.threshold_backward.default"


def test_a_constant_of_the_loss_leaves_its_address_to_nobody() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            y = torch.exp(
                y * torch.tensor([2.0])
            )  # the constant is gone at once, and exp may get its address
        return y.sum()

    def make() -> tuple[Any, ...]:
        return nn.Linear(4, 4), torch.randn(3, 4), loss, None

    trace = recorded(build_of(make)).trace
    ops, sts = trace.ops, trace.storages
    for i, target in enumerate(ops.target):
        if target in ("aten.exp.default", "aten.mul.Tensor"):
            assert [sts.nbytes[s] for s in ops.writes[i] if sts.producer[s] == i] == [3 * 4 * 4]
