"""How far long work is: one bar in a terminal's last line, lines elsewhere, and nothing of it left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from traces import progress
from traces.isolated import run_fresh
from traces.progress import counted, counting

pty = pytest.importorskip("pty")

# A command of three steps, of which the second says a line; what follows it is put in by a test.
COMMAND = """
import click, sys
from traces.commands import DefaultGroup, answer_options
from traces.errors import SpecError
from traces.progress import counted

@click.group(cls=DefaultGroup, default="run")
def main(): pass

@main.command()
@answer_options
def run(out):
    for k in counted("abc", lambda k: f"part {k} \\x1b[2J" + 99 * "x", out.say):
        if k == "b":
            out.say("a line")
            BODY
    out.show(lambda: {"k": k}, lambda: "done")

main()
"""


def on_a_terminal(body: str = "pass", *words: str) -> tuple[int, str, str]:
    """The exit code, stdout, and what a terminal of 80 columns got on stderr."""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.replace("BODY", body), "run", *words],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "COLUMNS": "80"},
    )
    os.close(theirs)
    told = b""
    while True:
        try:
            told += os.read(ours, 9999)
        except OSError:  # nobody holds the other end any more
            break
    os.close(ours)
    return done.returncode, done.stdout, told.decode()


def left(told: str) -> list[str]:
    """The lines that a terminal shows in the end."""
    return [line.rpartition("\r\x1b[K")[2] for line in told.replace("\r\n", "\n").split("\n")]


def test_a_terminal_shows_one_bar_and_keeps_the_lines() -> None:
    code, out, told = on_a_terminal()
    assert (code, out) == (0, "done\n")
    assert left(told) == ["a line", ""]
    bars = [bar for bar in told.split("\r\x1b[K") if bar.startswith("[")]
    assert [bar[:31].split()[-1] for bar in bars if "part" in bar] == ["0%", "33%", "33%", "66%"]
    assert all(len(bar.partition("\r")[0]) < 80 for bar in bars)
    assert "\x1b[2J" not in told  # what a name holds is no command to the terminal
    assert "\x1b[?25l" not in told  # nor is the cursor hidden, which a killed command would leave


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("raise SpecError('no such thing.')", 2, "Error: no such thing."),
        ("raise KeyboardInterrupt", 130, "Error: stopped."),
    ],
)
def test_an_error_leaves_the_terminal_clean(body: str, code: int, says: str) -> None:
    found, out, told = on_a_terminal(body)
    assert (found, out) == (code, "")
    assert left(told) == ["a line", says, ""]


def test_quiet_and_json() -> None:
    assert on_a_terminal("pass", "-q") == (0, "done\n", "")
    code, out, told = on_a_terminal("pass", "--json")
    assert (code, out) == (0, '{"k": "c"}\n')
    assert left(told) == ["a line", ""]


def test_elsewhere_what_is_done_is_said() -> None:
    said: list[str] = []
    assert list(counted("ab", "part {}".format, said.append)) == ["a", "b"]
    assert said == ["1 of 2: part a", "2 of 2: part b"]
    list(counted(iter("a"), str, said.append, of=1))
    assert said[2:] == ["a"]


@pytest.fixture
def drawn() -> Iterator[list[tuple[float | None, str]]]:
    """What was drawn."""
    found: list[tuple[float | None, str]] = []
    progress.shown_by(lambda share, text: bool(found.append((share, text))) or True)
    yield found
    progress.shown_by(None)


def test_work_inside_a_step_is_part_of_it(drawn: list[tuple[float | None, str]]) -> None:
    for _ in counted("ab", "outer {}".format):
        with counting(4) as done:
            done(3, "inner")
    shares = [(share, text) for share, text in drawn if text.endswith("inner")]
    assert shares == [(0.375, "outer a: inner"), (0.875, "outer b: inner")]
    assert drawn[-1] == (None, "")


def test_work_that_failed_counts_no_more(drawn: list[tuple[float | None, str]]) -> None:
    for _ in counted("ab", str):
        try:
            for _ in counted("cd", str):
                raise ValueError
        except ValueError:
            pass
    assert drawn[-2] == (1.0, "")


def test_a_fresh_process_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[tuple[float | None, str]]
) -> None:
    (tmp_path / "lowtide_far.py").write_text(
        "from traces.progress import counted\n"
        "def do():\n    for _ in counted(range(4), str):\n        print('beside', end='')\n    return {}"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for _ in counted("ab", str):
        assert run_fresh("lowtide_far:do", {}, what="did it") == {}
    assert {share for share, _ in drawn} == {None, *(k / 8 for k in range(9))}
