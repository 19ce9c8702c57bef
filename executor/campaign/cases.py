"""The cases of a campaign: a TOML file, multiplied out and checked before anything runs.

[campaign]                       # how to trace and measure; every key has a default (`Method`)
device = "cpu"

[defaults]                       # what a case does not say itself
budget = ["none", "60%"]

[[case]]
model = ["resnet18", "resnet50"]
batch-size = [8, 16]             # with the two models and the two budgets: eight cases
"""

from __future__ import annotations

import hashlib
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from simulator.core.budget import check_budget
from simulator.planners import DEFAULT, REGISTRY
from traces.devices import device
from traces.errors import LowtideError, SpecError
from traces.files.json_records import canonical_json, to_json
from traces.model_spec import short_name, split_reference

PACKAGED: Final = Path(__file__).resolve().parent
NONE: Final = "none"  # as a budget: everything saved
COUNTS: Final = ("batch_size", "seq_len", "image_size")
SHORT: Final = {"batch_size": "b", "seq_len": "s", "image_size": "px"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step: a model and the options that `trace` takes."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """`resnet50 b8 px64 amp bfloat16`."""
        known = [f"{mark}{self.options[k]}" for k, mark in SHORT.items() if k in self.options]
        plain = [k for k in ("dtype", "optimizer") if self.options.get(k, "none") != "none"]
        rest = [
            str(v) if k in plain else f"{k.replace('_', '-')} {v}"
            for k, v in sorted(self.options.items())
            if k not in SHORT
        ]
        return " ".join([short_name(self.model), *known, *rest])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question to the machine: how much does this step need with this plan."""

    step: Step
    budget: str = NONE  # `none`, or what `simulate --budget` takes
    planner: str = ""

    @property
    def label(self) -> str:
        """What `--only` is matched with."""
        run = "keep-all" if self.budget == NONE else f"{self.budget} {self.planner}"
        return f"{self.step.label} {run}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How the cases are traced and measured: the table [campaign]."""

    device: str = "cpu"  # unless --device says otherwise
    target: str = ""  # of the uncalibrated trace; empty: the device that the campaign runs on
    rounds: int = 3  # timed rounds of the calibrated trace
    trace_warmup: int = 1
    verify_steps: int = 3  # 0: no verification
    memory_steps: int = 5  # the third to the fifth are the steady ones
    warmup: int = 1
    runs: int = 5  # timed steps
    timeout_minutes: int = 30  # of each process
    memory_limit: str = ""  # of each measuring process: its data on the CPU, its share of the device on CUDA
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A file of cases, read and multiplied out."""

    name: str
    method: Method
    cases: tuple[Case, ...]


def digest(data: object) -> str:
    """A short name for JSON data."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()[:16]


def find_cases(name: str) -> Path:
    """The path of a cases file: as given, or the packaged one of that name (`cpu`, `gpu`, `gpu-quick`).

    Raises:
        SpecError: there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    packaged = PACKAGED / f"{name.removesuffix('.toml')}.toml"
    if path.name == name and packaged.is_file():
        return packaged
    known = ", ".join(sorted(p.stem for p in PACKAGED.glob("*.toml")))
    raise SpecError(f"{name}: no such file of cases; give the path of a TOML file, or one of: {known}.")


def load_cases(path: Path) -> Campaign:
    """Read, check and multiply out a cases file.

    Raises:
        SpecError: it is no TOML, or a key or value means nothing; says which case and what is possible.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not a TOML file ({error}).") from None
    return parse_cases(data, where=str(path), root=path.resolve().parent, name=path.stem)


def parse_cases(data: Mapping[str, Any], *, where: str, root: Path, name: str) -> Campaign:
    """The campaign of parsed TOML; `root`: what paths of models are relative to."""
    _known_keys(data, ("campaign", "defaults", "case"), where)
    method = _method(_table(data, "campaign", where), f"{where}, [campaign]")
    defaults = _table(data, "defaults", where)
    _known_keys(defaults, _case_keys(), f"{where}, [defaults]")
    tables = data.get("case", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise SpecError(f"{where}: no cases; add a table [[case]] with a model.")
    cases: dict[str, Case] = {}
    for number, table in enumerate(tables, 1):
        place = f"{where}, case {number}"
        _known_keys(table, _case_keys(), place)
        for case in _expand({**defaults, **table}, place, root):
            cases.setdefault(canonical_json(to_json(case)), case)  # the same question twice is asked once
    return Campaign(name=name, method=method, cases=tuple(cases.values()))


def _case_keys() -> tuple[str, ...]:
    from tracer.build.loop_options import AROUND_OPTIONS
    from tracer.build.named.models import IMAGE_OPTIONS, SEQUENCE_OPTIONS

    of_steps = dict.fromkeys((*IMAGE_OPTIONS, *SEQUENCE_OPTIONS, *AROUND_OPTIONS))
    return ("model", "budget", "planner", *(k.replace("_", "-") for k in of_steps))


def _table(data: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        raise SpecError(f"{where}: {key} must be a table, [{key}].")
    return table


def _known_keys(table: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for key in table:
        if key not in known:
            raise SpecError(f"{place}: unknown key {key!r}; known are {', '.join(known)}.")


def _method(table: Mapping[str, Any], place: str) -> Method:
    kinds = {f.name.replace("_", "-"): type(f.default) for f in fields(Method)}
    _known_keys(table, tuple(kinds), place)
    for key, value in table.items():
        if type(value) is not kinds[key]:
            wanted = {int: "a whole number", bool: "true or false"}.get(kinds[key], "text")
            raise SpecError(f"{place}: {key} = {value!r} must be {wanted}.")
        least = {"rounds": 1, "memory-steps": 1, "runs": 1, "timeout-minutes": 1}.get(key, 0)
        if type(value) is int and key != "seed" and value < least:
            raise SpecError(f"{place}: {key} = {value} must be at least {least}.")
    method = Method(**{k.replace("-", "_"): v for k, v in table.items()})
    with _at(place):
        if method.target:
            device(method.target)
        if method.memory_limit:
            check_budget(method.memory_limit)
    return method


def _expand(table: Mapping[str, Any], place: str, root: Path) -> list[Case]:
    if "model" not in table:
        raise SpecError(f'{place}: no model; add model = "resnet50" or a list of models.')
    lists = {k: v if isinstance(v, list) else [v] for k, v in table.items()}
    for key, values in lists.items():
        if not values:
            raise SpecError(f"{place}: {key} is an empty list; leave it out or give a value.")
    budgets = [str(b) for b in lists.pop("budget", [NONE])]
    planners = lists.pop("planner", [DEFAULT])
    for planner in planners:
        if str(planner) not in REGISTRY:
            raise SpecError(f"{place}: {planner!r} is no planner; there are {', '.join(REGISTRY)}.")
    with _at(place):
        for text in budgets:
            if text != NONE:
                check_budget(text)
    return [
        Case(step=step, budget=budget, planner="save-all" if budget == NONE else planner)
        for step in _steps(lists, place, root)
        for budget, planner in itertools.product(budgets, planners)
    ]


def _steps(lists: dict[str, list[Any]], place: str, root: Path) -> list[Step]:
    from tracer.build.loop_options import parse_around

    keys = [k for k in lists if k != "model"]
    steps = []
    for model in lists["model"]:
        name, takes = _model(model, place, root)
        for values in itertools.product(*(lists[k] for k in keys)):
            options = dict(zip((k.replace("-", "_") for k in keys), values, strict=True))
            for key, value in zip(keys, values, strict=True):
                if key.replace("-", "_") in COUNTS:
                    _count(key, value, place)
                elif not isinstance(value, str | float | int | bool):
                    raise SpecError(f"{place}: {key} = {value!r} must be text or a number.")
                if takes is not None and key.replace("-", "_") not in takes:
                    flags = ", ".join(t.replace("_", "-") for t in takes)
                    raise SpecError(f"{place}: model {name} takes no {key}; it takes {flags}.")
            with _at(place):  # which `trace` would refuse only after a process has been started
                parse_around(dict(options))
            steps.append(Step(model=name, options=options))
    return steps


def _model(model: Any, place: str, root: Path) -> tuple[str, tuple[str, ...] | None]:
    """The model's full name or path, and the options that it takes (None: its own function says)."""
    from tracer.build.loop_options import AROUND_OPTIONS
    from tracer.build.named.models import find_model

    if not isinstance(model, str):
        raise SpecError(f"{place}: model = {model!r} must be text.")
    if (parts := split_reference(model)) is not None:
        file, function = parts
        path = root / file
        if not path.is_file():
            raise SpecError(f"{place}: {path}: no such file; paths of models are relative to the cases file.")
        return f"{path}:{function}", None
    with _at(place):
        known = find_model(model)
    return known.name, (*known.takes, *AROUND_OPTIONS)


def _count(key: str, value: Any, place: str) -> None:
    if type(value) is not int or value < 1:
        raise SpecError(f"{place}: {key} = {value!r} must be a whole number of at least 1.")


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Checks in the body fail with the case in which they do."""
    try:
        yield
    except LowtideError as error:
        raise SpecError(f"{place}: {error}") from None
