"""Plans on disk: they come back as they were, and what is no plan is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.strategies import traces_with_actions
from tests.tiny import chain
from traces.errors import PlanError
from traces.records.plan import SAVE, Action, Plan, label_actions
from traces.records.trace import Trace

SMALL = Plan(
    meta=chain(2).meta,
    actions=(Action(storage=1, retain=False, evict_after=(4,)), Action(storage=2, recipe=SAVE)),
    planner="mu-two",
    budget_bytes=7,
    predicted={"plan": {"peak_allocated_bytes": 6}},
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=traces_with_actions())
def test_a_plan_comes_back_as_it_was(case: tuple[Trace, tuple[Action, ...]], tmp_path: Path) -> None:
    of, actions = case
    plan = Plan(meta=of.meta, actions=label_actions(of, actions), planner="p", budget_bytes=None)
    assert Plan.load(plan.save(tmp_path / "p.json")) == plan


def test_labels_come_from_the_trace_in_storage_order() -> None:
    of = chain(2)
    first, second = label_actions(of, [Action(storage=2), Action(storage=1)])
    assert (first.storage, first.op, first.nbytes) == (1, "x0", 4)
    assert (second.storage, second.op) == (2, "x1")


def changed(**values: Any) -> dict[str, Any]:
    return {**SMALL.to_json(), **values}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "holds no plan"),
        ({}, "holds no plan"),
        (changed(record="measurement"), "holds no plan"),
        (changed(plan_version=99), "plan version 99"),
        (changed(actions=[{"storage": 1, "recipe": 7}]), "malformed plan"),
        (changed(actions=[{"recipe": "recompute"}]), "malformed plan"),
        (changed(actions=[7]), "malformed plan"),
        (changed(actions=None), "malformed plan"),
        (changed(budget_bytes="much"), "malformed plan"),
        (changed(trace={}), "malformed plan"),
        (changed(trace=None), "malformed plan"),
        ({k: v for k, v in SMALL.to_json().items() if k != "planner"}, "malformed plan"),
    ],
)
def test_what_is_no_plan(tmp_path: Path, data: object, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "edit", [{"actions": ()}, {"budget_bytes": 7}, {"exactness": "fp"}], ids=lambda edit: next(iter(edit))
)
def test_a_seal_breaks_with_what_the_plan_promises(edit: dict[str, Any]) -> None:
    plan = Plan(
        meta=chain(2).meta, actions=(Action(storage=1),), predicted={"plan": {"step_time_ns": 3}}
    ).sealed()
    plan.check_seal("plan.json")
    with pytest.raises(PlanError, match="was changed after"):
        replace(plan, **edit).check_seal("plan.json")
