"""Inverting an activation in a trace: what its ops then take, and which inputs are needed after all."""

from __future__ import annotations

from dataclasses import replace

import pytest

import simulator as api
from simulator.core.problem import Problem
from simulator.levers import exactness_of
from simulator.levers.invert import CPU_FACTOR, FROM_OUTPUT, offer
from tests.tiny import Op, bwd, fwd, names, storage, trace
from tests.walked import rewritten
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.trace import EAGER, Trace

N = 1 << 16  # numbers; 4 bytes each
GELU, BACKWARD = "aten.gelu.default", "aten.gelu_backward.default"
NONE, TANH = ('[null,"none"]', '[null,null,"none"]'), ('[null,"tanh"]', '[null,null,"tanh"]')


def step(*more: Op, arguments: tuple[str, str] = NONE, backward: str = BACKWARD, size: int = 4 * N) -> Trace:
    """x -> y = gelu(x) -> z = y v, of which backward reads x, y and v; `more` at the end of forward."""
    ops = [
        fwd({"x": size}, "w"),
        fwd({"y": size}, "x", target=GELU, arguments=arguments[0]),
        fwd({"z": 8}, "y", "v"),
        *more,
        bwd({"gv": 4 * N}, "z", "y"),
        bwd({"gy": size}, "z", "v"),
        bwd({"gx": size}, "gy", "x", target=backward, arguments=arguments[1], overwrites="gy", time_ns=10),
        bwd({"gw": 4 * N}, "gx"),
    ]
    return trace(ops, {"w": 4 * N, "v": 4 * N})


@pytest.mark.parametrize(("arguments", "kind"), [(NONE, "gelu"), (TANH, "gelu_tanh")])
def test_backward_takes_the_output_and_a_bit_an_element(arguments: tuple[str, str], kind: str) -> None:
    t = step(arguments=arguments)
    inside = (4 * N, 64, -64)  # what torch's op allocates and the other one does not
    events = tuple(inside if n == "gx" else e for n, e in zip(t.ops.name, t.ops.events, strict=True))
    t = replace(t, ops=replace(t.ops, events=events))
    (rewrite,) = offer(Problem(t))
    assert rewrite == Rewrite(kind="invert", storage=storage(t, "x"), op="x")
    made = rewritten(t, [rewrite])
    assert made.ops.name == ("x", "y_side", "y", "z", "gv", "gy", "gx", "gw")
    assert names(made, "reads", "y_side") == ["x"]
    assert names(made, "reads", "gx") == ["gy", "y", "y_side"]
    assert names(made, "inputs", "gx") == ["gy", "y", "y_side"]
    assert made.storages.nbytes[storage(made, "y_side")] == N // 8
    at = made.ops.name.index("gx")
    assert made.ops.target[at] == "lowtide.backward_from_output.default"
    assert made.ops.arguments[at] == f'[null,null,null,"{kind}"]'
    assert made.ops.events[at] == (4 * N,)
    assert made.ops.time_ns[at] == int(
        10 * CPU_FACTOR
    )  # the bytes of the bits take no time in a trace without them
    assert names(made, "writes", "y_side") == ["y_side"]
    assert exactness_of([rewrite]) == "fp"
    before, after = (Problem(x).saved.timeline.peak_allocated_bytes for x in (t, made))
    # At the peak gradients of y and v, y and x or the bits of x.
    assert before - after == 4 * N - N // 8


@pytest.mark.parametrize(
    ("t", "why"),
    [
        (step(backward="aten.silu_backward.default"), "something else than one activation"),
        (step(arguments=(NONE[0], TANH[1])), "are not one"),
        (step(arguments=("", "")), "does not say with what arguments"),
        (step(bwd({"g": 8}, "x")), "something else than one activation"),
        (step(fwd({"u": 4 * N}, "x", target="aten.silu.default")), "something else than one activation"),
        (step(fwd({}, "x", mutates=("x",))), "overwrites it"),
        (step(fwd({}, "y", mutates=("y",))), "the output is overwritten"),
        (step(size=1 << 12), "has 1,024 numbers"),
        (step(size=4 * N + 4), "has 65,537 numbers"),
    ],
)
def test_an_input_that_is_needed_after_all_is_refused(t: Trace, why: str) -> None:
    assert not [*offer(Problem(t))]
    with pytest.raises(PlanError, match=why):
        rewritten(t, [Rewrite(kind="invert", storage=storage(t, "x"))])


def test_held_values_other_types_and_other_storages_are_refused() -> None:
    t = step()
    x, y = storage(t, "x"), storage(t, "y")
    for changed, why in (
        ({"hold": tuple(2 if s == x else -1 for s in range(len(t.storages)))}, "holds it"),
        ({"hold": tuple(2 if s == y else -1 for s in range(len(t.storages)))}, "held outside"),
        ({"dtype": ("float64",) * len(t.storages)}, "of float64"),
        ({"nbytes": tuple(n + 64 * (s == x) for s, n in enumerate(t.storages.nbytes))}, "gaps"),
        ({"nbytes": tuple(n + 64 * (s == y) for s, n in enumerate(t.storages.nbytes))}, "laid out otherwise"),
    ):
        other = replace(t, storages=replace(t.storages, **changed))
        with pytest.raises(PlanError, match=why):
            rewritten(other, [Rewrite(kind="invert", storage=x)])
    for s in (99, storage(t, "w"), storage(t, "gy")):
        with pytest.raises(PlanError, match="cannot be done without"):
            rewritten(t, [Rewrite(kind="invert", storage=s)])
    eager = replace(t, ops=replace(t.ops, flags=(EAGER, *t.ops.flags[1:])))
    assert not [*offer(Problem(eager))]


def test_only_an_output_that_backward_reads_is_worth_it() -> None:
    t = step()
    ops = replace(
        t.ops, reads=tuple(r[:1] if n == "gv" else r for n, r in zip(t.ops.name, t.ops.reads, strict=True))
    )
    with pytest.raises(PlanError, match="backward does not read the output"):
        rewritten(replace(t, ops=ops), [Rewrite(kind="invert", storage=storage(t, "x"))])


def test_an_input_that_is_done_without_is_not_packed() -> None:
    t = step()
    x = storage(t, "x")
    packed, inverted = Rewrite(kind="int8", storage=x), Rewrite(kind="invert", storage=x)
    alone = rewritten(t, [inverted])
    assert alone != rewritten(t, [packed])
    for both in ([packed, inverted], [inverted, packed], [inverted, inverted]):
        assert rewritten(t, both) == alone


# The name of an activation, its arguments, and those of its backward.
LEAKY = ("leaky_relu", "[null,0.1]", "[null,null,0.1,false]")
RELU6 = ("hardtanh", "[null,0.0,6.0]", "[null,null,0.0,6.0]")


def layers(name: str, forward: str, backward: str) -> Trace:
    """x, y = f(x), z = y w; backward: gy from z and y, gx from gy and x, gw from gx."""
    size = 4 * N
    return trace(
        [
            fwd({"x": size}, "w"),
            fwd({"y": size}, "x", target=f"aten.{name}.default", arguments=forward),
            fwd({"z": size}, "y", "w"),
            bwd({"gy": size}, "z", "y", "w"),
            bwd({"gx": size}, "gy", "x", target=f"aten.{name}_backward.default", arguments=backward),
            bwd({"gw": size}, "gx"),
        ],
        {"w": size},
    )


@pytest.mark.parametrize(("kind", "told"), [(LEAKY, "[null,null,0.1,true]"), (RELU6, RELU6[2])])
def test_backward_takes_the_output_alone_where_that_tells(kind: tuple[str, str, str], told: str) -> None:
    t = layers(*kind)
    (rewrite,) = offer(Problem(t), FROM_OUTPUT)
    made = rewritten(t, [rewrite])
    assert (made.ops.name, exactness_of([rewrite])) == (t.ops.name, "exact")
    assert names(made, "reads", "gx") == names(made, "inputs", "gx") == ["gy", "y"]
    at = made.ops.name.index("gx")
    assert (made.ops.target[at], made.ops.arguments[at]) == (t.ops.target[at], told)
    # w, x, y and z, of which x is not there when backward begins.
    assert [Problem(x).saved.timeline.peak_bytes[3] for x in (t, made)] == [20 * N, 16 * N]
    assert made.time_ns == t.time_ns
    plan = api.plan(t, 16 * N)
    assert (plan.rewrites, plan.actions) == ((rewrite,), ())
    assert api.plan(t, 20 * N).rewrites == ()  # nothing is needed


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # 0.1 is no number of 16 bits, where y would be another than what backward compares with.
        ("hardtanh", "[null,0.1,1.0]", "[null,null,0.1,1.0]"),
        ("hardtanh", "[null,0.0,257.0]", "[null,null,0.0,257.0]"),
        ("hardtanh", "[null,0.0,6.0]", "[null,null,0.0,1.0]"),  # of another activation
        ("leaky_relu", "[null,-0.1]", "[null,null,-0.1,false]"),  # what is below 0 goes above
        ("hardsigmoid", "[null]", "[null,null]"),
        ("leaky_relu", "", ""),  # a trace from before arguments were recorded
    ],
)
def test_it_is_offered_only_where_the_output_tells_the_side(name: str, forward: str, backward: str) -> None:
    assert not [*offer(Problem(layers(name, forward, backward)), FROM_OUTPUT)]


def test_a_copy_that_backward_reads_is_not_saved_either() -> None:
    """Autograd copies the input of an activation in place before it is overwritten."""
    size = 4 * N
    t = trace(
        [
            fwd({"x": size}, "w"),
            fwd({"copy": size}, "x", target="aten.clone.default"),
            fwd({"y": size}, "x", target="aten.hardtanh.default", arguments=RELU6[1], overwrites="x"),
            fwd({"z": size}, "y"),
            bwd({"gy": size}, "z", "y"),
            bwd({"gx": size}, "gy", "copy", target="aten.hardtanh_backward.default", arguments=RELU6[2]),
        ],
        {"w": size},
    )
    (rewrite,) = offer(Problem(t), FROM_OUTPUT)
    made = rewritten(t, [rewrite])
    assert names(made, "reads", "gx") == ["gy", "y"]
    # The copy goes as soon as it is made, y takes x's memory: w, y, z and gy. Saved, it is one more.
    assert [Problem(x).saved.timeline.peak_allocated_bytes // size for x in (t, made)] == [5, 4]
