"""The import law holds: the contracts of pyproject.toml, and that they are the ones meant."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("traces", "simulator", "tracer", "executor")


def modules() -> list[Path]:
    return sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))


def test_import_contracts() -> None:
    # import-linter finds its settings in the working directory; its command has no `python -m` form.
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_contracts_say_what_the_house_is() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers, forbidden, *rooms = settings["contracts"]
    assert layers["layers"] == ["executor", "tracer | simulator", "traces"]
    assert set(forbidden["source_modules"]) == {"traces", "simulator"}
    assert set(forbidden["forbidden_modules"]) == {"torch", "torchvision", "transformers"}
    assert {r["containers"][0] for r in rooms} >= {"traces", "simulator"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_each_module_is_one_sentence(path: Path) -> None:
    text = path.read_text()
    if text.strip():
        assert text.startswith('"""'), f"{path.name} does not begin with a docstring"
        assert path.stem not in ("utils", "helpers", "common")


# Lines, and the most that there may be. These numbers only go down: who deletes lowers them.
MOST_LINES = {
    "product": (30_710, ("traces", "simulator", "tracer", "executor"), ".py"),
    "tests": (28_905, ("tests",), ".py"),
    "C": (1_410, ("tracer", "executor"), (".c", ".h")),
    "manuals": (877, ("README.md", *(f"{room}/README.md" for room in ROOMS)), ".md"),
}


@pytest.mark.parametrize("part", MOST_LINES)
def test_the_house_only_gets_smaller(part: str) -> None:
    most, places, ends = MOST_LINES[part]
    roots = [ROOT / place for place in places]
    files = [f for root in roots for f in ([root] if root.is_file() else root.rglob("*"))]
    lines = sum(len(f.read_bytes().splitlines()) for f in files if f.name.endswith(ends))
    assert lines <= most, f"{part}: {lines:,} lines; delete as much as you add"
    assert lines > most - 1_500, f"{part}: {lines:,} lines; lower the limit"
