"""Read the cases of a campaign: a TOML file (see "A campaign" in traces/README.md), multiplied out and checked."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from simulator.core.limits import check_budget
from simulator.planners import DEFAULT, REGISTRY
from traces.errors import LowtideError, SpecError
from traces.files import canonical_json, from_json, to_json
from traces.model_spec import short_name, split_reference

PACKAGED: Final = Path(__file__).resolve().parent
NONE: Final = "none"  # as a budget: everything saved
SHORT: Final = {"batch_size": "b", "seq_len": "s", "image_size": "px"}
Count = Annotated[int, msgspec.Meta(ge=0)]
OneOrMore = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question to the machine: how much a step needs with a plan. `options` are those that `trace` takes."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: str = NONE  # `none`, or what `simulate --budget` takes
    planner: str = "save-all"

    @property
    def step(self) -> str:
        """`resnet50 b8 px64 amp bfloat16`."""
        marks = {k: SHORT.get(k, f"{k.replace('_', '-')} ") for k in sorted(self.options)}
        return " ".join([short_name(self.model), *(f"{mark}{self.options[k]}" for k, mark in marks.items())])

    @property
    def label(self) -> str:
        """The case in a line."""
        return f"{self.step} save-all" if self.budget == NONE else f"{self.step} {self.budget} {self.planner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How the cases are traced and measured: the table [campaign]."""

    device: str = "cpu"  # unless --device says otherwise
    rounds: OneOrMore = 3  # timed rounds of the trace
    trace_warmup: Count = 1
    verify_steps: Count = 3  # 0: no verification
    memory_steps: OneOrMore = 5  # those after the first are the steady ones
    warmup: Count = 1
    runs: OneOrMore = 5  # timed steps
    seed: int = 0


def load_cases(name: str) -> tuple[Method, tuple[Case, ...]]:
    """Read, check and multiply out a cases file: its path, or the name of one that comes with Lowtide (`cpu`, `gpu`,
    `gpu-quick`). Raises SpecError if there is none, it is no TOML, or a key or value means nothing; says which case.
    """
    from tracer.step.loop_options import AROUND_OPTIONS
    from tracer.step.named.models import IMAGE_OPTIONS, SEQUENCE_OPTIONS

    path = Path(name) if Path(name).is_file() else PACKAGED / f"{name.removesuffix('.toml')}.toml"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in PACKAGED.glob("*.toml")))
        raise SpecError(f"{name}: no such file of cases; give the path of a TOML file, or one of: {names}.")
    known = ("model", "budget", "planner", *IMAGE_OPTIONS, *SEQUENCE_OPTIONS, *AROUND_OPTIONS)
    place, cases = str(path), dict[str, Case]()
    try:
        data = _keys(tomllib.loads(path.read_text(encoding="utf-8")), ("campaign", "case"))
        if not isinstance(data.get("case"), list):
            raise SpecError("no cases; add a table [[case]] with a model.")
        place = f"{path}, [campaign]"
        method = from_json(Method, _keys(data.get("campaign", {}), [f.name for f in fields(Method)]))
        for number, table in enumerate(data["case"], 1):
            place = f"{path}, case {number}"
            for case in _multiplied(_keys(table, known), path.resolve().parent):
                cases.setdefault(canonical_json(to_json(case)), case)  # the same question is asked once
    except (LowtideError, ValueError) as error:  # broken TOML is one
        raise SpecError(f"{place}: {error}") from None
    return method, tuple(cases.values())


def _keys(table: Any, known: Iterable[str]) -> dict[str, Any]:
    """A table of the file by the names of options; SpecError for a key that is none of these."""
    if not isinstance(table, dict):
        raise SpecError(f"{table!r} must be a table.")
    flags = [k.replace("_", "-") for k in known]
    for key in table:
        if key not in flags:
            raise SpecError(f"unknown key {key!r}; known are {', '.join(dict.fromkeys(flags))}.")
    return {k.replace("-", "_"): v for k, v in table.items()}


def _multiplied(table: dict[str, Any], root: Path) -> Iterator[Case]:
    lists = {k: v if isinstance(v, list) else [v] for k, v in table.items()}
    if "model" not in lists or [] in lists.values():
        raise SpecError('no model (model = "resnet50" or a list of models), or an empty list.')
    budgets, planners = lists.pop("budget", [NONE]), lists.pop("planner", [DEFAULT])
    for values in itertools.product(*lists.values(), budgets, planners):
        *given, budget, planner = values
        options = dict(zip(lists, given, strict=True))
        model = str(options.pop("model"))
        if planner not in REGISTRY:
            raise SpecError(f"{planner!r} is no planner; there are {', '.join(REGISTRY)}.")
        if (parts := split_reference(model)) is not None:
            model = f"{root / parts[0]}:{parts[1]}"  # paths of models are relative to the cases file
        if budget == NONE:
            yield Case(model=model, options=options)
        else:
            check_budget(str(budget))
            yield Case(model=model, options=options, budget=str(budget), planner=planner)
