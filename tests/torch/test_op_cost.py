"""What an op costs in a trace that is not measured: which source is asked first, and when it is not believed."""

from __future__ import annotations

import pytest

import tracer.costs.cost as op_cost
from tests.torch import small_nets
from tests.torch.steps import recorded
from tracer.costs.cost import APPROXIMATE, MEASURED, NONE, Cost, Costs
from tracer.costs.rows import OpRow
from tracer.costs.signature import Signature, TensorSpec
from tracer.step.step import load_spec
from traces.devices import device
from traces.records.trace import FORWARD, VIEW

CPU, GPU = device("cpu"), device("h200")


def row(target: str = "aten.mm.default", batch: int = 4, *, flags: int = 0) -> OpRow:
    """x[batch, 8] @ w[8, 16] -> [batch, 16]: leaves batch * 64 bytes."""
    x = TensorSpec(shape=(batch, 8), stride=(8, 1), dtype="float32")
    w = TensorSpec(shape=(8, 16), stride=(16, 1), dtype="float32")
    out = TensorSpec(shape=(batch, 16), stride=(16, 1), dtype="float32")
    return OpRow(name="mm", target=target, phase=FORWARD, flags=flags,
                 signature=Signature(target=target, args=(x, w), outputs=(out,)))  # fmt: skip


def test_rules_are_asked_and_a_rule_that_does_not_fit_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op_cost, "approximate_events", lambda *_: (512, 256, -512))
    told = Costs().of(row(), 256, GPU)
    assert (told.events, told.source) == ((512, 256, -512), APPROXIMATE)
    assert told.time_ns > 0
    other = Costs().of(row(), 300, GPU)  # the rule's events leave 256 bytes
    assert (other.events, other.source) == ((), NONE)
    view = Costs().of(row(flags=VIEW), 0, CPU)
    assert (view.events, view.source, view.time_ns) == ((), "", 0)


def test_measured_comes_before_rules_unless_it_leaves_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_cost, "approximate_events", lambda *_: (1024, 256, -1024))
    signature = row(batch=4).signature
    assert signature is not None
    known = Cost(time_ns=7, events=(40, 256, -40), source=MEASURED)  # batch b leaves 64 b bytes
    costs = Costs(measured={signature: known})
    assert costs.of(row(batch=4), 256, CPU) == known
    assert costs.of(row(batch=4), 260, CPU).source == NONE  # neither leaves that
    told = costs.of(row("aten.addmm.default"), 256, CPU)
    assert (told.events, told.source) == ((1024, 256, -1024), APPROXIMATE)


def test_a_trace_counts_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_cost, "approximate_events", lambda *_: None)
    trace = recorded(load_spec(small_nets.spec("mlp"))).trace
    computing = sum(1 for f in trace.ops.flags if not f & VIEW)
    assert trace.meta.workspace == {NONE: computing}
