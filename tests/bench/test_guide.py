"""The guide in the gallery: its cells run, and what it shows is of them and of no machine."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from importlib.util import find_spec

import pytest

from tests.bench.guide import GUIDE, cells


def test_the_guide_is_executed_and_shows_pictures_without_scripts() -> None:
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [out for cell in code for out in cell["outputs"]]
    assert {out["output_type"] for out in outputs} == {"execute_result", "stream"}
    assert sum("<svg" in "".join(out["data"]["text/html"]) for out in outputs if "data" in out) == 3
    text = GUIDE.read_text("utf-8")
    assert not any(word in text for word in ("<script", "site-packages", '"name": "stderr"'))
    assert not re.search(r"(?<![\w<.:/-])/\w+/", text), "a path of some machine"


def test_every_cell_runs_to_what_it_shows() -> None:
    if find_spec("torch") is None:
        pytest.skip("needs torch")
    names: dict[str, object] = {"__name__": "guide"}
    for cell in cells():
        if cell["cell_type"] != "code":
            continue
        *rest, last = ast.parse("".join(cell["source"])).body
        shows = isinstance(last, ast.Expr) and not ast.unparse(last).startswith("print")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(ast.Module(rest if shows else [*rest, last], []), "guide", "exec"), names)
        if shows:
            (out,) = cell["outputs"]
            shown = eval(ast.unparse(last), names)
            html = shown._repr_html_()
            assert "<svg" in html
            assert "0.0 GiB" not in html, "a picture's axis has the unit that its figures need"
            assert repr(shown).partition(" peak ")[0] == out["data"]["text/plain"][0].partition(" peak ")[0]
        else:
            there = "".join(text for out in cell["outputs"] for text in out["text"])
            assert re.sub(r"[\d.]+", "N", said.getvalue()) == re.sub(r"[\d.]+", "N", there)
