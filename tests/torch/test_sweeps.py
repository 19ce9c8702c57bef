"""Measuring a sweep: every plan of it, and what did not verify is no row's figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from executor import plans
from executor.matching import times_apply
from executor.plans import Settings
from simulator.studies.sweep import Sweep
from tests import tiny
from tests.core.test_report import sweep_row
from traces.records.measurement import Measurement, RunFigures
from traces.records.plan import Plan
from traces.records.trace import TraceMeta

MEASURED = Measurement(
    model="m", options={}, planner="p", budget_bytes=None, fingerprint="f", device="cpu", provenance="measured-cpu",
    environment={}, predicted=RunFigures(), measured=RunFigures(peak_allocated_bytes=5),
    keep_all_predicted=RunFigures(), keep_all=RunFigures(peak_allocated_bytes=7),
    eager=RunFigures(peak_allocated_bytes=8), verified=True,
)  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    rows = (sweep_row(2, plan_path="plan-b2.json"), sweep_row(4, plan_path="plan-b4.json"), sweep_row(8))
    Sweep(model="m", options={}, target="cpu", rows=rows).save(tmp_path / "sweep.json")
    for row in rows[:2]:
        Plan(meta=tiny.chain(2).meta).save(tmp_path / row.plan_path)
    return tmp_path


def test_every_plan_is_measured_and_a_wrong_one_has_no_figures(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(MEASURED, verified=False)
    told = {"plan-b2.json": MEASURED, "plan-b4.json": wrong}

    def measure(plan: Plan, path: Path, settings: Settings, progress: object) -> Measurement:
        return told[path.name]

    monkeypatch.setattr(plans, "measure_plan", measure)
    table, found = plans.measure_sweep(directory, Settings(), lambda line: None)
    assert [*found.values()] == [MEASURED, wrong]  # batch 8 has no plan
    assert Sweep.load(directory / "sweep.json") == table
    assert [sorted(r.measured) for r in table.rows] == [["eager", "keep_all", "plan"], [], []]


@pytest.mark.parametrize(
    ("mode", "target", "device", "gpu", "applies"),
    [
        ("real", "cpu", "cpu", "", True),
        ("fake", "cpu", "cpu", "", True),
        ("fake", "H200", "cpu", "", False),
        ("fake", "cpu", "cuda", "NVIDIA H200", False),
        ("fake", "H200", "cuda", "NVIDIA H200", True),
        ("fake", "H200", "cuda:1", "NVIDIA H200", True),
        ("fake", "H200", "cuda", "NVIDIA H100 80GB HBM3", False),
        ("real", "NVIDIA H200", "cuda", "NVIDIA H200", True),
        ("real", "NVIDIA A100-SXM4-80GB", "cuda", "NVIDIA H200", False),
    ],
)
def test_times_are_set_beside_those_of_the_same_device_alone(
    mode: str, target: str, device: str, gpu: str, applies: bool
) -> None:
    assert times_apply(TraceMeta(model="m", mode=mode, target=target), device, gpu) is applies
