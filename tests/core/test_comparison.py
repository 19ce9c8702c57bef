"""What a plan is compared with is replayed once, and a plan that was just made is not replayed again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.core import replay as engine
from simulator.core.problem import Problem
from simulator.core.replay import run
from simulator.core.schedule import build
from simulator.studies.planning import keep_all, planned
from simulator.studies.prediction import compare
from tests.tiny import chain
from traces.plan import Action


def test_replays_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of = chain(8)
    built: list[tuple[Action, ...]] = []

    def counted(trace, actions=(), graph=None):  # type: ignore[no-untyped-def]
        built.append(tuple(actions))
        return build(problem, actions)

    monkeypatch.setattr(engine, "build", counted)
    problem = Problem(of)
    kept = keep_all(problem, None)
    c = planned(problem, "mu-two", budget_bytes=kept.kept_timeline.peak_allocated_bytes * 7 // 10)
    assert c.plan.actions
    assert sorted(len(actions) for actions in built) == [0, len(c.plan.actions)]
    # And they are what anybody else would make.
    assert c.kept == kept.kept == kept.planned == build(problem, ())
    assert c.planned == build(problem, c.plan.actions)
    assert c.kept_timeline == run(problem, c.kept)
    assert c.planned_timeline == run(problem, c.planned)


def test_another_plan_is_replayed_for_itself() -> None:
    of = chain(8)
    peak_bytes = keep_all(Problem(of), None).kept_timeline.peak_allocated_bytes
    c = planned(Problem(of), "mu-two", budget_bytes=peak_bytes * 7 // 10)
    fewer = replace(c.plan, actions=c.plan.actions[:1])
    assert compare(Problem(of), fewer, None).planned == build(Problem(of), fewer.actions)
    assert compare(Problem(of), replace(c.plan, actions=()), None).planned == build(Problem(of))
    other = chain(8)  # equal, but another trace: nothing is taken over
    assert compare(Problem(other), c.plan, None).planned == c.planned
