"""What an op costs in a trace that is not measured: which source is asked first, and when it is not believed."""

from __future__ import annotations

from dataclasses import replace

from tests.torch import small_nets
from tests.torch.steps import recorded
from tracer.costs.cost import MEASURED, NONE, Cost, cost_of
from tracer.costs.rows import OpRow
from tracer.step.step import load_spec
from traces.devices import device
from traces.records.trace import FORWARD, VIEW

CPU = device("cpu")


def row(flags: int = 0) -> OpRow:
    return OpRow(name="mm", target="aten.mm.default", phase=FORWARD, flags=flags)


def test_measured_events_count_unless_they_leave_other_bytes() -> None:
    known = Cost(time_ns=7, events=(40, 256, -40), source=MEASURED)
    measured = {"mm": known}
    assert cost_of(row(), 256, CPU, measured) == known
    assert cost_of(row(), 260, CPU, measured).source == NONE
    told = cost_of(replace(row(), name="addmm"), 256, CPU, measured)
    assert (told.events, told.source) == ((), NONE)
    assert told.time_ns > 0
    view = cost_of(row(flags=VIEW), 0, CPU)
    assert (view.events, view.source, view.time_ns) == ((), "", 0)


def test_a_trace_counts_its_sources() -> None:
    trace = recorded(load_spec(small_nets.spec("mlp"))).trace
    computing = sum(1 for f in trace.ops.flags if not f & VIEW)
    assert trace.meta.workspace == {NONE: computing}
