"""What torch itself says of an op, where no rule of a GPU does: its outputs, or nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.core.test_workspaces import events, spec
from tracer.costs.rules_cuda.workspaces import TABLE


def test_plain_ops() -> None:
    x = spec(4, 8)
    assert events("aten.mul.Tensor", (x, x), (x,)) == (128,)
    assert events("aten.mul_.Tensor", (x, x), (x,)) == ()
    assert events("aten.copy_.default", (x, x), (x,)) == ()
    assert events("aten._foreach_add_.List", ((x,), (x,)), (None,)) == ()
    assert events("aten._foreach_sqrt.default", ((x, x),), ((x, x),)) == (128, 128)
    assert events("aten.zeros_like.default", (x,), (x,)) == (128,)


def test_what_nobody_knows_has_no_rule() -> None:
    x = spec(4, 8)
    for target in (
        "aten.cudnn_batch_norm.default",
        "aten.unique_dim.default",
        "aten.nonzero.default",
        "aten.no_such_op.default",
        "elsewhere.mul.Tensor",
    ):
        assert events(target, (x,), (x,)) is None
        assert TABLE.rule_for(target) is None


def test_every_row_of_the_cpu_says_where_it_comes_from() -> None:
    from tracer.costs.rules_cpu.workspaces import TABLE as CPU

    assert len(CPU.rules) >= 20
    for rule in CPU.rules:
        assert rule.source.startswith("aten/src/ATen")
        known = {name for name, _ in rule.let}
        assert {e.lstrip("-=") for e in rule.events} <= {*known, "out"}, rule.ops
        # A value of the same name hides a function from the formulas behind it.
        assert not known & {"threads", "inputs", "results", "arg"}
        assert len(known) == len(rule.let)
    assert callable(CPU.functions["product_takes"])
