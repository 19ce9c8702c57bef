"""What a plan hands from forward to backward is no less than the bound says, whatever the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from simulator.core.problem import Problem
from tests.bench.saved_bytes import fewest, handed_bytes, least_bytes, main
from tests.exhaust import draw_trace, plans
from tests.synthetic import resnet
from traces.records.store import save

MOST_PLANS = 400


def test_no_plan_hands_over_less_than_the_bound_and_the_plan_made_is_near() -> None:
    """By every plan of drawn steps: fewer bytes than the bound at a plan's own time would be a wrong bound."""
    compared = tight = 0
    for seed in range(40):
        problem = Problem(draw_trace(seed))
        every = plans(problem.trace, drops=0, most=MOST_PLANS)
        if every is None:
            continue
        for actions in every:
            replay = problem.replay(actions)
            added_ns = replay.timeline.step_time_ns - problem.trace.time_ns
            nbytes, least = handed_bytes(problem, actions), least_bytes(problem, added_ns)
            assert nbytes >= least, (seed, actions)
            compared += 1
            tight += nbytes == least
    assert compared > 500
    assert tight > 50


@pytest.mark.parametrize("percent", [1, 5])
def test_the_plan_made_keeps_its_limit_and_is_near_the_bound(percent: int) -> None:
    problem = Problem(resnet((1, 1, 1, 1), batch=8, side=64))
    most_ns = problem.trace.time_ns * percent // 100
    found = fewest(problem, most_ns)
    assert found.plan_added_ns <= most_ns
    assert found.least_bytes <= found.plan_bytes < found.saved_bytes == handed_bytes(problem)
    assert found.plan_bytes - found.least_bytes < found.saved_bytes // 20


def test_the_command_says_what_is_saved_and_what_cannot_be(tmp_path: Path) -> None:
    path = str(save(resnet((1, 1, 1, 1), batch=8, side=64), tmp_path / "small"))
    said = CliRunner().invoke(main, [path, "--most", "2", "--json"])
    row = json.loads(said.stdout)[path]
    assert row["least_percent"] <= row["plan_percent"] < 0 <= row["plan_added_percent"] <= 2
    words = CliRunner().invoke(main, [path, "--most", "2"]).stdout
    assert f"{row['plan_percent']:+.1f} % at" in words
