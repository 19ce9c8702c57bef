"""Write a file whole or not at all, and let one process at a time change it."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """An empty file beside `path`, which takes its place when the body has ended well and is gone if it has not.

    So a crash leaves the old file or the new. Parents are made.

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


def umask() -> int:
    """The permissions that this process takes from what it makes."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def check_writable(path: str | Path) -> None:
    """Find out whether `path` can be made, before the work whose result goes there. Nothing is made.

    Raises:
        OSError: the nearest of its parents that exists is no directory, or this process may not write there.
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


@contextlib.contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Wait until no other process is in such a body for `path`, so that it can be read, changed and replaced.

    The lock is an empty file beside `path` (the file itself is replaced, so it cannot be the lock) and ends with the
    process that holds it. Where the system has no `fcntl` (Windows), nothing is locked.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (path.parent / f".{path.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
