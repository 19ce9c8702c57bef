"""The command lines as a user sets them up: defaults in pyproject.toml, help in groups, completion in the shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from simulator.cli.main import main
from tests.commands import python
from tracer.cli.main import trace

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def with_settings(text: str, *words: str) -> Result:
    Path("pyproject.toml").write_text(text)
    return run(main, [*words, "--json", "-q"])


def test_defaults_stand_in_pyproject_toml() -> None:
    table = '[tool.lowtide.simulate]\nbudget = "80%"\nplanner = "mu-two"\ndevice-memory = "20GiB"\n'
    told = json.loads(with_settings(table, "bert-base").stdout)
    assert (told["planner"], told["device_memory"]["memory_bytes"]) == ("mu-two", 20 << 30)
    given = json.loads(with_settings(table, "bert-base", "--budget", "90%").stdout)
    assert given["budget_bytes"] > told["budget_bytes"]
    assert json.loads(with_settings("[tool.other]\n", "bert-base").stdout)["budget_of"] == "allocated"
    assert run(main, ["planners", "--json"]).exit_code == 0  # which has none of these options


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[tool.lowtide.simulate]\nbudgte = "60%"\n', "has budgte, which is no option of `simulate`"),
        ("[tool.lowtide.simulate\n", "cannot be read"),
        ("[tool.lowtide]\nsimulate = 3\n", "cannot be read"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(text: str, words: str) -> None:
    refused = with_settings(text, "bert-base")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert words in refused.output


def test_help_has_what_most_people_use_first_and_each_option_once() -> None:
    for group, first, later in ((main, "  --budget ", "The search:"), (trace, "  --target ", "The loop:")):
        text = run(group, ["run", "--help"] if group is trace else ["--help"]).stdout
        assert text.index("Options:") < text.index(first) < text.index(later)
        options = [line.split()[0] for line in text.splitlines() if line.startswith("  -")]
        assert len(options) == len(set(options))


@pytest.mark.parametrize(
    ("shell", "words", "found"),
    [
        ("bash", "par", "pareto"),
        ("zsh", "bert-base --bud", "--budget"),
        ("fish", "sweep x --batch", "--batch-sizes"),
    ],
)
def test_shells_complete_words(shell: str, words: str, found: str) -> None:
    asked = {
        "_SIMULATE_COMPLETE": f"{shell}_complete", "COMP_WORDS": f"simulate {words}",
        "COMP_CWORD": words.split()[-1] if shell == "fish" else str(len(words.split())),
    }  # fmt: skip
    code = "from simulator.__main__ import run; run()"
    assert found in python("-c", code, code=None, **asked).stdout
