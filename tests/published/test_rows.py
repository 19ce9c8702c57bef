"""What others measured on GPUs: rehearsed no worse than the committed tables say, which agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench import published, rehearsed

HERE = Path(__file__).parent
TABLE = published.rows()
MADE: dict[str, dict[str, Any]] = {
    r["name"]: r for r in json.loads((HERE / "rows.json").read_text(encoding="utf-8"))["rows"]
}


def test_every_row_is_made_of_the_figures_that_were_published() -> None:
    assert set(MADE) <= set(TABLE)
    for name, row in MADE.items():
        assert row["measured"] == {f: TABLE[name][f] for f in published.FIGURES if f in TABLE[name]}
        assert row["rehearsed"]


def test_tables_say_what_the_results_are() -> None:
    written = (HERE / "rows.md").read_text(encoding="utf-8")
    assert written == published.page_of(list(MADE.values()))
    rows = json.loads((HERE / "rehearsed.json").read_text(encoding="utf-8"))["rows"]
    assert (HERE / "rehearsed.md").read_text(encoding="utf-8") == rehearsed.page_of(rows)


def test_readme_shows_the_results() -> None:
    """Lines of the README's table of published figures are those that the results make."""
    readme = (HERE.parents[1] / "README.md").read_text(encoding="utf-8").splitlines()
    ours = published.readme(list(MADE.values())).splitlines()
    begin = readme.index(ours[0])
    assert readme[begin : begin + len(ours)] == ours


@pytest.mark.slow
@pytest.mark.rehearsal
@pytest.mark.parametrize("name", MADE)
def test_no_row_gets_worse(name: str) -> None:
    before = MADE[name]
    if before["torch"] != torch.__version__:
        pytest.skip(f"made with torch {before['torch']}")
    now = published.made(name, TABLE[name])["rehearsed"]
    for figure, found in before["rehearsed"].items():
        assert abs(now[figure]["off_bytes"]) <= abs(found["off_bytes"]), figure
