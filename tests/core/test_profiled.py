"""A trace takes the times of a profile by torch.profiler: matched by name and turn, kernels added up, steps' median."""

from __future__ import annotations

import gzip
import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

from tracer.costs.profiled import with_times
from traces.errors import TraceError
from traces.records.store import load
from traces.records.trace import VIEW

OF = load("resnet152-cpu/trace-b8")
NAMES = ["::".join(target.split(".")[:2]) for target in OF.ops.target]

OP = {"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 0}
KERNEL = {**OP, "cat": "kernel"}


def profile(path: Path, steps: int = 3, gpu: bool = True, without: Container[int] = ()) -> Path:
    """Of some steps: op i takes (i + 1) us in the first, twice as long in the second and ten times in all others."""
    events: list[dict[str, Any]] = []
    for step in range(steps):
        for i, name in enumerate(NAMES):
            number, us = len(events), (i + 1) * (1, 2, 10)[min(step, 2)]
            op = {"ph": "X", "cat": "cpu_op", "tid": 7, "args": {"External id": number}}
            if i in without:
                continue
            begin, dur = 1e6 * number, 100.0 if gpu else us
            outside = {
                "name": "aten::linear",
                "ts": begin - 1,
                "dur": 200.0,
                "args": {"External id": number + 2},
            }
            inside = {
                "name": "aten::copy_",
                "ts": begin + 0.1,
                "dur": 0.1,
                "args": {"External id": number + 1},
            }
            events += [{**op, **outside}, {**op, "name": name, "ts": begin, "dur": dur}, {**op, **inside}]
            if gpu:  # two kernels: of the op, and of one inside it, which has an id of its own
                for k, part in ((0, us - 0.5), (1, 0.5)):
                    kernel = {"ph": "X", "cat": "kernel", "ts": begin + 5000, "tid": 0, "dur": part}
                    events.append({**kernel, "args": {"External id": number + k}})
    events.append({"ph": "i", "name": "Record Window End", "ts": 0})
    text = json.dumps({"schemaVersion": 1, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_an_op_has_the_median_of_its_turns(gpu: bool, name: str, tmp_path: Path) -> None:
    timed, told = with_times(OF, profile(tmp_path / name, gpu=gpu))
    views = [bool(flags & VIEW) for flags in OF.ops.flags]
    expected = [
        before if v else 2000 * (i + 1)
        for i, (before, v) in enumerate(zip(OF.ops.time_ns, views, strict=True))
    ]
    assert list(timed.ops.time_ns) == expected
    computing = views.count(False)
    assert told == {"steps": 3, "measured_ops": computing, "ops": computing, "estimated": []}
    assert timed.meta.times == f"measured by torch.profiler, {name}, 3 steps"
    assert timed.meta.fingerprint == OF.meta.fingerprint  # plans of the one are plans of the other


def test_what_runs_in_another_number_keeps_its_estimate_and_is_named(tmp_path: Path) -> None:
    some = [i for i, name in enumerate(NAMES) if name == "aten::convolution_backward"][::3]
    timed, told = with_times(OF, profile(tmp_path / "p.json", without=some))
    assert told["estimated"] == ["aten::convolution_backward"]
    times = enumerate(zip(OF.ops.time_ns, timed.ops.time_ns, OF.ops.flags, strict=True))
    assert all(now == (was if i in some or of & VIEW else 2000 * (i + 1)) for i, (was, now, of) in times)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no profile as torch.profiler"),
        ('{"traceEvents": [{"ph": "X", "dur": "a"}]}', "no profile as torch.profiler"),
        ('{"traceEvents": []}', "no op of the trace"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "ts": 1, "dur": 1}]}',
            "a profile of another step",
        ),
        (json.dumps({"traceEvents": [KERNEL, *({**OP, "name": n} for n in NAMES)]}), "without its kernels"),
    ],
)
def test_what_is_no_profile_of_the_step_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        with_times(OF, path)
