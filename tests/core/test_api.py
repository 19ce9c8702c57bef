"""The functions of the package `simulator` as a notebook uses them, with nothing of it beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator import compare, pareto, plan, simulate
from tests.commands import python
from tests.synthetic import resnet
from traces.errors import PlanError
from traces.records.store import save
from traces.records.trace import Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return resnet((1, 1, 1, 1), batch=32, side=64)


def test_simulate_takes_a_trace_in_hand_a_directory_or_a_name(trace: Trace, tmp_path: Path) -> None:
    step = simulate(trace)
    assert step.planned == step.saved
    assert step.saved.timeline.step_time_ns == trace.time_ns
    assert step.overhead_percent == 0
    directory = save(trace, tmp_path / "t")
    for place in (directory, str(directory)):
        assert simulate(place).saved_figures == step.saved_figures
    gallery = simulate("resnet152")
    assert gallery.saved_figures.peak_reserved_bytes is not None  # the trace of a GPU
    assert "reserved" in repr(gallery)


def test_a_plan_shows_itself_and_is_of_its_own_trace(trace: Trace) -> None:
    made = plan(trace, "80%")
    assert "<plan of search for tiny:" in repr(made)
    assert len(repr(made)) < 200
    assert simulate(trace, made).budget_bytes == made.budget_bytes
    with pytest.raises(PlanError):
        simulate("resnet152", made)


def test_devices_by_name_and_size(trace: Trace) -> None:
    peak = simulate(trace).saved.timeline.peak_allocated_bytes
    assert simulate(trace, device=peak).planned_fit.fits
    tight = simulate(trace, device=peak - 1)
    assert tight.planned_fit.fits is False
    assert tight.planned_fit.left_bytes is None
    assert simulate(trace).planned_fit.fits is None
    gpu = simulate("resnet152", device="a100-40", alloc_conf="expandable_segments:True")
    assert gpu.planned_fit.fits


def test_records_show_themselves(trace: Trace) -> None:
    step = simulate(trace, plan(trace, "80%", planner="mu-two"))
    assert "->" in repr(step)
    html = step._repr_html_()
    assert html.startswith("<div>")
    assert html.count("<polyline") == 3  # both runs and the budget
    assert "everything saved" in html
    assert len(html) < 60_000
    assert "<script" not in html
    front = pareto(trace, 3, planner="mu-two")
    assert "3 budgets" in repr(front)
    assert front._repr_html_().count("<polyline") == 2
    found = compare(trace, "80%", ["mu-two"])
    assert "mu-two" in found._repr_html_()
    assert len(repr(step)) < 400


def test_the_package_loads_nothing_until_it_is_asked() -> None:
    code = (
        "import sys, simulator; before = {'numpy', 'click', 'numba'} & set(sys.modules); "
        "simulator.simulate('resnet152'); heavy = {'torch', 'altair', 'pandas'} & set(sys.modules); "
        "print(sorted(before), sorted(heavy), sorted(set(simulator.__all__) - set(dir(simulator))))"
    )
    assert python("-c", code).stdout.strip() == "[] [] []"
    with pytest.raises(ImportError):
        exec("from simulator import nothing")
