"""Turn what a JSON file holds into a record, or say which of its fields is of another type than the record's."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


def read_json(path: str | Path) -> Any:
    """What a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or nested more deeply than can be read.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def checked(record: Record) -> Record:
    """The same record of a dataclass; raises TypeError if a field's value is not of the field's type.

    A bool is no int here, an int is a float, and what stands in a tuple or a mapping is looked at too.
    """
    kind: Any = type(record)
    hints = _hints(kind)
    for f in fields(record):  # type: ignore[arg-type]
        value = getattr(record, f.name)
        if not _fits(value, hints[f.name]):
            raise TypeError(f"{f.name} is {value!r:.80}")
    return record


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, k) for k in inside)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if inside[-1:] == (...,):
            return all(_fits(x, inside[0]) for x in value)
        return len(value) == len(inside) and all(map(_fits, value, inside))
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(k, inside[0]) and _fits(v, inside[1]) for k, v in value.items()
        )
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
