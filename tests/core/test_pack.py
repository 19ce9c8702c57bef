"""Packing a saved value: where its ops stand, what the step then takes, and what cannot be packed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.core.formats import FORMATS
from simulator.core.limits import Levers
from simulator.core.problem import Problem
from simulator.levers import LEVERS, exactness_of, in_order
from simulator.levers.pack import at_rate, costs, offer, pass_rate
from simulator.planners import plan_with
from simulator.prediction.levers import changed_steps, plan_with_levers
from tests.tiny import bwd, fwd, names, storage, trace
from tests.walked import rewritten
from traces.errors import PlanError, SpecError
from traces.records.plan import Action, Plan, Rewrite
from traces.records.trace import EAGER, RANDOM, Trace

N = 1 << 16  # numbers; 4 bytes each


def step(dtype: str = "float32", **more: object) -> Trace:
    """x and y are saved; of y backward takes a view that forward made. y's op also makes statistics."""
    ops = [
        fwd({"x": 4 * N}, "w", flags=RANDOM if dtype == "bool" else 0),
        fwd({"y": 4 * N, "s": N}, "x"),
        fwd({}, "y", view="v"),
        fwd({"z": 4 * N}, "v", **more),
        bwd({"gz": 4 * N}, "z", time_ns=5),
        bwd({"gv": 4 * N}, "gz", "v", "s", overwrites="y"),
        bwd({"gx": 4 * N}, "gv", "x"),
        bwd({"gw": 4 * N}, "gx", "x"),
    ]
    made = trace(ops, {"w": 4 * N})
    size = {"float32": 4, "bool": 1}[dtype]
    sts, x = made.storages, made.storages.name.index("x")
    columns = {"dtype": dtype, "nbytes": size * N, "shape": (64, N // 64)}
    sts = replace(
        sts,
        **{
            c: tuple(v if s == x else old for s, old in enumerate(getattr(sts, c)))
            for c, v in columns.items()
        },
    )
    return replace(made, storages=sts, ops=replace(made.ops, bytes_moved=(8 * N,) * len(ops)))


def test_it_is_packed_after_forwards_last_reader_and_unpacked_before_backwards_first() -> None:
    t = step()
    made = rewritten(t, [Rewrite(kind="int8", storage=storage(t, "x"))])
    assert made.ops.name == ("x", "y", "x_packed", "v", "z", "gz", "gv", "x_unpacked", "gx", "gw")
    assert names(made, "reads", "y") == ["x"]
    assert names(made, "reads", "gx") == ["gv", "x_unpacked"]
    assert names(made, "inputs", "gw") == ["gx", "x_unpacked"]
    payload, back = storage(made, "x_packed"), storage(made, "x_unpacked")
    assert made.storages.nbytes[payload] == FORMATS["int8"].payload_bytes(N)
    assert (made.storages.nbytes[back], made.storages.shape[back]) == (4 * N, (64, N // 64))
    assert made.meta.forward_ops == t.meta.forward_ops + (1 if t.meta.forward_ops else 0)
    # Eight ops of 8 N bytes each take 12 ns.
    moved = FORMATS["int8"].bytes_moved(N, 4, FORMATS["int8"].pack_moves)
    assert made.ops.time_ns[2] == at_rate(pass_rate(t), moved) == -(-moved * 12 // (64 * N))


def test_backward_gets_a_view_of_its_own_and_still_takes_what_else_the_op_made() -> None:
    t = step()
    made = rewritten(t, [Rewrite(kind="fp8_e4m3", storage=storage(t, "y"))])
    assert " ".join(made.ops.name) == "x y v z y_packed_0 gz y_unpacked_0 v_unpacked gv gx gw"
    assert names(made, "inputs", "v_unpacked") == ["y_unpacked_0"]
    assert names(made, "inputs", "gv") == ["gz", "v_unpacked", "y"]  # the statistics
    assert names(made, "reads", "gv") == ["gz", "y_unpacked_0", "s"]
    gv = made.ops.name.index("gv")
    assert made.ops.overwrites[gv] == storage(made, "y_unpacked_0")


def test_forward_reads_an_unpacked_mask_so_that_what_it_makes_can_be_recomputed() -> None:
    t = step("bool")
    made = rewritten(t, [Rewrite(kind="bits", storage=storage(t, "x"))])
    assert made.ops.name[:4] == ("x", "x_packed", "x_unpacked_in_forward", "y")
    assert names(made, "reads", "y") == ["x_unpacked_in_forward"]
    assert names(made, "reads", "gx") == ["gv", "x_unpacked"]
    problem = Problem(made)
    y = storage(made, "y")
    assert y in problem.candidates
    steps = problem.replay([Action(storage=y)]).schedule
    assert [made.ops.name[i] for i in steps.recomputed_ops] == ["x_unpacked_in_forward", "y", "v"]


def test_the_peak_is_what_by_hand_it_is() -> None:
    t = step()
    problem = Problem(rewritten(t, [Rewrite(kind="int8", storage=storage(t, s)) for s in ("x", "z")]))
    payload = FORMATS["int8"].payload_bytes(N)
    # While z is packed: w, y and its statistics, x's payload, z, its payload, and two buffers.
    assert problem.saved.timeline.peak_allocated_bytes == 4 * N * 3 + N + 2 * payload + 2 * 4 * N


def test_what_the_model_returns_is_held_while_forward_packs_its_last_value() -> None:
    t = step()
    t = replace(
        t,
        meta=replace(t.meta, forward_ops=4, first_backward_graph_op=4),
        storages=replace(t.storages, hold=tuple(3 if n == "s" else -1 for n in t.storages.name)),
    )
    made = rewritten(t, [Rewrite(kind="int8", storage=storage(t, x)) for x in ("x", "z")])
    last = made.storages.hold[storage(made, "s")]
    assert made.ops.name[last] == "z_packed"
    assert last == made.meta.forward_ops - 1


def test_what_saves_most_for_its_time_comes_first() -> None:
    t = step()
    found = offer(Problem(t), "int8")
    assert {t.storages.name[r.storage] for r in found} == {"x", "y", "z"}  # statistics are not offered
    figures = [costs(t, r.storage, r.kind) for r in found]
    worth = [saved / at_rate(pass_rate(t), moved) for saved, moved in figures]
    assert worth == sorted(worth, reverse=True)
    for r, (saved, moved) in zip(found, figures, strict=True):
        made = rewritten(t, [r])
        assert saved == 4 * N - made.storages.nbytes[storage(made, f"{r.op}_packed" + "_0" * (r.op == "y"))]
        assert abs(at_rate(pass_rate(t), moved) - (made.time_ns - t.time_ns)) <= 2


def test_the_rate_of_passes_is_that_of_ops_whose_launch_does_not_decide() -> None:
    ops = step().ops
    small = replace(ops, bytes_moved=(800, 800, 49, *(0,) * 5), time_ns=(10, 30, 10**9, *(7,) * 5))
    assert at_rate(pass_rate(replace(step(), ops=small)), 160) == 4
    products = replace(small, flops=(0, 10, *(0,) * 6))
    assert at_rate(pass_rate(replace(step(), ops=products)), 160) == 2


def test_how_exact_it_is() -> None:
    assert exactness_of([Rewrite(kind="bits", storage=1), Rewrite(kind="narrow16", storage=1)]) == "exact"
    assert exactness_of([Rewrite(kind="bits", storage=1), Rewrite(kind="int8", storage=1)]) == "approximate"


def test_tiles_come_first_whatever_the_plan_says() -> None:
    tile, one, other = (Rewrite(kind=kind, storage=1) for kind in ("tile", "bits", "int8"))
    assert in_order([other, one, tile, replace(one, storage=2)]) == [
        tile,
        one,
        replace(one, storage=2),
        other,
    ]
    with pytest.raises(PlanError, match="unknown rewrite 'bit'"):
        in_order([replace(one, kind="bit")])


def test_a_value_that_backward_no_longer_reads_is_left_as_it_is() -> None:
    t = step()
    one = Rewrite(kind="int8", storage=storage(t, "x"))
    assert rewritten(t, [one, replace(one, kind="int4")]) == rewritten(t, [one])


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("bits", "x", "it is of float32"),
        ("narrow16", "x", "it is of float32"),
        ("int8", "s", "statistics"),
        ("int8", "w", "not made in forward and read in backward"),
        ("int8", "gz", "not made in forward and read in backward"),
    ],
)
def test_what_cannot_be_packed_is_refused(kind: str, name: str, why: str) -> None:
    t = step()
    with pytest.raises(PlanError, match=why):
        rewritten(t, [Rewrite(kind=kind, storage=storage(t, name))])


def test_what_is_overwritten_held_or_read_by_the_users_own_code_is_refused() -> None:
    for more, why in (
        ({"mutates": ("y",)}, "overwrites it"),
        ({"flags": EAGER}, "outside the captured graph reads"),
    ):
        t = step(**more)
        with pytest.raises(PlanError, match=why):
            rewritten(t, [Rewrite(kind="int8", storage=storage(t, "y"))])
    t = step()
    held = replace(t.storages, hold=tuple(4 if n == "x" else -1 for n in t.storages.name))
    with pytest.raises(PlanError, match="holds it"):
        rewritten(replace(t, storages=held), [Rewrite(kind="int8", storage=storage(t, "x"))])
    with pytest.raises(PlanError, match="there is none"):
        rewritten(t, [Rewrite(kind="int8", storage=99)])


def test_what_backward_compares_is_packed_in_exact_formats_alone() -> None:
    """Of a maximum's input none is equal to the maximum once it has come back with an error."""
    t = step()
    at = t.ops.name.index("gx")
    compared = replace(
        t, ops=replace(t.ops, target=(*t.ops.target[:at], "aten.eq.Tensor", *t.ops.target[at + 1 :]))
    )
    for of, kinds in ((t, {"x", "y", "z"}), (compared, {"y", "z"})):
        offered = {of.storages.name[r.storage] for r in LEVERS["int8"].offer(Problem(of))}
        assert offered == kinds
    with pytest.raises(PlanError, match="gx compares it"):
        rewritten(compared, [Rewrite(kind="int8", storage=storage(t, "x"))])


@pytest.mark.parametrize(("side", "format"), [(16, "narrow8"), (64, "narrow16"), (512, "narrow32")])
def test_indices_are_as_wide_as_the_planes_that_they_point_into(side: int, format: str) -> None:
    planes, kept = 64, 32
    t = trace(
        [
            fwd({"a": 4 * planes * side * side}, "w"),
            fwd(
                {"y": 4 * planes * kept * kept, "at": 8 * planes * kept * kept},
                "a",
                target="aten.max_pool2d_with_indices.default",
            ),
            bwd({"g": 4}, "at", "a"),
        ],
        {"w": 4},
    )
    at = storage(t, "at")
    columns = {"dtype": "int64", "shape": (1, planes, kept, kept)}
    t = replace(
        t,
        storages=replace(
            t.storages,
            **{
                c: tuple(v if s == at else old for s, old in enumerate(getattr(t.storages, c)))
                for c, v in columns.items()
            },
        ),
    )
    order = ["narrow8", "narrow16", "narrow32"]
    assert [name for name in order if offer(Problem(t), name)] == [format]
    for other in order:
        if order.index(other) >= order.index(format):
            rewritten(t, [Rewrite(kind=other, storage=at)])
        else:
            with pytest.raises(PlanError, match="may have numbers from"):
                rewritten(t, [Rewrite(kind=other, storage=at)])


def costly() -> Trace:
    """The step with a mask; to make y again takes long."""
    t = step("bool")
    y = [n == "y" for n in t.ops.name]
    return replace(t, ops=replace(t.ops, time_ns=tuple(10**5 if of else 5 for of in y), flops=tuple(y)))


def test_masks_are_packed_by_default_where_their_bytes_cost_less_than_others() -> None:
    t = costly()
    problem, rewrites = Problem(t), offer(Problem(t), "bits")
    assert [r.storage for r in rewrites] == [storage(t, "x")]
    saved, _ = costs(t, storage(t, "x"), "bits")
    budget = problem.saved.timeline.peak_allocated_bytes - saved // 2
    best = changed_steps(problem, budget, Levers())[0]
    assert best.rewrites == tuple(rewrites)
    assert exactness_of(best.rewrites) == "exact"
    plan = plan_with_levers(problem, budget, Levers(), lambda p: plan_with("search", p, budget), helps=True)
    assert plan.rewrites == tuple(rewrites)
    assert plan.predicted["plan"]["step_time_ns"] < t.time_ns + 10**5
    assert not [x for x in changed_steps(problem, budget, Levers(allow="fp", kinds=("tile",))) if x.rewrites]


def test_a_planner_that_changes_the_step_itself_is_asked_for_the_step_as_it_is() -> None:
    problem = Problem(costly())
    budget = problem.saved.timeline.peak_allocated_bytes - N // 2
    own = Rewrite(kind="int8", storage=storage(problem.trace, "y"), op="y")

    def make(p: Problem) -> Plan:
        return replace(plan_with("search", p, budget), rewrites=(own,))

    assert plan_with_levers(problem, budget, Levers(), make, helps=True).rewrites == (own,)
    with pytest.raises(SpecError, match="name no --levers"):
        plan_with_levers(problem, budget, Levers(kinds=("bits",)), make, helps=True)
