"""The study's page, from small traces."""

from __future__ import annotations

from pathlib import Path

import pytest
from click import ClickException

from simulator.report.page import Chart, Page
from tests import synthetic
from tests.bench import study
from traces.records import store


@pytest.fixture
def gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps of two models like the gallery's, and what was measured of BERT."""
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    for model in ("resnet152", "bert-base"):
        for batch in (1, 2):
            trace = synthetic.resnet((1, 1), batch=batch, side=64)
            store.save(trace, tmp_path / f"{model}-h200" / f"trace-b{batch}")
    (tmp_path / "bert-base-cpu").symlink_to(
        Path(__file__).parents[2] / "traces" / "gallery" / "bert-base-cpu"
    )
    for name, value in {"GALLERY": tmp_path, "BUDGETS": ("80%", "50%"), "SECONDS": 0.1}.items():
        monkeypatch.setattr(study, name, value)
    return tmp_path


def test_the_command_writes_page_and_picture(gallery: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vl_convert

    made: list[Page] = []
    monkeypatch.setattr(study, "write_page", lambda path, page: made.append(page))
    study.main(["-o", "s.html", "--svg", str(gallery / "s.svg")], standalone_mode=False)
    assert "series: search" in (gallery / "s.svg").read_text("utf-8")
    charts = [b for s in made[0].sections for b in s.blocks if isinstance(b, Chart)]
    for chart in charts:
        assert vl_convert.vegalite_to_vega(chart.spec)
        assert chart.caption.endswith("]"), "says where its figures come from"
    assert len(charts) == 2 + 3 + 4 + 2 + 2


def test_a_folder_without_sweeps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClickException, match="holds no sweeps"):
        study.main(["-o", "s.html"], standalone_mode=False)
