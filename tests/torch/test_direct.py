"""A graph's ops are called by torch's own functions where these do the same, and not where they do something else."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from executor.graphs.direct import direct
from tracer.capture.passes.dropout import draw

aten = torch.ops.aten


def of_all_kinds(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    half = aten._to_copy.default(x, dtype=torch.bfloat16)
    scaled = aten.mul_.Scalar(aten.add.Tensor(x, y), 0.5)
    masked = aten.mul.Tensor(scaled, torch.ops.lowtide.dropout_mask.default(x, 0.3))
    turned = aten.t_.default(aten.clone.default(masked))
    shaped = aten.view.default(aten.relu_.default(turned), [2, 3, 4])
    return [half, shaped, aten.native_dropout_backward.default(x, masked.bool(), 2.0)]


def test_torchs_own_functions_stand_for_ops_where_they_are_the_same() -> None:
    inputs = [torch.randn(4, 6), torch.randn(4, 6)]
    module = make_fx(of_all_kinds, tracing_mode="fake")(*inputs)
    quick, shapes = direct(module), [n.meta["val"].shape for n in module.graph.nodes if "val" in n.meta]
    called = [n.target for n in quick.graph.nodes if n.op == "call_function"]
    assert {
        torch.Tensor.to,
        torch.add,
        torch.clone,
        torch.Tensor.t_,
        torch.relu_,
        torch.Tensor.view,
        draw,
    } <= {*called}
    # `Tensor.mul_` takes a number for a tensor of one element, and nothing else does what the last op does.
    assert {aten.mul_.Scalar, aten.native_dropout_backward.default} <= {*called}
    assert [n.meta["val"].shape for n in module.graph.nodes if "val" in n.meta] == shapes
    torch.manual_seed(0)
    wanted = module(*inputs)
    torch.manual_seed(0)
    for a, b in zip(wanted, quick.forward(list(inputs)), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


def test_a_function_that_does_something_else_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "add", lambda x, y: torch.sub(x, y))
    monkeypatch.setattr(torch.Tensor, "add", lambda x, y: x + 2 * y)
    module = make_fx(lambda x, y: [aten.add.Tensor(x, y)], tracing_mode="fake")(torch.ones(2), torch.ones(2))
    assert direct(module).forward([torch.ones(2), torch.ones(2)])[0].tolist() == [2.0, 2.0]
