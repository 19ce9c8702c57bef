"""The largest batch: the search for a boundary, the simulation of probes, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from simulator.allocator.device import DeviceMemory
from simulator.allocator.reserved import reserved_peak
from simulator.core.problem import Problem
from simulator.core.schedule import build
from simulator.planners import plan_with
from simulator.studies.max_batch import MaxBatch, _Search, max_batch
from simulator.studies.tracing import Traced, between
from tests import tiny
from tests.commands import simulate
from tests.synthetic import resnet
from traces.errors import BudgetError, SpecError
from traces.progress import Say
from traces.records.plan import Plan
from traces.records.store import save
from traces.records.trace import RANK, Trace, Untouched

MIB = 1 << 20


# the probes


def load(batch: int) -> Trace:
    return resnet((1, 1), batch=batch, side=32)


def load_gpu(batch: int) -> Trace:
    of = load(batch)
    return replace(of, meta=replace(of.meta, device="cuda", target="A100-40"))


def found_in(
    tmp_path: Path, memory_bytes: int, load: Callable[[int], Trace], kind: str = "cpu", **more: Any
) -> MaxBatch:
    device = DeviceMemory(name="d", kind=kind, memory_bytes=memory_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traced, "each", lambda self, sizes, say: [load(n) for n in sizes])
        return max_batch("m", device, directory=tmp_path, **{"planner": "mu-two", **more})


def cheapest(of: Trace, budget: int) -> float | None:
    """What a plan for this budget adds, in percent; None: there is none."""
    try:
        plan = plan_with("mu-two", Problem(of), budget)
    except BudgetError:
        return None
    keep = Problem(of).saved.timeline.step_time_ns
    return 100 * (Problem(of).replay(plan.actions).timeline.step_time_ns - keep) / keep


def test_the_largest_batch_on_a_cpu_is_the_one_of_all(tmp_path: Path) -> None:
    memory = Problem(load(20)).saved.timeline.peak_allocated_bytes + 1
    found = found_in(tmp_path, memory, load)
    assert found.without_plan == 20
    # By trying them all: the first batch whose plan costs too much, or that has none.
    b = 21
    while (cost := cheapest(load(b), memory)) is not None and cost <= 30:
        b += 1
    assert found.with_plan == b - 1
    assert found.with_plan > 20
    best = found.probe(found.with_plan)
    assert best.plan is not None
    assert best.overhead_percent == pytest.approx(cheapest(load(b - 1), memory))
    assert (best.plan.peak_allocated_bytes or memory) <= memory
    assert Plan.load(tmp_path / best.plan_path).meta.batch_size == load(b - 1).meta.batch_size
    assert found.probe(b).plan_fits is False  # confirmed, not extrapolated
    assert len(found.rows) <= 6


def test_on_a_gpu_reserved_memory_decides(tmp_path: Path) -> None:
    of = load_gpu(20)
    memory = reserved_peak(Problem(of), build(Problem(of))).peak_reserved_bytes
    found = found_in(tmp_path, memory, load_gpu, "cuda")
    fits = {p.batch_size: p.fits for p in found.rows}
    assert fits[found.without_plan]
    assert not fits[found.without_plan + 1]
    best = found.probe(found.with_plan)
    assert ((best.plan or best.untouched).peak_reserved_bytes or memory + 1) <= memory
    assert any("a CUDA build of torch" in text for text in found.data["warnings"])


def test_without_a_plan_the_untouched_model_must_fit(tmp_path: Path) -> None:
    """It needs a quarter more than its graph: batches at which only the graph fits get an empty plan."""

    def needs(batch: int) -> int:
        return Problem(load(batch)).saved.timeline.peak_allocated_bytes

    def counted(batch: int) -> Trace:
        of = load(batch)
        return replace(of, meta=replace(of.meta, untouched_peak_bytes=needs(batch) * 5 // 4))

    memory = needs(20) * 5 // 4
    graph = 20  # the largest batch whose graph fits
    while needs(graph + 1) <= memory:
        graph += 1
    found = found_in(tmp_path, memory, counted, budget_overhead_percent=0.0)
    assert (found.without_plan, found.with_plan) == (20, graph)
    kept = found.probe(graph)
    assert found.probe(20).untouched.peak_allocated_bytes == memory
    assert (kept.fits, kept.plan_fits, kept.overhead_percent) == (False, True, 0.0)
    plan = Plan.load(tmp_path / kept.plan_path)
    assert plan.actions == ()
    assert plan.predicted["plan"]["peak_allocated_bytes"] == needs(graph)
    assert not any("untouched" in text for text in found.data["warnings"])  # which the figures themselves say


def test_on_a_gpu_the_untouched_model_takes_over_no_memory(tmp_path: Path) -> None:
    """`y` and `g` have 20 MiB a sample. The graph's `g` takes over `y`'s memory, the untouched model's does not."""

    def step(batch: int) -> Trace:
        size = 20 * MIB * batch
        made = tiny.trace(
            [tiny.fwd({"y": size}, "x"), tiny.bwd({"g": size}, "y", overwrites="y")], {"x": 20 * MIB}
        )
        return replace(made, meta=replace(made.meta, device="cuda", options={"batch_size": batch}))

    # Segments of 20 MiB a sample, and x's: the graph takes (b + 1) of 20 MiB, the untouched model (2 b + 1).
    found = found_in(tmp_path, 9 * 20 * MIB, step, "cuda")
    assert (found.without_plan, found.with_plan) == (4, 8)
    assert found.probe(4).untouched.peak_reserved_bytes == 9 * 20 * MIB


def test_limits_of_the_batch_sizes(tmp_path: Path) -> None:
    memory = Problem(load(20)).saved.timeline.peak_allocated_bytes + 1
    eights = found_in(tmp_path, memory, load, multiple_of=8, budget_overhead_percent=0.0)
    assert (eights.without_plan, eights.with_plan) == (16, 16)
    assert all(p.batch_size % 8 == 0 for p in eights.rows)
    small = found_in(tmp_path, memory, load, maximum=5)
    assert (small.without_plan, small.with_plan, small.data["stopped_at_maximum"]) == (5, 5, True)
    nothing = found_in(tmp_path, 1000, load)
    assert (nothing.without_plan, nothing.with_plan) == (0, 0)
    with pytest.raises(SpecError, match="no multiple"):
        found_in(tmp_path, memory, load, multiple_of=8, maximum=7)


def test_a_step_on_the_line_through_two_is_the_one_that_is_traced() -> None:
    """Of the same bytes and times, on a GPU with what the untouched loop asks for and what ops give back."""

    def step(batch: int, *first: int) -> Trace:
        """`y` has 4 bytes a sample, made with 7 of workspace; `g` has 5 and 1 more."""
        made = tiny.trace([tiny.fwd({"y": 4 * batch}, "x"), tiny.bwd({"g": 5 * batch + 1}, "y")], {"x": 20})
        asked = Untouched(block=(0, -1), nbytes=(100 * batch, 0), once=(0, 0), phase=("forward", "backward"))
        events = ((*first, 7 * batch, 4 * batch, -7 * batch), (5 * batch + 1,))
        meta = replace(made.meta, batch_size=batch)
        return replace(made, meta=meta, ops=replace(made.ops, events=events), untouched=asked)

    for size in (3, 8, 20, 333):
        found, one = between((8, step(8)), (32, step(32)), size), step(size)
        assert (found.storages.nbytes, found.untouched) == (one.storages.nbytes, one.untouched)
        assert found.ops.events == one.ops.events
        assert found.meta.batch_size == size
    # At 32 another kernel, whose requests lie on no line: they are taken as they are, and leave the 80 bytes of `y`.
    found = between((8, step(8)), (32, step(32, 9, -9)), 20)
    assert found.ops.events == ((9, -9, 224, 128, -224, -48), (101,))
    three = between((8, step(8)), (11, replace(step(11), untouched=Untouched())), 32)
    assert three.untouched == Untouched()  # which ask for other blocks


def test_two_traces_and_those_on_both_sides_of_the_answers_are_made(tmp_path: Path) -> None:
    """A graph that is another one at every size has no line; there every probe is traced."""
    made: list[int] = []

    def traced(batch: int) -> Trace:
        made.append(batch)
        return load(batch)

    def another(batch: int) -> Trace:
        of = load(batch)
        return replace(of, ops=replace(of.ops, target=(f"aten.{batch}", *of.ops.target[1:])))

    memory = Problem(load(20)).saved.timeline.peak_allocated_bytes + 1
    found = found_in(tmp_path, memory, traced)
    ends = {n + k for n in (found.without_plan, found.with_plan) for k in (0, 1)}
    assert sorted(made) == sorted({8, 32} | ends)
    alone = found_in(tmp_path, memory, another)
    assert (alone.without_plan, alone.with_plan) == (found.without_plan, found.with_plan)


def test_where_the_line_is_wrong_the_search_goes_on(tmp_path: Path) -> None:
    """From 15 samples on the step needs much more than the line through 8 and 32 says, or less."""

    def bent(batch: int) -> Trace:
        of = load(batch)
        more = 1 << 20 if 15 <= batch < 30 else 0
        sizes = of.storages
        return replace(of, storages=replace(sizes, nbytes=(sizes.nbytes[0] + more, *sizes.nbytes[1:])))

    for limit in (14, 17, 20):
        memory = Problem(bent(limit)).saved.timeline.peak_allocated_bytes + 1
        found = found_in(tmp_path, memory, bent, budget_overhead_percent=0.0)
        best, following = found.probe(found.without_plan), found.probe(found.without_plan + 1)
        assert (best.fits, following.fits) == (True, False)


@pytest.mark.parametrize("lead", [min, max])
@pytest.mark.parametrize("step", [1, 8])
@pytest.mark.parametrize("limit", [0, 40, 4808, 9600, 65536])
def test_the_search_ends_however_wrong_the_line_is(lead: Callable[..., int], step: int, limit: int) -> None:
    """Here it always leads to the least that is left, or the most."""
    made = set[int]()
    search: Any = SimpleNamespace(step=step, top=65536, trace=lambda *sizes: made.update(sizes))
    search.reckoned = lambda fits, low, high, n: lead(low, high - step)
    assert _Search.confirmed(search, lambda n: n <= limit, 0, 4808) == limit
    assert len(made) <= 66


def test_a_trace_of_another_kind_of_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="graph of a CPU"):
        found_in(tmp_path, 1 << 40, load, "cuda")


# the command


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The words that `trace` is given for each probe."""
    seen: list[tuple[str, ...]] = []

    def each(self: Traced, sizes: Sequence[int], say: Say) -> list[Trace]:
        seen.append(self.words)
        return [load_gpu(n) if {"--target", "--device"} & {*self.words} else load(n) for n in sizes]

    monkeypatch.setattr(Traced, "each", each)
    return seen


def command(*words: object) -> Result:
    return simulate("max-batch", *words)


def test_the_command(traced: list[tuple[str, ...]], tmp_path: Path) -> None:
    memory = Problem(load(20)).saved.timeline.peak_allocated_bytes + 1
    words = ("m", "--memory", memory, "--image-size", "32", "--amp=bf16", "-o", tmp_path / "out")
    result = command(*words, "--json")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert said == json.loads((tmp_path / "out" / "max-batch.json").read_text("utf-8"))
    assert said["without_plan"]["batch_size"] == 20
    assert said["with_plan"]["plan"]["peak_allocated_bytes"] <= memory
    assert traced[0] == ("--image-size", "32", "--amp=bf16")
    text = command(*words).stdout
    assert "without a plan: batch 20" in text
    assert f"batch {said['with_plan']['batch_size']}\nplan: {tmp_path / 'out' / 'plan-b'}" in text
    assert "warning" in text
    assert not command(*words, "-q").stderr
    nothing = command("m", "--memory", "1KiB", "-o", tmp_path / "out")
    assert (nothing.exit_code, "does not fit" in nothing.stderr) == (1, True)


def test_a_gpu_is_the_target_and_keeps_a_reserve(traced: list[tuple[str, ...]], tmp_path: Path) -> None:
    words = ("m", "--gpu", "a100-40", "--max", "16", "-o", tmp_path / "out")
    result = command(*words, "--alloc-conf", "expandable_segments:True", "--json")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert (said["stopped_at_maximum"], said["alloc_conf"]) == (True, "expandable_segments:True")
    device = said["device_memory"]
    assert device["reserve_bytes"] == device["memory_bytes"] * 2 // 100
    assert traced[0] == ("--target", "A100-40")
    command(*words, "--device", "cuda", "--json")
    assert traced[-1] == ("--device", "cuda")
    assert "--max tries more" in command(*words).stdout


def test_the_capacity_of_two_gpus(traced: list[tuple[str, ...]], tmp_path: Path) -> None:
    """What `max-batch` says of each, and beside that what was asked of each; the page has a field for each."""
    asked = ("m", "--gpus", "rtx-4090,a100-40", "--batch-sizes", "8,3000,6000,50000", "--planner", "mu-two")
    page, out = tmp_path / "page.html", tmp_path / "out"
    result = simulate("capacity", *asked, "-o", out, "--report", page, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert [device["device_memory"]["device"] for device in said["devices"]] == ["RTX-4090", "A100-40"]
    for device in said["devices"]:
        plain, planned = (device[way]["batch_size"] for way in ("without_plan", "with_plan"))
        rows = {p["batch_size"]: p for p in device["probes"]}
        assert {8, 3000, 6000, 50000} <= rows.keys()
        for size, row in rows.items():
            assert row["fits"] == (size <= plain)
            assert row["plan_fits"] in (None, size <= planned)
            assert row["traced"] == (size in {8, 32})
    text = page.read_text("utf-8")
    assert all(word in text for word in ("A100-40", "batch 3000"))


def test_the_capacity_of_several_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is rehearsed around its largest batch, also where the line through 8 and 32 leads elsewhere, once; of two
    ranks the blocks are recorded, which save twice 128 MiB of a batch, of which a plan makes one half again."""
    asked: list[list[str]] = []

    def needs(ranks: int, batch: int) -> int:
        return 10 * 2**30 // ranks + batch * 2**28 + (2**31 if 60 < batch < 100 else 0)

    def run(command: list[str], **_: object) -> CompletedProcess[str]:
        asked.append(command)
        ranks, batch = (int(command[command.index(word) + 1]) for word in ("--ranks", "--batch-size"))
        asks = {"requested_bytes": batch * 2**28}
        told = {"gpu_bytes": needs(ranks, batch) + 7, "context_bytes": 7, "steady": asks}
        if "--trace" in command and ranks == 2:
            n = batch * 2**27
            ops = [tiny.fwd({"a": n}, "w"), tiny.fwd({"s": 1}, "a"), tiny.fwd({"b": n}, "s")]
            ops += [tiny.fwd({"y": 1}, "b", time_ns=99), tiny.bwd({"g": 1}, "y", "b")]
            step = tiny.trace([*ops, tiny.bwd({"h": 1}, "g", "a")], {"w": 1})
            save(replace(step, meta=replace(step.meta, device=RANK)), command[command.index("--trace") + 1])
        answer = "" if "--image-size" in command else json.dumps(told)
        return CompletedProcess(command, 1, answer, "Error: why.")  # as where it does not fit

    monkeypatch.setattr("simulator.studies.tracing.subprocess.run", run)
    asking = ("capacity", "m", "--gpus", "a100-40", "--ranks", "2,64", "--batch-sizes", "8,100")
    words = (*asking, "-o", tmp_path / "out")
    page = tmp_path / "page.html"
    result = simulate(*words, "--seq-len", "64", "--report", page, "--json")
    assert result.exit_code == 0, result.output
    for ranks, device in zip((2, 64), json.loads(result.stdout)["devices"], strict=True):
        n, room = device["without_plan"]["batch_size"], device["device_memory"]["usable_bytes"]
        assert needs(ranks, n) <= room < needs(ranks, n + 1)
        assert {8, 32, n, n + 1} <= {p["batch_size"] for p in device["probes"] if p["traced"]}
        assert device["ranks"] == ranks
        planned = (room - needs(ranks, 0) - 4) // 2**27 if ranks == 2 else None  # w, s, y or g
        assert (device["with_plan"] or {}).get("batch_size") == planned
    assert all(word in page.read_text("utf-8") for word in ("64 x A100-40", "execute rehearse --shard"))
    assert {"--seq-len", "A100-40", "fsdp2"} <= set(asked[0])
    times = len(asked)
    assert "64 x A100-40" in simulate(*words, "--seq-len", "64").stdout
    assert len(asked) == times
    assert "batch 8 could not be rehearsed: why." in simulate(*words, "--image-size", "8").output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("m",), "--gpu"),
        (("--image-size", "32", "--gpu", "cpu"), "first word"),
        (("m", "--gpu", "cpu", "--batch-size", "4"), "decides this itself"),
        (("m", "--gpu", "cpu", "--alloc-conf", "expandable_segments:True"), "no caching allocator"),
        (("m", "--gpu", "cpu", "--budget-overhead", "much"), "such as 10%"),
        (("m", "--gpu", "cpu", "--planner", "none"), "no planner"),
        (("m", "--gpu", "nothing"), "unknown"),
    ],
)
def test_input_that_makes_no_sense(traced: list[tuple[str, ...]], words: tuple[str, ...], says: str) -> None:
    result = command(*words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not traced
