"""The replay of every answer sees what changed, and nothing that only the clock decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.bench import answers


def row(answer: Any, **other: Any) -> dict[str, Any]:
    return {"trace": "t", "exit": 0, "message": "", "answer": answer, "files": {}, "written": {}} | other


def record(directory: Path, rows: dict[str, dict[str, Any]]) -> str:
    directory.mkdir()
    for name, found in rows.items():
        (directory / answers.file_of(name)).write_text(json.dumps({"row": name, "command": [], **found}))
    return str(directory)


def compared(tmp_path: Path, before: Any, after: Any, *options: str) -> tuple[int, str]:
    """Exit code and words of `compare` on two recordings."""
    old, new = record(tmp_path / "old", before), record(tmp_path / "new", after)
    result = CliRunner().invoke(answers.main, ["compare", old, new, *options])
    return result.exit_code, result.output


def test_equal_recordings_have_no_difference(tmp_path: Path) -> None:
    rows = {"plan a 60%": row({"plan": {"peak": 3}, "warnings": []})}
    code, words = compared(tmp_path, rows, rows)
    assert code == 0
    assert words == "1 rows compared: 0 differ; 0 only before, 0 only after, 0 about another trace.\n"


@pytest.mark.parametrize(
    ("after", "line"),
    [
        (row({"plan": {"peak": 4}, "steps": [1]}), "answer.plan.peak: 3 -> 4"),
        (row({"plan": {"peak": 3.0}, "steps": [1]}), "answer.plan.peak: 3 -> 3.0"),
        (row({"plan": {"peak": 3}, "steps": []}), "answer.steps[0]: 1 -> (none)"),
        (row({"plan": {"peak": 3}, "steps": [1], "new": None}), "answer.new: (none) -> null"),
        (
            row({"steps": [1], "plan": {"peak": 3}}),
            "(text): the same keys and values, written in another way",
        ),
        (
            row({"plan": {"peak": 3}, "steps": [1]}, written={"": "other"}),
            "(text): the same keys and values, written in another way",
        ),
        (row({"plan": {"peak": 3}, "steps": [1]}, exit=1), "exit: 0 -> 1"),
        (row({"plan": {"peak": 3}, "steps": [1]}, files={"p.json": {}}), "files.p.json: (none) -> {}"),
        (
            row({"plan": {"peak": 3}, "steps": [1]}, trace="u"),
            "another trace than the recorded one: not compared",
        ),
    ],
)
def test_a_difference_is_named_with_its_values(tmp_path: Path, after: dict[str, Any], line: str) -> None:
    before = row({"plan": {"peak": 3}, "steps": [1]})
    code, words = compared(tmp_path, {"r": before}, {"r": after})
    assert code == 1
    assert f"r | {line}\n" in words


def test_rows_of_one_recording_only_are_differences_unless_partial(tmp_path: Path) -> None:
    both = {"a": row(1), "b": row(2)}
    code, words = compared(tmp_path, both, {"a": row(1)})
    assert code == 1
    assert "b | only before\n" in words
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    assert CliRunner().invoke(answers.main, ["compare", old, new, "--partial"]).exit_code == 0
    assert CliRunner().invoke(answers.main, ["compare", new, old, "--partial"]).exit_code == 1


def test_known_differences_can_be_looked_past_and_others_stay(tmp_path: Path) -> None:
    code, words = compared(
        tmp_path,
        {"r": row({"warnings": ["x"], "n": 1})},
        {"r": row({"warnings": [], "n": 2})},
        "--ignore",
        "*warn*",
    )
    assert code == 1
    assert "warnings" not in words
    assert "answer.n: 1 -> 2" in words


def test_what_the_clock_decides_is_left_out_at_every_depth() -> None:
    value = {"solve_seconds": 1.5, "rows": [{"solve_seconds": 2, "peak": 1}], "peak": 2}
    assert answers.timeless(value) == {"rows": [{"peak": 1}], "peak": 2}


def test_texts_differ_by_their_bytes_but_not_by_the_clock() -> None:
    text = '{"solve_seconds": 1.5e-05, "peak": 1}'
    assert answers.text_digest(text) == answers.text_digest('{"solve_seconds": null, "peak": 1}')
    assert answers.text_digest(text) != answers.text_digest('{"solve_seconds": 1.5e-05, "peak":1}')


def test_an_entry_less_in_a_list_leaves_the_others_equal() -> None:
    entries = [{"planner": name, "peak": k} for k, name in enumerate(["first", "second", "third"])]
    assert answers.differences({"planners": entries}, {"planners": entries[1:]}) == [
        ("planners[first].planner", '"first" -> (none)'),
        ("planners[first].peak", "0 -> (none)"),
    ]


def test_digests_tell_which_part_of_an_answer_differs() -> None:
    before = answers.shortened(
        row({"plan": {"peak_allocated_bytes": 3, "steps": 1}, "bound": {"added_time_ns": 7}})
    )
    after = answers.shortened(
        row({"plan": {"peak_allocated_bytes": 3, "steps": 2}, "bound": {"added_time_ns": 7}})
    )
    assert before["peak_bytes"] == 3
    assert before["bound_added_ns"] == 7
    assert [path for path, _ in answers.differences(before, after)] == ["answer.plan"]


def test_the_committed_digests_are_of_rows_that_are_asked() -> None:
    asked = {found.name for found in answers.rows_of(answers.ROOT / "traces", quick=True)}
    assert asked
    assert asked <= set(answers.golden_rows())
