"""Files written whole or not at all, and records to JSON and back, every field checked against its type."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from traces.errors import LowtideError

Record = TypeVar("Record")


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """An empty file beside `path`, which takes its place when the body has ended well and is gone if it has not.

    So a crash leaves the old file or the new. Parents are made. Nothing else is ever removed: if the process is killed,
    its unfinished file stays, hidden beside `path`. Raises OSError, which names `path`: it cannot be written, or stands
    for a device or a pipe, in whose place no file may come.
    """
    path = Path(path)
    place = Path(os.path.realpath(path))  # a link stays, and leads to the new file
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists() and not place.is_file():
        raise OSError(errno.EINVAL, "not a regular file, and only such a one is replaced", str(path))
    try:
        handle, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    except OSError as error:
        error.filename = str(path)
        raise
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~umask())
        os.replace(temporary, place)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # One without a number says all in its text, which a file name would replace.
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, name):
            error.filename = str(path)
        raise


def umask() -> int:
    """The permissions that this process takes from what it makes."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def check_writable(path: str | Path) -> None:
    """Find out whether `path` can be made, before the work whose result goes there. Nothing is made. Raises OSError if
    the nearest of its parents that exists is no directory, or this process may not write there.
    """
    place = Path(os.path.realpath(path))
    parent = next(p for p in place.parents if p.exists())
    if not parent.is_dir():
        raise OSError(errno.ENOTDIR, f"{parent} is not a directory", str(path))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, f"nothing may be written in {parent}", str(path))


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` to `path`, whole or not at all; returns the path."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


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
    """Return what a JSON file holds. Raises OSError: it cannot be read; ValueError: it is no JSON, or nested too
    deeply."""
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

    @property
    def key(self) -> str:
        return f"{self.name.replace('-', '_')}_version"


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


def cache_directory() -> Path:
    """Where what is made once is kept: $XDG_CACHE_HOME/lowtide, or ~/.cache/lowtide."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "lowtide"
