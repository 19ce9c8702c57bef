"""cases.toml: lists are multiplied out, defaults give way, and every mistake is named with its place."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from executor.campaign.cases import PACKAGED, Campaign, Case, Method, find_cases, load_cases, parse_cases
from traces.errors import SpecError
from traces.files.json_records import from_json, to_json


def parsed(text: str, root: Path = Path()) -> Campaign:
    return parse_cases(tomllib.loads(text), where="cases.toml", root=root, name="cases")


def test_lists_are_multiplied_out_and_a_case_overrides_the_defaults() -> None:
    made = parsed(
        """
        [campaign]
        runs = 7
        [defaults]
        budget = ["none", "60%"]
        planner = ["mu-two", "sqrt-n"]
        dtype = "float32"
        [[case]]
        model = ["resnet18", "resnet50"]
        batch-size = [8, 16]
        [[case]]
        model = "bert-tiny"
        budget = "2GiB"
        dtype = "bfloat16"
        """
    )
    assert made.method == Method(runs=7)
    # 2 models x 2 batch sizes x (keep-all once, whatever the planner, and 60 % by each of two planners), and
    # one model x one budget x two planners.
    assert len(made.cases) == 2 * 2 * (1 + 2) + 2
    first = [c for c in made.cases if c.step.model == "resnet18" and c.step.options["batch_size"] == 8]
    assert [(c.budget, c.planner) for c in first] == [
        ("none", "save-all"),
        ("60%", "mu-two"),
        ("60%", "sqrt-n"),
    ]
    assert first[0].label == "resnet18 b8 float32 keep-all"
    assert first[1].label == "resnet18 b8 float32 60% mu-two"
    last = made.cases[-1]
    assert dict(last.step.options) == {"dtype": "bfloat16"}
    assert (last.budget, last.planner) == ("2GiB", "sqrt-n")
    assert [from_json(Case, to_json(c)) for c in made.cases] == list(made.cases)


def test_autocast_and_tf32_are_options_of_every_model() -> None:
    made = parsed('[[case]]\nmodel = "resnet18"\namp = ["bfloat16", "float16"]\ntf32 = true\n')
    assert [c.label for c in made.cases] == [
        "resnet18 amp bfloat16 tf32 True keep-all",
        "resnet18 amp float16 tf32 True keep-all",
    ]


def test_the_same_question_twice_is_asked_once() -> None:
    twice = (
        '[[case]]\nmodel = ["resnet18", "resnet-18"]\nbudget = ["50%", "50%"]\n[[case]]\nmodel = "resnet18"\n'
    )
    assert [c.budget for c in parsed(twice).cases] == ["50%", "none"]


def test_a_models_file_is_looked_for_beside_the_cases(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def build(): ...\n")
    made = parsed('[[case]]\nmodel = "net.py:build"\nbatch-size = 2\n', tmp_path)
    assert made.cases[0].step.model == f"{tmp_path / 'net.py'}:build"
    assert made.cases[0].step.label == "net b2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no cases"),
        ("[[case]]\nbatch-size = 8\n", "case 1: no model"),
        ('[[case]]\nmodel = "resnet999"\n', "case 1: model 'resnet999' is unknown"),
        ('[[case]]\nmodel = "resnet18"\n[[case]]\nmodel = "missing.py:build"\n', "case 2"),
        ('[[case]]\nmodel = "resnet18"\nbatch-sizes = 8\n', "unknown key 'batch-sizes'"),
        ('[[case]]\nmodel = "resnet18"\nbatch-size = 0\n', "--batch-size 0 must be a whole number"),
        ('[[case]]\nmodel = "resnet18"\nbatch-size = [8, true]\n', "--batch-size True"),
        ('[[case]]\nmodel = "resnet18"\nseq-len = 8\n', "takes no --seq-len"),
        (
            '[[case]]\nmodel = "resnet18"\nbudget = "60"\n[campaign]\nruns = 0\n',
            r"\[campaign\]: Expected `int` >= 1 - at `\$.runs`",
        ),
        ('[[case]]\nmodel = "resnet18"\nbudget = "much"\n', "case 1: budget 'much'"),
        ('[[case]]\nmodel = "resnet18"\nbudget = []\n', "budget is an empty list"),
        ('[[case]]\nmodel = "resnet18"\nplanner = "best"\n', "'best' is no planner"),
        ('[[case]]\nmodel = "resnet18"\nplanner = [["search"]]\n', "is no planner"),
        ('[defaults]\nmodels = 1\n[[case]]\nmodel = "resnet18"\n', r"\[defaults\]: unknown key"),
        (
            '[campaign]\nruns = "5"\n[[case]]\nmodel = "resnet18"\n',
            r"\[campaign\]: Expected `int`, got `str` - at `\$.runs`",
        ),
        ('[campaign]\ntarget = "h9000"\n[[case]]\nmodel = "resnet18"\n', "h9000"),
        ('[other]\n[[case]]\nmodel = "resnet18"\n', "unknown key 'other'"),
        ("case = 3\n", "no cases"),
        ('[[case]]\nmodel = "resnet18"\namp = "int8"\n', "case 1: .*amp"),
        ('[[case]]\nmodel = "resnet18"\namp = "bfloat16"\ndtype = "bfloat16"\n', "case 1: .*amp"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        parsed(text)
    assert str(refused.value).startswith("cases.toml")


def test_a_file_that_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[[case]\n")
    with pytest.raises(SpecError, match="not a TOML file"):
        load_cases(tmp_path / "x.toml")


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.toml")), ids=lambda p: p.stem)
def test_the_packaged_cases_can_be_read_by_their_name(path: Path) -> None:
    made = load_cases(find_cases(path.stem))
    assert made.name == path.stem
    assert len(made.cases) >= 9
    assert made.method.device == {"cpu": "cpu", "gpu": "cuda"}[path.stem.partition("-")[0]]


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(SpecError, match="cpu, gpu"):
        find_cases("tpu")
