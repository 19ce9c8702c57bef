"""Bytes and time at every step, by hand and against the oracle."""

from __future__ import annotations

from hypothesis import given

from simulator.bounds import Instants
from simulator.core.evaluator import Evaluator
from simulator.core.problem import Problem, by_category, holdings, peak_by_category, run
from simulator.core.schedule import build
from tests.strategies import traces_with_actions
from tests.tiny import bwd, fwd, trace
from traces.records.plan import Action
from traces.records.trace import GRADIENT, OPTIMIZER_STATE, Trace


def peaks(of: Trace, *actions: Action) -> list[int]:
    return list(Problem(of).replay(actions).timeline.peak_bytes)


def test_workspace_counts_while_the_op_runs_and_never_below_its_outputs() -> None:
    # 30 of scratch, then the output of 10, then the scratch goes: 40 at most
    of = trace([fwd({"x": 10}, "w", events=(30, 10, -30)), bwd({"g": 4}, "x", events=(4,))], {"w": 0})
    assert peaks(of) == [40, 14]
    assert Problem(of).transient_bytes == (40, 4)


def test_views_run_again_cost_no_time_and_are_not_counted() -> None:
    ops = [fwd({"x": 4}, "w", time_ns=5), fwd({}, "x", view="v", time_ns=2), bwd({"g": 4}, "v", time_ns=1)]
    of = trace(ops, {"w": 4})
    timeline = Problem(of).replay([Action(storage=1)]).timeline
    assert timeline.step_time_ns == 5 + 2 + 1 + 5
    assert timeline.recomputed_ops == 1


def test_breakdown_names_categories_and_the_workspace_of_the_running_op() -> None:
    of = trace(
        [fwd({"x": 10}, "w", "m"), bwd({"g": 7}, "x", events=(9, 7, -9))],
        {"w": 100, "m": 50},
        categories={"g": GRADIENT, "m": OPTIMIZER_STATE},
    )
    schedule = build(Problem(of))
    timeline = run(Problem(of), schedule)
    assert timeline.peak_allocated_bytes == 100 + 50 + 10 + 16
    parts = {c: n for c, n in peak_by_category(of, schedule, timeline).items() if n}
    assert parts == {"parameter": 100, "optimizer state": 50, "activation": 10, "gradient": 7, "workspace": 9}
    assert [of.storages.name[s] for s in holdings(of, schedule, 1)] == ["w", "m", "x", "g"]


def test_an_empty_step_peaks_at_what_is_resident() -> None:
    of = trace([], {"w": 12})
    timeline = Problem(of).saved.timeline
    assert (timeline.peak_allocated_bytes, timeline.peak_step, timeline.step_time_ns) == (12, -1, 0)
    assert (evaluator := Evaluator(Problem(of))).cost(evaluator.state()) == (12, 0)
    assert Instants(Problem(of)).floor.peak_bytes == 12


def test_the_floor_counts_what_no_plan_can_release() -> None:
    # at g: w 100, x 10 (read now), g 7, and r 30, which is random and needed later; y 50 need not be there
    of = trace(
        [
            fwd({"r": 30}, "w", flags=1),
            fwd({"y": 50}, "w"),
            fwd({"x": 10}, "y"),
            bwd({"g": 7}, "x"),
            bwd({"h": 1}, "g", "r"),
            bwd({"k": 1}, "h", "y"),
        ],
        {"w": 100},
    )
    least = Instants(Problem(of)).floor
    # in forward x is made while y and r are there: 100 + 30 + 50 + 10 = 190
    assert (least.peak_bytes, least.op) == (190, 2)
    assert (least.resident_bytes, least.gradient_bytes, least.working_bytes) == (100, 30, 60)


@given(traces_with_actions())
def test_the_categories_sum_to_what_is_allocated(case: tuple[Trace, tuple[Action, ...]]) -> None:
    of, actions = case
    schedule = build(Problem(of), actions)
    timeline = run(Problem(of), schedule)
    running = list(by_category(of, schedule, timeline))
    assert [sum(now.values()) for now in running] == list(timeline.peak_bytes)
    assert min(n for now in running for n in now.values()) >= 0
    assert running[timeline.peak_step] == peak_by_category(of, schedule, timeline)


@given(traces_with_actions(rich=False))
def test_no_plan_goes_below_the_floor(case: tuple[Trace, tuple[Action, ...]]) -> None:
    of, actions = case
    timeline = Problem(of).replay(actions).timeline
    assert timeline.peak_allocated_bytes >= Instants(Problem(of)).floor.peak_bytes
    assert min(timeline.live_bytes) >= of.resident_bytes
    assert timeline.live_bytes[-1] == of.resident_bytes
    assert timeline.step_time_ns >= of.time_ns
