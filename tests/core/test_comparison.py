"""What a plan is compared with is replayed once, and a plan that was just made is not replayed again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.allocator.device import Setting
from simulator.core import replay as engine
from simulator.core.problem import Problem
from simulator.core.replay import run
from simulator.core.schedule import build
from simulator.prediction.ask import ask
from simulator.prediction.question import Question
from simulator.prediction.step import predict
from tests.tiny import chain
from traces.records.plan import Action


def test_replays_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of = chain(8)
    built: list[tuple[Action, ...]] = []

    def counted(trace, actions=(), graph=None):  # type: ignore[no-untyped-def]
        built.append(tuple(actions))
        return build(problem, actions)

    monkeypatch.setattr(engine, "build", counted)
    problem = Problem(of)
    kept = predict(problem, Setting())
    c = ask(problem, Question(budget="70%", planner="mu-two")).planned
    assert c.plan.actions
    assert sorted(len(actions) for actions in built) == [0, len(c.plan.actions)]
    # And they are what anybody else would make.
    assert c.saved.schedule == kept.saved.schedule == kept.planned.schedule == build(problem, ())
    assert c.planned.schedule == build(problem, c.plan.actions)
    assert c.saved.timeline == run(problem, c.saved.schedule)
    assert c.planned.timeline == run(problem, c.planned.schedule)


def test_another_plan_is_replayed_for_itself() -> None:
    of = chain(8)
    c = ask(Problem(of), Question(budget="70%", planner="mu-two")).planned
    fewer = replace(c.plan, actions=c.plan.actions[:1])
    assert predict(Problem(of), Setting(), fewer).planned.schedule == build(Problem(of), fewer.actions)
    assert predict(Problem(of), Setting(), replace(c.plan, actions=())).planned.schedule == build(Problem(of))
    other = chain(8)  # equal, but another trace: nothing is taken over
    assert predict(Problem(other), Setting(), c.plan).planned == c.planned
