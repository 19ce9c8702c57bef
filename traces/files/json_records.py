"""Records to JSON and back: every field checked against its type, and what is wrong named with its place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from traces.errors import LowtideError
from traces.files.whole import write_text

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
    """The record of that kind that plain containers hold; keys that it does not have are left out. Raises ValueError if
    a field is missing or of another type; the text says which and where.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def read_json(path: str | Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or nested more deeply than can be read.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def canonical_json(data: object) -> str:
    """JSON with sorted keys, so that the same record always makes the same bytes."""
    return json.dumps(data, sort_keys=True, indent=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The header of one kind of record's files, and how a file that has another is refused."""

    name: str  # under the key `record`: "plan"
    version: int
    advice: str  # what to do about a file that is none, without its full stop
    error: type[LowtideError]
    version_key: str = ""  # without one: `plan_version`

    @property
    def key(self) -> str:
        return self.version_key or f"{self.name}_version"


class JsonRecord:
    """A frozen dataclass with JSON files of its own, which say what they hold and of which version: see `Form`."""

    __slots__ = ()
    form: ClassVar[Form]

    def to_json(self) -> dict[str, Any]:
        return {"record": self.form.name, self.form.key: self.form.version, **to_json(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The record that parsed JSON holds; ValueError if a field is missing or of another type."""
        return from_json(cls, data)

    def save(self, path: str | Path) -> Path:
        """Write the record as JSON, whole or not at all."""
        return write_text(path, canonical_json(self.to_json()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the record. Raises LowtideError of the kind that `form` says: no such file, no JSON, another record
        or version, or a field of another type.
        """
        form = cls.form

        def refused(what: str) -> LowtideError:
            return form.error(f"{path}: {what}; {form.advice}.")

        if not Path(path).is_file():
            raise refused(f"no such {form.name}")
        try:
            data = read_json(path)
        except (OSError, ValueError) as problem:
            raise refused(f"not a JSON file ({problem})") from None
        if not isinstance(data, dict) or data.get("record") != form.name:
            raise refused(f"holds no {form.name} of Lowtide's")
        if (version := data.get(form.key)) != form.version:
            raise refused(f"{form.name} version {version}, and this Lowtide reads {form.version}")
        try:
            return cls.from_json(data)
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            raise refused(f"malformed {form.name} ({problem})") from None
