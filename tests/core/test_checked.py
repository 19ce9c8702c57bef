"""Records out of JSON files: a value of another type than its field's is named, in whichever record it stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from executor.campaign.run import Book
from simulator.studies.sweep import Sweep
from traces.commands import Output
from traces.errors import LowtideError
from traces.records.measurement import Measurement, RunFigures
from traces.records.plan import Plan
from traces.records.store import GALLERY

CPU = GALLERY / "resnet152-cpu"
FILES: dict[str, tuple[Callable[[Path], object], Path]] = {
    "plan": (Plan.load, CPU / "plan-b16.json"),
    "sweep": (Sweep.load, CPU / "sweep.json"),
    "measurement": (Measurement.load, CPU / "measurement-b16.json"),
    "book": (Book.load, GALLERY / "cpu-campaign" / "campaign.json"),
}
INFINITE = float("inf")


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("plan", ("budget_bytes",), INFINITE),
        ("plan", ("actions", 0, "storage"), 1.7),
        ("plan", ("actions", 0, "retain"), "false"),
        ("sweep", ("rows", 0, "baseline", "peak_allocated_bytes"), INFINITE),
        ("sweep", ("rows", 0, "feasible"), "yes"),
        ("sweep", ("rows", 0, "breakdown_baseline", "gradient"), None),
        ("measurement", ("measured", "step_time_ns"), "1"),
        ("measurement", ("verified",), "yes"),
        ("book", ("asked",), INFINITE),
        ("book", ("records", 0, "measurement", "measured", "times_ns"), ["a"]),
        ("book", ("records", 0, "measurement", "measured", "keep_all_times_ns"), [0]),
    ],
)
def test_a_record_with_a_value_of_another_type_is_refused(
    name: str, place: tuple[str | int, ...], value: object, tmp_path: Path
) -> None:
    load, path = FILES[name]
    data = json.loads(path.read_text())
    inside = data
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    (tmp_path / "r.json").write_text(json.dumps(data))
    with pytest.raises(LowtideError, match=r"r\.json"):
        load(tmp_path / "r.json")


@pytest.mark.parametrize("load", [load for load, _ in FILES.values()])
@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\xff", "NaN", "3", "[]", "null"])
def test_what_is_no_record_is_refused_in_words(
    load: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(LowtideError, match=r"record\.json: "):
        load(path)


def test_the_gallery_is_read_as_before() -> None:
    for load, path in FILES.values():
        load(path)


def test_times_in_turns_come_in_pairs() -> None:
    RunFigures(times_ns=(1, 2), keep_all_times_ns=(3, 4))
    for pairs in ((3,), (3, 0)):
        with pytest.raises(ValueError, match="as many steps"):
            RunFigures(times_ns=(1, 2), keep_all_times_ns=pairs)


def test_what_is_printed_is_json_for_every_reader(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    a, b = {"loss": float("inf"), "gradients": 0.5}, [float("nan"), 1, True, None, "x"]
    Output(as_json=True).show(lambda: {"a": a, "b": b, "c": (2.5,)}, str)
    said = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert said == {"a": {"loss": None, "gradients": 0.5}, "b": [None, 1, True, None, "x"], "c": [2.5]}
