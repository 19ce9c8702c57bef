"""What an op costs in a trace that is not measured: which source is asked first, and when it is not believed."""

from __future__ import annotations

from dataclasses import replace

from tests.torch import small_nets
from tests.torch.steps import recorded
from tracer.costs.cost import HOST_NS, MEASURED, NONE, Cost, costs_of
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
    assert costs_of([row()], [256], CPU, measured) == [known]
    other = [row(), replace(row(), name="addmm"), row(flags=VIEW)]
    changed, told, view = costs_of(other, [260, 256, 0], CPU, measured)
    assert changed.source == NONE
    assert (told.events, told.source) == ((), NONE)
    assert told.time_ns > 0
    assert (view.events, view.source, view.time_ns) == ((), "", 0)


def test_a_step_takes_as_long_as_the_host_needs_for_its_ops() -> None:
    gpu, large = device("h200"), replace(row(), bytes_moved=480_000_000)
    small = [c.time_ns for c in costs_of([row(), row(flags=VIEW), large, *[row()] * 8], [0] * 11, gpu)]
    assert 9.9 * HOST_NS < sum(small) <= 10 * HOST_NS
    assert small[1] == 0 < 6 * small[0] < small[2]
    assert [c.time_ns for c in costs_of([large, row()], [0, 0], gpu)] == [129_000, 4_000]


def test_a_trace_counts_its_sources() -> None:
    trace = recorded(load_spec(small_nets.spec("mlp"))).trace
    computing = sum(1 for f in trace.ops.flags if not f & VIEW)
    assert trace.meta.workspace == {NONE: computing}
