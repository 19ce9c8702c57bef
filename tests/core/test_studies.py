"""`simulate compare` and `simulate pareto`: what each row says, monotone fronts, prices, pages, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from simulator import bound, compare, pareto
from simulator.allocator.device import DeviceMemory
from simulator.allocator.reserved import reserved_peak
from simulator.allocator.settings import parse_alloc_conf
from simulator.core.problem import Problem
from simulator.core.schedule import build
from simulator.planners import REGISTRY, plan_with
from simulator.prediction.ask import Answer, Question
from simulator.prediction.step import predict
from simulator.studies.pareto import cheapest
from tests.commands import simulate
from tests.synthetic import resnet
from tests.tiny import chain
from traces.errors import SpecError
from traces.records.plan import ALLOCATED, Action, Plan
from traces.records.store import save
from traces.records.trace import Trace
from traces.units import GIB

CONF = "expandable_segments:True"


def peak(of: Trace) -> int:
    return Problem(of).saved.timeline.peak_allocated_bytes


@pytest.fixture(scope="module")
def small() -> Trace:
    return resnet((1, 2, 2, 1), batch=64, side=64)


@pytest.fixture(scope="module")
def directory(small: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(small, tmp_path_factory.mktemp("traces") / "small")


def test_every_row_is_the_planners_own_plan_judged_by_the_replay(small: Trace) -> None:
    budget, names = peak(small) * 85 // 100, ("mu-two", "per-block", "save-all")
    by_name = {row.planner: row for row in compare(small, budget, names).rows}
    assert tuple(by_name) == names
    timeline = Problem(small).replay(plan_with("mu-two", Problem(small), budget).actions).timeline
    row, kept = by_name["mu-two"], by_name["save-all"]
    assert (row.peak_allocated_bytes, row.step_time_ns) == (
        timeline.peak_allocated_bytes,
        timeline.step_time_ns,
    )
    added, least = timeline.step_time_ns - small.time_ns, bound(small, budget).added_time_ns
    assert row.overhead_percent == pytest.approx(100 * added / small.time_ns, abs=1e-4)
    assert row.gap_points == pytest.approx(100 * (added - least) / small.time_ns, abs=1e-4)
    assert row.gap_points >= 0
    assert (kept.feasible, kept.peak_allocated_bytes, kept.lowest_peak_bytes) == (False, None, peak(small))
    assert "lowest peak" in kept.message


def test_compare_prints_a_table_and_one_object(directory: Path, small: Trace) -> None:
    words = ("compare", directory, "--budget", "85%", "--planners", "mu-two,save-all", "-q")
    lines = simulate(*words).stdout.splitlines()
    assert "no plan adds less than" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["planner", "mu-two", "save-all", "warning"]
    assert "no plan; lowest peak" in lines[3]
    done = simulate(*words, "--json")
    data = json.loads(done.stdout)
    assert (done.stderr, data["feasible"]) == ("", True)
    assert data["budget_bytes"] == peak(small) * 85 // 100
    assert [row["planner"] for row in data["planners"]] == ["mu-two", "save-all"]
    bad = simulate("compare", directory, "--budget", "1%", "--planners", "save-all", "--json", "-q")
    assert (bad.exit_code, json.loads(bad.stdout)["feasible"]) == (1, False)


def test_compare_takes_all_planners(directory: Path) -> None:
    done = simulate("compare", directory, "--budget", "95%", "--seconds", "0.5", "--json", "-q")
    assert done.exit_code == 0, done.output
    assert [row["planner"] for row in json.loads(done.stdout)["planners"]] == [*REGISTRY]


@pytest.mark.parametrize(
    "words",
    [
        *(("compare", "T", "--budget", "90%", "--planners", names) for names in ("mu-two,magic", "mu-two,mu-two", "")),
        ("pareto", "T", "--planner", "magic"),
        ("pareto", "T", "--alloc-conf", CONF),
        ("compare", "T", "--budget", "90%", "--alloc-conf", CONF),
    ],
)  # fmt: skip
def test_words_that_mean_nothing(directory: Path, words: tuple[str, ...]) -> None:
    done = simulate(*(directory if word == "T" else word for word in words))
    assert (done.exit_code, done.stdout) == (2, "")
    assert CONF not in words or "no caching allocator" in done.stderr


def test_studies_are_of_planners_by_themselves(small: Trace) -> None:
    with pytest.raises(SpecError, match="by themselves"):
        compare(small, "80%", allow="fp")
    with pytest.raises(SpecError, match="by themselves"):
        pareto(small, levers=["tile"])
    with pytest.raises(SpecError, match="a front has two at least"):
        pareto(small, 1)


def test_the_front_is_monotone_and_above_the_bound(small: Trace) -> None:
    done = pareto(small, 9, planner="mu-two", seconds=4)
    budgets = [row.budget_bytes for row in done.rows]
    assert budgets == sorted(budgets)
    assert (budgets[0], budgets[-1]) == (done.data["floor_bytes"], peak(small))
    assert sum(row.feasible for row in done.rows) >= 5
    for row, plan in zip(done.rows, done.plans, strict=True):
        assert (plan is None) == (not row.feasible) == bool(row.message)
        assert plan is None or (row.gap_points is not None and row.gap_points >= 0)
    assert done.rows[-1].overhead_percent == 0
    assert done.rows[0].price_ns_per_gib is None
    for below, row in pairwise(done.rows):
        price = None
        if below.step_time_ns is not None and row.step_time_ns is not None:
            between = row.budget_bytes - below.budget_bytes
            price = round((below.step_time_ns - row.step_time_ns) * GIB / between)
        assert row.price_ns_per_gib == price


def test_a_faster_plan_made_for_a_smaller_budget_is_carried_to_the_larger() -> None:
    problem = Problem(chain(6, size=100))
    meta, x = problem.trace.meta, {n: s for s, n in enumerate(problem.trace.storages.name)}

    def answer(budget: int, *names: str) -> Answer:
        plan = Plan(meta=meta, actions=tuple(Action(storage=x[n]) for n in names))
        asked = Question(budget=budget)
        setting = asked.setting(meta)
        c, kept = predict(problem, setting, plan), predict(problem, setting)
        return Answer(
            question=asked, trace_name="t", asked=kept, found=c, budget_bytes=budget, budget_of=ALLOCATED
        )

    # One value away is faster than three away, although the larger budget's planner took three.
    slow, fast = answer(10_000, "x1", "x3", "x5"), answer(9_000, "x1")
    low, high = (a.planned.planned.timeline.peak_allocated_bytes for a in (slow, fast))
    assert low < high
    refused = replace(slow, found=None, refusal=SpecError("no"))
    made = {low - 1: refused, low: refused, high: fast, high + 1: slow}
    assert cheapest(made) == [None, slow, fast, fast]


def test_pareto_prints_a_table_and_one_object(directory: Path) -> None:
    words = ("pareto", directory, "--points", 4, "--planner", "mu-two", "-q")
    lines = simulate(*words).stdout.splitlines()
    assert "4 budgets" in lines[0]
    assert [line.split()[0] for line in (lines[1], lines[-1])] == ["budget", "warning"]
    assert len(lines) == 7
    data = json.loads(simulate(*words, "--json").stdout)
    assert len(data["points"]) == 4
    assert data["smallest_peak_bytes"] >= data["floor_bytes"]


def test_every_plan_of_a_cpus_trace_is_told_to_fit_or_not(directory: Path, small: Trace) -> None:
    limit = peak(small) * 9 // 10
    words = ("--device-memory", limit, "-q")
    front = ("pareto", directory, "--points", 5, "--planner", "mu-two", *words)
    data = json.loads(simulate(*front, "--json").stdout)
    assert (data["device"]["usable_bytes"], data["alloc_conf"]) == (limit, None)
    contest = ("compare", directory, "--budget", "95%", "--planners", "mu-two,search", *words)
    for rows in (data["points"], json.loads(simulate(*contest, "--json").stdout)["planners"]):
        made = [row for row in rows if row["feasible"]]
        assert [row["fits"] for row in made] == [row["peak_allocated_bytes"] <= limit for row in made]
        assert False in [row["fits"] for row in made]
    assert "too large" in simulate(*front).stdout.splitlines()[2]
    assert "does not fit the device" in simulate(*contest).stdout


def test_reserved_memory_is_that_of_the_settings_asked_about(small: Trace) -> None:
    of = replace(small, meta=replace(small.meta, device="cuda", target="h200"))
    usable, settings = peak(of) * 95 // 100, parse_alloc_conf(CONF)
    device = DeviceMemory(name="tiny", kind="cuda", memory_bytes=usable)
    plain = pareto(of, 3, planner="mu-two")
    asked = pareto(of, 3, planner="mu-two", alloc_conf=CONF, device=device)
    contest = compare(of, peak(of), ["mu-two"], alloc_conf=CONF, device=device)
    assert (asked.data["alloc_conf"], plain.data["alloc_conf"]) == (CONF, "")
    for row, other, plan in zip(asked.rows, plain.rows, asked.plans, strict=True):
        if plan is not None:
            schedule = build(Problem(of), plan.actions)
            grown = reserved_peak(Problem(of), schedule, settings)
            assert row.fits == (grown.highest_reserved_bytes <= usable)
            if row.fits:
                assert row.peak_reserved_bytes == grown.peak_reserved_bytes
            assert other.peak_reserved_bytes == reserved_peak(Problem(of), schedule).peak_reserved_bytes
            assert other.fits is None
    assert {row.fits for row in asked.rows if row.feasible} == {True, False}
    for study in (plain, compare(of, peak(of), ["mu-two"])):
        assert any("a CUDA build of torch" in text for text in study.data["warnings"])
        assert study.data["baseline"]["peak_reserved_bytes"] == plain.rows[-1].peak_reserved_bytes
    kept, row = asked.rows[-1], contest.rows[0]
    assert (row.fits, row.peak_reserved_bytes) == (kept.fits, kept.peak_reserved_bytes)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ("compare", "--budget", "85%", "--planners", "mu-two,save-all"),
            ("mu-two", "save-all", "no plan; lowest peak"),
        ),
        (("pareto", "--points", "4"), ("vega", "certified bound", "one GiB less costs")),
    ],
)
def test_the_pages_hold_the_figures_and_the_front_a_picture(
    directory: Path, tmp_path: Path, words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    pytest.importorskip("vl_convert")
    page = tmp_path / "page.html"
    done = simulate(words[0], directory, *words[1:], "--report", page, "-q")
    assert done.exit_code == 0, done.output
    text = page.read_text(encoding="utf-8")
    assert [part for part in parts if part not in text] == []
