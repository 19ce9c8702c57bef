"""--report: what a page needs is looked for before the work, and what was measured is not lost with the page."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import executor.cli.main as main
import executor.plans as plans
import executor.report as report
from executor.cli.main import execute
from simulator.cli.main import main as simulate
from tests import tiny
from tests.commands import call
from traces.records.measurement import RunFigures
from traces.records.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
NOTHING = "none-there"


def reporting(command: click.Command) -> Iterator[click.Command]:
    """The commands below this one that have --report."""
    if any("--report" in p.opts for p in command.params):
        yield command
    for below in getattr(command, "commands", {}).values():
        yield from reporting(below)


# The input is not there either, and would be named if it were looked at first.
COMMANDS: list[tuple[Any, tuple[str, ...]]] = [
    (execute, ("run", NOTHING)),
    (execute, ("campaign", NOTHING)),
    (simulate, ("", NOTHING)),  # the default command
    (simulate, ("sweep", NOTHING, "--batch-sizes", "8", "--budget", "80%")),
    (simulate, ("capacity", NOTHING, "--gpus", "h100")),
    (simulate, ("compare", NOTHING, "--budget", "80%")),
    (simulate, ("pareto", NOTHING)),
    (simulate, ("why", NOTHING)),
    (simulate, ("diff", NOTHING, NOTHING)),
]


def test_the_list_of_commands_is_complete() -> None:
    found = {c.name for group in (execute, simulate) for c in reporting(group)}
    assert found == {words[0] for _, words in COMMANDS}


@pytest.mark.parametrize(("command", "words"), COMMANDS, ids=lambda x: x[0] if type(x) is tuple else x.name)
def test_a_missing_package_is_named_before_the_work(
    command: Any, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "altair", None)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    words = tuple(w for w in words if w)
    result = call(command, *words, "--report", "page.html")
    assert result.exit_code == 2
    assert "page.html: a report needs altair and vl-convert-python" in result.stderr
    assert "pip install altair vl-convert-python" in result.stderr
    assert NOTHING not in result.stderr
    assert (result.stdout, list(tmp_path.iterdir())) == ("", [])


def test_what_was_measured_is_printed_though_the_page_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("altair")
    plan = Plan(meta=tiny.chain(2).meta)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "page.html")

    plan.save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    measured = tiny.measurement(RunFigures(peak_allocated_bytes=2))
    monkeypatch.setattr(plans, "measure_plan", lambda *_: measured)
    monkeypatch.setattr(main, "trace_of", lambda *_: tiny.chain(2))
    monkeypatch.setattr(report, "write_measurement", full)
    result = call(execute, "run", "plan.json", "--json", "--report", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "No space left" in result.stderr
    assert json.loads(result.stdout)["measured"]["peak_allocated_bytes"] == 2
