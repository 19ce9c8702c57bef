"""Records to JSON and back: every field checked against its type, and what is wrong named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from traces.errors import LowtideError

Record = TypeVar("Record")


def to_json(record: Any) -> Any:
    """A record of frozen dataclasses, or a container of such, as plain containers, numbers and text."""
    return msgspec.to_builtins(record, enc_hook=_plain)


def _plain(value: Any) -> str:
    """Text of a class of its own, such as torch's version, as plain text."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"{value!r:.80} of type {type(value).__name__} is nothing that JSON knows")


def from_json(kind: type[Record], data: Any) -> Record:
    """The record of that kind that plain containers hold; keys that it does not have are left out.

    Raises:
        ValueError: a field is missing or of another type; the text says which and where.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def checked(record: Record) -> Record:
    """The same record; raises ValueError if a field's value is not of the field's type."""
    from_json(type(record), to_json(record))
    return record


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


def read_record(
    path: str | Path,
    kind: type[Record],
    *,
    name: str,
    version_key: str,
    version: int,
    advice: str,
    error: type[LowtideError],
) -> Record:
    """Read one record from a JSON file whose `record` is `name` and whose `version_key` is `version`.

    Raises:
        error: no such file, no JSON, another record or version, or a field of another type; with the advice.
    """
    if not Path(path).is_file():
        raise error(f"{path}: no such file; {advice}.")
    try:
        data = read_json(path)
    except (OSError, ValueError) as problem:
        raise error(f"{path}: not a JSON file ({problem}); {advice}.") from None
    if not isinstance(data, dict) or data.get("record") != name:
        raise error(f"{path}: holds no {name} of Lowtide's; {advice}.")
    if data.get(version_key) != version:
        raise error(f"{path}: version {data.get(version_key)}, and this Lowtide reads {version}; {advice}.")
    try:
        return from_json(kind, data)
    except ValueError as problem:
        raise error(f"{path}: malformed ({problem}); {advice}.") from None
