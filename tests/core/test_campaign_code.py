"""Which code a campaign's kept results belong to: all that predicts and measures, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from executor.campaign.code import ENTRIES, ROOMS, ROOT, code_digest, modules_behind, read_modules
from simulator.planners import REGISTRY

SMALL = {
    "traces/__init__.py": "",
    "tracer/__init__.py": "",
    "tracer/rates.py": "RATE = 1",
    "tracer/workspaces.toml": "a = 1",
    "simulator/__init__.py": '"""Text."""',
    "simulator/engine.py": 'def run():\n    """Text."""\n    return 1',
    "simulator/planners/__init__.py": 'REGISTRY = {"greedy": "simulator.planners.greedy:plan"}',
    "simulator/planners/greedy.py": "def plan():\n    from simulator import engine\n    return engine",
    "simulator/report/__init__.py": "",
    "simulator/report/page.py": "from simulator.engine import run",
    "executor/__init__.py": "",
    "executor/measure_worker.py": "def do():\n    from tracer.rates import RATE",
    "executor/cli.py": "import executor.measure_worker",
    "executor/cases/cpu.toml": "a = 1",
    "executor/campaign/__init__.py": "",
    "executor/campaign/worker.py": "import simulator.planners",
    "executor/campaign/one.py": "",
    "executor/campaign/boundary.py": "",
}


def written(root: Path, name: str = "", text: str = "") -> str:
    """The digest of the small tree with one file changed."""
    shutil.rmtree(root, ignore_errors=True)
    for file, content in {**SMALL, **({name: text} if name else {})}.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(content)
    code_digest.cache_clear()
    return code_digest(root)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tracer/rates.py", "RATE = 2"),  # imported inside a function
        ("tracer/workspaces.toml", "a = 2"),
        ("simulator/__init__.py", "import traces"),  # a package runs before its modules
        ("simulator/engine.py", "def run():\n    return 2"),  # imported from a package
        ("simulator/planners/greedy.py", "def plan():\n    pass"),  # named in a string
        ("executor/campaign/one.py", "A = 1"),
    ],
)
def test_an_edit_of_what_predicts_or_measures_makes_other_code(tmp_path: Path, name: str, text: str) -> None:
    before = written(tmp_path)
    assert written(tmp_path) == before
    assert written(tmp_path, name, text) != before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("simulator/report/page.py", "A = 1"),
        ("executor/cli.py", "A = 1"),
        ("executor/cases/cpu.toml", "a = 2"),
        ("simulator/engine.py", 'def run():\n    """Other text."""\n    # why\n    return (1)'),
        ("simulator/__init__.py", ""),
    ],
)
def test_an_edit_of_what_shows_or_of_words_keeps_the_results(tmp_path: Path, name: str, text: str) -> None:
    assert written(tmp_path, name, text) == written(tmp_path)


def test_all_that_the_workers_have_loaded_is_among_it() -> None:
    code = "import sys, executor.measure_worker, executor.campaign.worker, executor.campaign.boundary\n"
    code += "from simulator.planners import REGISTRY, find\n"
    code += "[find(name) for name in REGISTRY]\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {m for m in done.stdout.split() if m.partition(".")[0] in ROOMS}
    behind = set(modules_behind(ENTRIES, read_modules(ROOT)))
    assert len(loaded) > 60
    assert loaded <= behind


def test_pages_and_commands_are_not_among_it() -> None:
    trees = read_modules(ROOT)
    behind = set(modules_behind(ENTRIES, trees))
    assert {e.function.partition(":")[0] for e in REGISTRY.values()} <= behind
    shown = {m for m in trees if ".report" in m or m.rpartition(".")[2].startswith(("cli", "page"))}
    assert len(shown) > 15
    assert not behind & shown
