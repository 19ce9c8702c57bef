"""`simulate compare` and `simulate pareto`: what each row says, monotone fronts, prices, pages, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from simulator.allocator.device import DeviceMemory
from simulator.allocator.device_fit import Setting, setting_of
from simulator.allocator.reserved import reserved_peak
from simulator.allocator.settings import parse_alloc_conf
from simulator.bounds.bound import lower_bound
from simulator.cli.main import main
from simulator.core.limits import Constraints, Limits
from simulator.core.problem import Problem
from simulator.core.replay import run
from simulator.core.schedule import build
from simulator.planners import REGISTRY, plan_with
from simulator.studies.comparison import Comparison, Entrant, compare
from simulator.studies.pareto import GIB, Front, cheapest, pareto, pick_of
from tests.synthetic import resnet
from tests.tiny import chain
from traces.errors import SpecError, UnfinishedError
from traces.records.plan import Action, Plan
from traces.records.store import save
from traces.records.trace import Trace

BASELINE = "tests.bench.baselines.min_cut:plan"
QUICK = Limits(seconds=1)


def simulate(*words: object) -> Result:
    return CliRunner().invoke(main, [str(w) for w in words], prog_name="simulate")


def peak(of: Trace) -> int:
    return Problem(of).saved.timeline.peak_allocated_bytes


@pytest.fixture(scope="module")
def small() -> Trace:
    return resnet((1, 2, 2, 1), batch=64, side=64)


def alone(problem: Problem, budget_bytes: int) -> Comparison:
    """A comparison without planners."""
    return compare(problem, "t", budget_bytes, (), QUICK, Setting())


def front(
    problem: Problem, name: str, planner: str, points: int, limits: Limits, setting: Setting | None = None
) -> Front:
    return pareto(problem, name, planner, points, limits, setting or setting_of(problem.trace.meta))


@pytest.fixture(scope="module")
def directory(small: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(small, tmp_path_factory.mktemp("traces") / "small")


def test_every_row_is_the_planners_own_plan_judged_by_the_replay(small: Trace) -> None:
    budget = peak(small) * 85 // 100
    names = ("mu-two", "per-block", "save-all")
    contest = compare(Problem(small), "t", budget, names, QUICK, Setting())
    by_name = {e.planner: e for e in contest.entrants}
    assert tuple(by_name) == names
    timeline = run(Problem(small), build(Problem(small), plan_with("mu-two", Problem(small), budget).actions))
    row = by_name["mu-two"]
    assert (row.peak_allocated_bytes, row.step_time_ns) == (
        timeline.peak_allocated_bytes,
        timeline.step_time_ns,
    )
    added = timeline.step_time_ns - small.time_ns
    assert row.overhead_percent == pytest.approx(100 * added / small.time_ns, abs=1e-4)
    bound = lower_bound(Problem(small), budget).added_time_ns
    assert row.gap_points == pytest.approx(100 * (added - bound) / small.time_ns, abs=1e-4)
    assert row.gap_points >= 0
    kept = by_name["save-all"]
    assert not kept.feasible
    assert kept.peak_allocated_bytes is None
    assert kept.lowest_peak_bytes == peak(small)
    assert "lowest peak" in kept.message


def test_a_peers_plan_over_the_budget_is_a_row_and_no_refusal() -> None:
    of = chain(6, size=100)
    contest = alone(Problem(of), peak(of) - 100)
    row = contest.judged("other", Plan(meta=of.meta), None, peer=True)
    assert (row.feasible, row.peak_allocated_bytes, row.gap_points) == (False, peak(of), None)
    assert contest.with_entrants([row]).to_json()["planners"][0]["peer"] is True


def test_a_peers_plan_that_breaks_the_constraints_is_no_answer() -> None:
    """Its time is not bounded by what the constrained problem's bound says, so there is no gap between the two."""
    of = chain(6, size=100)
    budget = peak(of) - 100
    actions = plan_with("mu-two", Problem(of), budget).actions
    under = Problem(of, Constraints(never=(":: aten.test",)))
    free = alone(Problem(of), budget).judged("other", Plan(meta=of.meta, actions=actions), None)
    assert free.feasible
    assert free.gap_points == 0
    bound = alone(under, budget)
    row = bound.judged("other", Plan(meta=of.meta, actions=actions), None, peer=True, message="a note")
    assert (row.feasible, row.gap_points) == (False, None)
    assert "breaks the constraints" in row.message
    assert "a note" in row.message


def test_compare_prints_a_table_and_one_object(directory: Path, small: Trace) -> None:
    words = ("compare", directory, "--budget", "85%", "--planners", "mu-two,save-all", "-q")
    table = simulate(*words)
    assert table.exit_code == 0, table.output
    lines = table.stdout.splitlines()
    assert "no plan adds less than" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["planner", "mu-two", "save-all", "warning"]
    assert "no plan; lowest peak" in lines[3]
    done = simulate(*words, "--json")
    data = json.loads(done.stdout)
    assert not done.stderr
    assert data["budget_bytes"] == peak(small) * 85 // 100
    assert [e["planner"] for e in data["planners"]] == ["mu-two", "save-all"]
    assert data["feasible"] is True
    bad = simulate("compare", directory, "--budget", "1%", "--planners", "save-all", "--json", "-q")
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["feasible"] is False


def test_compare_takes_all_planners_and_constraints(directory: Path) -> None:
    done = simulate("compare", directory, "--budget", "90%", "--never", "*convolution*", "--seconds", "1")
    assert done.exit_code == 2  # the synthetic trace names no such op
    done = simulate(
        "compare", directory, "--budget", "95%", "--never", "layer1", "--seconds", "0.5", "--json", "-q"
    )
    assert done.exit_code == 0, done.output
    assert [e["planner"] for e in json.loads(done.stdout)["planners"]] == [*REGISTRY]


@pytest.mark.parametrize("planners", ["mu-two,magic", "mu-two,mu-two", ""])
def test_planners_that_are_none_or_twice(directory: Path, planners: str) -> None:
    assert simulate("compare", directory, "--budget", "90%", "--planners", planners).exit_code == 2
    assert simulate("pareto", directory, "--planner", "magic").exit_code == 2


def test_the_front_is_monotone_and_above_the_bound(small: Trace) -> None:
    done = front(Problem(small), "t", "mu-two", 9, Limits(seconds=4))
    budgets = [p.budget_bytes for p in done.points]
    assert budgets == sorted(budgets)
    assert (budgets[0], budgets[-1]) == (done.floor_bytes, peak(small))
    times = [p.step_time_ns for p in done.points if p.step_time_ns is not None]
    assert times == sorted(times, reverse=True)
    assert len(times) >= 5
    for p, plan in zip(done.points, done.plans, strict=True):
        assert (plan is None) == (not p.feasible)
        if plan is not None:
            timeline = Problem(small).replay(plan.actions).timeline
            assert timeline.peak_allocated_bytes == p.peak_allocated_bytes <= p.budget_bytes
            assert p.gap_points is not None
            assert p.gap_points >= 0
        else:
            assert p.message
    assert done.points[-1].overhead_percent == 0


def test_a_faster_plan_made_for_a_smaller_budget_is_carried_to_the_larger() -> None:
    of = chain(6, size=100)
    x = {n: s for s, n in enumerate(of.storages.name)}
    # one value away is faster than three away, although the larger budget's planner took three
    slow = Plan(meta=of.meta, actions=tuple(Action(storage=x[f"x{k}"]) for k in (1, 3, 5)))
    fast = Plan(meta=of.meta, actions=(Action(storage=x["x1"]),))
    low = Problem(of).replay(slow.actions).timeline.peak_allocated_bytes
    high = Problem(of).replay(fast.actions).timeline.peak_allocated_bytes
    assert low < high
    made = [pick_of(Problem(of), fast, high), pick_of(Problem(of), slow, high + 1)]
    picks = cheapest([low - 1, low, high, high + 1], made)
    assert [p and p.plan for p in picks] == [None, slow, fast, fast]
    assert [p and p.made_for_bytes for p in picks] == [None, high + 1, high, high]


def test_prices_are_time_for_each_gib_between_neighbours(small: Trace) -> None:
    points = front(Problem(small), "t", "mu-two", 6, Limits(seconds=4)).points
    assert points[0].price_ns_per_gib is None
    for below, p in pairwise(points):
        if below.step_time_ns is None or p.step_time_ns is None:
            assert p.price_ns_per_gib is None
            continue
        between = p.budget_bytes - below.budget_bytes
        assert p.price_ns_per_gib == round((below.step_time_ns - p.step_time_ns) * GIB / between)


def test_the_fronts_planner_obeys_constraints(small: Trace) -> None:
    under = Problem(small, Constraints(never=("layer1 ::",)))
    done = front(under, "t", "mu-two", 4, Limits(seconds=2))
    for plan in done.plans:
        if plan is not None:
            again = build(Problem(small), plan.actions).recomputed_ops
            assert not any(small.ops.module[op].startswith("layer1.") for op in again)


def test_a_budget_that_is_not_finished_costs_no_other_point(
    directory: Path, small: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the time of a planner that proves or says nothing runs out, the front says so and stands otherwise."""
    whole = front(Problem(small), "t", "mu-two", 5, QUICK).points
    late = {whole[0].budget_bytes, whole[-2].budget_bytes}

    def plan(name: str, problem: Problem, budget_bytes: int, limits: Limits) -> Plan:
        if budget_bytes in late:
            raise UnfinishedError("did not finish in 1 s")
        return plan_with(name, problem, budget_bytes, limits)

    monkeypatch.setattr("simulator.studies.pareto.plan_with", plan)
    points = front(Problem(small), "t", "mu-two", 5, QUICK).points
    assert [p.finished for p in points] == [p.budget_bytes not in late for p in whole]
    assert not points[0].feasible
    assert (points[-2].step_time_ns, points[-2].made_for_bytes) == (
        whole[-3].step_time_ns,
        whole[-3].made_for_bytes,
    )
    assert {p.message for p in points if not p.finished} == {"did not finish in 1 s"}
    assert points[-1].overhead_percent == 0
    words = ("pareto", directory, "--points", 5, "--planner", "mu-two", "-q")
    lines = simulate(*words, "--report", tmp_path / "front.html").stdout.splitlines()
    assert "not finished" in lines[6]
    assert lines[7].startswith("mu-two did not finish 2 of 5 budgets in their share of --seconds: ")
    page = (tmp_path / "front.html").read_text(encoding="utf-8")
    assert "not finished" in page
    data = json.loads(simulate(*words, "--json").stdout)
    assert [p["finished"] for p in data["points"]] == [p.finished for p in points]


def too_large(problem: Problem, budget_bytes: int, limits: Limits) -> Plan:
    raise SpecError("this planner is for small graphs")


def test_a_planner_that_cannot_plan_the_trace_at_all_has_no_front(small: Trace) -> None:
    with pytest.raises(SpecError, match="is for small graphs"):
        front(Problem(small), "t", f"{__name__}:{too_large.__name__}", 4, QUICK)


def test_pareto_prints_a_table_and_one_object(directory: Path) -> None:
    words = ("pareto", directory, "--points", 4, "--planner", "mu-two", "-q")
    lines = simulate(*words).stdout.splitlines()
    assert "4 budgets" in lines[0]
    assert lines[1].split()[0] == "budget"
    assert len(lines) == 7
    assert lines[-1].startswith("warning The inner allocations of")
    data = json.loads(simulate(*words, "--json").stdout)
    assert len(data["points"]) == 4
    assert data["smallest_peak_bytes"] >= data["floor_bytes"]


def test_every_plan_of_a_cpus_trace_is_told_to_fit_or_not(directory: Path, small: Trace) -> None:
    limit = peak(small) * 9 // 10
    words = ("--device-memory", limit, "-q")
    data = json.loads(
        simulate("pareto", directory, "--points", 5, "--planner", "mu-two", "--json", *words).stdout
    )
    assert data["device"]["usable_bytes"] == limit
    assert data["alloc_conf"] is None
    made = [p for p in data["points"] if p["feasible"]]
    assert [p["fits"] for p in made] == [p["peak_allocated_bytes"] <= limit for p in made]
    assert {p["fits"] for p in made} == {True, False}
    table = simulate("pareto", directory, "--points", 5, "--planner", "mu-two", *words).stdout
    assert "too large" in table.splitlines()[2]
    done = simulate(
        "compare",
        directory,
        "--budget",
        "95%",
        "--planners",
        f"mu-two,{BASELINE}",
        "--json",
        *words,
    )
    rows = json.loads(done.stdout)["planners"]
    assert [r["fits"] for r in rows] == [r["peak_allocated_bytes"] <= limit for r in rows]
    assert False in [r["fits"] for r in rows]
    table = simulate("compare", directory, "--budget", "95%", "--planners", "mu-two", *words).stdout
    assert "does not fit the device" in table
    for command in (("pareto",), ("compare", "--budget", "90%")):
        done = simulate(command[0], directory, *command[1:], "--alloc-conf", "expandable_segments:True")
        assert done.exit_code == 2
        assert "no caching allocator" in done.output


def test_reserved_memory_is_that_of_the_settings_asked_about(small: Trace) -> None:
    of = replace(small, meta=replace(small.meta, device="cuda", target="h200"))
    conf = "expandable_segments:True"
    usable = peak(of) * 95 // 100
    device = DeviceMemory(name="tiny", kind="cuda", memory_bytes=usable)
    settings = parse_alloc_conf(conf)
    plain = front(Problem(of), "t", "mu-two", 3, QUICK)
    asked = front(Problem(of), "t", "mu-two", 3, QUICK, setting_of(of.meta, conf, device))
    setting = setting_of(of.meta, conf, device)
    contest = compare(Problem(of), "t", peak(of), ["mu-two"], QUICK, setting)
    assert (asked.setting.alloc_conf, plain.setting.alloc_conf) == (conf, "")
    for point, other, plan in zip(asked.points, plain.points, asked.plans, strict=True):
        if plan is not None:
            schedule = build(Problem(of), plan.actions)
            grown = reserved_peak(Problem(of), schedule, settings)
            assert point.fits == (grown.highest_reserved_bytes <= usable)
            if point.fits:
                assert point.peak_reserved_bytes == grown.peak_reserved_bytes
            assert other.peak_reserved_bytes == reserved_peak(Problem(of), schedule).peak_reserved_bytes
            assert other.fits is None
    assert {p.fits for p in asked.points if p.feasible} == {True, False}
    kept, row = asked.points[-1], contest.entrants[0]
    assert (row.fits, row.peak_reserved_bytes) == (kept.fits, kept.peak_reserved_bytes)


def test_the_pages_hold_the_figures_and_a_picture(directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    page = tmp_path / "c.html"
    done = simulate(
        "compare", directory, "--budget", "85%", "--planners", "mu-two,save-all", "--report", page, "-q"
    )
    assert done.exit_code == 0, done.output
    text = page.read_text(encoding="utf-8")
    for part in ("mu-two", "save-all", "no plan; lowest peak", "Peak against added time"):
        assert part in text
    page = tmp_path / "p.html"
    assert simulate("pareto", directory, "--points", 4, "--report", page, "-q").exit_code == 0
    text = page.read_text(encoding="utf-8")
    for part in ("What each GiB costs", "certified bound", "one GiB less costs"):
        assert part in text


def test_the_page_says_of_a_plan_that_cannot_be_had_why_not() -> None:
    from simulator.studies.comparison import verdict

    row = Entrant(
        planner="torch", feasible=False, solve_seconds=1.0, peak_allocated_bytes=90, message="wrong gradients"
    )
    assert verdict(row, 100).text == "wrong gradients"
    assert verdict(row, 80).text == "over the budget; wrong gradients"
