"""torch's own tools open the snapshots that a simulation writes."""

from __future__ import annotations

import pytest

from simulator.history.export import snapshot_of
from simulator.prediction.ask import simulate

memory_viz = pytest.importorskip("torch.cuda._memory_viz")


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_memory_viz_opens_an_exported_step(conf: str) -> None:
    c = simulate("resnet152", alloc_conf=conf)
    data = snapshot_of(c)
    text = memory_viz.segsum(data)  # which asserts that the segments' sums are right
    reserved = sum(s["total_size"] for s in data["segments"])
    assert f"total_reserved: {memory_viz.Bytes(reserved)}" in text
    assert "cudaMalloc" in memory_viz.trace(data) or conf
    for plot in (memory_viz.trace_plot, memory_viz.segment_plot):
        assert "MemoryViz" in plot(data)
