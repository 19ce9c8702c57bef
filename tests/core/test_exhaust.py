"""The definitions that the exhaustive search goes by, worked out on their own, and the simulator say the same."""

from __future__ import annotations

import ast
from pathlib import Path

from hypothesis import given, settings

from simulator.core.problem import Problem, run
from simulator.core.schedule import build
from tests import exhaust
from tests.strategies import traces, traces_with_actions
from traces.errors import PlanError
from traces.records.plan import RECOMPUTE, Action
from traces.records.trace import Trace


def test_it_shares_no_code_with_what_it_checks() -> None:
    tree = ast.parse(Path(exhaust.__file__).read_text(encoding="utf-8"))
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    own = {
        m
        for m in imported
        if m and m.partition(".")[0] in ("traces", "simulator", "tracer", "executor", "tests")
    }
    assert own == {"tests.tiny", "traces.records.plan", "traces.records.trace"}


@settings(max_examples=200)
@given(case=traces_with_actions())
def test_the_simulator_does_what_a_plan_is_defined_to_do(case: tuple[Trace, tuple[Action, ...]]) -> None:
    of, actions = case
    try:
        schedule = build(Problem(of), actions)
    except PlanError:
        schedule = None
    try:
        walked = exhaust.walk(of, actions)
    except exhaust.Impossible:
        walked = None
    assert (schedule is None) == (walked is None)
    if schedule is None or walked is None:
        return
    assert (list(schedule.op), list(schedule.recompute)) == (walked.op, walked.again)
    assert [sorted(b) for b in schedule.binds] == walked.born
    timeline = run(Problem(of), schedule)
    assert (timeline.peak_allocated_bytes, timeline.step_time_ns) == exhaust.peak_and_time(of, walked)
    assert schedule.forward_steps == walked.forward_steps
    found = exhaust.step_by_step(of, walked)
    assert (list(timeline.peak_bytes), list(timeline.live_bytes)) == (found.peaks, found.live)


@settings(max_examples=200)
@given(of=traces())
def test_the_simulator_offers_every_choice_that_there_is(of: Trace) -> None:
    wanted = {
        mine[0].storage
        for options in exhaust.choices(of, drops=0)
        if (mine := [a for a in options if a is not None and a.recipe == RECOMPUTE and not a.retain])
    }
    assert set(Problem(of).candidates) == wanted
    for options in exhaust.choices(of, drops=0):
        for action in options:
            build(Problem(of), [] if action is None else [action])
