"""Write a file or a directory whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """An empty file beside `path`, which takes its place when the body has ended well and is gone if it has not.

    So a crash leaves the old file or the new. Parents are made. Nothing else is ever removed: if the process is killed,
    its unfinished file stays, hidden beside `path`.

    Raises:
        OSError: it cannot be written, or stands for a device or a pipe, in whose place no file may come. It names
            `path`.
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


@contextlib.contextmanager
def directory_beside(place: Path) -> Iterator[Path]:
    """An empty directory beside `place` for what is to stand there; gone in the end if the body has not moved it.

    Parents are made. Nothing else is ever removed.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
