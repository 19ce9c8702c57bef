"""The study of Inverted Activations: its page is made of what was recorded, and what the record says of the levers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.inverted_study_page import MODELS, write

STUDY = json.loads((Path(__file__).parents[1] / "bench" / "inverted_study.json").read_text())


def test_the_page_shows_every_part(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    write(tmp_path / "study.html", STUDY)
    page = (tmp_path / "study.html").read_text()
    assert all(model in page for model in MODELS.values())
    assert all(way in page for way in STUDY["training"]["runs"] if "'" not in way)
    assert "http://" not in page.replace("http://www.w3.org/", "")


def test_every_way_is_of_as_many_steps_and_the_derivatives_of_every_type() -> None:
    training = STUDY["training"]
    assert training["steps"] == 1000
    assert {len(run["curve"]) for run in training["runs"].values()} == {1000 // training["per_point"]}
    inverted = [r for r in STUDY["derivative"]["rows"] if r["way"] == "Lowtide"]
    assert {r["dtype"] for r in inverted} == {"float32", "bfloat16", "float16"}
    assert not any(r["nan"] for r in inverted)
