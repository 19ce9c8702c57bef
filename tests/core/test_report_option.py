"""--report: whether the page can be written is found out before the work, and what was measured is not lost with it."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import executor.matching as matching
import executor.plans as plans
import executor.report as report
from executor.cli.main import execute
from tests import tiny
from traces.records.measurement import Measurement, RunFigures
from traces.records.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
NOTHING = "none-there"
FIGURES = RunFigures(peak_allocated_bytes=2, step_time_ns=3)


def call(command: Any, *words: object) -> Result:
    return CliRunner().invoke(command, [str(w) for w in words])


def test_a_page_that_cannot_be_made_is_named_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "page.html", tmp_path):
        result = call(execute, "run", NOTHING, "--report", path)
        assert result.exit_code == 2
        assert str(path) in result.stderr
        assert NOTHING not in result.stderr
    result = call(execute, "run", NOTHING, "-o", tmp_path / "file" / "measurement.json")
    assert NOTHING not in result.stderr
    assert "is not a directory" in result.stderr


def test_what_was_measured_is_printed_though_the_page_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(meta=tiny.chain(2).meta)
    measured = Measurement(
        model="m", options={}, planner="p", budget_bytes=None, fingerprint="f", device="cpu",
        provenance="measured-cpu", environment={}, predicted=FIGURES, measured=FIGURES,
        keep_all_predicted=FIGURES, keep_all=FIGURES, eager=FIGURES,
    )  # fmt: skip
    outcome = plans.Outcome(plan_path="plan.json", plan=plan, measurement=measured)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "page.html")

    plan.save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plans, "measure_plan", lambda *_: outcome)
    monkeypatch.setattr(matching, "trace_of", lambda *_: tiny.chain(2))
    monkeypatch.setattr(report, "write_measurement", full)
    result = call(execute, "run", "plan.json", "--json", "--report", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "No space left" in result.stderr
    assert json.loads(result.stdout)["measured"]["peak_allocated_bytes"] == 2
