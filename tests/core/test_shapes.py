"""Plans at other sizes: which shapes are looked at, each one's peak worked out by hand, and random ones in turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import simulator.studies.shapes as study
from simulator.allocator.device import DeviceMemory, setting_of
from simulator.allocator.reserved import reserved_over, reserved_peak
from simulator.core.problem import Problem
from simulator.prediction.step import Prediction, predict
from simulator.studies.shapes import PLAN, REFUSED, SAVED, OverShapes, over_shapes, traces_of
from tests.commands import simulate
from tests.tiny import bwd, fwd, trace
from tests.walked import rewritten
from traces.errors import LowtideError, SpecError, TraceError
from traces.records import store
from traces.records.plan import Action, Plan, Rewrite
from traces.records.trace import ALIAS, SLICE, Trace
from traces.shapes import MOST_SHAPES, Shapes, label

MIB = 2**20


def step(length: int, inside: int = 0, unit: int = 1, view: str = "", **header: Any) -> Trace:
    """w (10) is read by x0 -> x1 -> x2, backward reads x2 and x1, each as large as the length; x1 can be made again.

    Args:
        inside: what the last op of forward allocates inside.
        unit: bytes of one of everything.
        view: the target of a view of x0, if there is one.
    """
    n = length * unit
    ops = [fwd({"x0": n}, "w"), *([fwd({}, "x0", view="v", target=view)] if view else [])]
    ops += [fwd({"x1": 2 * n}, "x0"), fwd({"x2": n}, "x1", events=(inside, -inside, n) if inside else ())]
    made = trace([*ops, bwd({"g1": n}, "x2", "x1"), bwd({"g0": n}, "g1", "x0")], {"w": 10 * unit})
    meta = {"model": "tiny", "options": {"seq_len": length}, "device": "cpu", **header}
    return replace(made, meta=replace(made.meta, **meta))


X1 = 2  # the storage of x1


def planned(at: Trace, budget_bytes: int | None = None, **setting: Any) -> Prediction:
    problem = Problem(at)
    plan = Plan(meta=at.meta, actions=(Action(storage=X1),), budget_bytes=budget_bytes)
    return predict(problem, setting_of(at.meta, **setting), plan)


def asked(
    text: str, make: Callable[[int], Trace] = step, budget_bytes: int | None = None, **setting: Any
) -> OverShapes:
    shapes = Shapes.parse(text)
    c = planned(make(shapes.largest["seq_len"]), budget_bytes, **setting)
    return over_shapes(c, shapes, [(s, make(s["seq_len"])) for s in shapes.looked_at()])


# ranges


@pytest.mark.parametrize(
    "text",
    ["", "seq-len", "seq-len=8", "seq-len=9:8", "seq-len=0:8", "len=1:8", "seq-len=1:8,seq-len=1:8", "seq-size=1:2",
     "seq-len=1:8:x", "seq-len=1:٣", "seq-len=1:9000000", "seq-len=1:9000000:1", "seq-len=1:8;batch-size=1:2"],
)  # fmt: skip
def test_ranges_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--shapes"):
        Shapes.parse(text)


@given(low=st.integers(1, 60), more=st.integers(0, 900), step=st.integers(0, 9), batch=st.integers(1, 5))
def test_what_is_looked_at(low: int, more: int, step: int, batch: int) -> None:
    high = low + more
    text = f"seq-len={low}:{high}{f':{step}' if step else ''},batch-size=1:{batch}"
    shapes = Shapes.parse(text)
    found = [(s["seq_len"], s["batch_size"]) for s in shapes.looked_at()]
    inside = {(n, b) for n in range(low, high + 1, step or 1) for b in range(1, batch + 1)}
    assert shapes.count == len(inside)
    assert len(found) == len(set(found))
    assert set(found) <= inside
    top = max(n for n, _ in inside)
    assert {(low, 1), (low, batch), (top, 1), (top, batch)} <= set(found)
    assert shapes.largest == {"seq_len": top, "batch_size": batch}
    assert len(found) == len(inside) if len(inside) <= MOST_SHAPES else len(found) >= MOST_SHAPES
    assert found == [(s["seq_len"], s["batch_size"]) for s in Shapes.parse(text).looked_at()]


def test_a_step_looks_at_every_one() -> None:
    assert len(Shapes.parse("seq-len=16:512").looked_at()) == MOST_SHAPES
    assert len(Shapes.parse("seq-len=16:512:1").looked_at()) == 497
    assert label({"seq_len": 512, "batch_size": 4, "optimizer": "sgd"}) == "b4-s512"


# peaks, by hand: 10 of w, and in units of the length


def test_each_shape_s_peak() -> None:
    """Everything saved: x0, x1, x2 and g1, 5 lengths at the first backward op. With x1 made again: x0, x2, x1 and g1,
    the same 5 while it is there; in forward, x0, x1 and x2, 4."""
    found = asked("seq-len=2:5", budget_bytes=35)
    assert [(p.sizes["seq_len"], p.peak_allocated_bytes) for p in found.peaks] == [
        (n, 10 + 5 * n) for n in (2, 3, 4, 5)
    ]
    assert {p.runs for p in found.peaks} == {PLAN}
    assert found.worst.sizes == {"seq_len": 5}
    assert found.holds
    assert found.reserved is None
    assert found.to_json()["looked_at"] == found.to_json()["count"] == 4


def test_a_smaller_shape_may_need_more_than_the_largest() -> None:
    """At length 3 an op allocates 40 inside: 10 of w, 2 * 3 of x1, 3 of x0 and 40 are more than 10 + 5 * 5."""
    found = asked("seq-len=2:5", lambda n: step(n, inside=40 if n == 3 else 0), budget_bytes=35)
    assert found.worst.sizes == {"seq_len": 3}
    assert found.worst.peak_allocated_bytes == 10 + 3 + 6 + 40
    assert [p.sizes for p in found.over] == [{"seq_len": 3}]
    assert not found.holds
    assert "1 over the budget: seq-len 3" in "\n".join(found.lines())


def other_graph(length: int) -> Callable[[int], Trace]:
    more = trace([fwd({"x0": 1}, "w"), bwd({"g": 1}, "x0")], {"w": 10})
    return lambda n: more if n == length else step(n)


def test_a_size_of_one_runs_with_everything_saved() -> None:
    found = asked("seq-len=1:5", other_graph(1))
    assert [p.runs for p in found.peaks] == [SAVED, PLAN, PLAN, PLAN, PLAN]
    assert found.holds
    assert found.to_json()["everything_saved"] == [{"seq_len": 1}]


def test_another_graph_is_refused() -> None:
    found = asked("seq-len=1:5", other_graph(2))
    assert [p.sizes for p in found.running(REFUSED)] == [{"seq_len": 2}]
    assert found.peaks[1].runs == REFUSED
    assert not found.holds


def test_a_slice_that_takes_all_is_the_same_graph() -> None:
    found = asked("seq-len=2:5", lambda n: step(n, view=ALIAS if n == 5 else SLICE))
    assert {p.runs for p in found.peaks} == {PLAN}
    found = asked("seq-len=2:5", lambda n: step(n, view=ALIAS if n == 5 else "aten.t.default"))
    assert len(found.running(REFUSED)) == 3


def test_another_step_at_the_largest_shape_is_an_error() -> None:
    shapes = Shapes.parse("seq-len=2:5")
    traces = [(s, step(s["seq_len"], inside=40)) for s in shapes.looked_at()]
    with pytest.raises(TraceError, match="recorded again at seq-len 5"):
        over_shapes(planned(step(5)), shapes, traces)


# reserved memory


def on_gpu(n: int) -> Trace:
    return step(n, unit=MIB, device="cuda", torch_version="2.13.0")


def test_one_shape_again_and_again_is_the_ordinary_loop() -> None:
    """Iterations that do not differ reserve what `reserved_peak` says."""
    c = planned(on_gpu(30))
    requests = study.requests_of(c.problem, c.planned.schedule)
    steps = reserved_over([requests] * 4, requests.residents)
    alone = reserved_peak(c.problem, c.planned.schedule)
    assert [f.peak_reserved_bytes for f in steps[: len(alone.iterations)]] == [
        f.peak_reserved_bytes for f in alone.iterations
    ]


def test_random_shapes_reserve_more_than_the_largest_alone() -> None:
    """Blocks of one length do not fit the next one's values, and segments of a fixed size are not given back."""
    found = asked("seq-len=20:30", on_gpu)
    assert found.reserved is not None
    assert found.reserved.steps == study.STEPS
    alone = asked("seq-len=30:30", on_gpu).reserved
    assert alone is not None
    assert found.reserved.peak_reserved_bytes > alone.peak_reserved_bytes >= (10 + 5 * 30) * MIB
    again = asked("seq-len=20:30", on_gpu)
    assert again.reserved == found.reserved
    growing = asked("seq-len=20:30", on_gpu, alloc_conf="expandable_segments:True").reserved
    assert growing is not None
    assert growing.peak_reserved_bytes < found.reserved.peak_reserved_bytes


def test_a_device_that_the_random_steps_do_not_fit() -> None:
    alone = asked("seq-len=30:30", on_gpu).reserved
    assert alone is not None
    room = DeviceMemory(
        name="small",
        kind="cuda",
        memory_bytes=alone.peak_reserved_bytes - MIB,
        context_bytes=0,
        reserve_bytes=0,
    )
    found = asked("seq-len=20:30", on_gpu, device=room)
    assert found.reserved is not None
    assert found.reserved.out_of_memory
    assert not found.holds


# the command


def saved(tmp_path: Path, lengths: Mapping[int, Trace], at: int) -> Path:
    for n, made in lengths.items():
        store.save(made, tmp_path / "t-shapes" / f"s{n}")
    return store.save(lengths.get(at, step(at)), tmp_path / "t")


def test_the_command_reads_traces_that_are_there(tmp_path: Path) -> None:
    place = saved(tmp_path, {n: step(n) for n in (2, 3, 4, 5)}, 5)
    done = simulate(place, "--shapes", "seq-len=2:5", "--json", "-q")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)["shapes"]
    assert told["worst"]["peak_allocated_bytes"] == 35
    assert told["holds"] is True
    text = simulate(place, "--shapes", "seq-len=2:5", "-q").output
    assert "all 4 shapes of seq-len=2:5 looked at: the highest peak is 35 B, at seq-len 5" in text


def test_a_shape_over_the_budget_is_exit_code_1(tmp_path: Path) -> None:
    place = saved(tmp_path, {n: step(n, inside=40 if n == 3 else 0) for n in (2, 3, 4, 5)}, 5)
    done = simulate(place, "--shapes", "seq-len=2:5", "--budget", "100%", "-q")
    assert done.exit_code == 1
    assert "1 over the budget: seq-len 3" in done.output
    assert "does not hold" in done.output


def test_a_trace_of_another_shape_is_refused(tmp_path: Path) -> None:
    place = saved(tmp_path, {}, 4)
    done = simulate(place, "--shapes", "seq-len=2:5")
    assert done.exit_code == 2
    assert "made for the largest shape, seq-len 5" in done.output
    assert "seq-len 4" in done.output


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({"model": "mine.py:build"}, "no file that a trace names is run unasked: run `trace mine.py:build"),
        ({"model": "in hand: Net"}, "was in hand"),
        ({"mode": "real"}, "was measured"),
    ],
)
def test_what_cannot_be_recorded_again(header: dict[str, str], told: str, tmp_path: Path) -> None:
    store.save(step(5, **header), tmp_path / "t")
    done = simulate(tmp_path / "t", "--shapes", "seq-len=2:5")
    assert done.exit_code == 2
    assert told in done.output


def test_a_model_by_its_name_is_recorded_by_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"seq_len": 5, "batch_size": 2, "use_cache": False, "zero_grad": "keep"}
    made = step(5, options=options, target="h100")
    commands: list[list[str]] = []

    class Done:
        returncode, stderr = 2, "Error: no such model\n"

    def run(command: list[str], **_: Any) -> Done:
        commands.append(command)
        return Done()

    monkeypatch.setattr("simulator.studies.tracing.subprocess.run", run)
    with pytest.raises(LowtideError, match="could not be traced: no such model"):
        traces_of(made, str(tmp_path / "t"), Shapes.parse("seq-len=2:5"), lambda text: None)
    words = "tiny --batch-size 2 --no-use-cache --zero-grad keep --seed 0 --target h100 --shapes seq-len=2:5"
    assert commands[0][3:] == [*words.split(), "-o", str(tmp_path / "t-shapes"), "--force", "-q"]


def test_traces_of_another_step_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, {n: step(n, seed=1) for n in (4, 5)}, 9)

    def refuse(*_: Any, **__: Any) -> None:
        raise LowtideError("recorded again")

    monkeypatch.setattr("simulator.studies.tracing.subprocess.run", refuse)
    shapes, name = Shapes.parse("seq-len=4:5"), str(tmp_path / "t")
    assert len(traces_of(step(5, seed=1), name, shapes, lambda text: None)) == 2
    with pytest.raises(LowtideError, match="recorded again"):  # of another seed
        traces_of(step(5), name, shapes, lambda text: None)


def test_a_plan_that_rewrites_the_step_rewrites_it_at_every_size() -> None:
    """Here x0 waits for backward as int8."""
    shapes = Shapes.parse("seq-len=512:1024:512")
    traces = [(s, step(s["seq_len"])) for s in shapes.looked_at()]
    plan = Plan(meta=traces[-1][1].meta, rewrites=(Rewrite(kind="int8", storage=1),))
    problem = Problem(traces[-1][1])
    found = over_shapes(predict(problem, setting_of(traces[-1][1].meta), plan), shapes, traces)
    assert {p.runs for p in found.peaks} == {PLAN}
    for (_, one), p in zip(traces, found.peaks, strict=True):
        alone = Problem(rewritten(one, plan.rewrites)).saved.timeline.peak_allocated_bytes
        assert p.peak_allocated_bytes == alone != Problem(one).saved.timeline.peak_allocated_bytes
