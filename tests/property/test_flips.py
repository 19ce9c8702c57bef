"""What a flip makes of a plan, worked out from what differs, is what the whole evaluation of the flipped plan says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simulator.core.evaluator import Evaluator, State
from simulator.core.flips import IMPOSSIBLE, Flips
from tests.property.test_evaluator import draw_actions
from tests.strategies import traces, traces_with_actions
from tests.synthetic import ladder
from traces.errors import PlanError
from traces.plan import Action
from traces.store import load
from traces.trace import Trace


def flipped(evaluator: Evaluator, state: State, flips: list[int]) -> tuple[int, int]:
    """The whole evaluation."""
    state = state.copy()
    for s in flips:
        if s >= 0:
            state.there[s] ^= 1
        else:
            state.share[~s] ^= 1
    try:
        return evaluator.cost(state)
    except PlanError:
        return IMPOSSIBLE, IMPOSSIBLE


def check(evaluator: Evaluator, state: State, groups: list[list[int]]) -> Flips:
    flips = Flips(evaluator, state)
    assert (flips.peak_bytes, flips.time_ns) == evaluator.cost(state)
    for _ in range(2):  # a try leaves nothing behind
        costs = flips.groups(groups)
        found = list(zip(costs.peak_bytes.tolist(), costs.time_ns.tolist(), strict=True))
        assert found == [flipped(evaluator, state, g) for g in groups]
    return flips


@settings(max_examples=200, deadline=None)
@given(case=traces_with_actions())
def test_every_flip_of_any_plan(case: tuple[Trace, tuple[Action, ...]]) -> None:
    of, actions = case
    evaluator = Evaluator(of)
    state = evaluator.state(actions)
    state.drops = {}
    groups = [[f] for s in evaluator.made_forward for f in (s, ~s)]
    check(evaluator, state, groups)


@settings(max_examples=200, deadline=None)
@given(case=traces_with_actions(reruns=True))
def test_every_flip_where_libraries_keep_bytes_because_of_reruns(
    case: tuple[Trace, tuple[Action, ...]],
) -> None:
    """A flip may be the first or take away the last rerun of an op that makes a library keep them."""
    of, actions = case
    evaluator = Evaluator(of)
    state = evaluator.state(actions)
    state.drops = {}
    check(evaluator, state, [[f] for s in evaluator.made_forward for f in (s, ~s)])


@settings(max_examples=150, deadline=None)
@given(case=traces_with_actions(), data=st.data())
def test_flips_made_together(case: tuple[Trace, tuple[Action, ...]], data: st.DataObject) -> None:
    """With the plan's drops where it has some: then each try is a whole evaluation."""
    of, actions = case
    evaluator = Evaluator(of)
    assume(evaluator.made_forward)
    storages = st.sampled_from([f for s in evaluator.made_forward for f in (s, ~s)])
    groups = data.draw(st.lists(st.lists(storages, max_size=4, unique=True), max_size=6))
    check(evaluator, evaluator.state(actions), groups)


@settings(max_examples=150, deadline=None)
@given(of=traces(max_forward=14, max_backward=12), seed=st.integers(0, 99))
def test_flips_of_states_that_no_action_makes(of: Trace, seed: int) -> None:
    """Kept or not at random, also what is no candidate: some need an op that may not run again."""
    evaluator = Evaluator(of)
    draw = random.Random(seed)
    state = evaluator.state()
    for s in evaluator.made_forward:
        state.there[s] = draw.random() < 0.6
        state.share[s] = draw.random() < 0.6
    try:
        evaluator.cost(state)
    except PlanError:
        with pytest.raises(PlanError):
            Flips(evaluator, state)
        return
    check(evaluator, state, [[f] for s in evaluator.made_forward for f in (s, ~s)])


@pytest.mark.parametrize("name", ["resnet152", "bert-base", "bert-base-cpu/trace-b16"])
def test_flips_on_the_gallery(name: str) -> None:
    evaluator = Evaluator(load(name))
    draw = random.Random(name)
    given_up = tried = 0
    for _ in range(10):
        state = evaluator.state(draw_actions(draw, evaluator.trace, evaluator.graph))
        state.drops = {}
        candidates = evaluator.graph.candidates
        groups = [[s] for s in draw.sample(candidates, 40)] + [[~s] for s in draw.sample(candidates, 20)]
        groups += [draw.sample(candidates, draw.randrange(2, 9)) for _ in range(20)]
        given_up += check(evaluator, state, groups).given_up
        tried += 2 * len(groups)
    assert given_up < tried / 2  # or nothing was gained


def test_a_walk_of_flips_ends_where_the_whole_evaluation_is() -> None:
    """Moving on from plan to plan, with one evaluator's work space used throughout."""
    evaluator = Evaluator(ladder(60, seed=3))
    draw = random.Random(1)
    state = evaluator.state()
    state.share[list(evaluator.graph.candidates)] = 1
    first = Flips(evaluator, state)
    before = first.each(evaluator.graph.candidates)
    for _ in range(60):
        flips = Flips(evaluator, state)
        s = draw.choice(evaluator.graph.candidates)
        costs = flips.each([s])
        state.there[s] ^= 1
        assert evaluator.cost(state) == (costs.peak_bytes[0], costs.time_ns[0])
    after = first.each(evaluator.graph.candidates)
    assert np.array_equal(before.peak_bytes, after.peak_bytes)
    assert np.array_equal(before.time_ns, after.time_ns)
