"""Runs in one form: what a snapshot says held the memory, why it ran out, how two runs differ, what is handed on."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.allocator.device import setting_of
from simulator.core.problem import Problem, peak_by_category
from simulator.history.diff import Diff
from simulator.history.message import message_in
from simulator.history.read import Source, of_prediction, read
from simulator.history.run import around
from simulator.history.snapshot import BACKWARD, EARLIER, OTHER, history_of, recording_of
from simulator.history.why import why
from simulator.prediction.ask import question
from simulator.prediction.step import Prediction, predict
from tests import tiny
from tests.commands import simulate
from tests.core.test_recording import Program, block, event, halves_and_whole, write
from traces.errors import LowtideError, TraceError
from traces.records import store
from traces.records.plan import Action, Plan
from traces.units import GIB, MIB

FORWARD = [
    {"filename": "/x/site-packages/torch/nn/modules/linear.py", "line": 1, "name": "forward"},
    {"filename": "/home/me/net.py", "line": 7, "name": "forward"},
    {"filename": "/home/me/train.py", "line": 90, "name": "step"},
]
STATE = [
    {"filename": "/x/torch/optim/adamw.py", "line": 1, "name": "_init_group"},
    {"filename": "/home/me/train.py", "line": 95, "name": "step"},
]


def segment(address: int, *blocks: dict[str, Any], grows: bool = False) -> dict[str, Any]:
    total = sum(b["size"] for b in blocks)
    return {"address": address, "total_size": total, "is_expandable": grows, "blocks": [*blocks]}


def made_up(*events: dict[str, Any], segments: list[dict[str, Any]]) -> dict[str, Any]:
    return {"segments": segments, "device_traces": [list(events)]}


def test_what_was_there_is_undone_from_the_end() -> None:
    # Before the recording a block of 8 MiB lies at 0 in a segment of 20 MiB. At the peak, after the third event, it is
    # still there: 8 + 4 + 1000 B. In the end the 4 MiB at 8 MiB are left, whose stack the final block does not tell.
    data = made_up(
        event("alloc", 8 * MIB, 4 * MIB, FORWARD),
        event("segment_alloc", 64 * MIB, 2 * MIB),
        event("alloc", 64 * MIB, 1000),  # no stack: made in backward's thread
        event("free_completed", 0, 8 * MIB),
        event("free_completed", 64 * MIB, 1000),
        event("segment_free", 64 * MIB, 2 * MIB),
        segments=[
            segment(
                0,
                block(0, 8 * MIB, 0, "inactive"),
                block(8 * MIB, 4 * MIB, 4 * MIB),
                block(12 * MIB, 8 * MIB, 0, "inactive"),
            )
        ],
    )
    h = history_of(data, "s")
    assert (h.peak_bytes, h.reserved_bytes) == (12 * MIB + 1000, 22 * MIB)
    assert h.parts == {
        "category": {EARLIER: 8 * MIB, "activation": 4 * MIB, BACKWARD: 1000},
        "module": {"": 8 * MIB + 1000, "net.py": 4 * MIB},
        "line": {"": 8 * MIB + 1000, "net.py:7 forward": 4 * MIB},
    }
    assert h.where == "event 3 of 6"
    assert h.notes == ("When the recording began, 8.00 MiB were in use; an earlier peak is not in it.",)
    data["device_traces"][0][2].pop("frames")
    assert history_of(data, "s").parts["category"].keys() == {EARLIER, "activation", OTHER}
    f = h.free
    # 1000 B take 1024. Behind them 2 MiB - 1024 B, and behind the 4 MiB 8 MiB, are free.
    assert (f.rounding_bytes, f.rests_bytes, f.pieces, f.cached_bytes) == (24, 0, 2, 0)
    assert (f.pieces_bytes, f.largest_bytes) == (10 * MIB - 1024, 8 * MIB)


def test_free_memory_is_told_by_why_it_is_free() -> None:
    # A segment of 20 MiB: 19.5 MiB in use, 0.5 MiB behind it too small to be split off. One of 30 MiB, all of it free.
    # Pages from 200 MiB on: 1 MiB free, 512 B in use, the rest of 2 MiB free, a hole, and another 2 MiB of pages.
    data = made_up(
        event("alloc", 200 * MIB + MIB, 512, STATE),
        segments=[
            segment(0, block(0, 20 * MIB, 19 * MIB + MIB // 2)),
            segment(100 * MIB, block(100 * MIB, 30 * MIB, 0, "inactive")),
            segment(
                200 * MIB,
                block(200 * MIB, MIB, 0, "inactive"),
                block(201 * MIB, 512, 512),
                block(201 * MIB + 512, MIB - 512, 0, "inactive"),
                grows=True,
            ),
            segment(300 * MIB, block(300 * MIB, 2 * MIB, 0, "inactive"), grows=True),
        ],
    )
    h = history_of(data, "s")
    f = h.free
    assert (f.rests_bytes, f.cached_bytes, f.pieces) == (MIB // 2, 32 * MIB, 2)
    assert f.pieces_bytes == 2 * MIB - 512
    whole = f.rounding_bytes + f.rests_bytes + f.pieces_bytes + f.cached_bytes
    assert h.reserved_bytes == h.peak_bytes + whole == 54 * MIB
    assert h.parts["category"] == {EARLIER: 19 * MIB + MIB // 2, "optimizer state": 512}


def test_a_recording_without_stacks_says_so() -> None:
    p = Program()
    p.malloc(MIB)
    h = history_of(p.snapshot(), "s")
    assert h.parts == {}
    assert h.notes == ("It was recorded without stacks, so nobody knows who asked.",)


def test_of_several_devices_the_fullest_is_told_unless_another_was_refused_memory() -> None:
    few, many = Program(), Program()
    few.malloc(MIB)
    many.malloc(30 * MIB)
    data, fuller = few.snapshot(), many.snapshot()
    data["segments"] += [s | {"device": 1} for s in fuller["segments"]]
    data["device_traces"] += fuller["device_traces"]
    h = history_of(data, "s")
    assert (h.peak_bytes, recording_of(data, "s").events[-1].size_bytes) == (30 * MIB, 30 * MIB)
    assert h.notes[-1] == "2 GPUs recorded events; this is GPU 1, the one with most memory reserved."
    data["device_traces"][0].append({"action": "oom", "size": 10 * MIB, "device_free": 2 * MIB})
    assert history_of(data, "s").peak_bytes == MIB


def test_a_refusal_is_where_one_looks() -> None:
    # 12 MiB were in use once, 8 MiB when 10 MiB were refused with 2 MiB free on a device of 40 MiB.
    data = made_up(
        event("segment_alloc", 0, 20 * MIB),
        event("alloc", 0, 8 * MIB, FORWARD),
        event("alloc", 8 * MIB, 4 * MIB, FORWARD),
        event("free_completed", 8 * MIB, 4 * MIB),
        {"action": "oom", "size": 10 * MIB, "device_free": 2 * MIB, "stream": 0, "frames": FORWARD},
        segments=[segment(0, block(0, 8 * MIB, 8 * MIB), block(8 * MIB, 12 * MIB, 0, "inactive"))],
    )
    source = replace(read_data(data), history=replace(history_of(data, "s"), device_bytes=40 * MIB))
    found = why(source, question())
    assert found.history.peak_bytes == 8 * MIB
    assert found.over_bytes == 8 * MIB  # asked for 10, 2 were there
    text = " ".join(found.sentences())
    assert "When memory ran out (event 5 of 5, in net.py:7 forward) 8.00 MiB are in use" in text
    assert "outside of torch lie 18.00 MiB" in text  # 40 - 20 reserved - 2 free
    assert "no smaller batch does" in text  # all 8 MiB of activations would have to go


def read_data(data: Any) -> Any:
    return Source(history=history_of(data, "s"), snapshot=data)


def test_expandable_segments_are_tried_on_the_same_requests() -> None:
    data = halves_and_whole()
    settings, line = (
        why(read_data(data), question()).remedies,
        "reserves 60.00 MiB for the same requests in place of 120.00 MiB",
    )
    assert [(r.name, r.saves_bytes) for r in settings] == [("settings", 60 * MIB)]
    assert line in settings[0].words
    (asked,) = why(read_data(data), question(alloc_conf="max_split_size_mb:20")).remedies
    assert (asked.name, asked.saves_bytes) == ("settings", 0)
    tight = replace(read_data(data), history=replace(history_of(data, "s"), device_bytes=50 * MIB))
    found = why(tight, question())
    assert found.over_bytes == 70 * MIB  # 120 reserved of 50
    assert "not enough by itself" in found.sentences()[-1]


def test_what_was_there_before_a_recording_is_asked_for_first() -> None:
    # As above, but of the first 30 MiB nothing is recorded but that they are freed.
    p = Program()
    p.malloc(30 * MIB)
    p.record()
    p.malloc(30 * MIB)
    p.free(0)
    p.free(0)
    p.malloc(60 * MIB)
    (settings,) = why(read_data(p.snapshot()), question()).remedies
    assert settings.saves_bytes == 60 * MIB
    assert "reserves about 60.00 MiB for the same requests in place of 120.00 MiB" in settings.words
    data = p.snapshot()
    data["segments"][0]["segment_pool_id"] = (0, 1)
    (settings,) = why(read_data(data), question()).remedies
    assert "nobody knows what it would do here (private pools" in settings.words
    data = p.snapshot()
    data["device_traces"][0] = [e for e in data["device_traces"][0] if e["action"] != "free_requested"]
    assert why(read_data(data), question()).remedies == (settings,)


def test_whatever_a_snapshot_holds_there_is_an_answer_or_a_reason() -> None:
    p = Program()
    for size in (512, MIB, 30 * MIB, 5 * MIB):
        p.malloc(size)
    p.free(1)
    made = p.snapshot()
    made["external_annotations"] = [{"stage": "END", "name": "Optimizer.step#SGD", "time_us": 3}]
    for e in made["device_traces"][0]:
        e |= {"frames": [{"filename": "lowtide", "line": 1, "name": "forward"}], "time_us": 2}
    junk = (None, -1, 0, 1 << 62, "x", [], {}, [None], 3.5, b"x", "alloc", "oom", "segment_map", {"a": 1})

    def places(x: Any) -> list[Any]:
        below = [x] if isinstance(x, dict | list) else []
        inside = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
        return below + [place for y in inside for place in places(y)]

    rng = random.Random(5)
    for _ in range(600):
        data = copy.deepcopy(made)
        for place in rng.sample(places(data), 2):
            if place:
                key = rng.choice([*place] if isinstance(place, dict) else range(len(place)))
                place[key] = rng.choice(junk)
        with contextlib.suppress(LowtideError):
            found = why(read_data(data), question())
            assert found.sentences()
            assert json.dumps(found.to_json())


@pytest.mark.parametrize(
    "data",
    [
        made_up(segments=[]),
        made_up(event("free_completed", 0, 5), event("alloc", 0, 9), segments=[]),  # −9 before
        made_up(event("alloc", 0, 512, [{"filename": 3}]), segments=[segment(0, block(0, 512, 512))]),
        made_up({"action": "alloc", "addr": "x"}, segments=[]),
    ],
)
def test_damaged_snapshots_are_refused(data: Any) -> None:
    with pytest.raises(TraceError, match=r"^s: "):
        history_of(data, "s")


# Predicted steps --------------------------------------------------------------------------------------------------


def chain(*recomputed: int) -> Prediction:
    trace = tiny.chain(6, size=MIB, time_ns=1000)
    trace = replace(
        trace, ops=replace(trace.ops, module=tuple(f"net.{k % 7}.fc" for k in range(len(trace.ops))))
    )
    plan = Plan(meta=trace.meta, actions=tuple(Action(storage=s) for s in recomputed))
    return predict(Problem(trace), setting_of(trace.meta), plan)


@pytest.mark.parametrize("recomputed", [(), (3, 4, 5)])
def test_a_predicted_step_is_held_by_what_the_replay_says(recomputed: tuple[int, ...]) -> None:
    c = chain(*recomputed)
    h = of_prediction(c, "t")
    run = c.planned
    there = peak_by_category(c.step.trace, run.schedule, run.timeline)
    assert h.parts["category"] == {k: n for k, n in there.items() if n}
    assert h.peak_bytes == run.timeline.peak_allocated_bytes
    assert all(sum(of.values()) == h.peak_bytes for of in h.parts.values())
    assert {"net.1", "the model itself"} <= {*h.parts["module"]}  # whose parameter w is


def test_why_a_trace_does_not_fit_and_what_would_make_it() -> None:
    # w and x0..x6 of 1 MiB, and g6: 9 MiB at the peak. 8 MiB of activations grow with the batch.
    c = chain()
    source = read_trace(c)
    asked = question(budget=7 * MIB, seconds=0.2)
    found = why(source, asked)
    assert (found.history.peak_bytes, found.over_bytes) == (9 * MIB, 2 * MIB)
    by = {r.name: r for r in found.remedies}
    assert by["batch"].batch_share == 1 - 2 / 8
    assert by["plan"].saves_bytes is not None
    assert by["plan"].saves_bytes >= 2 * MIB
    assert by["plan"].overhead_percent
    assert found.sentences()[-1].startswith(
        "It lacks 2.00 MiB; what would help: a plan keeps it within 7.00 MiB"
    )
    assert why(source, question(budget=9 * MIB)).sentences()[-1] == "It fits, with 0 B left."
    assert "name --gpu or --budget" in why(source, question()).sentences()[-1]
    assert "no plan was found" in why(source, question(budget=1 * MIB)).sentences()[-1]


def read_trace(c: Prediction) -> Any:
    return Source(history=of_prediction(c, "t"), prediction=c)


def test_a_diff_says_what_grew() -> None:
    a, b = chain(3, 4, 5), chain()
    found = Diff(before=of_prediction(a, "a"), after=of_prediction(b, "b"))
    grown = b.planned.timeline.peak_allocated_bytes - a.planned.timeline.peak_allocated_bytes
    assert grown > 0
    for part in ("peaks", "category", "module", "line"):
        assert sum(after - before for _, before, after in found.changes(part)) == grown


# The commands -----------------------------------------------------------------------------------------------------

REHEARSAL: dict[str, Any] = {
    "iterations": [{"phases": {
        "forward": {"requested_bytes": 70, "allocated_bytes": 71, "reserved_bytes": 80},
        "backward": {"requested_bytes": 90, "allocated_bytes": 92, "reserved_bytes": 100},
    }}],
    "alive": [
        {"line": "net.py:3 forward", "phase": "forward", "blocks": 2, "requested_bytes": 50},
        {"line": "", "phase": "backward", "blocks": 1, "requested_bytes": 20},
    ],
    "at_the_peak": {"parameters": 15, "activations": 50, "the rest": 25},
    "memory_bytes": 110, "outside_bytes": 20, "gpu_bytes": 120, "out_of_memory": "",
}  # fmt: skip


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A file or directory of each kind."""
    p = Program()
    p.malloc(30 * MIB)
    p.malloc(4 * MIB)
    write(tmp_path / "s.pickle", p.snapshot())
    (tmp_path / "r.json").write_text(json.dumps(REHEARSAL))
    c = chain(3, 4)
    store.save(c.trace, tmp_path / "t")
    c.plan.save(tmp_path / "p.json")
    (tmp_path / "error.txt").write_text(MESSAGE)
    return tmp_path


MESSAGE = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 12, in <module>\n'
    '  File "/usr/lib/site-packages/torch/nn/modules/module.py", line 1, in f\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
    "of which 1.00 GiB is free. Process 77 has 3.00 GiB memory in use. Including non-PyTorch memory, this process has "
    "20.00 GiB memory in use. Of the allocated memory 16.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
)


@pytest.mark.parametrize("name", ["s.pickle", "r.json", "t", "p.json", "error.txt"])
def test_why_answers_for_everything(name: str, there: Path) -> None:
    words = ["why", str(there / name), "--trace", str(there / "t"), "-q"]
    said = simulate(*words)
    assert said.exit_code == 0, said.output
    answer = json.loads(simulate(*words, "--json").stdout)
    assert said.stdout.splitlines()[: len(answer["sentences"])] == answer["sentences"]


def test_a_rehearsal_that_does_not_fit(there: Path) -> None:
    answer = json.loads(simulate("why", str(there / "r.json"), "--json", "-q").stdout)
    # 100 reserved and 20 outside of torch of 110. All but 15 of parameters grows with the batch: 75.
    assert (answer["peak_bytes"], answer["over_bytes"]) == (90, 10)
    assert answer["parts"]["category"] == {"activation": 50, "other": 25, "parameter": 15}
    assert answer["parts"]["line"] == {"net.py:3 forward": 50, "": 40}
    assert answer["remedies"][0]["batch_share"] == pytest.approx(1 - 10 / 75)


def test_of_several_ranks_the_largest_is_looked_at(tmp_path: Path) -> None:
    smaller = {**REHEARSAL, "gpu_bytes": 119, "outside_bytes": 1}
    (tmp_path / "r.json").write_text(json.dumps({"rehearsals": [smaller, REHEARSAL, smaller]}))
    assert read(str(tmp_path / "r.json"), question()).history.outside_bytes == 20


def test_diff_of_each_with_each(there: Path) -> None:
    names = ("s.pickle", "r.json", "t", "p.json")
    for a in names:
        for b in names:
            trace = ["--trace", str(there / "t")] if {a, b} != {"t", "p.json"} else []
            said = simulate("diff", str(there / a), str(there / b), *trace, "--json", "-q")
            assert said.exit_code == 0, said.output
            assert {"peaks", "by_category", "by_module", "by_line"} <= {*json.loads(said.stdout)}
    assert "peak requested" in simulate("diff", str(there / "t"), str(there / "p.json"), "-q").stdout


@pytest.mark.parametrize(
    "words",
    [
        ("why", "nothing.pickle"),
        ("why", "THERE/p.json"),  # of which trace?
        ("why", "THERE/wrong.json"),
        ("why", "THERE/empty.txt"),
        ("diff", "THERE/t", "THERE/error.txt"),
        ("why", "THERE/s.pickle", "--alloc-conf", "max_split:1"),
        ("why", "THERE/s.pickle", "--device-memory", "50%"),
    ],
)
def test_wrong_input_is_refused(words: tuple[str, ...], there: Path) -> None:
    (there / "wrong.json").write_text('{"a": 1}')
    (there / "empty.txt").write_text("MPS backend out of memory. Tried to allocate 512.00 MB.")
    result = simulate(*(w.replace("THERE", str(there)) for w in words))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output


# torch's message --------------------------------------------------------------------------------------------------


def test_torchs_message_is_taken_apart() -> None:
    m = message_in(MESSAGE, "m")
    assert m["script"] == "/home/me/train.py"
    figures = {"asked": 2, "total": 24, "free": 1, "process": 20, "allocated": 16, "unallocated": 3}
    assert {k: m[f"{k}_bytes"] / GIB for k in figures} == figures
    text = " ".join(m["sentences"])
    assert "1.00 GiB of this process lie outside of torch; 3.00 GiB belong to other processes" in text
    assert "Fragmentation" in text  # 1 GiB is lacking, and 3 are free
    assert "execute rehearse /home/me/train.py" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Tried to allocate 300.00 MiB. GPU 0 has a total capacity of 23.99 GiB of which 52.00 MiB is free. Of the "
         "allocated memory 23.44 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.",
         "It lacks 248.00 MiB"),
        ("Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.00 GiB is free. this process "
         "has 3.00 GiB memory in use. Of the allocated memory 2.00 GiB is allocated by PyTorch, and 0 bytes is "
         "reserved by PyTorch but unallocated.", "Without the other processes it would have fitted"),
        ("Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 20.00 GiB is free. 4.00 GiB "
         "allowed; Of the allocated memory 3.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
         "unallocated.", "set itself a limit"),
        ("Tried to allocate 2.00 GiB", "How much it lacks, the message does not say"),
        ("Tried to allocate 20.00 MiB (GPU 0; 9.00 GiB total capacity; 8.00 GiB already allocated; 17.00 MiB free; "
         "8.00 GiB reserved in total by PyTorch)", "It lacks 3.00 MiB"),
    ],
)  # fmt: skip
def test_torchs_message_is_judged(text: str, says: str) -> None:
    assert says in " ".join(message_in(text, "m")["sentences"])


def test_modules_are_told_by_the_layer_that_repeats() -> None:
    assert around("bert.encoder.layer.3.output.dense") == "bert.encoder.layer.3"
    assert around("fc.weight") == "fc.weight"
