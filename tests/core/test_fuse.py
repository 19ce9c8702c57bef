"""An activation in steps as one op of the trace: what its ops then take, and what is left as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.core.limits import Levers
from simulator.core.problem import Problem
from simulator.core.rewrites import exactness_of, rewritten
from simulator.core.rewrites.fuse import offer
from simulator.prediction.levers import changed_steps, ops_take_ns
from tests.tiny import Op, bwd, fwd, trace
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.trace import EAGER, Trace

N = 4096
MUL, SIGMOID, BOTH = "aten.mul.Tensor", "aten.sigmoid.default", "[null,null]"


def step(*more: Op, scale: str = "1.0", overwrites: str = "", late: str = "gx") -> Trace:
    """x -> s = sigmoid(scale x) -> y = x s -> z, and back: gs = gy x, gp = s' gs, gq = scale gp, gd = gy s, gx."""
    ops = [
        fwd({"x": N}, "w"),
        fwd(
            {"p": N},
            "x",
            target="aten.mul.Scalar",
            arguments=f"[null,{scale}]",
            overwrites=overwrites,
            time_ns=3,
        ),
        fwd({"s": N}, "p", target=SIGMOID, arguments="[null]", time_ns=5),
        fwd({"y": N}, "x", "s", target=MUL, arguments=BOTH, time_ns=7),
        fwd({"z": 8}, "y", "v"),
        *more,
        bwd({"gv": N}, "z", "y"),
        bwd({"gy": N}, "z", "v"),
        bwd({"gs": N}, "gy", "x", target=MUL, arguments=BOTH),
        bwd({"gd": N}, "gy", "s", target=MUL, arguments=BOTH),
        bwd({"gp": N}, "gs", "s", target="aten.sigmoid_backward.default", arguments=BOTH, time_ns=9),
        bwd({"gq": N}, "gp", target="aten.mul.Scalar", arguments=f"[null,{scale}]"),
        bwd({"gx": N}, "gd", "gq", target="aten.add.Tensor", arguments="[null,null,1]", overwrites="gd"),
        bwd({"gw": N}, late),
    ]
    return trace(ops, {"w": N, "v": N})


def names(t: Trace, column: str, op: str) -> list[str]:
    found = getattr(t.ops, column)[t.ops.name.index(op)]
    return [(t.ops if column == "inputs" else t.storages).name[k] for k in found]


def test_the_steps_become_one_op_each_way() -> None:
    t = step(overwrites="x")
    (rewrite,) = offer(Problem(t))
    assert rewrite == Rewrite(kind="fuse", storage=t.storages.name.index("y"), op="y")
    assert exactness_of([rewrite]) == "fp"
    made = rewritten(t, [rewrite])
    assert made.ops.name == ("x", "y", "z", "gv", "gy", "gx", "gw")
    assert [made.ops.target[i] for i in (1, 5)] == ["aten.silu.default", "aten.silu_backward.default"]
    assert [made.ops.arguments[i] for i in (1, 5)] == ["[null]", "[null,null]"]
    assert names(made, "inputs", "gx") == names(made, "reads", "gx") == ["gy", "x"]
    assert [made.ops.time_ns[i] for i in (1, 5)] == [5, 9]  # as the slowest step that takes no more than it
    assert [made.ops.overwrites[i] for i in (1, 5)] == [made.storages.name.index("x"), -1]
    before, after = ([x.storages.name[s] for s in x.saved] for x in (t, made))
    assert (before, after) == (["x", "s", "y", "z"], ["x", "y", "z"])
    assert rewritten(t, [rewrite, rewrite]) == made
    assert ops_take_ns(Problem(t), (rewrite,)) <= made.time_ns < t.time_ns


@pytest.mark.parametrize(
    "t",
    [
        step(scale="1.01"),
        step(fwd({"u": 8}, "s")),
        step(bwd({"u": 8}, "p")),
        step(fwd({}, "x", mutates=("x",))),
        step(late="gd"),
    ],
)
def test_another_function_or_a_step_that_is_read_elsewhere_is_left_alone(t: Trace) -> None:
    assert not [*offer(Problem(t))]
    with pytest.raises(PlanError, match="is not the output of an activation in steps"):
        rewritten(t, [Rewrite(kind="fuse", storage=t.storages.name.index("y"), op="y")])


def test_held_values_other_types_and_ops_outside_the_graph_are_left_alone() -> None:
    t = step()
    s = t.storages.name.index("s")
    held = tuple(5 if k == s else -1 for k in range(len(t.storages)))
    types = tuple("bfloat16" if name == "x" else "float32" for name in t.storages.name)
    eager = tuple(EAGER if name == "s" else 0 for name in t.ops.name)
    for other in (
        replace(t, storages=replace(t.storages, hold=held)),
        replace(t, storages=replace(t.storages, dtype=types)),
        replace(t, ops=replace(t.ops, flags=eager)),
        replace(t, ops=replace(t.ops, arguments=("",) * len(t.ops))),
    ):
        assert not [*offer(Problem(other))]


def test_a_plan_up_to_rounding_takes_it_all_at_once() -> None:
    problem = Problem(step())
    budget = problem.saved.timeline.peak_allocated_bytes - 1
    steps = changed_steps(problem, budget, Levers(allow="fp"))
    assert [r.kind for r in steps[0].rewrites] == ["fuse"]
    assert steps[0].least_ns < problem.trace.time_ns
    assert not [r for x in changed_steps(problem, budget, Levers()) for r in x.rewrites]
