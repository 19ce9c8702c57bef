"""The study's page: all of its sections, from small traces."""

from __future__ import annotations

import subprocess
from pathlib import Path
from shutil import which

import pytest
from click import ClickException

from tests import synthetic
from tests.bench.study import Study, main
from traces.errors import SpecError
from traces.records import store

GALLERY = Path(__file__).resolve().parents[2] / "traces" / "gallery"


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    """Steps of two models like the gallery's, and what was measured of BERT."""
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    for model in ("resnet152", "bert-base"):
        for batch in (1, 2):
            trace = synthetic.resnet((1, 1), batch=batch, side=64)
            store.save(trace, tmp_path / f"{model}-h200" / f"trace-b{batch}")
    (tmp_path / "bert-base-cpu").symlink_to(GALLERY / "bert-base-cpu")
    return tmp_path


def test_the_page_has_all_sections(gallery: Path) -> None:
    import vl_convert

    page = Study(gallery, ("80%", "50%"), 0.1, lambda line: None).page()
    assert [s.title for s in page.sections] == [
        "1. Question and method",
        "2. Computation and memory statistics",
        "3. First and last use of activations",
        "4. Peak breakdown",
        "5. Peak memory and latency against batch size",
        "6. Planners beside the bound",
        "7. What of the search matters",
        "8. What was measured where",
    ]
    blocks = [b for s in page.sections for b in s.blocks]
    charts = [b for b in blocks if b.kind == "chart"]
    for chart in charts:
        assert vl_convert.vegalite_to_vega(chart.spec)
        assert chart.caption.endswith("]"), "says where its figures come from"
    assert len(charts) == 4 + 3 + 4 + 3 + 2


def test_the_command_writes_page_and_picture(gallery: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gallery", str(gallery), "-o", str(gallery / "s.html"), "--svg", str(gallery / "s.svg"), "-q"]
    main([*words, "--budgets", "80%", "--seconds", "0.1"], standalone_mode=False)
    assert (gallery / "s.html").stat().st_size < 1_500_000
    assert "series: search" in (gallery / "s.svg").read_text("utf-8")
    if which("chromium") is None:
        pytest.skip("no headless Chromium")
    look = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    look += ["--virtual-time-budget=20000", "--dump-dom", (gallery / "s.html").as_uri()]
    done = subprocess.run(look, capture_output=True, text=True, check=True, timeout=300)
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count('<svg xmlns="http://www.w3.org/2000/svg"') == done.stdout.count('id="spec') == 16


def test_a_folder_without_sweeps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="holds no sweeps"):
        Study(tmp_path, ("60%",), 0.1, lambda line: None).page()


def test_budgets_are_shares(tmp_path: Path) -> None:
    with pytest.raises(ClickException, match="give shares"):
        main(["-o", str(tmp_path / "s.html"), "--budgets", "8GiB"], standalone_mode=False)
