"""What a plan means, step by step, on traces whose every step is worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.core.problem import Problem, run
from simulator.core.schedule import build
from tests.tiny import bwd, chain, fwd, storage, trace
from traces.errors import PlanError
from traces.records.plan import SAVE, Action
from traces.records.trace import COLLECTIVE, EAGER, EFFECT, MUTATES, RANDOM, Trace


def shown(of: Trace, *actions: Action) -> str:
    """The schedule as text: a recomputed op has a prime, what is bound again stands in brackets."""
    schedule = build(Problem(of), actions)
    words = []
    for op, again, binds in zip(schedule.op, schedule.recompute, schedule.binds, strict=True):
        word = of.ops.name[op] + ("'" if again else "")
        if again and binds:
            word += "[" + ",".join(of.storages.name[s] for s in binds) + "]"
        words.append(word)
    return " ".join(words)


def freed(of: Trace, *actions: Action) -> list[set[str]]:
    return [{of.storages.name[s] for s in f} for f in build(Problem(of), actions).frees]


def test_nothing_planned_runs_the_trace_as_it_is() -> None:
    of = chain(2)
    assert shown(of) == "x0 x1 x2 g2 g1 g0"
    # x2 is last read by g2, x1 and g2 by g1, and so on; nothing reads g0
    assert freed(of) == [set(), set(), set(), {"x2"}, {"x1", "g2"}, {"x0", "g1", "g0"}]


def test_a_recomputed_value_goes_after_forward_and_returns_just_before_its_reader() -> None:
    of = chain(2)
    action = Action(storage=storage(of, "x1"))
    assert shown(of, action) == "x0 x1 x2 g2 x1'[x1] g1 g0"
    # x1's forward instance dies with its last forward reader x2
    assert freed(of, action)[2] == {"x1"}
    assert "x1" in freed(of, action)[5]


def neighbours() -> Trace:
    """w 4 resident; a, b, c, d of 10 bytes, one made from the other in 5, 7, 11, 13 ns; backward reads dc, cb, ba."""
    forward = [
        fwd({name: 10}, before, time_ns=time_ns)
        for name, before, time_ns in zip("abcd", "wabc", (5, 7, 11, 13), strict=True)
    ]
    backward = [bwd({}, y, x, name=f"{y}{x}") for y, x in ("dc", "cb", "ba")]
    return trace([*forward, *backward], {"w": 4})


def test_a_saved_value_may_go_before_its_last_use_and_come_back() -> None:
    of = neighbours()
    a, b, c = (storage(of, n) for n in "abc")
    # Two values have room within 24 bytes. c and d are saved; c goes once dc has run, and is made again for cb.
    plan = (
        Action(storage=a, retain=False),
        Action(storage=b),
        Action(storage=c, recipe=SAVE, evict_after=(4,)),
    )
    assert shown(of, *plan) == "a b c d dc a'[a] b'[b] c'[c] cb a'[a] ba"
    # In forward a goes with b's op, b with c's. In backward c and d go with dc: 4 left. a and b are made, 24, and a
    # goes: 14; c beside b, 24. After cb only b is left, and a comes beside it.
    timeline = run(Problem(of), build(Problem(of), plan))
    assert timeline.peak_bytes == (14, 24, 24, 24, 24, 14, 24, 24, 24, 24, 24)
    assert timeline.live_bytes == (14, 14, 14, 24, 4, 14, 14, 24, 14, 24, 4)
    # a 5, b 7, c 11 for cb, and a 5 for ba: 28 more. Were c not to come back, d and c themselves would have to be made
    # again for dc (36), then a, b and c (23), then a and b (12): 71.
    assert timeline.step_time_ns - of.time_ns == 28
    everything = [Action(storage=storage(of, n), retain=False) for n in "abcd"]
    assert run(Problem(of), build(Problem(of), everything)).step_time_ns - of.time_ns == 36 + 23 + 12


def test_an_unsaved_value_does_not_stay_beyond_its_last_use_in_forward_for_a_rerun_there() -> None:
    of = trace(
        [
            fwd({"a": 4}, "w"),
            fwd({"b": 4}, "a"),
            fwd({"c": 4}, "b"),
            fwd({"d": 4}, "b", "c"),
            bwd({"g": 4}, "d", "a"),
        ],
        {"w": 4},
    )
    a, b = storage(of, "a"), storage(of, "b")
    # b is made again for d; its a went after b's own op, comes back for it, and goes once d has run, retained or not.
    for retain in (True, False):
        plan = [Action(storage=a, retain=retain), Action(storage=b, evict_after=(2,))]
        assert shown(of, *plan) == "a b c a'[a] b'[b] d a'[a] g"
    # Saved, a is simply there.
    assert shown(of, Action(storage=b, evict_after=(2,))) == "a b c b'[b] d g"


def test_an_eviction_in_forward_of_what_the_users_code_reads_is_refused() -> None:
    ops = [fwd({"x": 4}, "w"), fwd({"y": 4}, "x"), fwd({"l": 4}, "x", flags=EAGER), bwd({"g": 4}, "y", "x")]
    of = trace(ops, {"w": 4})
    x = storage(of, "x")
    with pytest.raises(PlanError, match="code outside the captured graph holds it beyond"):
        build(Problem(of), [Action(storage=x, evict_after=(1,))])
    assert shown(of, Action(storage=x, evict_after=(2,))) == "x y l x'[x] g"
    held = trace(ops[:2] + ops[3:], {"w": 4}, {"x": 1})
    with pytest.raises(PlanError, match="code outside the captured graph holds it beyond"):
        build(Problem(held), [Action(storage=x, recipe=SAVE, evict_after=(0,))])


@pytest.mark.parametrize("flag", [RANDOM, MUTATES, COLLECTIVE, EFFECT, EAGER])
def test_ops_that_may_not_run_twice_make_no_candidates(flag: int) -> None:
    of = trace([fwd({"x": 4}, "w", flags=flag), fwd({"y": 4}, "x"), bwd({"g": 4}, "x", "y")], {"w": 4})
    assert [of.storages.name[s] for s in Problem(of).candidates] == ["y"]
    with pytest.raises(PlanError, match=r"cannot be recomputed.*marked"):
        build(Problem(of), [Action(storage=storage(of, "x"))])


def test_a_value_that_hangs_on_a_random_one_which_is_not_kept_is_no_candidate() -> None:
    of = trace([fwd({"r": 4}, "w", flags=RANDOM), fwd({"y": 4}, "r"), bwd({"g": 4}, "y")], {"w": 4})
    assert Problem(of).candidates == ()
    with pytest.raises(PlanError, match="random"):
        build(Problem(of), [Action(storage=storage(of, "y"))])


def test_a_chain_never_runs_what_may_not_run_twice() -> None:
    of = chain(1)
    problem = Problem(of)
    problem.may_rerun = (False,) * len(of.ops)
    with pytest.raises(PlanError, match="again, which is marked"):
        build(problem, [Action(storage=1)])


def without_inputs(of: Trace, op: int) -> Trace:
    inputs = list(of.ops.inputs)
    inputs[op] = ()
    return replace(of, ops=replace(of.ops, inputs=tuple(inputs)))


def test_a_link_that_is_held_beyond_forward_cannot_be_recomputed() -> None:
    of = trace([fwd({"x": 4}, "w"), bwd({"g": 4}, "w")], {"w": 4}, {"x": 1})
    with pytest.raises(PlanError, match="outside the captured graph holds it"):
        build(Problem(of), [Action(storage=1)])


def test_a_value_read_without_its_maker_is_no_candidate() -> None:
    """Nothing would say how to rebuild it: an op may read a storage through another op that overwrote it."""
    of = chain(1)
    assert storage(of, "x1") in Problem(of).candidates
    assert storage(of, "x1") not in Problem(without_inputs(of, 2)).candidates


def test_a_read_of_what_is_not_there_is_an_error_and_not_a_wrong_figure() -> None:
    of = chain(1)
    problem = Problem(of)
    problem.trace = without_inputs(of, 2)  # as if a candidate had been found that is none
    with pytest.raises(PlanError, match="reads storage"):
        build(problem, [Action(storage=storage(of, "x1"))])


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action(storage=99), "belongs to another trace"),
        (Action(storage=-1), "belongs to another trace"),
        (Action(storage=0), "forward does not make it"),
        (Action(storage=0, recipe=SAVE), "cannot be saved"),
        (Action(storage=4), "forward does not make it"),
        (Action(storage=4, recipe=SAVE), "cannot be saved"),
        (Action(storage=1, recipe="burn"), "unknown recipe"),
        (Action(storage=1, evict_after=(5,)), "after op 5, and the trace has 4"),
        (Action(storage=2, recipe=SAVE, evict_after=(-1,)), "after op -1"),
    ],
)
def test_impossible_actions(action: Action, message: str) -> None:
    # storages: w 0, x0 1, x1 2, g1 3, g0 4
    with pytest.raises(PlanError, match=message):
        build(Problem(chain(1)), [action])


def test_a_storage_may_have_one_action_only() -> None:
    with pytest.raises(PlanError, match="twice"):
        build(Problem(chain(1)), [Action(storage=1), Action(storage=1, retain=False)])
