"""The study's page, from small traces."""

from __future__ import annotations

from pathlib import Path

import pytest
from click import ClickException

from simulator.report.page import Chart, Page
from tests import synthetic
from tests.bench import study
from traces.errors import SpecError
from traces.records import store


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
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
    return tmp_path


def test_the_command_writes_page_and_picture(gallery: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vl_convert

    made: list[Page] = []
    monkeypatch.setattr(study, "write_page", lambda path, page: made.append(page))
    words = ["--gallery", str(gallery), "-o", "s.html", "--svg", str(gallery / "s.svg")]
    study.main([*words, "--budgets", "80%,50%", "--seconds", "0.1"], standalone_mode=False)
    assert "series: search" in (gallery / "s.svg").read_text("utf-8")
    charts = [b for s in made[0].sections for b in s.blocks if isinstance(b, Chart)]
    for chart in charts:
        assert vl_convert.vegalite_to_vega(chart.spec)
        assert chart.caption.endswith("]"), "says where its figures come from"
    assert len(charts) == 2 + 3 + 4 + 2 + 2


def test_a_folder_without_sweeps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="holds no sweeps"):
        study.Study(tmp_path, ("60%",), 0.1).page()


def test_budgets_are_shares(tmp_path: Path) -> None:
    with pytest.raises(ClickException, match="give shares"):
        study.main(["-o", str(tmp_path / "s.html"), "--budgets", "8GiB"], standalone_mode=False)
