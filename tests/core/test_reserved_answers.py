"""Answers about a GPU's trace: reserved memory, allocator settings, devices, budgets of reserved memory, warnings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.allocator.device import (
    DeviceFit,
    DeviceMemory,
    Setting,
    device_fit,
    device_memory,
    setting_of,
    settings_to_try,
)
from simulator.allocator.reserved import reserved_peak
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.core.schedule import build
from simulator.kernels import now
from simulator.planners import plan_with
from simulator.prediction import ask as api
from simulator.prediction import reserved_budget
from simulator.prediction.ask import ask, question
from simulator.prediction.reserved_budget import ATTEMPTS, Tried, lower_until_within
from simulator.prediction.step import (
    Prediction,
    predict,
    texts,
    unknown_ops,
    untouched_fit,
    untouched_peak_bytes,
)
from tests.commands import simulate
from tests.synthetic import resnet
from tests.tiny import bwd, chain, fwd, opt, trace
from traces.devices import CONTEXT_BYTES
from traces.errors import BudgetError, SpecError
from traces.records.plan import RESERVED, Plan
from traces.records.store import load, save
from traces.records.trace import FORWARD, MOST, OPTIMIZER_STATE, Trace, TraceMeta, Untouched

MIB = 1 << 20
GIB = 1 << 30


def on_gpu(of: Trace, **meta: Any) -> Trace:
    return replace(of, meta=replace(of.meta, device="cuda", target="A100-40", **meta))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(on_gpu(resnet((1, 2, 2, 1), batch=64, side=64)), tmp_path_factory.mktemp("traces") / "gpu")


@pytest.fixture(scope="module")
def cpu_network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(resnet((1, 2, 2, 1), batch=64, side=64), tmp_path_factory.mktemp("traces") / "cpu")


def with_state(size: int) -> Trace:
    """w, an activation of 30 MiB, its gradient g, and an optimizer whose state `m` has `size` bytes."""
    ops = [fwd({"x": 30 * MIB}, "w"), bwd({"g": 4 * MIB}, "x"), opt({}, "g", "m")]
    return trace(ops, {"w": 4 * MIB, "m": size}, hold={"g": 2}, categories={"m": OPTIMIZER_STATE})


def saved(of: Trace) -> Prediction:
    """The step with everything saved."""
    return predict(Problem(of), setting_of(of.meta))


def fit_of(of: Trace, setting: Setting) -> DeviceFit:
    return device_fit(Problem(of), Problem(of).saved, setting)


def test_optimizer_state_comes_into_the_holes_of_the_first_iteration() -> None:
    # First iteration: w 4 and g 4 share a segment of 20; x 30 in a segment of its own, free when the optimizer begins.
    # m of 4 then fits behind g in the segment of 20: reserved stays 20 + 30 in every iteration.
    small = with_state(4 * MIB)
    figures = reserved_peak(Problem(small), build(Problem(small)))
    assert [i.reserved_bytes for i in figures.iterations] == [50 * MIB, 50 * MIB]
    assert figures.steady
    # m of 16 fits only into x's free segment of 30, of which 14 are left; so the second iteration must get x anew.
    large = with_state(16 * MIB)
    figures = reserved_peak(Problem(large), build(Problem(large)))
    assert [i.reserved_bytes for i in figures.iterations] == [50 * MIB, 80 * MIB, 80 * MIB]
    assert figures.steady
    # In the first iteration w, x and g are there at once; afterwards m as well.
    assert [i.peak_requested_bytes for i in figures.iterations] == [38 * MIB, 54 * MIB, 54 * MIB]


def test_simulation_ends_when_nothing_new_is_asked_for() -> None:
    of = chain(3, 1000)
    assert len(reserved_peak(Problem(of), build(Problem(of))).iterations) == 2
    once = reserved_peak(Problem(of), build(Problem(of)), iterations=1)
    assert (len(once.iterations), once.steady) == (1, False)


def test_would_these_settings_help(network: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    conf = "expandable_segments:True"
    said = json.loads(simulate(network, "--alloc-conf", conf, "-o", output, "--json").stdout)
    without = json.loads(simulate(network, "--json").stdout)
    assert said["baseline"]["peak_reserved_bytes"] < without["baseline"]["peak_reserved_bytes"]
    assert (said["alloc_conf"], without["alloc_conf"]) == (conf, "")
    assert Plan.load(output).meta.alloc_conf == conf
    assert f" with {conf}; " in simulate(network, "--alloc-conf", conf).stdout


def test_a_cpus_trace_has_no_reserved_memory(cpu_network: Path) -> None:
    said = json.loads(simulate(cpu_network, "--budget", "60%", "--json").stdout)
    for key in ("baseline", "plan"):
        figures = (said[key]["peak_block_bytes"], said[key]["peak_reserved_bytes"], said[key]["allocator"])
        assert figures == (None, None, None)
    assert simulate(cpu_network, "--gpu", "cpu").exit_code == 0
    small = simulate(cpu_network, "--device-memory", "64MiB", "--json")
    assert small.exit_code == 1
    assert json.loads(small.stdout)["device_memory"]["plan_fits"] is False


def test_whether_it_fits_a_device(network: Path) -> None:
    said = json.loads(simulate(network, "--gpu", "a100-40", "--json").stdout)
    device, reserved = said["device_memory"], said["plan"]["peak_reserved_bytes"]
    assert device["memory_bytes"] == 40 * GIB
    assert device["usable_bytes"] == 40 * GIB - CONTEXT_BYTES
    assert device["left_bytes"] == device["usable_bytes"] - reserved
    assert (device["plan_fits"], said["feasible"]) == (True, True)
    result = simulate(network, "--device-memory", reserved // 2, "--context", "0", "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert (said["device_memory"]["plan_fits"], said["feasible"]) == (False, False)
    assert "does not fit" in result.stderr


def test_a_device_on_which_cached_memory_must_be_given_back() -> None:
    # 30 tensors of 1 MiB in the small pool: one beside w in its segment of 2 MiB, two in each of 15 more: 32 MiB.
    # They are freed, and z of 30 MiB wants a large segment: 62 MiB in all on a device that has them.
    many = {f"x{k}": MIB for k in range(30)}
    ops = [fwd(many, "w"), fwd({"a": 512}, *many), fwd({"z": 30 * MIB}, "a"), bwd({"g": 512}, "z")]
    of = on_gpu(trace(ops, {"w": 512}))

    def on(memory_bytes: int) -> DeviceFit:
        return fit_of(
            of, setting_of(of.meta, None, DeviceMemory(name="d", kind="cuda", memory_bytes=memory_bytes))
        )

    enough = on(62 * MIB)
    assert enough.fits
    assert (enough.reserved.peak_reserved_bytes, enough.reserved.retries_a_step) == (62 * MIB, 0)
    # A device of 34 has room for the 30 only when the small segments have gone back, and the other way round in the
    # next iteration: two retries a step.
    tight = on(34 * MIB)
    assert (tight.fits, tight.wanted_bytes) == (True, 62 * MIB)
    assert tight.reserved.highest_reserved_bytes == 34 * MIB
    assert tight.reserved.retries_a_step == 2
    assert not tight.reserved.steady
    none = on(30 * MIB)
    assert not none.fits
    assert "32.00 MiB more than there is" in none.out_of_memory
    device = DeviceMemory(name="d", kind="cuda", memory_bytes=34 * MIB)
    c = predict(Problem(of), setting_of(of.meta, None, device))
    assert any("2 times a step" in text for text in texts(c))
    assert (c.planned_fit.fits, c.planned_fit.retries_a_step) == (True, 2)


def test_a_trace_recorded_under_settings_is_planned_under_them() -> None:
    meta = TraceMeta(model="m", device="cuda", torch_version="2.13.0")
    tried = [s.alloc_conf for s in settings_to_try(meta, setting_of(meta))]
    assert tried[0] == ""
    assert "expandable_segments:True" in tried
    recorded = replace(meta, alloc_conf="max_split_size_mb:64")
    assert [s.alloc_conf for s in settings_to_try(recorded, setting_of(recorded))] == ["max_split_size_mb:64"]


NOW = Limits()


def made(reserves: Callable[[int], int], least: int = 0) -> Any:
    """Makes plans that remember their budget and for which the allocator reserves `reserves(budget)`; and what it was
    asked."""
    asked: list[int] = []

    def make(budget: int) -> Tried:
        asked.append(budget)
        if budget < least:
            raise BudgetError("too little")
        predicted = {"plan": {"step_time_ns": 2000 - budget}}
        plan = Plan(meta=TraceMeta(model="m"), budget_bytes=budget, predicted=predicted)
        return Tried(plan=plan, reserved_bytes=reserves(budget), setting=Setting())

    return make, asked


def highest_within(tried: list[Tried], limit_bytes: int) -> int:
    return max(t.plan.budget_bytes or 0 for t in tried if t.reserved_bytes <= limit_bytes)


def test_the_search_for_a_budget_of_reserved_memory() -> None:
    make, asked = made(lambda budget: budget)
    assert highest_within(lower_until_within(make, 1000, NOW)[0], 1000) == 1000
    assert asked == [1000]  # what fits at once is taken at once
    make, asked = made(lambda budget: budget + budget // 4)
    tried, why = lower_until_within(make, 1000, NOW)
    assert why is None
    assert 780 <= highest_within(tried, 1000) <= 800  # 800 is the largest that does
    assert len(asked) <= ATTEMPTS
    make, asked = made(lambda budget: budget + 500, least=700)
    tried, why = lower_until_within(make, 1000, NOW)
    assert min(t.reserved_bytes for t in tried) > 1200  # none above 700 reserves less
    assert "too little" in str(why)
    make, _ = made(lambda budget: budget, least=2000)
    with pytest.raises(BudgetError, match="too little"):
        lower_until_within(make, 1000, NOW)


def test_device_memory_in_words() -> None:
    device = device_memory("cuda", gpu="a100-40", context="1GiB")
    assert device is not None
    assert device.usable_bytes == 40 * GIB - GIB
    assert "A100-40" in device.room()
    assert device_memory("cuda") is None
    cpu = device_memory("cpu", memory="2GiB")
    assert cpu is not None
    assert cpu.usable_bytes == 2 * GIB  # no context
    for words in ({"gpu": "cpu"}, {"memory": "50%"}, {"context": "1GiB"}, {"gpu": "no-such-gpu"}):
        with pytest.raises(SpecError):
            device_memory("cuda", **words)


def test_what_is_said_beside_a_prediction() -> None:
    ops = [fwd({"x": 8}, "w"), bwd({"g": 4}, "x")]
    of = trace(ops, {"w": 4})

    def said(of: Trace) -> tuple[str, ...]:
        return texts(saved(of))

    (warning,) = said(of)
    assert "2 of 2 computing ops count by what they return alone" in warning
    # What a rule says of a convolution is not all: cuDNN asks for more.
    partly = replace(
        of, ops=replace(of.ops, events=((8,), (4,)), target=("aten.convolution.default", "aten.test"))
    )
    partly = replace(partly, meta=replace(partly.meta, workspace={"rehearsed": 1, "none": 1}))
    assert unknown_ops(on_gpu(partly)) == (0,)
    assert unknown_ops(partly) == ()
    by_hand = replace(partly, meta=replace(partly.meta, workspace={"measured": 1, "none": 1}))
    assert unknown_ops(on_gpu(by_hand)) == ()
    measured = replace(of, meta=replace(of.meta, mode="real", workspace={"measured": 2}))
    assert said(measured) == ()
    approximate = replace(of, meta=replace(of.meta, workspace={"none": 2}))
    (warning,) = said(on_gpu(approximate))
    assert "a CUDA build of torch" in warning
    (warning,) = said(approximate)
    assert "trace with --device cpu" in warning
    meta = replace(partly.meta, mode="rehearsed", workspace={"rehearsed": 1, "none": 1})
    rehearsed = on_gpu(replace(partly, meta=meta))
    (asked,) = said(rehearsed)
    assert "What libraries ask for inside 1 of 2 computing ops is unknown" in asked
    whole = replace(rehearsed, meta=replace(rehearsed.meta, workspace={"rehearsed": 2}))
    assert said(whole) == ()


def test_what_the_untouched_model_may_need_beyond_the_graph_is_said() -> None:
    """`g` takes over `y`'s 50 bytes; without that, g's op holds x 100, y 50 and g 50."""
    step = trace([fwd({"y": 50}, "x"), bwd({"g": 50}, "y", overwrites="y")], {"x": 100})
    c = saved(step)
    assert c.saved.timeline.peak_allocated_bytes == 150
    assert untouched_peak_bytes(c) == 200
    assert any("untouched model needs about 50 B (+33.3 %)" in w for w in texts(c))
    counted = replace(step, meta=replace(step.meta, untouched_peak_bytes=170))  # by running it as it is
    c = saved(counted)
    assert untouched_peak_bytes(c) == 170
    assert any("untouched model needs about 20 B (+13.3 %)" in w for w in texts(c))
    plain = trace([fwd({"y": 50}, "x"), bwd({"g": 50}, "y")], {"x": 100})
    assert not any("untouched" in w for w in texts(saved(plain)))


def test_what_the_untouched_loop_asks_decides_what_it_reserves() -> None:
    """The graph asks for 50 bytes at a time; the loop, as recorded, for two blocks of 3 MiB, and for 1 MiB for good."""
    blocks, nbytes = (0, -1, 1, ~0, ~1), (3 * MIB, MIB, 3 * MIB, 0, 0)
    asked = Untouched(block=blocks, nbytes=nbytes, once=(0, 1, 0, 0, 0), phase=(FORWARD,) * 5)
    graph = trace([fwd({"y": 50}, "x"), bwd({"g": 50}, "y")], {"x": 100})
    step = replace(graph, untouched=asked, meta=replace(graph.meta, device="cuda"))
    found = untouched_fit(saved(step)).reserved
    assert found is not None
    assert found.peak_block_bytes == 7 * MIB + 512  # x in a block of 512
    assert untouched_fit(saved(replace(step, untouched=Untouched()))).reserved != found


@pytest.mark.parametrize(
    ("block", "nbytes", "once"),
    [
        ((0, 0), (5, 5), (0, 0)),
        ((~0,), (0,), (0,)),
        ((0, ~0, ~0), (5, 0, 0), (0, 0, 0)),
        ((0,), (0,), (0,)),
        ((-1,), (5,), (2,)),  # for good, in every later iteration
    ],
)
def test_requests_that_cannot_be(block: Any, nbytes: Any, once: Any) -> None:
    with pytest.raises(ValueError, match="cannot ask"):
        Untouched(block=block, nbytes=nbytes, once=once, phase=(FORWARD,) * len(block))


def test_all_plans_for_one_budget_share_its_time(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are tried, and each with and without what comes at no cost: none begins a time of its own."""
    ends: list[float] = []

    def planned(planner: str, problem: Problem, budget_bytes: int, limits: Limits) -> Plan:
        ends.append(replace(limits, seconds=100.0).started().until)
        return plan_with("mu-two", problem, budget_bytes, limits)

    monkeypatch.setattr(reserved_budget, "plan_with", planned)
    whole = saved(load(network)).saved_figures.peak_reserved_bytes
    latest = now() + 7.0
    api.plan(load(network), (whole or 0) * 7 // 10, budget_of=RESERVED, seconds=7.0, alloc_conf="")
    assert len(ends) > 1
    assert len(set(ends)) == 1
    assert latest <= ends[0] <= latest + 5.0


def test_the_time_ends_the_search_once_a_plan_is_within() -> None:
    over = Limits(until=-math.inf)
    make, asked = made(lambda budget: budget + budget // 4)
    tried, _ = lower_until_within(make, 1000, over)
    assert highest_within(tried, 1000) == tried[-1].plan.budget_bytes  # the first that is within is the last
    assert len(asked) > 1
    again, _ = lower_until_within(make, 1000, Limits(enough_ns=1300))
    assert again == tried  # so it is where any plan so fast will do,
    dear, _ = lower_until_within(make, 1000, Limits(enough_ns=1100))
    assert [t.plan.budget_bytes for t in dear] == asked[:2]  # and where the next is slower, that is the last


def test_where_no_plan_lies_within_one_of_a_hasty_search_may(
    network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(_: str, problem: Problem, budget_bytes: int, limits: Limits) -> Plan:
        return plan_with("mu-two", problem, budget_bytes if limits.hasty else MOST, limits)

    monkeypatch.setattr(reserved_budget, "plan_with", planned)
    limit_bytes = (saved(load(network)).saved_figures.peak_reserved_bytes or 0) * 7 // 10
    found = api.plan(load(network), limit_bytes, budget_of=RESERVED, levers=())
    assert 0 < found.predicted["plan"]["peak_reserved_bytes"] <= limit_bytes


def test_levers_are_tried_no_longer_than_the_question_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ways to change the step have a plan: once there is one and the time is over, no other is made."""
    asked: list[float] = []

    def planned(planner: str, problem: Problem, budget_bytes: int, limits: Limits) -> Plan:
        asked.append(limits.until)
        return plan_with("mu-two", problem, budget_bytes, limits)

    monkeypatch.setattr("simulator.prediction.ask.plan_with", planned)
    problem = Problem(load("resnet152-cpu/trace-b8"))
    for seconds, plans in ((0.0, 1), (60.0, 2)):
        asked.clear()
        ask(problem, question(budget="45%", seconds=seconds))
        assert (len(asked), len(set(asked))) == (plans, 1)  # one deadline for all
