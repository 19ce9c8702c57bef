"""Constraints by the user: what selectors match, what planners and the bound make of them, and the guard behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simulator.bounds import lower_bound
from simulator.cli.main import main
from simulator.core.limits import Constraints
from simulator.core.problem import Problem, run
from simulator.core.schedule import build
from simulator.core.selectors import module_matches, op_matches, resolve
from simulator.planners import REGISTRY, plan_with
from simulator.planners.outcome import Infeasible, finish
from tests.exhaust import Facts, Impossible, draw_trace, optimum, peak_and_time, plans, walk
from tests.strategies import traces
from tests.tiny import bwd, fwd, trace
from traces.errors import PlanError, SpecError
from traces.records.plan import SAVE, Action, Plan
from traces.records.store import save
from traces.records.trace import RANDOM, VIEW, Ops, Trace, fingerprint

UNLIMITED = 1 << 62
FREE = [*REGISTRY]


def two_layers() -> Trace:
    """Two layers of mm and relu; backward reads both outputs of each, of 100 bytes."""
    ops = []
    x = "w"
    for k in range(2):
        ops.append(fwd({f"mm{k}": 100}, x, time_ns=10, module=f"layers.{k}.attn.q", name=f"mm{k}"))
        ops.append(fwd({f"relu{k}": 100}, f"mm{k}", time_ns=1, module=f"layers.{k}.mlp", name=f"relu{k}"))
        x = f"relu{k}"
    ops.append(fwd({"out": 150}, x, module="head"))
    ops.append(bwd({"g": 4}, "out"))
    ops += [bwd({f"g{k}": 4}, "g", f"mm{k}", f"relu{k}") for k in (1, 0)]
    of = trace(ops, {"w": 4})
    targets = tuple(
        "aten.mm.default" if n.startswith("mm") else "aten.relu.default" if n.startswith("relu") else t
        for n, t in zip(of.ops.name, of.ops.target, strict=True)
    )
    named = Ops(**{**{k: getattr(of.ops, k) for k in Ops.__dataclass_fields__}, "target": targets})
    return replace(of, ops=named, meta=replace(of.meta, fingerprint=fingerprint(named, of.storages)))


def peak(of: Trace, plan: Plan | None = None) -> int:
    return run(Problem(of), build(Problem(of), plan.actions if plan else ())).peak_allocated_bytes


def recomputed(of: Trace, plan: Plan) -> set[str]:
    return {of.ops.name[i] for i in build(Problem(of), plan.actions).recomputed_ops}


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("layers.*.attn", "layers.0.attn", True),
        ("layers.*.attn", "layers.0.attn.q_proj", True),  # what lies inside
        ("layers.*.attn", "layers.0.attention", False),
        ("layers.*.attn", "model.layers.0.attn", False),  # from the root
        ("**.attn", "model.layers.0.attn.q", True),
        ("**", "x", True),
        ("**", "", False),  # no module
        ("layers.*", "layers.a.b", True),
        ("layers.*.b", "layers.a.x.b", False),  # one star is one part
        ("layers.**.b", "layers.b", True),
        ("layers.[0-2]", "layers.2.x", True),
        ("layers.[!0-2]", "layers.2.x", False),
        ("layers.?", "layers.11", False),
        ("lay*", "layers.0", True),
    ],
)
def test_module_globs(glob: str, path: str, expected: bool) -> None:
    assert module_matches(glob, path) is expected


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("aten.mm.default", True),
        ("aten.mm", True),
        ("mm", True),
        ("*mm*", True),
        ("aten.*", True),
        ("aten.m", False),
        ("m?", True),
        ("addmm", False),
    ],
)
def test_op_globs(glob: str, expected: bool) -> None:
    assert op_matches(glob, "aten.mm.default") is expected


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("layers.*.attn :: aten.mm.default", {"mm0", "mm1"}),
        ("layers.1 ::", {"mm1", "relu1"}),
        (":: relu", {"relu0", "relu1"}),
        ("layers.1 :: relu", {"relu1"}),
        ("head", {"out"}),  # without `::` either side will do
        ("relu", {"relu0", "relu1"}),
    ],
)
def test_what_selectors_mean(selector: str, names: set[str]) -> None:
    of = two_layers()
    assert {of.ops.name[i] for i in resolve(of, Constraints(never=(selector,)))[0]} == names
    kept = resolve(of, Constraints(always_save=(selector,)))[1]
    assert {of.storages.name[s] for s in kept} == names


@pytest.mark.parametrize(
    ("selector", "hint"),
    [
        ("layers.*.atn :: mm", "matches no op of forward"),
        ("g0", "matches no op of forward"),  # a backward op cannot run again anyway
        ("a :: b :: c", "module glob :: op glob"),
        (" :: ", "not both"),
    ],
)
@pytest.mark.parametrize("field", ["never", "always_save"])
def test_a_selector_that_means_nothing_is_an_error(selector: str, hint: str, field: str) -> None:
    with pytest.raises(SpecError) as caught:
        Problem(two_layers(), Constraints(**{field: (selector,)}))
    assert hint in str(caught.value)


def test_views_cost_nothing_and_keep_what_they_show() -> None:
    of = trace(
        [
            fwd({"x": 4}, "w", module="a"),
            fwd({}, "x", view="v", module="b"),
            fwd({"y": 4}, "v", module="c"),
            bwd({"g": 4}, "v", "y"),
        ],
        {"w": 4},
    )
    assert of.ops.flags[1] & VIEW
    with pytest.raises(SpecError, match="only views"):
        resolve(of, Constraints(never=("b ::",)))
    assert resolve(of, Constraints(always_save=("b ::",)))[1] == {of.storages.name.index("x")}


def test_never_and_always_save_change_the_plan() -> None:
    of = two_layers()
    # at g: 4 + 400 + 150 + 4 = 558; 458 wants one value away, and a relu is the cheaper one
    assert peak(of) == 558
    free = plan_with("mu-two", Problem(of), 458)
    assert recomputed(of, free) in ({"relu0"}, {"relu1"})
    for constraints in (Constraints(never=("relu",)), Constraints(always_save=("*relu*",))):
        plan = plan_with("mu-two", Problem(of, constraints), 458)
        assert recomputed(of, plan) <= {"mm0", "mm1"}
        assert plan.constraints == constraints.to_json()
    with pytest.raises(Infeasible):
        plan_with("mu-two", Problem(of, Constraints(never=("** ::",))), 458)


def test_a_link_that_must_not_run_again_is_saved_for_those_that_need_it() -> None:
    """`low` is rebuilt from `link`, which backward does not read: forbidding `link` saves it, for 1 byte."""
    of = trace(
        [
            fwd({"link": 1}, "w", time_ns=45, module="a"),
            fwd({"low": 100}, "link", time_ns=5, module="b"),
            fwd({"top": 100}, "low", module="c"),
            bwd({"g0": 1}, "top"),
            bwd({"g1": 1}, "g0", "low"),
        ],
        {"w": 0},
    )
    for constraints in (Constraints(never=("a ::",)), Constraints(always_save=("a ::",))):
        plan = plan_with("recompute-all", Problem(of, constraints), UNLIMITED)
        assert recomputed(of, plan) == {"low", "top"}
        assert {of.storages.name[a.storage] for a in plan.actions if a.recipe == SAVE} == {"link"}


@pytest.mark.parametrize("field", ["never", "always_save"])
def test_a_plan_that_breaks_constraints_is_refused(field: str) -> None:
    of = two_layers()
    relu0 = Action(storage=of.storages.name.index("relu0"))
    with pytest.raises(PlanError, match="a constraint forbids it"):
        finish(Problem(of, Constraints(**{field: ("relu",)})), "x", UNLIMITED, [relu0])


@st.composite
def constrained(draw: st.DrawFn) -> tuple[Trace, Constraints]:
    of = draw(traces())
    forward = [i for i in range(len(of.ops)) if of.ops.phase[i] == "forward" and of.ops.module[i]]
    assume(forward)
    assume(any(not of.ops.flags[i] & VIEW for i in forward))
    # each op its own target, so that selectors can tell them apart
    targets = tuple(f"test.op{i}.default" for i in range(len(of.ops)))
    of = replace(
        of, ops=Ops(**{**{k: getattr(of.ops, k) for k in Ops.__dataclass_fields__}, "target": targets})
    )
    solid = [i for i in forward if not of.ops.flags[i] & VIEW]
    never = draw(st.lists(st.sampled_from(solid), max_size=3, unique=True))
    keep = draw(st.lists(st.sampled_from(solid), max_size=3, unique=True))
    return of, Constraints(
        never=tuple(f":: op{i}" for i in never), always_save=tuple(f"** :: op{i}" for i in keep)
    )


@pytest.mark.parametrize("name", FREE)
@settings(max_examples=15, deadline=None)
@given(case=constrained(), percent=st.integers(40, 110))
def test_every_plan_obeys_and_means_the_same_without_the_constraints(
    name: str, case: tuple[Trace, Constraints], percent: int
) -> None:
    of, constraints = case
    try:
        plan = plan_with(name, Problem(of, constraints), peak(of) * percent // 100)
    except Infeasible:
        return
    plain = build(Problem(of), plan.actions)
    assert plain == build(Problem(of, constraints), plan.actions)
    forbidden = {int(s.partition("op")[2]) for s in constraints.never}
    keep = {int(s.partition("op")[2]) for s in constraints.always_save}
    for op, again, binds in zip(plain.op, plain.recompute, plain.binds, strict=True):
        if again:
            assert op not in forbidden
            assert not any(of.storages.producer[s] in keep for s in binds)


@pytest.mark.parametrize("seed", range(0, 300, 3))
def test_the_bound_is_below_every_plan_that_obeys(seed: int) -> None:
    """Against all plans of the trace without constraints, sieved by what runs again under them."""
    of = draw_trace(seed)
    targets = tuple(f"test.op{i}.default" for i in range(len(of.ops)))
    of = replace(of, ops=replace(of.ops, target=targets))
    facts = Facts(of)
    free = [i for i in range(facts.turn) if facts.reruns[i] and not facts.view[i]]
    every = plans(of, most=1_500)
    if every is None or not free:
        return
    chosen = free[seed % len(free)]
    never: dict[int, int] = {}  # peak -> least added time of the plans under which the op never runs again
    stays: dict[int, int] = {}  # or under which none of what it makes is made again
    for actions in every:
        try:
            walked = walk(of, actions, facts)
        except Impossible:
            continue
        peak_bytes, time_ns = peak_and_time(of, walked)
        again = [k for k, op in enumerate(walked.op) if op == chosen and walked.again[k]]
        fronts = [stays] if not any(walked.born[k] for k in again) else []
        fronts += [never] if not again else []
        for front in fronts:
            front[peak_bytes] = min(time_ns - of.time_ns, front.get(peak_bytes, time_ns))
    for front, constraints in (
        (never, Constraints(never=(f":: op{chosen}",))),
        (stays, Constraints(always_save=(f":: op{chosen}",))),
    ):
        under = Problem(of, constraints)
        for budget in front:
            bound = lower_bound(under, budget)
            assert bound.feasible
            assert bound.added_time_ns <= optimum(front, budget)


def test_the_command_line_records_constraints_and_refuses_wrong_ones(tmp_path: Path) -> None:
    directory = save(two_layers(), tmp_path / "t")

    def simulate(*words: object) -> object:
        return CliRunner().invoke(main, [str(w) for w in words], prog_name="simulate")

    out = tmp_path / "plan.json"
    done = simulate(directory, "--budget", "458", "--never", "layers.* :: relu", "-o", out)
    assert done.exit_code == 0, done.output
    plan = Plan.load(out)
    assert plan.constraints == {"never": ["layers.* :: relu"]}
    assert recomputed(two_layers(), plan) <= {"mm0", "mm1"}
    assert "less than 38.46 %" in done.stdout  # the bound obeys as well: 10 of 26 ns
    wrong = simulate(directory, "--budget", "458", "--never", "layers.* :: rleu")
    assert wrong.exit_code == 2
    assert "matches no op of forward" in wrong.output


def test_a_refusal_under_constraints_says_so() -> None:
    constraints = Constraints(always_save=("layers.* ::",))
    with pytest.raises(Infeasible, match="under the given constraints"):
        plan_with("mu-two", Problem(two_layers(), constraints), 458)


def test_what_a_constraint_saves_makes_no_more_possible() -> None:
    """`low` hangs on a random link that nobody keeps; saving the link by a constraint must not change that."""
    of = trace(
        [
            fwd({"link": 1}, "w", flags=RANDOM, module="a"),
            fwd({"low": 100}, "link", module="b"),
            bwd({"g": 1}, "low"),
        ],
        {"w": 0},
    )
    assert Problem(of).candidates == ()
    for constraints in (Constraints(never=("a ::",)), Constraints(always_save=("a ::",))):
        assert Problem(of, constraints).candidates == ()
