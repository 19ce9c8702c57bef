"""The manuals say what the code does: names of the format, options, keys, commands, and the README's own example."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from executor.campaign.page import summary
from executor.campaign.run import Book, Case, Method, Result
from executor.cli.main import execute
from simulator.cli.main import main as simulate
from simulator.core.problem import Problem
from simulator.planners import DEFAULT, REGISTRY
from simulator.prediction.ask import Question, ask
from simulator.studies.sweep import Sweep, SweepRow
from tests import tiny
from tests.tiny import bwd, fwd, opt
from tracer.cli.main import trace
from traces.records.measurement import RunFigures
from traces.records.plan import SAVE, Action, Plan
from traces.records.store import GALLERY, OPS_COLUMNS, STORAGES_COLUMNS
from traces.records.trace import CATEGORIES, FLAG_NAMES, FORBIDS_RECOMPUTE, PHASES, Trace, TraceMeta

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("tracer", "simulator", "executor")
MANUALS = {name: (ROOT / name / "README.md").read_text(encoding="utf-8") for name in ROOMS}
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
README = "\n".join((PAGE, *MANUALS.values()))  # all that speaks of commands
FORMATS = (ROOT / "traces" / "README.md").read_text(encoding="utf-8")


FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    inside = level = 0
    fenced = False
    out = []
    for line in text.splitlines(keepends=True):
        fenced ^= line.startswith("```")
        heading = re.match(r"(#+) (.+)$", line)
        if heading and not fenced:
            if inside and len(heading[1]) <= level:
                break
            if heading[2] == title:
                inside, level = 1, len(heading[1])
                continue
        if inside:
            out.append(line)
    assert inside, f"no section {title!r}"
    return "".join(out)


def blocks(text: str, language: str) -> list[str]:
    return [body for word, body in FENCED.findall(text) if word == language]


def quoted(text: str) -> set[str]:
    """Everything in backticks outside fenced blocks."""
    return set(re.findall(r"`([^`\n]+)`", FENCED.sub("", text)))


def rows(text: str) -> dict[str, list[str]]:
    """The tables' rows by the first cell without its backticks; a cell that names several makes several."""
    out: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [c.strip() for c in line.strip("|").split("|")]
            out.update((name, cells[1:]) for name in re.findall(r"`([^`]+)`", cells[0]))
    return out


def small_trace() -> Trace:
    ops = [fwd({"a": 8}, "w"), fwd({"b": 4}, "a"), bwd({"g": 8}, "a", "b"), opt({}, "g")]
    return tiny.trace(ops, {"w": 8})


# traces/README.md


@pytest.mark.parametrize(
    ("title", "columns"),
    [
        ("`ops.parquet`: one row an op, in execution order", OPS_COLUMNS),
        ("`storages.parquet`: one row a storage", STORAGES_COLUMNS),
    ],
)
def test_every_column_is_documented_with_its_type(title: str, columns: dict[str, str]) -> None:
    words = {
        "string": "string",
        "int64": "int64",
        "int32": "int32",
        "list<int32>": "list of int32",
        "list<int64>": "list of int64",
    }
    table = {name: cells[0] for name, cells in rows(section(FORMATS, title)).items() if name in columns}
    assert table == {name: words[kind] for name, kind in columns.items()}


def test_every_field_of_the_header_is_documented_and_no_other() -> None:
    assert tuple(rows(section(FORMATS, "The header"))) == tuple(TraceMeta.__dataclass_fields__)


def test_flags_phases_and_categories_are_documented() -> None:
    text = section(FORMATS, "`ops.parquet`: one row an op, in execution order")
    for bit, name in FLAG_NAMES.items():
        again = "no" if bit & FORBIDS_RECOMPUTE else "yes"
        assert re.search(rf"^\| {bit} \| `{name}` \|.*\| {again} \|$", text, re.MULTILINE), name
    assert {*PHASES} <= quoted(text)
    assert {*CATEGORIES} <= quoted(section(FORMATS, "`storages.parquet`: one row a storage"))


def keys_of(title: str) -> set[str]:
    """The keys that stand under a heading."""

    def named(*kinds: Any) -> set[str]:
        return {f.name for kind in kinds for f in fields(kind)}

    if title == "A plan":
        actions = Action(storage=1, evict_after=(3,)), Action(storage=2, recipe=SAVE)
        data = Plan(meta=small_trace().meta, actions=actions).to_json()
        return {*data} | {k for a in data["actions"] for k in a}
    if title == "A measurement":
        return {*tiny.measurement(RunFigures(step_time_ns=3)).to_json()} | named(RunFigures)
    if title == "A sweep":
        return named(SweepRow) | {*Sweep(model="m", options={}, target="").to_json()}
    return named(Result, Case) | {*Book(name="n", method=Method(), asked=0).to_json()}


@pytest.mark.parametrize("title", ["A plan", "A measurement", "A sweep", "A campaign"])
def test_every_key_of_a_record_is_documented(title: str) -> None:
    text = section(FORMATS, title)
    assert keys_of(title) <= quoted(text)


def test_every_key_of_a_campaigns_cases_is_documented() -> None:
    text = section(FORMATS, "A campaign")
    assert [f.name for f in fields(Method) if f.name.replace("_", "-") not in text] == []


# README.md: commands, options, keys


def groups() -> dict[str, click.Group]:
    return {"trace": trace, "simulate": simulate, "execute": execute}


def default_command(group: click.Group) -> click.Command:
    """The command that is meant when the first word is no subcommand."""
    name = getattr(group, "default", None)
    return group.commands[name if name in group.commands else ""]


def shown_commands() -> list[list[str]]:
    """Every call of one of the three commands in the README's shell blocks."""
    out = []
    for block in blocks(README, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if words and words[0] in ("trace", "simulate", "execute"):
                    out.append(words)
    return out


def test_the_readme_shows_each_command() -> None:
    assert {words[0] for words in shown_commands()} == {"trace", "simulate", "execute"}


@pytest.mark.parametrize("words", shown_commands(), ids=" ".join)
def test_shown_commands_parse(words: list[str]) -> None:
    group, args = groups()[words[0]], words[1:]
    if args[0] in group.commands:
        command, args = group.commands[args[0]], args[1:]
    else:
        command = default_command(group)
    with command.make_context(words[0], list(args)) as context:
        assert context.params


@pytest.mark.parametrize("name", ["trace", "simulate", "execute"])
def test_every_subcommand_is_in_the_manuals_and_every_option_in_its_help(name: str) -> None:
    group = groups()[name]
    default = default_command(group)
    for key, command in group.commands.items():
        assert command is default or f"{name} {key}" in README
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, parameter.opts


def test_every_option_that_the_manuals_name_exists() -> None:
    known = {"--version", "--help", "--epochs", "--nproc-per-node"}  # the last two are of a rehearsed line
    for group in groups().values():
        for command in group.commands.values():
            for parameter in command.params:
                known |= {*parameter.opts, *parameter.secondary_opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", README)) <= known


def test_the_table_of_planners_is_the_registry() -> None:
    table = rows(section(MANUALS["simulator"], "Planners"))
    assert [*table] == [*REGISTRY]
    assert table[DEFAULT][0].startswith("The default")


def test_every_key_of_simulates_json_is_documented() -> None:
    record = small_trace()
    data = ask(Problem(record), Question()).to_json()
    keys = {*data, *data["plan"], *data["untouched"], *ask(Problem(record), Question(budget=1)).to_json()}
    assert keys <= quoted(section(FORMATS, "What the commands print with --json"))


def test_the_readme_is_one_page() -> None:
    assert len(PAGE.splitlines()) <= 140


@pytest.mark.parametrize(
    "path", ["README.md", *(f"{name}/README.md" for name in (*ROOMS, "traces")), ".github/CONTRIBUTING.md"]
)
def test_links_lead_somewhere(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, heading = target.partition("#")
        found = (ROOT / path).parent / file if file else ROOT / path
        assert found.exists(), target
        if heading:
            headings = {
                re.sub(r"[^a-z0-9 _-]", "", h.lower()).replace(" ", "-")
                for h in re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            }
            assert heading in headings, target


def test_the_accuracy_table_is_the_gallerys_campaign() -> None:
    _, shown, _ = MANUALS["executor"].split("<!-- campaign -->")
    told = summary(Book.load(GALLERY / "cpu-campaign" / "campaign.json")).splitlines()
    of_all = told[next(n for n, line in enumerate(told) if line.startswith("figure ")) :]
    assert shown.strip().splitlines() == ["```text", *of_all, "```"]
