"""Measuring a sweep: rows are kept, devices are not mixed, and what did not verify is no row's figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from executor import plans
from executor.matching import times_apply
from executor.plans import Settings
from simulator.studies.sweep import Sweep
from tests.core.test_report import sweep_row
from traces.errors import TraceError
from traces.records.measurement import Measurement, RunFigures
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
    return tmp_path


@pytest.fixture
def run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measure the sweep; every plan comes out as the test says, and the plans that ran are told."""

    def go(outcome: dict[str, Measurement], device: str = "cpu") -> tuple[plans.MeasuredSweep, list[str]]:
        ran: list[str] = []

        def measure(path: Path, settings: Settings, progress: object) -> object:
            ran.append(path.name)
            return SimpleNamespace(measurement=outcome[path.name], first_difference="step 1: loss differs")

        monkeypatch.setattr(plans, "measure_plan", measure)
        return plans.measure_sweep(directory, Settings(device=device), lambda line: None), ran

    return go


def test_rows_are_measured_once(directory: Path, run: Any) -> None:
    both = {"plan-b2.json": MEASURED, "plan-b4.json": MEASURED}
    done, ran = run(both)
    assert ran == ["plan-b2.json", "plan-b4.json"]  # batch 8 has no plan
    assert (done.place, done.failures) == ("CPU", ())
    assert Sweep.load(directory / "sweep.json") == done.sweep
    assert [sorted(r.measured) for r in done.sweep.rows] == [["eager", "keep_all", "plan"]] * 2 + [[]]
    again, ran = run(both)
    assert ran == []
    assert again == done


def test_what_did_not_verify_is_tried_again_and_fails_again(directory: Path, run: Any) -> None:
    wrong = replace(MEASURED, verified=False)
    for _ in range(2):
        done, ran = run({"plan-b2.json": wrong, "plan-b4.json": MEASURED})
        assert "plan-b2.json" in ran
        assert done.failures == ("batch size 2: step 1: loss differs",)
        assert not done.sweep.rows[0].measured
    assert Measurement.load(directory / "measurement-b2.json").verified is False


def test_figures_of_two_devices_do_not_get_into_one_table(directory: Path, run: Any) -> None:
    run({"plan-b2.json": MEASURED, "plan-b4.json": replace(MEASURED, verified=False)})
    with pytest.raises(TraceError, match=r"rows of it were measured on CPU; measure on cuda here in another"):
        run({}, device="cuda")


def test_figures_of_two_gpus_do_not_get_into_one_table(directory: Path, run: Any) -> None:
    one = replace(MEASURED, provenance="measured-cuda", environment={"gpu": "NVIDIA H200"})
    two = replace(one, environment={"gpu": "NVIDIA H100"})
    assert one.place == "GPU (NVIDIA H200)"
    with pytest.raises(
        TraceError, match=r"were measured on GPU \(NVIDIA H200\); measure on cuda here in another"
    ):
        run({"plan-b2.json": one, "plan-b4.json": two}, device="cuda")
    kept = Sweep.load(directory / "sweep.json").rows
    assert [bool(r.measured) for r in kept] == [True, False, False]
    done, ran = run({"plan-b4.json": one}, device="cuda")
    assert (ran, done.place) == (["plan-b4.json"], "GPU (NVIDIA H200)")


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
