"""Signatures: equal for equal calls, others for any that differ in what decides an op's memory."""

from __future__ import annotations

import torch
from torch import fx, nn

from tests.torch.steps import program
from tracer.costs.signature import of_call

aten = torch.ops.aten


def test_calls_are_equal_where_shapes_strides_and_dtypes_are_on_every_device() -> None:
    x = torch.zeros(4, 4)
    different = [x, torch.zeros(2, 8), torch.zeros(4, 8)[:, :4], x.double()]
    assert len({of_call(aten.add.Tensor, (y, y), {"alpha": 1.0}, y) for y in different}) == 4
    full = {of_call(aten.full.default, ([3], 1.0), {"device": torch.device(d)}, x) for d in ("cpu", "cuda:0")}
    assert len(full) == 1


def test_lists_of_tensors_are_inputs() -> None:
    xs = [torch.zeros(3), torch.zeros(5)]
    signature = of_call(aten._foreach_add.List, (xs, xs), {}, xs)
    assert [x[0] for given in signature[1] for x in given] == [(3,), (5,)] * 2
    assert [x[0] for x in signature[3]] == [(3,), (5,)]
    assert hash(signature) == hash(of_call(aten._foreach_add.List, (xs, xs), {}, xs))


def test_every_op_of_a_program_has_the_signature_of_its_node() -> None:
    p = program(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.randn(4, 6))
    for op, row in zip(p.ops, p.rows, strict=True):
        assert isinstance(op.node, fx.Node)
        args, kwargs = fx.node.map_arg((op.node.args, op.node.kwargs), lambda a: a.meta["val"])
        assert row.signature == of_call(op.node.target, args, kwargs, op.node.meta["val"])
