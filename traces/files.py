"""Write a file whole or not at all, and let one process at a time change it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """An empty file beside `path`, which takes its place when the body has ended well and is gone if it has not.

    So a crash leaves the old file or the new. Parents are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
