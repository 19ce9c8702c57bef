"""What was rehearsed passes nowhere for what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from executor.campaign.cases import Case, Step
from executor.campaign.page import write_campaign
from executor.campaign.record import Book, Record
from executor.cli.main import execute
from executor.plans import Settings, measure_sweep
from traces.errors import SpecError, TraceError
from traces.provenance import ABSENT, MEASURED_CPU, MEASURED_CUDA, NAME, REHEARSED, provenance_of
from traces.records.device_profile import DeviceProfile, Identity
from traces.records.measurement import Measurement, RunFigures

MEMORY = RunFigures(peak_allocated_bytes=5, peak_block_bytes=6, peak_reserved_bytes=7)
TIMED = replace(MEMORY, step_time_ns=1)
GPU, ABSENT_GPU = {"gpu": "NVIDIA H200"}, {"gpu": f"H200{ABSENT}"}


def measurement(**more: Any) -> Measurement:
    given: dict[str, Any] = {"provenance": REHEARSED, "environment": ABSENT_GPU, "measured": MEMORY}
    return Measurement(
        model="m", options={}, planner="p", budget_bytes=9, fingerprint="f", device="cuda",
        predicted=TIMED, keep_all_predicted=TIMED, keep_all=MEMORY, eager=MEMORY, **{**given, **more},
    )  # fmt: skip


def record(**more: Any) -> Record:
    given: dict[str, Any] = {
        "status": "rehearsed", "provenance": REHEARSED, "environment": ABSENT_GPU, "measured": MEMORY,
    }  # fmt: skip
    return Record(case=Case(step=Step(model="m"), planner="search"), key="k", **{**given, **more})


def test_a_rehearsal_is_known_by_the_gpu_s_name_and_before_that_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    assert provenance_of("cpu") == MEASURED_CPU
    assert provenance_of("cuda:0") == provenance_of("cuda", "NVIDIA H200") == MEASURED_CUDA
    assert provenance_of("cuda", f"H200{ABSENT}") == REHEARSED
    monkeypatch.setenv(NAME, f"H200{ABSENT}")
    assert (provenance_of("cpu"), provenance_of("cuda")) == (MEASURED_CPU, REHEARSED)


@pytest.mark.parametrize("make", [measurement, record])
@pytest.mark.parametrize("more", [
    {"provenance": MEASURED_CUDA},
    {"environment": GPU},
    {"measured": TIMED},
    {"keep_all": replace(MEMORY, times_ns=(1, 2))},
    {"verified": True},
])  # fmt: skip
def test_figures_of_a_gpu_that_is_not_there_are_memory_alone(
    make: Callable[..., Any], more: dict[str, Any]
) -> None:
    assert make().measured.step_time_ns is None
    if make is measurement and "keep_all" in more:
        more = {"measured": more["keep_all"]}
    with pytest.raises(ValueError, match=r"provenance|not there"):
        make(**more)


def test_a_case_s_status_says_it_too() -> None:
    with pytest.raises(ValueError, match="status"):
        record(status="measured")
    with pytest.raises(ValueError, match="status"):
        record(provenance=MEASURED_CUDA, environment=GPU)


def test_a_device_profile_takes_nothing_of_it() -> None:
    identity = Identity(device=f"H200{ABSENT}", kind="cuda", target="H200", torch_version="2.15.0", flags={})
    with pytest.raises(TraceError, match="not there"):
        DeviceProfile(identity=identity).validate()


def test_pages_and_sweeps_take_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from executor.campaign.cases import Method

    book = Book(name="b", asked=1, method=Method(device="cuda"), records=(record(),))
    with pytest.raises(SpecError, match="rehearsed"):
        write_campaign(tmp_path / "x.html", book)
    monkeypatch.setenv(NAME, f"H200{ABSENT}")
    with pytest.raises(SpecError, match="not there"):
        measure_sweep(tmp_path, Settings(device="cuda"), print)
    for words in (["plan.json"], ["campaign", "cpu"]):
        done = CliRunner().invoke(execute, [*words, "--report", str(tmp_path / "x.html")])
        assert done.exit_code == 2
        assert "not there" in done.output


def test_a_command_on_the_null_driver_takes_its_own_options() -> None:
    done = CliRunner().invoke(execute, ["rehearse", "--gpu", "h100", "--json", "--", "execute", "plan.json"])
    assert done.exit_code == 2
    assert "so --json must follow" in done.output
