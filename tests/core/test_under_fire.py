"""Commands that are killed, run beside one another, or given what somebody made to harm them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from simulator.allocator.settings import MAX_TEXT, parse_alloc_conf
from simulator.history.snapshot import recording_of
from tests import tiny
from tests.commands import python, simulate
from tests.core.test_recording import RECORDED, SEGMENT, doubled, write
from traces.commands import echo
from traces.errors import PlanError, SpecError
from traces.files import write_text
from traces.records import store
from traces.records.plan import Plan


def test_text_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pickle", {**RECORDED, "device_traces": [[{**SEGMENT, "\ud800": 1}]]})
    result = simulate("why", str(path))
    assert result.exit_code == 2
    assert "not a memory snapshot, or damaged" in result.output


@pytest.mark.parametrize("wrong", [None, "text", [1], {}])
def test_a_plan_whose_warnings_are_no_texts_is_refused(wrong: object, tmp_path: Path) -> None:
    good = Plan(meta=tiny.chain(2).meta, predicted={"warnings": ["so"]}).save(tmp_path / "plan.json")
    data = json.loads(good.read_text())
    data["predicted"]["warnings"] = wrong
    good.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"predicted\.warnings should be a list of texts"):
        Plan.load(good)


def test_endless_settings_are_not_read(tmp_path: Path) -> None:
    text = "roundup_power2_divisions:[" + ",".join(f"{1 << k % 16}:4" for k in range(200_000)) + "]"
    settings = {"PYTORCH_CUDA_ALLOC_CONF": text, "x": doubled(60)}
    assert len(str(recording_of({**RECORDED, "allocator_settings": settings}, "x").notes)) < 4000
    with pytest.raises(SpecError, match="characters; torch"):
        parse_alloc_conf("a:1," * MAX_TEXT)


def test_the_terminal_obeys_nothing_that_a_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    echo("a\x1b[31mb\x07\x9bc\tµ\n")
    assert capsys.readouterr().out == "a\\x1b[31mb\\x07\\x9bc\tµ\n\n"


def test_text_that_a_terminal_cannot_show_does_not_end_the_command() -> None:
    code = "from traces.commands import echo; echo('5 µs')"
    assert python("-c", code, PYTHONIOENCODING="ascii").stdout == "5 \\xb5s\n"


def test_a_word_that_is_no_text_is_refused_before_the_work() -> None:
    result = simulate("some\udcfftrace")
    assert result.exit_code == 2
    assert "is no text in UTF-8" in result.output


def test_simulate_does_not_replace_a_plan_that_came_while_it_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    from simulator.planners import plan_with

    def slow(*args: object) -> object:
        path.write_text("theirs")
        return plan_with(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("simulator.prediction.ask.plan_with", slow)
    result = simulate("resnet152-cpu/trace-b4", "--planner", "save-all", "-o", str(path))
    assert result.exit_code == 2
    assert "exists; give --force" in result.output
    assert path.read_text() == "theirs"


def test_files_and_directories_of_the_user_stay_whatever_their_names(tmp_path: Path) -> None:
    theirs = tmp_path / ".a.json.abcd1234"
    theirs.write_text("notes of somebody")
    folder = tmp_path / ".trace.01234567"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    for path in (theirs, folder / "thesis.txt", folder):
        os.utime(path, (0, 0))
    write_text(tmp_path / "a.json", "{}")
    store.save(tiny.chain(2), tmp_path / "trace")
    assert theirs.read_text() == "notes of somebody"
    assert (folder / "thesis.txt").read_text() == "years of work"
    assert sorted(p.name for p in tmp_path.iterdir()) == [theirs.name, folder.name, "a.json", "trace"]
