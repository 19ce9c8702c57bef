"""What an op costs in a trace that is not measured: which source is asked first, and when it is not believed."""

from __future__ import annotations

from tests.torch import small_nets
from tests.torch.steps import recorded
from tracer.costs.cost import MEASURED, NONE, Cost, Costs
from tracer.costs.rows import OpRow
from tracer.step.step import load_spec
from traces.devices import device
from traces.records.trace import FORWARD, VIEW

CPU = device("cpu")


def row(target: str = "aten.mm.default", batch: int = 4, *, flags: int = 0) -> OpRow:
    """x[batch, 8] @ w[8, 16] -> [batch, 16]: leaves batch * 64 bytes."""
    return OpRow(name="mm", target=target, phase=FORWARD, flags=flags, signature=(target, batch))


def test_measured_events_count_unless_they_leave_other_bytes() -> None:
    signature = row(batch=4).signature
    assert signature is not None
    known = Cost(time_ns=7, events=(40, 256, -40), source=MEASURED)  # batch b leaves 64 b bytes
    costs = Costs(measured={signature: known})
    assert costs.of(row(batch=4), 256, CPU) == known
    assert costs.of(row(batch=4), 260, CPU).source == NONE
    told = costs.of(row("aten.addmm.default"), 256, CPU)
    assert (told.events, told.source) == ((), NONE)
    assert told.time_ns > 0
    view = Costs().of(row(flags=VIEW), 0, CPU)
    assert (view.events, view.source, view.time_ns) == ((), "", 0)


def test_a_trace_counts_its_sources() -> None:
    trace = recorded(load_spec(small_nets.spec("mlp"))).trace
    computing = sum(1 for f in trace.ops.flags if not f & VIEW)
    assert trace.meta.workspace == {NONE: computing}
