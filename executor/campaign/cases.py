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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from simulator.core.budget import check_budget
from simulator.planners import DEFAULT, REGISTRY
from traces.devices import device
from traces.errors import LowtideError, SpecError
from traces.files.json_records import canonical_json, from_json, to_json
from traces.model_spec import short_name, split_reference

PACKAGED: Final = Path(__file__).resolve().parent
NONE: Final = "none"  # as a budget: everything saved
SHORT: Final = {"batch_size": "b", "seq_len": "s", "image_size": "px"}
Count = Annotated[int, msgspec.Meta(ge=0)]
OneOrMore = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step: a model and the options that `trace` takes."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keep_all(self) -> Case:
        """The case in which it has no plan."""
        return Case(step=self, planner="save-all")

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
    rounds: OneOrMore = 3  # timed rounds of the calibrated trace
    trace_warmup: Count = 1
    verify_steps: Count = 3  # 0: no verification
    memory_steps: OneOrMore = 5  # the third to the fifth are the steady ones
    warmup: Count = 1
    runs: OneOrMore = 5  # timed steps
    timeout_minutes: OneOrMore = 30  # of each process
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
    """The path of a cases file: as given, or the packaged one of that name (`cpu`, `gpu`, `gpu-quick`). Raises
    SpecError if there is neither.
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
    """Read, check and multiply out a cases file. Raises SpecError if it is no TOML, or a key or value means nothing;
    says which case and what is possible.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not a TOML file ({error}).") from None
    return parse_cases(data, where=str(path), root=path.resolve().parent, name=path.stem)


def parse_cases(data: Mapping[str, Any], *, where: str, root: Path, name: str) -> Campaign:
    """The campaign of parsed TOML; `root`: what paths of models are relative to."""
    from tracer.step.loop_options import AROUND_OPTIONS
    from tracer.step.named.models import IMAGE_OPTIONS, SEQUENCE_OPTIONS

    known = dict.fromkeys(("model", "budget", "planner", *IMAGE_OPTIONS, *SEQUENCE_OPTIONS, *AROUND_OPTIONS))
    with _at(where):
        top = _keys(data, ("campaign", "defaults", "case"))
    with _at(f"{where}, [campaign]"):
        method = from_json(Method, _keys(top.get("campaign", {}), [f.name for f in fields(Method)]))
        if method.target:
            device(method.target)
    with _at(f"{where}, [defaults]"):
        defaults = _keys(top.get("defaults", {}), known)
    tables = top.get("case", [])
    if not isinstance(tables, list) or not tables:
        raise SpecError(f"{where}: no cases; add a table [[case]] with a model.")
    cases: dict[str, Case] = {}
    for number, table in enumerate(tables, 1):
        with _at(f"{where}, case {number}"):
            for case in _expand({**defaults, **_keys(table, known)}, root):
                cases.setdefault(canonical_json(to_json(case)), case)  # the same question is asked once
    return Campaign(name=name, method=method, cases=tuple(cases.values()))


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Checks in the body fail with the place in the file of what they check."""
    try:
        yield
    except (LowtideError, ValueError) as error:
        raise SpecError(f"{place}: {error}") from None


def _keys(table: Any, known: Iterable[str]) -> dict[str, Any]:
    """A table of the file by the names of options; SpecError for a key that is none of these."""
    if not isinstance(table, dict):
        raise SpecError(f"{table!r} must be a table.")
    flags = [k.replace("_", "-") for k in known]
    for key in table:
        if key not in flags:
            raise SpecError(f"unknown key {key!r}; known are {', '.join(flags)}.")
    return {k.replace("-", "_"): v for k, v in table.items()}


def _expand(table: dict[str, Any], root: Path) -> list[Case]:
    if "model" not in table:
        raise SpecError('no model; add model = "resnet50" or a list of models.')
    lists = {k: v if isinstance(v, list) else [v] for k, v in table.items()}
    for key, values in lists.items():
        if not values:
            raise SpecError(f"{key} is an empty list; leave it out or give a value.")
    budgets, planners = (
        [str(v) for v in lists.pop(k, [d])] for k, d in (("budget", NONE), ("planner", DEFAULT))
    )
    for planner in planners:
        if planner not in REGISTRY:
            raise SpecError(f"{planner!r} is no planner; there are {', '.join(REGISTRY)}.")
    for budget in budgets:
        if budget != NONE:
            check_budget(budget)
    return [
        Case(
            step=_step(dict(zip(lists, values, strict=True)), root),
            budget=budget,
            planner="save-all" if budget == NONE else planner,
        )
        for values in itertools.product(*lists.values())
        for budget, planner in itertools.product(budgets, planners)
    ]


def _step(options: dict[str, Any], root: Path) -> Step:
    """The step of a model with these options, what `trace` would refuse after a process had been started refused."""
    from tracer.step.loop_options import parse_around
    from tracer.step.named.models import find_model

    model = options.pop("model")
    if not isinstance(model, str):
        raise SpecError(f"model = {model!r} must be text.")
    around = parse_around(dict(options))
    if (parts := split_reference(model)) is not None:
        path = root / parts[0]
        if not path.is_file():
            raise SpecError(f"{path}: no such file; paths of models are relative to the cases file.")
        return Step(model=f"{path}:{parts[1]}", options=options)
    known = find_model(model)
    known.check({k: v for k, v in options.items() if k not in around})
    return Step(model=known.name, options=options)
