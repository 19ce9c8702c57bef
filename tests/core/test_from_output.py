"""An activation's backward that takes the output in place of the input: offered, simulated, bounded and planned."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from simulator.bounds import bounder_of
from simulator.core import from_output
from simulator.core.from_output import KIND, Swap
from simulator.core.problem import Problem, run
from simulator.core.schedule import build
from simulator.planners import plan_with
from tests.tiny import bwd, fwd, trace
from traces.errors import PlanError
from traces.records.plan import SAVE, Action
from traces.records.trace import Trace

# The name of an activation, its arguments, and those of its backward.
LEAKY = ("leaky_relu", "[null,0.1]", "[null,null,0.1,false]")
RELU6 = ("hardtanh", "[null,0.0,6.0]", "[null,null,0.0,6.0]")


def layers(name: str, forward: str, backward: str) -> Trace:
    """x of 10 bytes, y = f(x), z = y w; backward: gy from z and y, gx from gy and x, gw from gx. w has 4 bytes."""
    return trace(
        [
            fwd({"x": 10}, "w", time_ns=5),
            fwd({"y": 10}, "x", target=f"aten.{name}.default", arguments=forward, time_ns=1),
            fwd({"z": 10}, "y", "w", time_ns=5),
            bwd({"gy": 10}, "z", "y", "w", time_ns=5),
            bwd({"gx": 10}, "gy", "x", target=f"aten.{name}_backward.default", arguments=backward),
            bwd({"gw": 4}, "gx", time_ns=5),
        ],
        {"w": 4},
    )


def swaps(of: Trace) -> list[Swap]:
    return list(from_output.swaps(Problem(of)).values())


def test_the_input_is_neither_saved_nor_made_again() -> None:
    of = layers(*LEAKY)
    assert swaps(of) == [Swap(storage=1, payload=2, swaps=((4, 0, 1),))]
    problem = Problem(of)
    # w 4; x 14; y 24; z 34; gy beside x, y and z 44; gx beside x and gy 34; gw beside gx 18.
    assert problem.saved.timeline.peak_bytes == (14, 24, 34, 44, 34, 18)
    without = run(problem, build(problem, [Action(storage=1, recipe=KIND)]))
    # x goes with y's op: z is made beside y alone 24, gy beside y and z 34; gx beside gy and y 34.
    assert without.peak_bytes == (14, 24, 24, 34, 34, 18)
    assert without.step_time_ns == of.time_ns


def test_what_else_needs_the_input_recomputes_it() -> None:
    problem = Problem(layers(*LEAKY))
    both = build(problem, [Action(storage=1, recipe=KIND), Action(storage=2)])
    # y is not saved: x and y are made again for gy, and y, retained, serves gx as well.
    assert [problem.trace.ops.name[i] for i in both.op] == ["x", "y", "z", "x", "y", "gy", "gx", "gw"]
    saved = build(problem, [Action(storage=1, recipe=SAVE), Action(storage=2)])
    assert [problem.trace.ops.name[i] for i in saved.op] == ["x", "y", "z", "y", "gy", "gx", "gw"]


@pytest.mark.parametrize("budget", [34, 43])
def test_the_planner_takes_it_where_it_costs_nothing(budget: int) -> None:
    of = layers(*LEAKY)
    plan = plan_with("search", Problem(of), budget)
    assert [(a.storage, a.recipe) for a in plan.actions] == [(1, KIND)]
    assert plan.predicted["baseline"]["peak_allocated_bytes"] == 44
    assert plan.predicted["plan"]["peak_allocated_bytes"] == 34
    assert plan.predicted["plan"]["overhead_percent"] == 0
    assert plan_with("search", Problem(of), 44).actions == ()  # nothing is needed


def test_the_bound_holds_for_it() -> None:
    of = layers(*LEAKY)
    assert bounder_of(Problem(of)).bound(34).added_time_ns == 0
    assert bounder_of(Problem(of)).floor.peak_bytes <= 34
    plain = layers("other", "", "")
    assert swaps(plain) == []
    assert bounder_of(Problem(plain)).bound(34).added_time_ns > 0


def test_no_plan_of_all_recipes_beats_the_bound() -> None:
    """Two layers: every plan that saves, recomputes, or takes the output of each of their four values."""
    of = trace(
        [
            fwd({"x1": 10}, "w", time_ns=5),
            fwd({"y1": 10}, "x1", target="aten.leaky_relu.default", arguments=LEAKY[1], time_ns=2),
            fwd({"x2": 8}, "y1", "w", time_ns=7),
            fwd({"y2": 8}, "x2", target="aten.hardtanh.default", arguments=RELU6[1], time_ns=3),
            fwd({"z": 4}, "y2", "w", time_ns=5),
            bwd({"gy2": 8}, "z", "y2", "w"),
            bwd({"gx2": 8}, "gy2", "x2", target="aten.hardtanh_backward.default", arguments=RELU6[2]),
            bwd({"gy1": 10}, "gx2", "y1", "w"),
            bwd({"gx1": 10}, "gy1", "x1", target="aten.leaky_relu_backward.default", arguments=LEAKY[2]),
            bwd({"gw": 4}, "gx1"),
        ],
        {"w": 4},
    )
    problem = Problem(of)
    assert [r.storage for r in swaps(of)] == [3, 1]
    options: list[list[Action | None]] = []
    for s in (1, 2, 3, 4):
        retained = [Action(storage=s, retain=retain) for retain in (True, False)]
        evicted = [Action(storage=s, recipe=SAVE, evict_after=(c,)) for c in (5, 6, 7)]
        options.append(
            [None, *retained, *evicted, *([Action(storage=s, recipe=KIND)] if s in (1, 3) else [])]
        )
    best: dict[int, int] = {}
    for chosen in product(*options):
        timeline = problem.replay([a for a in chosen if a is not None]).timeline
        added_ns = timeline.step_time_ns - of.time_ns
        best[timeline.peak_allocated_bytes] = min(added_ns, best.get(timeline.peak_allocated_bytes, added_ns))
    assert len(best) > 5
    for budget in {b + d for b in best for d in (-1, 0)}:
        reached = [added_ns for peak, added_ns in best.items() if peak <= budget]
        bound = bounder_of(problem).bound(budget)
        assert not reached or (bound.feasible and bound.added_time_ns <= min(reached))


@pytest.mark.parametrize(
    ("name", "forward", "backward", "dtype", "is_offered"),
    [
        (*RELU6, "float32", True),
        (*RELU6, "bfloat16", True),
        ("hardtanh", "[null,0.1,1.0]", "[null,null,0.1,1.0]", "float32", True),
        # 0.1 is no number of 16 bits: y is another than what backward compares with.
        ("hardtanh", "[null,0.1,1.0]", "[null,null,0.1,1.0]", "bfloat16", False),
        ("hardtanh", "[null,0.1,1.0]", "[null,null,0.1,1.0]", "float16", False),
        ("hardtanh", "[null,0.0,6.0]", "[null,null,0.0,1.0]", "float32", False),  # of another activation
        ("leaky_relu", "[null,0.1]", "[null,null,0.1,false]", "bfloat16", True),  # it compares with 0 alone
        ("leaky_relu", "[null,0.0]", "[null,null,0.0,false]", "float32", True),
        (
            "leaky_relu",
            "[null,-0.1]",
            "[null,null,-0.1,false]",
            "float32",
            False,
        ),  # what is below 0 goes above
        ("threshold", "[null,0.5,0.25]", "[null,null,0.5]", "float16", True),
        (
            "threshold",
            "[null,0.5,1.0]",
            "[null,null,0.5]",
            "float32",
            False,
        ),  # the value lies above the threshold
        ("hardshrink", "[null,0.5]", "[null,null,0.5]", "bfloat16", True),
        ("hardsigmoid", "[null]", "[null,null]", "float32", False),
        ("elu", "[null,1.0,1,1]", "[null,1.0,1,1,false,null]", "float32", False),
        ("leaky_relu", "", "", "float32", False),  # a trace from before arguments were recorded
    ],
)
def test_it_is_offered_only_where_the_output_tells_the_side(
    name: str, forward: str, backward: str, dtype: str, is_offered: bool
) -> None:
    of = layers(name, forward, backward)
    typed = replace(of, storages=replace(of.storages, dtype=(dtype,) * len(of.storages)))
    assert bool(swaps(typed)) == is_offered


def test_a_copy_that_backward_reads_is_not_saved_either() -> None:
    """Autograd copies the input of an activation in place before it is overwritten."""
    of = trace(
        [
            fwd({"x": 10}, "w"),
            fwd({"copy": 10}, "x", target="aten.clone.default"),
            fwd({"y": 10}, "x", target="aten.hardtanh.default", arguments=RELU6[1], overwrites="x"),
            fwd({"z": 10}, "y"),
            bwd({"gy": 10}, "z", "y"),
            bwd({"gx": 10}, "gy", "copy", target="aten.hardtanh_backward.default", arguments=RELU6[2]),
        ],
        {"w": 4},
    )
    assert [(r.storage, r.payload, r.swaps) for r in swaps(of)] == [(2, 3, ((5, 1, 2),))]
    problem = Problem(of)
    planned = run(problem, build(problem, [Action(storage=2, recipe=KIND)]))
    # The copy goes as soon as it is made, y takes x's memory: w 4, y, z and gy 10 each. Saved, it is one more.
    assert (planned.peak_allocated_bytes, problem.saved.timeline.peak_allocated_bytes) == (34, 44)


def test_another_storage_has_no_such_recipe() -> None:
    with pytest.raises(PlanError, match=r"storage 2 \(y\) has no recipe 'from_output'"):
        build(Problem(layers(*LEAKY)), [Action(storage=2, recipe=KIND)])
