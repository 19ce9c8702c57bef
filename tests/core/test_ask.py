"""Questions and their answers: what words mean, and what must hold of every answer, whatever was asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator import Infeasible
from simulator.allocator.reserved import reserved_peak
from simulator.allocator.settings import parse_alloc_conf
from simulator.core.problem import Problem
from simulator.planners import DEFAULT, SAVE_ALL
from simulator.prediction import ask as api
from simulator.prediction.ask import ask, question
from tests.synthetic import resnet
from traces.errors import SpecError
from traces.records.plan import ALLOCATED, RESERVED, Plan
from traces.records.trace import Trace

CONF = "expandable_segments:True"
CPU = resnet((1, 2, 2, 1), batch=64, side=64)
GPU = replace(CPU, meta=replace(CPU.meta, device="cuda", target="A100-40"))
LARGE = resnet((1, 2, 2, 1), batch=256, side=64)
LARGE_GPU = replace(LARGE, meta=replace(LARGE.meta, device="cuda", target="A100-40"))
PEAK = Problem(CPU).saved.timeline.peak_allocated_bytes

# Trace, words, what the budget limits, and whether there is a plan.
ASKED: list[tuple[Trace, dict[str, Any], str, bool]] = [
    (CPU, {}, ALLOCATED, True),
    (CPU, {"budget": "60%"}, ALLOCATED, True),
    (CPU, {"budget": PEAK * 6 // 10, "seconds": 1}, ALLOCATED, True),
    (CPU, {"budget": "85%", "planner": "mu-two"}, ALLOCATED, True),
    (CPU, {"budget": "device", "memory": str(PEAK * 9 // 10)}, ALLOCATED, True),
    (CPU, {"budget": "80%", "memory": "30GiB", "planner": "mu-two"}, ALLOCATED, True),
    (CPU, {"budget": "1%"}, ALLOCATED, False),
    (CPU, {"budget": "1%", "device": 1 << 30}, ALLOCATED, False),
    (CPU, {"budget": "90%", "planner": SAVE_ALL}, ALLOCATED, False),
    (GPU, {"budget": "60%"}, ALLOCATED, True),
    (GPU, {"alloc_conf": CONF}, ALLOCATED, True),
    (GPU, {"budget": "70%", "budget_of": RESERVED, "planner": "mu-two"}, RESERVED, True),
    (GPU, {"budget": "80%", "gpu": "a100-40", "planner": "mu-two"}, RESERVED, True),
    (GPU, {"budget": "80%", "gpu": "a100-40", "budget_of": ALLOCATED, "planner": "mu-two"}, ALLOCATED, True),
    (GPU, {"budget": "device", "memory": str(PEAK), "context": "0", "planner": "mu-two"}, RESERVED, True),
    (GPU, {"budget": "1%", "budget_of": RESERVED, "planner": "mu-two"}, RESERVED, False),
    (LARGE_GPU, {"budget": "70%", "budget_of": RESERVED, "planner": "mu-two"}, RESERVED, True),
    (LARGE_GPU, {"budget": "70%", "budget_of": RESERVED, "planner": "mu-two", "alloc_conf": ""}, RESERVED, True),
]  # fmt: skip


@pytest.mark.parametrize(("of", "words", "limits", "feasible"), ASKED)
def test_what_holds_of_every_answer(
    of: Trace, words: dict[str, Any], limits: str, feasible: bool, tmp_path: Path
) -> None:
    asked = question(**words)
    problem = Problem(of)
    answer = ask(problem, asked, name="t")
    data = answer.to_json()
    assert (data["trace"], data["budget_of"], data["feasible"]) == ("t", limits, feasible)
    assert data["planner"] == words.get("planner", DEFAULT if "budget" in words else SAVE_ALL)
    assert sum(data["baseline"]["peak_by_category"].values()) == data["baseline"]["peak_allocated_bytes"]
    if not feasible:
        with pytest.raises(Infeasible) as refused:
            _ = answer.planned
        assert data["plan"]["peak_allocated_bytes"] is None
        assert data["message"] == str(refused.value)
        assert data["budget_bytes"] < data["lowest_peak_bytes"]
        floor = data["floor"]
        if floor is not None:
            parts = floor["resident_bytes"] + floor["gradient_bytes"] + floor["working_bytes"]
            assert parts == floor["peak_allocated_bytes"] <= data["lowest_peak_bytes"]
        return
    c, figures = answer.planned, answer.planned.planned_figures
    plan = c.plan
    assert answer.budget_bytes is None or (figures.peak_bytes(limits) or 0) <= answer.budget_bytes
    assert (plan.budget_bytes, plan.budget_of) == (answer.budget_bytes, limits)
    # The figures are those of the replay, and of the allocator under the settings that the plan carries.
    replay = Problem(of).replay(plan.actions)
    if not plan.rewrites:
        assert replay.timeline.peak_allocated_bytes == figures.peak_allocated_bytes
        assert replay.timeline.step_time_ns == figures.step_time_ns
        if of.meta.device == "cuda":
            settings = parse_alloc_conf(plan.meta.alloc_conf)
            reserved = reserved_peak(Problem(of), replay.schedule, settings).peak_reserved_bytes
            assert reserved == figures.peak_reserved_bytes
            assert any("CUDA build of torch" in text for text in data["warnings"])
    assert data["alloc_conf"] == (plan.meta.alloc_conf if of.meta.device == "cuda" else None)
    assert figures.headline().items() <= data["plan"].items()
    assert figures.headline().items() <= plan.predicted["plan"].items()
    bound = data["bound"]["overhead_percent"]
    if answer.bound is not None and bound is not None:
        assert answer.bound.tried == ("the rewrites that were tried" in data["bound"]["reason"])
        assert 0 <= bound <= c.overhead_percent
        assert data["gap_points"] == pytest.approx(c.overhead_percent - bound, abs=1e-3)
    # Whoever asks in another way has the same answer.
    saved = Plan.load(plan.save(tmp_path / "plan.json"))
    saved.check_seal("plan.json")
    assert saved == plan
    assert ask(problem, asked).planned.plan == plan
    if not {"gpu", "memory", "context"} & {*words}:
        assert api.plan(of, **{"budget": None, **words}) == plan
        assert api.simulate(of, tmp_path / "plan.json").planned_figures == figures


def test_settings_that_are_chosen_cost_no_more_than_those_that_are_given() -> None:
    chosen, given = (api.plan(of, **words) for of, words, *_ in ASKED if of is LARGE_GPU)
    assert given.meta.alloc_conf == ""
    assert chosen.predicted["plan"]["overhead_percent"] <= given.predicted["plan"]["overhead_percent"]
    assert any(
        f"PYTORCH_ALLOC_CONF is {chosen.meta.alloc_conf} before" in w for w in chosen.predicted["warnings"]
    ) == bool(chosen.meta.alloc_conf)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *(({"budget": budget}, "budget") for budget in ("0", "-1", "80 percent", 0, "0.6")),
        ({"budget_of": "x"}, "give allocated or reserved"),
        *(({"seconds": s}, "a number of seconds") for s in ("5", None, -1, float("nan"), float("inf"), 10**400)),
        ({"planner": "magic"}, "no planner"),
        ({"alloc_conf": "expandable:True"}, "expandable_segments"),
        ({"device": "no-such-gpu"}, "no-such-gpu"),
        ({"device": "40 gigs"}, "unknown unit"),
        ({"context": "1GiB"}, "part of a device's memory"),
        ({"allow": "all"}, "give one of bit, fp, approximate"),
        ({"max_gradient_error": 0.1}, "of plans with --allow approximate"),
        ({"host_memory": "50%"}, "give a size"),
    ],
)  # fmt: skip
def test_words_that_mean_nothing_in_any_trace(words: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        question(**words)


def test_a_word_that_is_none_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="'buget' is no word"):
        api.plan(CPU, "60%", buget=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("of", "words", "told"),
    [
        (CPU, {"budget": "device"}, "name the device"),
        (CPU, {"budget": "60%", "budget_of": RESERVED}, "graph of a CPU"),
        (CPU, {"alloc_conf": CONF}, "no caching allocator"),
        (CPU, {"gpu": "h200"}, "graph of a CPU"),
        (GPU, {"gpu": "cpu"}, "graph of a CUDA"),
        (CPU, {"budget": "60%", "levers": "tile"}, "needs --allow fp"),
        (CPU, {"budget": "60%", "levers": ["nope"]}, "no such lever"),
    ],
)
def test_words_that_mean_nothing_for_this_trace(of: Trace, words: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        ask(Problem(of), question(**words))
