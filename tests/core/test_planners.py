"""Every planner: within the budget or a refusal, exact, deterministic; and what each one chooses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.bounds import Instants
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.planners import REGISTRY, mu_two_paper, plan_with
from simulator.planners.mu_two import Costs, Search, cheapest
from simulator.planners.outcome import Infeasible
from simulator.planners.segments import OUTSIDE, block_paths, equal_segments, numbered, torch_segment
from tests.strategies import traces
from tests.synthetic import ladder, resnet
from tests.tiny import bwd, chain, fwd, trace
from tests.walked import state_of
from traces.errors import BudgetError
from traces.records.plan import SAVE, Action, Plan
from traces.records.trace import RANDOM, Trace

UNLIMITED = 1 << 62


def peak(of: Trace, plan: Plan | None = None) -> int:
    return Problem(of).replay(plan.actions if plan else ()).timeline.peak_allocated_bytes


def names(of: Trace, plan: Plan, action: str = "recompute") -> set[str]:
    return {of.storages.name[a.storage] for a in plan.actions if a.recipe == action}


@pytest.mark.parametrize("name", REGISTRY)
@settings(max_examples=40, deadline=None)
@given(of=traces(), percent=st.integers(1, 120))
def test_a_plan_is_within_the_budget_or_refused(name: str, of: Trace, percent: int) -> None:
    before = peak(of)
    budget_bytes = before * percent // 100
    refused: Infeasible | None = None
    try:
        plan = plan_with(name, Problem(of), budget_bytes)
    except Infeasible as error:
        refused = error
    if refused is not None:
        assert refused.exit_code == 1
        assert refused.figures["lowest_peak_bytes"] > budget_bytes
        assert refused.figures["lowest_peak_bytes"] >= refused.figures["floor"]["peak_allocated_bytes"]
        return
    timeline = Problem(of).replay(plan.actions).timeline
    assert timeline.peak_allocated_bytes <= budget_bytes
    assert timeline.step_time_ns >= of.time_ns
    assert plan.predicted["baseline"]["peak_allocated_bytes"] == before
    assert plan.predicted["plan"]["peak_allocated_bytes"] == timeline.peak_allocated_bytes
    assert plan.predicted["plan"]["step_time_ns"] == timeline.step_time_ns
    assert (plan.planner, plan.budget_bytes, plan.meta) == (name, budget_bytes, of.meta)
    assert plan_with(name, Problem(of), budget_bytes) == plan  # the same every time


@given(traces())
def test_save_all_adds_nothing_and_mu_two_changes_nothing_that_fits(of: Trace) -> None:
    assert plan_with("save-all", Problem(of), UNLIMITED).actions == ()
    assert plan_with("mu-two", Problem(of), peak(of)).actions == ()


def test_a_refusal_names_the_budget_the_lowest_peak_the_floor_and_what_makes_it() -> None:
    of = chain(4, size=2**20)
    with pytest.raises(BudgetError) as caught:
        plan_with("mu-two", Problem(of), 2**20)
    least = Instants(Problem(of)).floor
    words = "1.00 MiB", "resident", "gradients", "smaller batch"
    assert all(w in str(caught.value) for w in (*words, str(least.peak_bytes), of.ops.name[least.op]))


def test_recompute_all_leaves_out_nothing_that_can_be_recomputed() -> None:
    of = chain(3)
    assert names(of, plan_with("recompute-all", Problem(of), UNLIMITED)) == {"x0", "x1", "x2", "x3"}


def test_sqrt_n_keeps_the_borders_of_the_segments() -> None:
    of = chain(8)  # nine ops: three segments x0-x2, x3-x5, x6-x8; x2 and x5 are read by the next segment
    plan = plan_with("sqrt-n", Problem(of), UNLIMITED)
    assert names(of, plan) == {f"x{k}" for k in (0, 1, 3, 4, 6, 7, 8)}


def test_equal_segments_differ_by_one_creating_op_at_most() -> None:
    assert equal_segments([True] * 7, 3) == [0, 0, 0, 1, 1, 2, 2]
    assert equal_segments([True, False, True, False], 2) == [0, 1, 1, 1]
    assert equal_segments([False], 1) == [0]


@pytest.mark.parametrize(
    ("last", "again", "saved"),
    [
        # y crosses from block h.0 to h.1, and backward does not read it.
        ("h.1.fc", {"x", "z"}, {"y"}),
        # No recomputation reads it.
        ("head", {"x"}, set()),
    ],
)
def test_a_border_is_saved_for_the_next_segment_where_a_recomputation_reads_it(
    last: str, again: set[str], saved: set[str]
) -> None:
    of = trace(
        [
            fwd({"x": 4}, "w", module="h.0.fc"),
            fwd({"y": 4}, "x", module="h.0"),
            fwd({"z": 4}, "y", module=last),
            bwd({"g": 4}, "z"),
            bwd({"k": 4}, "g", "x"),
        ],
        {"w": 4},
    )
    plan = plan_with("per-block", Problem(of), UNLIMITED)
    assert names(of, plan) == again
    assert names(of, plan, SAVE) == saved


@pytest.mark.parametrize(
    ("paths", "blocks"),
    [
        (["conv1", "layer1.0.conv1", "layer1.0", "layer1.1.downsample.0", "fc"], [OUTSIDE, 0, 0, 1, OUTSIDE]),
        (
            ["encoder.layer.3.attention.self.query", "encoder.layer.3.output", "encoder.layer.4.output"],
            [0, 0, 1],
        ),
        (["h.5.attn.c_attn", "h.6.mlp", "h.6.mlp.c_fc"], [0, 1, 1]),
        (["model.layers.2.mlp.gate_proj", "model.norm"], [0, OUTSIDE]),
        (["encoder.block.0.layer.0.SelfAttention.q", "encoder.block.0.layer.1.wi"], [0, 0]),
        (["features.1.0.block.0.0", "features.1.1.block.0.0", "features.0.0"], [0, 1, 2]),
        (["features.denseblock1.denselayer1.conv1", "features.denseblock1.denselayer2.conv1"], [0, 1]),
        (["features.0", "features.1", "classifier.0", ""], [OUTSIDE] * 4),
    ],
)
def test_blocks_follow_the_numbered_containers(paths: list[str], blocks: list[int]) -> None:
    assert numbered(paths, block_paths(paths)) == blocks


def test_per_block_keeps_random_values_and_block_inputs() -> None:
    of = trace(
        [
            fwd({"a": 4}, "w", module="h.0.fc"),
            fwd({"r": 4}, "a", module="h.0.drop", flags=RANDOM),
            fwd({"b": 4}, "a", "r", module="h.0"),
            fwd({"c": 4}, "b", module="h.1.fc"),
            bwd({"g": 4}, "c", "r"),
            bwd({"k": 4}, "g", "a", "b"),
        ],
        {"w": 4},
    )
    assert names(of, plan_with("per-block", Problem(of), UNLIMITED)) == {"a", "c"}


def cheap_and_dear() -> Trace:
    """Two values of one size, one cheap to make and one dear; the peak is at the end of forward."""
    return trace(
        [
            fwd({"dear": 100}, "w", time_ns=50),
            fwd({"cheap": 100}, "w", time_ns=5),
            fwd({"top": 100}, "dear", "cheap", time_ns=9),
            fwd({"more": 10}, "top", time_ns=1),
            bwd({"g0": 1}, "more", "top"),
            bwd({"g1": 1}, "g0", "cheap"),
            bwd({"g2": 1}, "g1", "dear"),
        ],
        {"w": 0},
    )


def test_mu_two_keeps_again_what_need_not_be_released() -> None:
    """With a budget that one value meets, the greedy's cheaper first choices do not stay in the plan."""
    of = trace(
        [
            *(fwd({f"s{k}": 30}, "w", time_ns=1) for k in range(3)),
            fwd({"big": 200}, "w", time_ns=30),
            fwd({"end": 10}, "s0", "s1", "s2", "big", time_ns=1),
            fwd({"fin": 200}, "end", time_ns=1),
            bwd({"g": 1}, "fin", "end"),
            bwd({"h": 1}, "g", "big"),
            bwd({"i": 1}, "h", "s0", "s1", "s2"),
        ],
        {"w": 0},
    )
    # at fin: 90 + 200 + 10 + 200 = 500; the small ones cost less per byte but free 90 of the 150 only
    assert peak(of) == 500 + 1
    search = Search(Problem(of), 350)
    state = search.evaluator.state()
    assert search.evict(state)
    released = {of.storages.name[s] for s in search.problem.candidates if not state.saved[s]}
    assert released == {"s0", "s1", "s2", "big"}
    search.save_again(state)
    assert {of.storages.name[s] for s in search.problem.candidates if not state.saved[s]} == {"big"}


def test_costs_are_the_union_with_what_runs_again_already() -> None:
    of = trace(
        [
            fwd({"link": 1}, "w", time_ns=100),
            fwd({"a": 10}, "link", time_ns=2),
            fwd({"b": 10}, "link", time_ns=3),
            bwd({"g": 1}, "a", "b"),
        ],
        {"w": 0},
    )
    search = Search(Problem(of), 0)
    costs = Costs(search.evaluator, search.evaluator.state())
    a, b = (of.storages.name.index(n) for n in "ab")
    assert (costs.of(a), costs.of(b)) == (102, 103)
    costs.evicted(a)
    assert (costs.saves_ns([a]), costs.of(b)) == (102, 3)
    costs.evicted(b)
    assert (costs.saves_ns([a]), costs.saves_ns([b])) == (2, 3)


def test_mu_two_stops_in_time_where_no_plan_fits() -> None:
    """A budget below the floor is refused anyway, so the time limit ends the descent; a possible one is met."""
    of = ladder(24, seed=2)
    problem = Problem(of)
    least = Instants(problem).floor.peak_bytes
    no_time = Limits(seconds=0)
    search = Search(problem, least - 1, no_time.started())
    assert cheapest(search) is None
    assert search.evaluations <= 2
    assert cheapest(Search(problem, peak(of) // 2, no_time.started())) is not None


def test_mu_two_goes_below_what_greedy_releases_by_segments_and_drops() -> None:
    """A long chain: releasing everything rebuilds all of it at once, so a low budget needs borders."""
    of = chain(40, size=100)
    plan = plan_with("mu-two", Problem(of), peak(of) * 40 // 100)
    assert peak(of, plan) <= peak(of) * 40 // 100
    # each op runs again once at most for this budget
    assert plan.predicted["plan"]["recomputed_ops"] <= 41
    lowest = plan_with("mu-two", Problem(of), peak(of) * 24 // 100)
    assert any(a.evict_after for a in lowest.actions)


def test_a_value_that_is_kept_again_is_dropped_no_more() -> None:
    of = chain(5)
    search = Search(Problem(of), UNLIMITED)
    x1, x2 = (of.storages.name.index(n) for n in ("x1", "x2"))
    g5 = search.evaluator.forward
    state = state_of(search.evaluator, [Action(storage=x, evict_after=(g5,)) for x in (x1, x2)])
    found = search.save_again(state)
    assert found.state.evictions == {}
    assert found.time_ns == of.time_ns
    assert search.evaluator.actions(found.state) == []


def test_the_search_ends_after_a_bounded_number_of_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    of = chain(60, size=100)
    monkeypatch.setattr("simulator.planners.mu_two.MOST_EVALUATIONS", 12)
    search = Search(Problem(of), peak(of) // 10)
    assert not search.evict(search.evaluator.state())
    assert search.evaluations == 3
    search = Search(Problem(of), peak(of) * 9 // 10)
    search.save_again(state_of(search.evaluator, [Action(storage=s) for s in search.problem.candidates]))
    assert search.evaluations == 6


def test_the_paper_releases_at_least_one_value() -> None:
    assert len(plan_with("mu-two-paper", Problem(cheap_and_dear()), UNLIMITED).actions) == 1


def test_the_paper_does_not_see_what_a_chain_holds() -> None:
    """Algorithm G claims that a chain rebuilt at once is free; the exact replay refuses its plan."""
    of = chain(12, size=100)
    budget_bytes = peak(of) * 40 // 100
    with pytest.raises(BudgetError, match="own memory model"):
        mu_two_paper.plan(Problem(of), budget_bytes)


def test_static_memory_is_not_subtracted() -> None:
    of = trace(
        [fwd({"x": 100}, "w"), fwd({"y": 10}, "x"), bwd({"g": 1}, "y"), bwd({"h": 1}, "g", "x")], {"w": 1000}
    )
    assert mu_two_paper.Greedy(Problem(of)).peak() == peak(of)


def test_effects_of_a_choice_as_printed() -> None:
    """a -> b -> c of 1 ns each, backward reads c, b, a: b chosen, then a."""
    of = chain(2, size=4, time_ns=1)
    a, b, c = (of.storages.name.index(f"x{k}") for k in range(3))
    greedy = mu_two_paper.Greedy(Problem(of))
    assert greedy.sources[c] == {b}
    assert greedy._update_chosen(b) == 1
    greedy.chosen.add(b)
    greedy.pool.discard(b)
    greedy._update_remaining(b, 1)
    # F(a): c is rebuilt from a now, at the price of both; F(b): a is needed once, for b
    assert (greedy.recomp_time[c], greedy.sources[c], greedy.total[a]) == (2, {a}, 1)
    # E: a serves b and itself, and b inherits a's cost
    assert greedy._update_chosen(a) == 2
    assert greedy.recomp_time[b] == 2


def test_shared_ancestors_count_twice_as_printed() -> None:
    of = trace(
        [
            fwd({"root": 4}, "w", time_ns=10),
            fwd({"left": 4}, "root", time_ns=1),
            fwd({"right": 4}, "root", time_ns=1),
            fwd({"top": 4}, "left", "right", time_ns=1),
            bwd({"g": 4}, "top"),
            bwd({"h": 4}, "g", "left", "right"),
            bwd({"i": 4}, "h", "root"),
        ],
        {"w": 4},
    )
    root, left, right, top = (of.storages.name.index(n) for n in ("root", "left", "right", "top"))
    greedy = mu_two_paper.Greedy(Problem(of))
    for chosen in (root, left, right):
        greedy._update_remaining(chosen, greedy._update_chosen(chosen))
        greedy.chosen.add(chosen)
    assert greedy.recomp_time[top] == 23  # top + left + right + root twice


def test_when_the_time_is_over_the_search_stops_improving() -> None:
    of = cheap_and_dear()
    in_no_time = plan_with("mu-two", Problem(of), 300, Limits(seconds=0))
    assert peak(of, in_no_time) <= 300
    search = Search(Problem(of), UNLIMITED, Limits(seconds=0).started())
    state = state_of(search.evaluator, [Action(storage=s) for s in search.problem.candidates])
    assert not any(search.save_again(state).state.saved[s] for s in search.problem.candidates)


@pytest.mark.parametrize(
    ("blocks", "segments", "expected"),
    [
        # torch: 7 // 3 = 2 blocks each for the first two, the last three run without checkpointing
        (7, 3, [0, 0, 1, 1, OUTSIDE, OUTSIDE, OUTSIDE]),
        (4, 1, [OUTSIDE] * 4),
        (4, 4, [0, 1, 2, OUTSIDE]),
        (5, 4, [0, 1, 2, OUTSIDE, OUTSIDE]),
    ],
)
def test_segments_are_those_of_checkpoint_sequential(blocks: int, segments: int, expected: list[int]) -> None:
    assert [torch_segment(b, blocks, segments) for b in range(blocks)] == expected


def test_checkpoint_sequential_takes_the_fastest_number_that_fits() -> None:
    of = resnet((2, 2, 2, 2), batch=64, side=64)
    plan = plan_with("checkpoint-sequential", Problem(of), peak(of) * 80 // 100)
    assert peak(of, plan) <= peak(of) * 80 // 100
    assert plan_with("checkpoint-sequential", Problem(of), UNLIMITED).actions == ()
    assert numbered(["a", "b", "a", ""], {"a": "a", "b": "b"}) == [0, 1, 0, OUTSIDE]


def test_checkpoint_sequential_takes_modules_where_no_block_repeats() -> None:
    ops = [fwd({"x": 8}, "w", module="a"), fwd({"y": 8}, "x", module="a"), fwd({"z": 8}, "y", module="b")]
    of = trace([*ops, bwd({"g": 1}, "z", "y"), bwd({"h": 1}, "x")], {"w": 4})
    plan = plan_with("checkpoint-sequential", Problem(of), peak(of) - 1)
    assert [of.storages.name[s] for s in plan.recomputed] == ["x"]
