"""The replay of every answer sees what changed, and nothing that only the clock decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench import answers


def row(answer: Any, **other: Any) -> dict[str, Any]:
    return {"trace": "t", "exit": 0, "message": "", "answer": answer, "files": {}, "written": {}} | other


def compared(before: Any, after: Any, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    """Whether two recordings differ, and what is said."""
    return answers.show_differences(before, after), capsys.readouterr().out


def test_equal_recordings_have_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"plan a 60%": row({"plan": {"peak": 3}, "warnings": []})}
    words = "1 rows compared: 0 differ; 0 only after, 0 about another trace.\n"
    assert compared(rows, rows, capsys) == (False, words)


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    path = tmp_path / answers.file_of("plan a 60%")
    path.write_text(json.dumps({"row": "plan a 60%", "command": [], **row(1)}))
    assert answers.recorded(tmp_path) == {"plan a 60%": row(1)}


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
def test_a_difference_is_named_with_its_values(
    after: dict[str, Any], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = row({"plan": {"peak": 3}, "steps": [1]})
    differ, words = compared({"r": before}, {"r": after}, capsys)
    assert differ
    assert f"r | {line}\n" in words


def test_a_row_that_was_not_recorded_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    both = {"a": row(1), "b": row(2)}
    assert compared({"a": row(1)}, both, capsys)[0]
    assert not compared(both, {"a": row(1)}, capsys)[0]


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
