"""What a plan is compared with is replayed once, and a plan that was just made is not replayed again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.core import replay as engine
from simulator.core.graph import analyse
from simulator.core.replay import run
from simulator.core.schedule import build
from simulator.planners import outcome
from simulator.studies.planning import keep_all, planned
from simulator.studies.prediction import compare
from tests.tiny import chain
from traces.plan import Action


def test_replays_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of = chain(8)
    built: list[tuple[Action, ...]] = []

    def counted(trace, actions=(), graph=None):  # type: ignore[no-untyped-def]
        built.append(tuple(actions))
        return build(trace, actions, graph)

    for module in (engine, outcome):
        monkeypatch.setattr(module, "build", counted)
    kept = keep_all(of, None)
    c = planned(of, "mu-two", budget_bytes=kept.kept_timeline.peak_allocated_bytes * 7 // 10)
    assert c.plan.actions
    assert sorted(len(actions) for actions in built) == [0, len(c.plan.actions)]
    # And they are what anybody else would make.
    graph = analyse(of)
    assert c.kept == kept.kept == kept.planned == build(of, (), graph)
    assert c.planned == build(of, c.plan.actions, graph)
    assert c.kept_timeline == run(of, c.kept, graph)
    assert c.planned_timeline == run(of, c.planned, graph)


def test_another_plan_is_replayed_for_itself() -> None:
    of = chain(8)
    peak_bytes = keep_all(of, None).kept_timeline.peak_allocated_bytes
    c = planned(of, "mu-two", budget_bytes=peak_bytes * 7 // 10)
    fewer = replace(c.plan, actions=c.plan.actions[:1])
    assert compare(of, fewer, None).planned == build(of, fewer.actions)
    assert compare(of, replace(c.plan, actions=()), None).planned == build(of)
    other = chain(8)  # equal, but another trace: nothing is taken over
    assert compare(other, c.plan, None).planned == c.planned
