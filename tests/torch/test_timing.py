"""Where a step that keeps everything does not fit, the plan is timed alone."""

from __future__ import annotations

import pytest

import executor.measuring as measuring
from tests.core.test_timing import Clock, job, ready
from traces.records.measurement import RunFigures, measured_slowdown_percent


def test_where_keep_all_does_not_fit_the_plan_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def too_large() -> bool:
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
        )

    figures = measuring._with_times(RunFigures(), ready(clock, lambda: too_large), job(), lambda: None)
    assert figures == RunFigures(step_time_ns=30, times_ns=(30,) * 3)
    assert measured_slowdown_percent(figures, RunFigures()) is None
