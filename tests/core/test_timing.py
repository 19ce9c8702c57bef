"""Steps are timed alone or in turns; a slow-down is the median over pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import executor.measuring as measuring
from executor.measuring import PLAN, Job, timed
from executor.plans import other_threads
from traces.errors import PlanError
from traces.records.measurement import RunFigures, measured_slowdown_percent, slowdown_percent
from traces.records.trace import TraceMeta


class Clock:
    """A machine whose time stands still but in steps; it slows down with every step that it runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drift: int = 0) -> None:
        self.now_ns = 1_000
        self.drift = drift
        self.ran: list[str] = []
        self.waits = 0
        monkeypatch.setattr(measuring.time, "perf_counter_ns", lambda: self.now_ns)

    def step(self, name: str, takes_ns: int) -> Callable[[], bool]:
        def run() -> bool:
            self.now_ns += takes_ns * (100 + self.drift * len(self.ran)) // 100
            self.ran.append(name)
            return True

        return run

    def wait(self) -> None:
        self.waits += 1


def test_a_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert timed([clock.step("a", 40)], warmup=2, runs=3, wait=clock.wait) == [(40, 40, 40)]
    assert clock.ran == ["a"] * 5  # two warm up
    assert clock.waits == 6  # before and after each timed one


def test_what_the_device_still_has_to_do_belongs_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    queued = [0]

    def launch() -> bool:
        queued[0] += 70
        clock.now_ns += 5
        return True

    def wait() -> None:
        clock.now_ns += queued[0]
        queued[0] = 0

    assert timed([launch], warmup=1, runs=2, wait=wait) == [
        (75, 75)
    ]  # the warm-up's 70 are not the first one's


def test_steps_in_turns_alternate_who_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    turns = timed([clock.step("p", 30), clock.step("k", 20)], warmup=1, runs=3, wait=clock.wait)
    assert turns == [(30, 30, 30), (20, 20, 20)]
    assert "".join(clock.ran) == "pk" + "pk" + "kp" + "pk"


def test_pairs_cancel_the_drift_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine gets slower by 10 % of its first speed with every step; the plan costs 25 %."""
    clock = Clock(monkeypatch, drift=10)
    steps = [clock.step("p", 1_250), clock.step("k", 1_000)]
    first, second = timed(steps, warmup=0, runs=4, wait=clock.wait)
    # Step n takes 1 + n/10 times as long: p 0, k 1, k 2, p 3, p 4, k 5, k 6, p 7.
    assert first == (1_250, 1_625, 1_750, 2_125)
    assert second == (1_100, 1_200, 1_500, 1_600)
    plan = RunFigures(step_time_ns=1_687, times_ns=first, keep_all_times_ns=second)
    # Ratios 1.1364, 1.3542, 1.1667, 1.3281: the median is (1.1667 + 1.3281) / 2.
    assert measured_slowdown_percent(plan, RunFigures(step_time_ns=1_000)) == pytest.approx(24.74, abs=0.01)
    # One after the other, k first: its four steps take 1.15 on average, those of p 1.55.
    apart = slowdown_percent(RunFigures(step_time_ns=1_937), RunFigures(step_time_ns=1_150))
    assert apart == pytest.approx(68.4, abs=0.1)


@pytest.mark.parametrize(
    ("plan", "keep_all", "percent"),
    [
        (RunFigures(step_time_ns=3), RunFigures(step_time_ns=2), 50.0),
        (RunFigures(step_time_ns=3), RunFigures(), None),
        (RunFigures(), RunFigures(step_time_ns=2), None),
        # Two of three pairs say 0 %, whatever the other process measured.
        (
            RunFigures(step_time_ns=9, times_ns=(5, 9, 90), keep_all_times_ns=(5, 9, 30)),
            RunFigures(step_time_ns=1),
            0.0,
        ),
    ],
)
def test_a_measured_slow_down(plan: RunFigures, keep_all: RunFigures, percent: float | None) -> None:
    assert measured_slowdown_percent(plan, keep_all) == percent


def job(**changes: Any) -> Job:
    given: dict[str, Any] = {
        "variant": PLAN, "plan_path": "", "model": "", "device": "cpu",
        "memory_steps": 1, "warmup": 0, "runs": 3, "steps": 0,
    }  # fmt: skip
    return Job(**{**given, **changes})


def ready(clock: Clock, keep_all: Callable[[], Callable[[], bool]] | None) -> Any:
    return measuring._Ready(clock.step("p", 30), keep_all)


def test_a_plan_is_timed_in_turns_with_keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    start = RunFigures(peak_allocated_bytes=7)
    figures = measuring._with_times(start, ready(clock, lambda: clock.step("k", 20)), job(), lambda: None)
    assert figures == RunFigures(
        peak_allocated_bytes=7, step_time_ns=30, times_ns=(30,) * 3, keep_all_times_ns=(20,) * 3
    )


def test_eager_and_keep_all_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    figures = measuring._with_times(RunFigures(), ready(clock, None), job(), lambda: None)
    assert figures == RunFigures(step_time_ns=30, times_ns=(30,) * 3)
    assert clock.ran == ["p"] * 3


def test_an_error_of_keep_all_that_is_not_about_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> bool:
        raise PlanError("the plan was made for another graph")

    with pytest.raises(PlanError, match="another graph"):
        measuring._with_times(RunFigures(), ready(Clock(monkeypatch), lambda: refused), job(), lambda: None)


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
