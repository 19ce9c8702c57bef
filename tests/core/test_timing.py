"""Steps are timed to the end of what the device has to do; other threads than the trace's are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

import executor.measuring as measuring
from executor.measuring import PLAN, Job
from executor.plans import other_threads
from traces.records.measurement import RunFigures, slowdown_percent
from traces.records.trace import TraceMeta


class Clock:
    """A machine whose time stands still but in steps and while it finishes what they left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns, self.queued_ns, self.steps = 1_000, 0, 0
        monkeypatch.setattr(measuring.time, "perf_counter_ns", lambda: self.now_ns)

    def step(self) -> bool:
        self.now_ns += 5
        self.queued_ns += 70
        self.steps += 1
        return True

    def wait(self) -> None:
        self.now_ns += self.queued_ns
        self.queued_ns = 0


@pytest.mark.parametrize("beside", [(), (75, 75)])
def test_what_the_device_still_has_to_do_belongs_to_the_step(
    monkeypatch: pytest.MonkeyPatch, beside: tuple[int, ...]
) -> None:
    clock, start = Clock(monkeypatch), RunFigures(peak_allocated_bytes=7)
    job = Job(variant=PLAN, plan_path="", warmup=1, runs=2, beside=bool(beside))
    figures = measuring._with_times(start, clock.step, lambda: clock.step, job, clock.wait)
    assert figures == replace(start, step_time_ns=75, times_ns=(75, 75), keep_all_times_ns=beside)
    assert clock.steps == (6 if beside else 3)


@pytest.mark.parametrize(("plan", "keep_all", "percent"), [(3, 2, 50.0), (3, None, None), (None, 2, None)])
def test_a_measured_slow_down(plan: int | None, keep_all: int | None, percent: float | None) -> None:
    figures = [RunFigures(step_time_ns=ns) for ns in (plan, keep_all)]
    assert slowdown_percent(*figures) == percent
    in_turns = RunFigures(step_time_ns=9, times_ns=(5, 9, 90), keep_all_times_ns=(5, 9, 30))
    assert slowdown_percent(in_turns, figures[1]) == 0.0  # two of three pairs say so


@pytest.mark.parametrize(
    ("meta", "now", "told"),
    [
        (TraceMeta(model="m", mode="real", threads=2), {"threads": "1"}, True),
        (TraceMeta(model="m", mode="real", threads=2), {"threads": "2"}, False),
        (
            TraceMeta(model="m", mode="real", threads=0),
            {"threads": "2"},
            False,
        ),  # an older trace does not say
        (TraceMeta(model="m", mode="real", threads=2), {}, False),
        (TraceMeta(model="m", mode="real", device="cuda", threads=2), {"threads": "1"}, False),
    ],
)
def test_other_threads_than_the_trace_s_are_told(meta: TraceMeta, now: dict[str, str], told: bool) -> None:
    text = other_threads(meta, now)
    assert bool(text) == told
    assert not told or ("measured with 2 threads" in text and "OMP_NUM_THREADS=2" in text)
