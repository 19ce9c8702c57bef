"""The replay of every answer sees what changed, and nothing that only the clock decides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import answers


def row(answer: dict[str, Any], **other: Any) -> dict[str, Any]:
    """Digests as they are committed."""
    return {"trace": "t", "exit": 0, "message": "", "answer": answer, "files": {}, "written": "w"} | other


PLAN = {"plan": "3", "steps": "1"}


def compared(before: Any, after: Any, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    """Whether two recordings differ, and what is said."""
    return answers.show_differences(before, after), capsys.readouterr().out


@pytest.mark.parametrize(
    ("after", "line"),
    [
        (row({**PLAN, "plan": "4"}), "answer.plan: 3 -> 4"),
        (row({"plan": "3"}), "answer.steps: 1 -> (none)"),
        (row({**PLAN, "new": "5"}), "answer.new: (none) -> 5"),
        (row(PLAN, written="other"), "(text): the same keys and values, written in another way"),
        (row(PLAN, exit=1), "exit: 0 -> 1"),
        (row(PLAN, files={"p.json": "6"}), "files.p.json: (none) -> 6"),
        (row(PLAN, trace="u"), "another trace than the recorded one: not compared"),
    ],
)
def test_a_difference_is_named_with_its_values(
    after: dict[str, Any], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    differ, words = compared({"r": row(PLAN)}, {"r": after}, capsys)
    assert differ
    assert f"r | {line}\n" in words


def test_a_row_that_was_not_recorded_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    one, both = {"a": row({})}, {"a": row({}), "b": row(PLAN)}
    assert compared(one, both, capsys)[0]
    assert not compared(both, one, capsys)[0]


def test_what_the_clock_decides_is_left_out_at_every_depth() -> None:
    value = {"solve_seconds": 1.5, "rows": [{"solve_seconds": 2, "peak": 1}], "peak": 2}
    assert answers.timeless(value) == {"rows": [{"peak": 1}], "peak": 2}


def test_texts_differ_by_their_bytes_but_not_by_the_clock() -> None:
    text = '{"solve_seconds": 1.5e-05, "peak": 1}'
    assert answers.text_digest(text) == answers.text_digest('{"solve_seconds": null, "peak": 1}')
    assert answers.text_digest(text) != answers.text_digest('{"solve_seconds": 1.5e-05, "peak":1}')


def test_the_committed_digests_are_of_rows_that_are_asked() -> None:
    asked = {found.name for found in answers.rows_of(quick=True)}
    assert asked
    assert asked <= set(answers.golden_rows())
